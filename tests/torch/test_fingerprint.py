"""The fingerprint of a recorded pass: it detects every change, and reports nothing else."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.torch.capture.fingerprint import fingerprint, modules_of

from .training import alone

SETTINGS = {"factor": 1.0}
ARGUMENTS = Namespace(factor=1.0)
FACTOR = 1.0
mean = 1.0
"""The loss does not read this number; it only uses an attribute of the same name."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.pair = (1.0, 2.0)
        self.rows = [[1.0], [2.0]]
        self.options = {"deep": {"factor": 1.0}}
        self.config = Namespace(inner=Namespace(factor=1.0))
        self.activation = F.gelu
        self.hidden = [nn.Dropout(0.5)]
        self.temperature = torch.tensor(1.0)
        self.graph = torch.eye(3).to_sparse()
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x)) * self.pair[0]


def helped(value: Tensor) -> Tensor:
    return value * FACTOR


def loss(model: nn.Module, x: Tensor) -> Tensor:
    parts = [(lambda part: helped(part) * SETTINGS["factor"])(part) for part in model(x)]
    return torch.stack(parts).mean() * ARGUMENTS.factor


def change_global(name: str, value: Any) -> None:
    globals()[name] = value


CHANGES: dict[str, Callable[[Net], Any]] = {
    "a tuple": lambda m: setattr(m, "pair", (3.0, 2.0)),
    "a number in a list": lambda m: m.rows[1].__setitem__(0, 3.0),
    "a number in a dict": lambda m: m.options["deep"].update(factor=3.0),
    "a configuration": lambda m: setattr(m.config.inner, "factor", 3.0),
    "a function": lambda m: setattr(m, "activation", F.relu),
    "a module in a list": lambda m: setattr(m.hidden[0], "p", 0.1),
    "a number on the host": lambda m: m.temperature.fill_(3.0),
    "a buffer's place": lambda m: setattr(m, "mask", torch.zeros(3)),
    "a layer's place": lambda m: setattr(m, "layer", nn.Linear(3, 2)),
    "a frozen parameter": lambda m: m.layer.weight.requires_grad_(False),
    "a hook of a parameter": lambda m: m.layer.weight.register_hook(lambda g: g * 2),
    "a hook after a gradient": lambda m: m.layer.weight.register_post_accumulate_grad_hook(lambda p: None),
    "a hook of a layer": lambda m: m.layer.register_forward_hook(lambda *_: None),
    "eval": lambda m: m.eval(),
    "a global dict": lambda m: SETTINGS.update(factor=SETTINGS["factor"] + 1),
    "a global object": lambda m: setattr(ARGUMENTS, "factor", ARGUMENTS.factor + 1),
    "a global of a function that the loss calls": lambda m: change_global("FACTOR", FACTOR + 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_detected(name: str) -> None:
    model = Net()
    before = fingerprint(model, loss)
    assert fingerprint(model, loss) == before
    CHANGES[name](model)
    assert fingerprint(model, loss) != before


def test_replaced_hook_is_detected() -> None:
    model = Net()
    handle = model.layer.register_forward_hook(lambda *_: None)
    before = fingerprint(model, loss)
    handle.remove()
    model.layer.register_forward_hook(lambda *_: None)
    assert fingerprint(model, loss) != before


def test_no_change_is_not_reported() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = fingerprint(model, loss)
    change_global("mean", mean + 1)
    loss(model, torch.ones(4, 3)).backward()
    optimizer.step()
    model.mask.mul_(2)
    optimizer.zero_grad()
    assert fingerprint(model, loss) == before


def test_new_tensor_in_each_pass_is_not_a_change() -> None:
    class Keeps(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.auxiliary = self.layer(x).square().mean()
            return super().forward(x)

    model = Keeps()
    loss(model, torch.ones(4, 3))
    before = fingerprint(model, loss)
    first = model.auxiliary
    loss(model, torch.ones(4, 3))
    assert model.auxiliary is not first
    assert fingerprint(model, loss) == before


class Trainer:
    def __init__(self) -> None:
        self.num_steps = 0
        self.factor = 1.0
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.smoothed(model(x))

    def smoothed(self, output: Tensor) -> Tensor:
        return self.criterion(output, torch.zeros(len(output), dtype=torch.int64)) * self.weight

    @property
    def weight(self) -> float:
        return self.factor

    def trained(self) -> None:
        self.num_steps += 1


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean() * self.factor


def test_method_is_compared_by_the_attributes_it_uses() -> None:
    model, trainer = Net(), Trainer()
    before = fingerprint(model, trainer.loss)
    trainer.trained()
    assert fingerprint(model, trainer.loss) == before
    trainer.factor = 2.0
    assert fingerprint(model, trainer.loss) != before
    before = fingerprint(model, trainer.loss)
    trainer.criterion.label_smoothing = 0.2
    assert fingerprint(model, trainer.loss) != before


def test_callable_objects_and_partial_functions() -> None:
    model, slotted = Net(), Slotted()
    weighted = partial(lambda model, x, weights: model(x).mean() * weights[0], weights=[1.0])
    before = [fingerprint(model, found) for found in (slotted, weighted)]
    slotted.factor = 2.0
    weighted.keywords["weights"][0] = 2.0
    assert fingerprint(model, slotted) != before[0]
    assert fingerprint(model, weighted) != before[1]


def test_modules_of_the_loss_are_found() -> None:
    model, trainer, criterion = Net(), Trainer(), nn.Sequential(nn.Linear(2, 2))
    assert trainer.criterion in modules_of(model, trainer.loss)
    assert criterion[0] in modules_of(model, lambda model, x: criterion(model(x)).mean())
    assert modules_of(model, loss) == list(model.modules())


def test_state_of_ddp_within_a_window_is_ignored(tmp_path: Path) -> None:
    with alone(tmp_path):
        model = Net()
        shared = nn.parallel.DistributedDataParallel(model)

        def closing(_: nn.Module, x: Tensor) -> Tensor:
            return shared(x).mean()

        before = fingerprint(model, closing)
        with shared.no_sync():
            closing(model, torch.ones(4, 3)).backward()
            assert fingerprint(model, closing) == before
        model.pair = (3.0, 2.0)
        assert fingerprint(model, closing) != before


def test_model_with_many_modules_is_inspected() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    before = fingerprint(model, loss)
    assert fingerprint(model, loss) == before
    model[90].weight.requires_grad_(False)
    assert fingerprint(model, loss) != before
    model[90].weight.requires_grad_(True)
    assert fingerprint(model, loss) == before
    model[95].weight.data = model[95].weight.data.clone()
    assert fingerprint(model, loss) != before
