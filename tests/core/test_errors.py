import inspect
import re

import pytest

import bigbatch
from bigbatch.core import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
ERRORS = [c for c in CLASSES if not issubclass(c, Warning)]


def drawn():
    """The tree in the docstring: each name, and the name it hangs from."""
    parents = {}
    for line in errors.__doc__.splitlines():
        if found := re.match(r"^(?:([├└])── (\w+)|(BigBatchError)$)", line):
            parents[found[2] or found[3]] = "BigBatchError" if found[1] else None
    return parents


def test_every_error_is_ours():
    assert len(ERRORS) > 5
    for error in ERRORS:
        assert issubclass(error, bigbatch.BigBatchError)


def test_drawn_tree_is_the_tree():
    real = {
        error.__name__: None if error is bigbatch.BigBatchError else error.__bases__[0].__name__ for error in ERRORS
    }
    assert drawn() == real


def test_drawn_tree_says_what_else_an_error_is():
    assert "MissingExtraError (also an ImportError)" in errors.__doc__


def test_all_are_exported():
    for error in CLASSES:
        assert getattr(bigbatch, error.__name__) is error


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("OptionError", ValueError),
        ("BatchError", ValueError),
        ("WeightError", ValueError),
        ("LossError", ValueError),
        ("NonFiniteError", ArithmeticError),
        ("GradientError", RuntimeError),
        ("CaptureError", RuntimeError),
        ("OrderError", RuntimeError),
        ("RankError", RuntimeError),
        ("StateError", ValueError),
        ("MissingExtraError", ImportError),
    ],
)
def test_each_is_the_builtin_that_fits(name, builtin):
    with pytest.raises(builtin, match="why"):
        raise getattr(bigbatch, name)("why")


def test_parent_is_a_plain_exception():
    assert bigbatch.BigBatchError.__bases__ == (Exception,)


def test_warning_is_a_user_warning_and_no_error():
    assert issubclass(bigbatch.BigBatchWarning, UserWarning)
    assert not issubclass(bigbatch.BigBatchWarning, bigbatch.BigBatchError)


def test_each_says_what_it_is_for():
    for error in CLASSES:
        assert error.__doc__
