"""What can be said of capturing without a GPU."""

import pytest
import torch
from torch import nn

from bigbatch import OptionError
from bigbatch.torch import Accumulator


def make(**options: object) -> Accumulator:
    model = nn.Linear(3, 1)
    return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).mean(), 2, **options)


def test_a_model_on_the_cpu_is_refused() -> None:
    with pytest.raises(OptionError, match="the parameters are on cpu, and only what runs on a CUDA device"):
        make(capture=True)


def test_auto_goes_on_without() -> None:
    assert make(capture="auto").step(torch.ones(5, 3)).is_applied


@pytest.mark.parametrize("value", ["yes", None, 1])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(OptionError, match='pass True, False or "auto"'):
        make(capture=value)
