"""Options that are set after the accumulator was made: each takes effect, or is refused with a sentence."""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Interrupted, NonFiniteError, OptionError
from bigbatch.torch import Accumulator

FIXED = {"model", "optimizer", "reduction", "precision", "scaler", "accumulate_dtype", "capture", "group", "reduce"}
FIXED |= {"has_aux", "aux"}
BAD = {
    "loss": 3,
    "weight": 3,
    "micro_batch_size": 0,
    "batch_axis": True,
    "cut": "rows",
    "num_samples": 3,
    "accumulation_steps": -1,
    "clip_norm": -1.0,
    "clip_value": float("nan"),
    "scheduler": 0.1,
    "on_nonfinite": "explode",
    "max_skipped": 0,
    "batch_norm": "both",
}
torch.manual_seed(0)
BATCH = (torch.randn(7, 3).double(), torch.randn(7, 2).double())


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def squares(batch: tuple[Tensor, Tensor]) -> Tensor:
    return batch[1].square().sum()


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def made(**options: Any) -> Accumulator:
    torch.manual_seed(1)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "scheduler" in options:
        options["scheduler"] = options["scheduler"](optimizer)
    return Accumulator(model, optimizer, **{"loss": loss, "micro_batch_size": 3, **options})


def after(accumulator: Accumulator, num_steps: int = 2) -> Tensor:
    for _ in range(num_steps):
        accumulator.step(BATCH)
    return torch.cat([p.detach().flatten() for p in accumulator.model.parameters()])


def test_every_option_is_either_fixed_or_checked() -> None:
    assert FIXED | BAD.keys() == set(inspect.signature(Accumulator).parameters) - {"unknown"}


@pytest.mark.parametrize("name", sorted(FIXED))
def test_fixed_options_cannot_be_changed(name: str) -> None:
    accumulator, expected = made(), after(made())
    before = getattr(accumulator, name)
    with pytest.raises(OptionError, match=f"^{name} cannot be changed after .*: make a new Accumulator$"):
        setattr(accumulator, name, "sum")
    assert getattr(accumulator, name) is before
    assert after(accumulator).equal(expected)


@pytest.mark.parametrize("name", sorted(BAD))
def test_options_set_later_are_checked_as_in_the_constructor(name: str) -> None:
    with pytest.raises(OptionError, match=name) as at_once:
        Accumulator(*(model := nn.Linear(3, 2), torch.optim.SGD(model.parameters(), 0.1)), **{name: BAD[name]})
    accumulator = made()
    before = getattr(accumulator, name)
    with pytest.raises(OptionError) as later:
        setattr(accumulator, name, BAD[name])
    assert str(later.value) == str(at_once.value)
    assert getattr(accumulator, name) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_norm", 0.01),
        ("clip_value", 0.01),
        ("weight", squares),
        ("micro_batch_size", 2),
        ("loss", lambda model, batch: 2 * loss(model, batch)),
        ("scheduler", halved),
    ],
)
def test_options_set_later_are_used(name: str, value: Any) -> None:
    expected, unchanged = after(made(**{name: value})), after(made())
    accumulator = made()
    setattr(accumulator, name, value(accumulator.optimizer) if name == "scheduler" else value)
    found = after(accumulator)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert name == "micro_batch_size" or not torch.allclose(found, unchanged, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_axis", 1), ("cut", lambda batch, sizes: [batch[k : k + 2] for k in (2, 0)]), ("num_samples", len)],
)
def test_how_a_batch_is_cut_cannot_be_changed_in_the_middle_of_one(name: str, value: Any) -> None:
    model = nn.Linear(4, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 4, 4).double()

    def interrupting(model: nn.Module, micro_batch: Tensor) -> Tensor:
        accumulator.interrupt()
        return model(micro_batch).square().mean()

    accumulator = Accumulator(model, optimizer, interrupting, 2, accumulation_steps=2)
    before = getattr(accumulator, name)
    with pytest.raises(Interrupted):
        accumulator.step(batch)
    with pytest.raises(OptionError, match=f"^{name} was changed while a step is interrupted: .*forget"):
        setattr(accumulator, name, value)
    assert getattr(accumulator, name) == before
    setattr(accumulator, name, before)  # no change
    accumulator.forget()
    with accumulator.micro_batch(weight=4) as micro:
        micro.backward(model(batch).square().mean())
    with pytest.raises(OptionError, match=f"^{name} was changed while a window is open"):
        setattr(accumulator, name, value)
    accumulator.flush()
    setattr(accumulator, name, value)
    assert getattr(accumulator, name) == value


def test_accumulation_steps_set_later() -> None:
    accumulator = made(accumulation_steps=2)
    accumulator.accumulation_steps = 3
    for number in range(1, 7):
        with accumulator.micro_batch(weight=7) as micro:
            micro.backward(loss(accumulator.model, BATCH))
        assert (micro.step is not None) == (number % 3 == 0)


def test_on_nonfinite_set_later() -> None:
    accumulator = made()
    accumulator.max_skipped = 2
    bad = (BATCH[0] * float("inf"), BATCH[1])
    with pytest.warns(UserWarning, match="step 1 was skipped"):
        accumulator.step(bad)
    with pytest.warns(UserWarning, match="step 2"), pytest.raises(NonFiniteError, match="2 steps were skipped"):
        accumulator.step(bad)
    accumulator.on_nonfinite = "stop"
    accumulator.step(bad)
    assert accumulator.is_stopped
