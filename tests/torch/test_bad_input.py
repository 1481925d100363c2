"""Bad input that torch accepts or explains badly: one sentence, no change, and the next step is exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from bigbatch import BigBatchError, LossError, OptionError, StateError, WeightError
from bigbatch.torch import Accumulator

from .test_accumulator import assert_exact_step, assert_untouched, loss, make, make_batch, make_model, snapshot


def on_meta(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch).to("meta")


BAD: dict[str, tuple[dict[str, Any], type[BigBatchError], str]] = {
    "complex loss": (
        {"loss": lambda m, b: loss(m, b) * (1 + 1j)},
        LossError,
        "the loss is torch.complex128",
    ),
    "loss on meta": ({"loss": on_meta}, LossError, "the loss is on the device meta"),
    "loss of no terms": ({"loss": lambda m, b: ()}, LossError, "0 terms but the weight has 1"),
    "loss in a list": ({"loss": lambda m, b: [loss(m, b)]}, LossError, "the loss is a list"),
    "loss None": ({"loss": lambda m, b: None}, LossError, "the loss is a NoneType"),
    "no number in the loss": ({"loss": lambda m, b: m(b[0])[:0].sum(1)}, LossError, r"shape \(0,\), so 0 numbers"),
    "weight of no terms": ({"weight": lambda b: ()}, WeightError, "micro-batch 1 has 0 terms"),
    "weight above all floats": ({"weight": lambda b: 10**400}, WeightError, "micro-batch 1 is 1000"),
    "total above all floats": ({"weight": lambda b: 1e308}, WeightError, "of 3 micro-batches together is inf"),
    "a sample below 0": (
        {"weight": lambda b: torch.tensor([2.0, -1.0, 3.0])},
        WeightError,
        r"1 of 3 samples have a weight below 0 \(-1 is the lowest\)",
    ),
    "a weight that is no number": ({"weight": lambda b: torch.tensor([1.0, torch.nan])}, WeightError, "is nan"),
    "sparse weight": ({"weight": lambda b: torch.ones(3).to_sparse()}, WeightError, "on cpu with torch.float32 and"),
    "weight on meta": ({"weight": lambda b: torch.ones((), device="meta")}, WeightError, "a tensor on meta"),
    "complex weight": ({"weight": lambda b: torch.tensor(1j)}, WeightError, "is 1j"),
}


@pytest.mark.parametrize("way", ["batch", "micro_batch"])
@pytest.mark.parametrize("name", BAD)
def test_bad_losses_and_weights_change_nothing(name: str, way: str) -> None:
    options, error, message = BAD[name]
    accumulator = make(accumulation_steps=3, **options)
    before = snapshot(accumulator)
    if way == "batch":
        with pytest.raises(error, match=message) as caught:
            accumulator.step(make_batch())
        assert "\n" not in str(caught.value)
    else:
        with pytest.raises(BigBatchError):
            for part in zip(*(leaf.split(4) for leaf in make_batch()), strict=True):
                weight = 4 if accumulator.weight is None else accumulator.weight(part)
                with accumulator.micro_batch(weight=weight) as micro:
                    micro.backward(accumulator.loss(accumulator.model, part))
        accumulator.forget()
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def frozen() -> Accumulator:
    model = make_model().requires_grad_(False)
    return Accumulator(model, sgd(model), loss, 4)


def partly_on_meta() -> Accumulator:
    model = make_model()
    model[2] = nn.Linear(7, 3, device="meta")
    return Accumulator(model, sgd(model), loss, 4)


def made(**options: Any) -> Accumulator:
    return Accumulator(model := make_model(), sgd(model), loss, 4, **options)


def without_parameters() -> Accumulator:
    model = make_model()
    optimizer = sgd(model)
    optimizer.param_groups[0]["params"] = []
    return Accumulator(model, optimizer, loss, 4)


@pytest.mark.parametrize(
    ("make_one", "message"),
    [
        (frozen, "none of the 4 parameters that the optimizer holds is trainable: call requires_grad_"),
        (partly_on_meta, r"2 of 4 parameters \(2\.weight first\) are on the meta device"),
        (without_parameters, "the optimizer holds 0 parameters but none of the model's 4"),
        (lambda: Accumulator(nn.Tanh(), sgd(make_model()), loss, 4), "holds 4 parameters but none of the model's 0"),
        (lambda: Accumulator(loss, sgd(make_model()), loss, 4), "model is a function: pass a torch.nn.Module"),
        (
            lambda: made(scheduler=torch.optim.lr_scheduler.StepLR),
            "scheduler is the class StepLR: pass one learning rate",
        ),
        (lambda: made(scaler=True), "scaler is True: pass a torch.amp.GradScaler, or None"),
        (
            lambda: made(accumulate_dtype="float64"),
            "accumulate_dtype is 'float64': pass torch.float32 or torch.float64",
        ),
        (lambda: Accumulator(make_model(), None, loss, 4), "optimizer is a NoneType: pass a torch.optim.Optimizer"),
    ],
)
def test_untrainable_models_and_optimizers_are_refused(make_one: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_one()


def test_optimizer_may_also_hold_parameters_of_the_loss() -> None:
    model, temperature = make_model(), nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)

    def tempered(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]) * temperature, batch[1])

    full = make_model()
    tempered(full, make_batch()).backward()
    expected = (temperature - 0.1 * temperature.grad).detach()
    temperature.grad = None
    Accumulator(model, optimizer, tempered, 4).step(make_batch())
    assert torch.allclose(temperature, expected, rtol=1e-12, atol=0)


GOOD = {"num_steps": 1, "scaler": None, "window": None}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (3, "the state is a int"),
        (GOOD | {"window": {}}, "cannot be read .KeyError: 'reduction'"),
        (GOOD | {"window": 3}, "cannot be read .TypeError"),
        (GOOD | {"num_steps": "many"}, "cannot be read .ValueError"),
        (GOOD | {"skipped": 3}, "cannot be read .TypeError"),
        (GOOD | {"skipped": {"num_steps": "many"}}, "cannot be read .TypeError"),
    ],
)
def test_invalid_state_changes_nothing(state: Any, message: str) -> None:
    accumulator = make()
    accumulator.step(make_batch())
    before = accumulator.state_dict()
    with pytest.raises(StateError, match=message):
        accumulator.load_state_dict(state)
    assert accumulator.state_dict() == before
    assert_exact_step(accumulator)


@pytest.mark.parametrize("damaged", [{}, {"scale": 4.0}, 3, {**GradScaler("cpu").state_dict(), "scale": "large"}])
def test_invalid_scaler_state_changes_nothing(damaged: Any) -> None:
    model = make_model().float()
    accumulator = Accumulator(model, sgd(model), loss, 4, scaler=GradScaler("cpu", init_scale=8))
    before = accumulator.state_dict()
    with pytest.raises(StateError, match="cannot be read"):
        accumulator.load_state_dict({**before, "scaler": damaged})
    assert accumulator.state_dict() == before
    accumulator.load_state_dict({**before, "scaler": {**before["scaler"], "scale": 0.5}})
    assert accumulator.scaler.get_scale() == 0.5
