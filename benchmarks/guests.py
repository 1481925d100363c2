"""Frameworks that own the training loop. They cannot be called for one step, but they can be fed its micro-batches.

Each function trains a model on a stream of micro-batches.
"""

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from .work import Work

LIGHTNING = "Lightning, `accumulate_grad_batches`"
TRAINER = "HF Trainer, `gradient_accumulation_steps`"


class Stream:
    """Micro-batches with a length. Without a length, Lightning fetches the next one before it finishes the last.

    The length is one too large: the last window ends when the framework asks for that extra micro-batch.
    """

    def __init__(self, micro_batches: Iterable[Any], num: int) -> None:
        self.micro_batches = micro_batches
        self.num = num

    def __iter__(self) -> Iterator[Any]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return self.num + 1


def lightning_fit(model: nn.Module, work: Work, stream: Stream) -> None:
    """Uses `barebones`, Lightning's own switch for measuring its loop: no logger, no progress bar."""
    from pytorch_lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, micro_batch: Any, _: int) -> Tensor:
            return work.loss(self.model, tuple(micro_batch))

        def configure_optimizers(self) -> Any:
            return work.optimizer(self)

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu" if work.device == "cpu" else "gpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=work.num_micro_batches,
            precision="bf16-mixed" if work.precision == "bf16" else "32-true",
            barebones=True,
        )
        trainer.fit(Module(), stream)


def trainer_fit(model: nn.Module, work: Work, stream: Stream) -> None:
    """No logging, saving, clipping, or check of every loss for NaN, which waits for the device."""
    from transformers import Trainer, TrainingArguments

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, micro_batch: Any) -> dict[str, Tensor]:
            return {"loss": work.loss(self.model, micro_batch)}

    class Fed(Trainer):
        def get_train_dataloader(self) -> Any:
            return Stream(({"micro_batch": micro_batch} for micro_batch in stream), stream.num)

    optimizer = work.optimizer(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=1,
            gradient_accumulation_steps=work.num_micro_batches,
            per_device_train_batch_size=work.micro_batch_size,
            bf16=work.precision == "bf16",
            use_cpu=work.device == "cpu",
            max_grad_norm=0.0,
            logging_strategy="no",
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        Fed(Module(), arguments, optimizers=(optimizer, LambdaLR(optimizer, lambda _: 1.0))).train()


Fit = Callable[[nn.Module, Work, Stream], None]
GUESTS: dict[str, Fit] = {LIGHTNING: lightning_fit, TRAINER: trainer_fit}


def windows_of(work: Work, num: int) -> Stream:
    """The micro-batches of `num` windows of the same batch."""
    micro_batches = list(work.micro_batches()) * num
    return Stream(micro_batches, len(micro_batches))
