from typing import Any

import numpy as np
import pytest

from bigbatch import OptionError
from bigbatch.core.options import Fixed, Option, check_clip, check_size, check_steps


class Holder:
    clip_norm = Option(check_clip)
    reduction = Fixed()

    def __init__(self, clip_norm: Any = None, reduction: str = "mean") -> None:
        self.clip_norm, self.reduction = clip_norm, reduction


def test_an_option_is_checked_whenever_it_is_set() -> None:
    one, other = Holder(2), Holder()
    one.clip_norm = 0.5
    assert (one.clip_norm, other.clip_norm) == (0.5, None)
    for bad in (-1, 0, float("nan"), "1"):
        with pytest.raises(OptionError, match=r"clip_norm is .*: pass a number above 0, or None"):
            one.clip_norm = bad
        with pytest.raises(OptionError, match=r"clip_norm is .*: pass a number above 0, or None"):
            Holder(bad)
    assert one.clip_norm == 0.5


def test_a_fixed_option_is_set_once() -> None:
    holder = Holder(reduction="sum")
    with pytest.raises(OptionError, match=r"^reduction cannot be changed after the accumulator was made: make a new H"):
        holder.reduction = "mean"
    assert holder.reduction == "sum"


def test_checks_return_what_is_kept() -> None:
    assert check_clip("clip_norm", np.float32(2)) == 2
    assert (check_size("micro_batch_size", np.int64(3)), check_size("micro_batch_size", None)) == (3, None)
    assert check_steps("accumulation_steps", abs) is abs


def test_an_option_that_is_not_set_yet_is_no_attribute() -> None:
    assert not hasattr(Holder.__new__(Holder), "clip_norm")
