"""Locks of parameters: one call at a time, for every accumulator that trains them."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from bigbatch import OrderError
from bigbatch.core.exclusive import Exclusive


class Parameter:
    pass


def exclusive(*parameters):
    held = list(parameters) or [Parameter(), Parameter()]
    return Exclusive(lambda: list(held))


def in_another_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(30)


def is_free(exclusive):
    """Whether another thread may train the parameters now."""

    def take():
        try:
            with exclusive.hold("step()"):
                return True
        except OrderError as error:
            return "another thread is in a step of the same parameters" not in str(error)

    return in_another_thread(take)


def test_a_call_keeps_all_others_away_until_it_ends():
    own = exclusive()
    with own.hold("step()"):
        assert not is_free(own)
        with pytest.raises(OrderError, match=r"^flush\(\) was called inside a micro_batch"), own.hold("flush()"):
            pass
        assert not is_free(own)  # the refused call released nothing
    assert is_free(own)


def test_a_call_that_raises_releases_its_locks():
    own = exclusive()
    with pytest.raises(ZeroDivisionError), own.hold("step()"):
        raise ZeroDivisionError
    assert is_free(own)


def test_a_call_that_never_reaches_its_end_holds_nothing():
    """As if Ctrl-C came just before the locks are released."""
    own = exclusive()
    hold = own.hold("step()")
    hold.__enter__()
    assert not is_free(own)
    del hold
    assert is_free(own)


@pytest.mark.parametrize("num_lines", range(1, 25))
def test_an_interrupt_at_any_line_leaves_the_locks_free(num_lines):
    own, seen = exclusive(), []

    def interrupt(frame, event, _):
        if event == "line" and frame.f_code.co_filename.endswith("exclusive.py"):
            seen.append(frame.f_lineno)
            if len(seen) == num_lines:
                raise KeyboardInterrupt
        return interrupt

    hold = None
    sys.settrace(interrupt)
    try:
        hold = own.hold("step()")
        with hold:
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    del hold
    assert is_free(own)


def test_a_call_takes_all_locks_or_none():
    a, b = Parameter(), Parameter()
    one, other, both = exclusive(a), exclusive(b), exclusive(a, b)
    with one.hold("step()"):
        assert not is_free(both)
        assert is_free(other)
    with both.hold("step()"):
        assert not is_free(one)
        assert not is_free(other)
    assert is_free(both)


def test_a_parameter_that_comes_later_is_shared_too():
    shared, held = Parameter(), [Parameter()]
    growing, other = Exclusive(lambda: list(held)), exclusive(shared)
    held.append(shared)
    with other.hold("step()"):
        assert not is_free(growing)


def test_replicas_may_train_their_copies_at_the_same_time():
    own = exclusive()
    with own.hold("step()", [0]):
        with own.hold("step()", [1]):
            pass
        with pytest.raises(OrderError), own.hold("step()", [1, 0]):
            pass


def test_changes_are_counted_for_everyone_who_shares_a_parameter():
    shared = Parameter()
    one, other, third = exclusive(shared), exclusive(shared, Parameter()), exclusive()
    before = [each.num_changes() for each in (one, other, third)]
    one.changed()
    after = [each.num_changes() for each in (one, other, third)]
    assert [b != a for b, a in zip(before, after, strict=True)] == [True, True, False]


def test_a_copy_has_its_own_locks():
    own = exclusive()
    twin = copy.deepcopy(own)
    twin._parameters = lambda: [Parameter()]
    with own.hold("step()"):
        assert is_free(twin)
