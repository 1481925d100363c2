import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigbatch import BigBatchError, OptionError, Window, windows
from bigbatch.core.window import cuts, rank_slices
from tests.examples import examples

stable = settings(max_examples=examples(100), derandomize=True, database=None, deadline=None)


def grouped(stream, accumulation_steps, **options):
    return [list(window) for window in windows(stream, accumulation_steps, **options)]


# --- windows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num", "accumulation_steps", "expected"),
    [
        (6, 3, [[0, 1, 2], [3, 4, 5]]),
        (7, 3, [[0, 1, 2], [3, 4, 5], [6]]),
        (2, 3, [[0, 1]]),
        (3, 1, [[0], [1], [2]]),
        (0, 3, []),
    ],
)
def test_groups_in_order_and_the_last_may_be_shorter(num, accumulation_steps, expected):
    assert grouped(range(num), accumulation_steps) == expected


@stable
@given(st.integers(0, 40), st.integers(1, 45))
def test_every_micro_batch_is_in_exactly_one_window(num, accumulation_steps):
    found = grouped(range(num), accumulation_steps)
    assert [micro_batch for window in found for micro_batch in window] == list(range(num))
    assert all(len(window) == accumulation_steps for window in found[:-1])
    assert all(1 <= len(window) <= accumulation_steps for window in found)
    assert len(windows(range(num), accumulation_steps)) == len(found)


def test_accepts_a_generator_once():
    stream = windows((k * k for k in range(5)), 2)
    assert [list(window) for window in stream] == [[0, 1], [4, 9], [16]]
    assert list(stream) == []


def test_reads_only_the_window_it_yields():
    read = []
    stream = iter(windows((read.append(k) or k for k in range(10)), 4))
    next(stream)
    assert read == [0, 1, 2, 3]


def test_a_list_can_be_iterated_again():
    stream = windows([1, 2, 3], 2)
    assert [len(window) for window in stream] == [2, 1]
    assert [len(window) for window in stream] == [2, 1]


def test_every_window_is_a_window():
    assert all(isinstance(window, Window) for window in windows(range(5), 2))


def test_window_may_hold_false_values():
    assert grouped([0, None, "", ()], 3) == [[0, None, ""], [()]]


# --- a ramp ----------------------------------------------------------------------------------------------


def test_ramp_asks_for_each_step_number():
    assert grouped(range(10), lambda step: step + 1) == [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_ramp_counts_on_over_epochs():
    stream = windows(range(5), lambda step: step + 1)
    assert [len(window) for window in stream] == [1, 2, 2]  # steps 0, 1, 2: the last is short
    assert stream.next_step == 3
    assert [len(window) for window in stream] == [4, 1]  # steps 3, 4
    assert stream.next_step == 5


def test_ramp_starts_at_first_step():
    assert grouped(range(10), lambda step: step + 1, first_step=3) == [[0, 1, 2, 3], [4, 5, 6, 7, 8], [9]]


def test_an_epoch_left_early_counts_its_steps():
    stream = windows(range(10), lambda step: step + 1)
    for window in stream:
        if len(window) == 2:
            break
    assert [len(window) for window in stream] == [3, 4, 3]


def test_ramp_of_exactly_as_many_steps_as_the_stream_has():
    """A table of sizes must not be asked for the window after the last."""
    assert grouped(range(7), [1, 2, 4].__getitem__) == [[0], [1, 2], [3, 4, 5, 6]]


# --- len -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num", "accumulation_steps"), [(6, 3), (7, 3), (2, 3), (0, 3), (5, 1)])
def test_len_is_the_number_of_windows(num, accumulation_steps):
    stream = windows(range(num), accumulation_steps)
    assert len(stream) == len(list(stream))


def test_len_of_a_ramp_is_unknown():
    with pytest.raises(TypeError, match="varying number"):
        len(windows(range(4), lambda step: 2))


def test_len_of_a_generator_is_unknown():
    with pytest.raises(TypeError, match="no len"):
        len(windows((k for k in range(4)), 2))


# --- accumulation_steps that cannot work -----------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1, 2.5, 2.0, True, False, "4", None, [2]])
def test_refuses_accumulation_steps(bad):
    message = f"accumulation_steps is {bad!r}: pass a whole number of at least 1"
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        windows([1, 2], bad)


@pytest.mark.parametrize("bad", [0, -3, 1.5, True, "2", None])
def test_refuses_a_ramp_that_gives_no_size_and_names_the_step(bad):
    stream = iter(windows(range(9), lambda step: 2 if step < 2 else bad))
    assert [len(next(stream)), len(next(stream))] == [2, 2]
    message = f"accumulation_steps(2) is {bad!r}: pass a whole number of at least 1"
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        next(stream)


def test_option_error_is_a_value_error():
    with pytest.raises(ValueError, match="accumulation_steps"):
        windows([1], 0)
    with pytest.raises(BigBatchError):
        windows([1], 0)


def test_accepts_numpy_integers():
    assert grouped(range(3), np.int64(2)) == [[0, 1], [2]]
    assert len(windows(range(3), np.int64(2))) == 2
    assert grouped(range(3), lambda step: np.int32(2)) == [[0, 1], [2]]


# --- Window ----------------------------------------------------------------------------------------------


def test_window_is_a_sequence():
    window = Window("abcd")
    assert isinstance(window, Sequence)
    assert len(window) == 4
    assert window[0] == "a"
    assert window[-1] == "d"
    assert list(window) == ["a", "b", "c", "d"]
    assert list(reversed(window)) == ["d", "c", "b", "a"]
    assert "c" in window
    assert "z" not in window
    assert window.index("c") == 2
    assert window.count("a") == 1
    assert repr(window) == "Window of 4 micro-batches"
    with pytest.raises(IndexError):
        window[4]


def test_slice_of_a_window_is_a_window():
    part = Window("abcd")[1:3]
    assert isinstance(part, Window)
    assert list(part) == ["b", "c"]


def test_window_does_not_change_with_its_source():
    micro_batches = [1, 2]
    window = Window(micro_batches)
    micro_batches.append(3)
    assert list(window) == [1, 2]


def test_window_is_false_only_if_empty():
    assert not Window([])
    assert Window([None])


# --- cuts ------------------------------------------------------------------------------------------------


@stable
@given(st.integers(1, 60), st.integers(1, 65))
def test_cuts_cover_the_batch_in_order_and_all_are_full_but_the_last(batch_size, micro_batch_size):
    parts = cuts(batch_size, micro_batch_size)
    samples = list(range(batch_size))
    assert [sample for part in parts for sample in samples[part]] == samples
    sizes = [part.stop - part.start for part in parts]  # as written, not as Python would clamp them
    assert sum(sizes) == batch_size
    assert all(size == micro_batch_size for size in sizes[:-1])
    assert 1 <= sizes[-1] <= micro_batch_size


@pytest.mark.parametrize(
    ("micro_batch_size", "sizes"), [(1, [1] * 7), (2, [2, 2, 2, 1]), (3, [3, 3, 1]), (6, [6, 1]), (7, [7]), (9, [7])]
)
def test_cuts_of_seven(micro_batch_size, sizes):
    assert [part.stop - part.start for part in cuts(7, micro_batch_size)] == sizes


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "sizes"),
    [(7, 3, [3, 2, 2]), (9, 4, [4, 3, 2]), (8, 3, [3, 3, 2]), (7, 2, [2, 2, 2, 1]), (3, 1, [1] * 3), (1, 3, [1])],
)
def test_cuts_that_avoid_a_single_sample(batch_size, micro_batch_size, sizes):
    parts = cuts(batch_size, micro_batch_size, avoid_single_sample=True)
    assert [part.stop - part.start for part in parts] == sizes
    assert [parts[0].start, parts[-1].stop] == [0, batch_size]


@stable
@given(st.integers(1, 60), st.integers(1, 65))
def test_shares_cover_the_batch_in_order_and_differ_by_one_at_most(batch_size, num_ranks):
    parts = rank_slices(batch_size, num_ranks)
    assert len(parts) == num_ranks
    assert [sample for part in parts for sample in range(part.start, part.stop)] == list(range(batch_size))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == max(sizes)
