"""Capture, as far as it can be tested without a GPU."""

import pytest
import torch
from torch import nn

from bigbatch import CaptureError, OptionError
from bigbatch.torch import Accumulator
from bigbatch.torch.capture.graph import rehearsed
from bigbatch.torch.capture.optimizer import CapturedOptimizer, marked_capturable


def make(**options: object) -> Accumulator:
    model = nn.Linear(3, 1)
    return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).mean(), 2, **options)


def test_a_model_on_the_cpu_is_refused() -> None:
    with pytest.raises(OptionError, match="the parameters are on cpu, and only what runs on a CUDA device"):
        make(capture=True)


def test_auto_continues_without_capture() -> None:
    assert make(capture="auto").step(torch.ones(5, 3)).is_applied


@pytest.mark.parametrize("value", ["yes", None, 1])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(OptionError, match='pass True, False or "auto"'):
        make(capture=value)


def test_learning_rate_tensor_on_the_host_is_read_as_a_number() -> None:
    """A recorded step uses it as a number too."""
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(nn.Linear(3, 1).parameters(), lr=rate, capturable=True)
    captured = CapturedOptimizer(optimizer, torch.device("cuda", 0), lambda: None)
    before = captured._fingerprint()
    assert captured._fingerprint() == before
    rate.fill_(0.2)
    assert captured._fingerprint() != before


@pytest.mark.parametrize(
    ("options", "is_captured"), [({}, False), ({"capturable": True}, True), ({"fused": True}, True)]
)
def test_which_optimizers_can_be_recorded(options: dict[str, bool], is_captured: bool) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(3, 1).parameters(), **options)
    captured = CapturedOptimizer(optimizer, torch.device("cuda", 0), lambda: None)
    assert bool(captured._can_be_recorded()) == is_captured
    before = dict(optimizer.param_groups[0])
    with marked_capturable(optimizer.param_groups):
        assert optimizer.param_groups[0]["capturable"]
    assert optimizer.param_groups[0] == before


def test_error_in_the_rehearsal_names_its_line() -> None:
    def bad() -> None:
        raise RuntimeError("not like this\nand more")  # this line

    told = r"test_capture\.py:\d+ \(.*this line\): not like this: keep the host"
    with pytest.raises(CaptureError, match=told), rehearsed():
        bad()
    with pytest.raises(KeyError), rehearsed():
        raise KeyError("of the user's")
