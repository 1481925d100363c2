import copy
import pickle
import pydoc
import sys
from typing import Any

import numpy as np
import pytest

from bigbatch import OptionError
from bigbatch.core.nonfinite import check_on_nonfinite
from bigbatch.core.options import Fixed, Option, OptionOf, check_choice, check_clip, check_size, check_steps


class Holder:
    clip_norm = Option(check_clip, "The largest norm.")
    reduction = Fixed()

    def __init__(self, clip_norm: Any = None, reduction: str = "mean") -> None:
        self.clip_norm, self.reduction = clip_norm, reduction


def test_an_option_is_checked_whenever_it_is_set() -> None:
    one, other = Holder(2), Holder()
    one.clip_norm = 0.5
    assert (one.clip_norm, other.clip_norm) == (0.5, None)
    for bad in (-1, 0, float("nan"), "1", True):
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


def test_checks_return_the_value_to_keep() -> None:
    assert check_clip("clip_norm", np.float32(2)) == 2
    assert (check_size("micro_batch_size", np.int64(3)), check_size("micro_batch_size", None)) == (3, None)
    assert check_steps("accumulation_steps", abs) is abs


@pytest.mark.parametrize("bad", [True, 0, -1, 2.0, "2"])
def test_a_size_is_a_whole_number(bad: Any) -> None:
    for check in (check_size, check_steps):
        with pytest.raises(OptionError, match=r"^size is .*: pass a whole number of at least 1$"):
            check("size", bad)


def test_a_choice_that_is_unknown_is_refused() -> None:
    assert check_choice("rng", None, ("per_sample", None)) is None
    with pytest.raises(OptionError, match=r"^way='both' is unknown: pass \"auto\", True or None$"):
        check_choice("way", "both", ("auto", True, None))
    with pytest.raises(OptionError, match=r"^on_nonfinite='pray' is unknown: pass \"skip\", \"raise\" or \"stop\"$"):
        check_on_nonfinite("on_nonfinite", "pray")


def test_reading_an_option_calls_nothing() -> None:
    """Options are read for every micro-batch."""
    holder, calls = Holder(2), []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        found = holder.clip_norm
    finally:
        sys.setprofile(None)
    assert (found, vars(holder)["clip_norm"], calls) == (2, 2, [])


def test_help_shows_the_doc_of_an_option() -> None:
    assert isinstance(Holder.clip_norm, Option)
    text = pydoc.plain(pydoc.render_doc(Holder))
    assert "clip_norm\n |      The largest norm." in text


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda holder: pickle.loads(pickle.dumps(holder))])
def test_options_are_copied_with_their_owner(copied: Any) -> None:
    holder = copied(Holder(2, "sum"))
    assert (holder.clip_norm, holder.reduction) == (2, "sum")
    with pytest.raises(OptionError, match="reduction cannot be changed"):
        holder.reduction = "mean"


def test_an_option_of_a_part_is_checked_there_and_refused_by_the_whole() -> None:
    def refuse(whole: Any, name: str) -> None:
        if whole.is_closed:
            raise OptionError(f"{name} cannot be changed any more")

    class Whole:
        clip_norm = OptionOf("part", before_change=refuse)
        is_closed = False

        def __init__(self) -> None:
            self.part = Holder(2)

    whole = Whole()
    whole.clip_norm = 0.5
    assert whole.clip_norm == whole.part.clip_norm == 0.5
    with pytest.raises(OptionError, match="pass a number above 0, or None"):
        whole.clip_norm = -1
    whole.is_closed = True
    with pytest.raises(OptionError, match=r"^clip_norm cannot be changed any more$"):
        whole.clip_norm = 1
    whole.clip_norm = 0.5  # no change
    assert whole.part.clip_norm == 0.5
