"""A run that can be stopped in the middle of a window and continued by another process.

python -m tests.torch.resume FIRST LAST STATE…: feeds the micro-batches FIRST to LAST of each run. A file STATE has the
name of its run. It is read first, unless FIRST is 0, and written at the end.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.torch import Accumulator

NUM_MICRO_BATCHES = 10
KINDS = ("plain", "fp16", "terms", "bf16_parameters", "sparse")


class Model(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, sparse=sparse)
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, 20)
        if sparse:  # SparseAdam accepts nothing else
            self.hidden.requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(ids))))


class Run:
    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.model = Model(kind == "sparse")
        if kind == "bf16_parameters":
            self.model.bfloat16()
        held = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: Any = (torch.optim.SparseAdam if kind == "sparse" else torch.optim.AdamW)(held, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.accumulator = Accumulator(
            self.model,
            self.optimizer,
            accumulation_steps=4,
            precision="fp16" if kind == "fp16" else None,
            scheduler=self.scheduler,
            clip_norm=None if kind == "sparse" else 0.1,
        )

    def feed(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 20, (3 + number % 3, 7), generator=generator)
        weight: Any = 2 * ids.numel() - number
        with self.accumulator.micro_batch(weight=(weight, len(ids)) if self.kind == "terms" else weight) as micro:
            logits = self.model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())
            micro.backward((loss, logits.float().square().mean()) if self.kind == "terms" else loss)

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "accumulator": self.accumulator,
        }


def main(kind: str, first: int, last: int, path: str) -> None:
    run = Run(kind)
    if first:
        state = torch.load(path, weights_only=True)
        for name, part in run.parts().items():
            part.load_state_dict(state[name])
    for number in range(first, last):
        run.feed(number)
    if last == NUM_MICRO_BATCHES:
        run.accumulator.flush()
    torch.save({name: part.state_dict() for name, part in run.parts().items()}, path)


if __name__ == "__main__":
    for state in sys.argv[3:]:
        main(Path(state).name, int(sys.argv[1]), int(sys.argv[2]), state)
