"""Natural mistakes are answered with what to write; an accumulator prints readably."""

import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigbatch import BatchError, OptionError
from bigbatch.torch import Accumulator, train_with_accumulation, verify

from .test_accumulator import assert_exact_step, loss, make, make_batch, make_model


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "gradient_accumulation_steps",
            "pass micro_batch_size, the number of samples in a micro-batch, if batches",
        ),
        ("accumulate_grad_batches", "or accumulation_steps if you feed micro-batches"),
        ("max_grad_norm", r"did you mean clip_norm\?"),
        ("micro_batchsize", r"did you mean micro_batch_size\?"),
        ("loss_fn", r"did you mean loss\?"),
        ("lr_scheduler", r"did you mean scheduler\?"),
        ("verbose", "its options are model, optimizer, loss, micro_batch_size, .*, max_skipped"),
    ],
)
def test_an_option_of_another_library_is_answered_with_ours(name: str, told: str) -> None:
    with pytest.raises(OptionError, match=f"Accumulator has no option {name}: .*{told}"):
        make(**{name: 4})


def test_in_train_with_accumulation_and_verify_too() -> None:
    model = make_model()
    with pytest.raises(OptionError, match="Accumulator has no option max_grad_norm: did you mean clip_norm"):
        train_with_accumulation(model, [], torch.optim.SGD(model.parameters()), loss, 4, max_grad_norm=1.0)
    with pytest.raises(OptionError, match="verify has no option gradient_accumulation_steps: pass micro_batch_size"):
        verify(model, make_batch(), loss, gradient_accumulation_steps=2)


def test_help_still_has_the_options() -> None:
    names = list(inspect.signature(Accumulator).parameters)
    assert names[:4] == ["model", "optimizer", "loss", "micro_batch_size"]
    assert "clip_norm" in names


def test_the_parts_of_a_batch_are_to_be_one_argument() -> None:
    accumulator = make()
    with pytest.raises(BatchError, match=r"step\(\) got 2 arguments: .* pass step\(\(x, y\)\)"):
        accumulator.step(*make_batch())
    assert_exact_step(accumulator)


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss, F.cross_entropy])
def test_a_criterion_is_answered_with_the_lambda_to_write(criterion: object) -> None:
    name = getattr(criterion, "__name__", type(criterion).__name__)
    told = rf"loss is {name}, which compares predictions with targets.*lambda model, batch: {name}.*\(model\(batch\[0"
    with pytest.raises(OptionError, match=told):
        make(loss=criterion)
    with pytest.raises(OptionError, match=told):
        verify(make_model(), make_batch(), criterion, 4)
    accumulator = make()
    with pytest.raises(OptionError, match=told):
        accumulator.loss = criterion


def test_the_lambda_that_is_told_works() -> None:
    with pytest.raises(OptionError) as caught:
        make(loss=nn.CrossEntropyLoss())
    written = str(caught.value).partition("loss=lambda")[2]
    assert_exact_step(make(loss=eval(f"lambda{written}", {"CrossEntropyLoss": nn.CrossEntropyLoss})))


def test_a_module_of_the_users_own_is_a_loss() -> None:
    class Own(nn.Module):
        def forward(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return loss(model, batch)

    assert_exact_step(make(loss=Own()))


def test_model_and_optimizer_the_wrong_way_round() -> None:
    model = make_model()
    with pytest.raises(OptionError, match="model is a SGD, an optimizer: the model comes first"):
        Accumulator(torch.optim.SGD(model.parameters()), model, loss, 4)


def test_repr_shows_what_is_not_at_its_default() -> None:
    accumulator = make(clip_norm=1.0, accumulate_dtype=torch.float64, reduction="mean")
    assert repr(accumulator) == (
        "Accumulator(Sequential, SGD, loss=loss, micro_batch_size=4, clip_norm=1.0, accumulate_dtype=torch.float64) "
        "after 0 steps"
    )
    accumulator.step(make_batch())
    assert repr(accumulator).endswith("after 1 step")
    accumulator.loss = nn.Identity()
    accumulator.scheduler = torch.optim.lr_scheduler.ConstantLR(accumulator.optimizer)
    assert "loss=Identity, " in repr(accumulator)
    assert "scheduler=ConstantLR" in repr(accumulator)
    model = make_model()
    parameters = list(model.parameters())
    both = [torch.optim.SGD(parameters[:1]), torch.optim.AdamW(parameters[1:])]
    assert repr(Accumulator(model, both, loss, 4)).startswith("Accumulator(Sequential, (SGD, AdamW), loss=loss")
    copied = pickle.loads(pickle.dumps(make(loss=None)))
    assert repr(copied) == "Accumulator(Sequential, SGD, micro_batch_size=4) after 0 steps"
