import inspect
import re

import pytest

import bigbatch
from bigbatch.core import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
ERRORS = [c for c in CLASSES if not issubclass(c, Warning)]


def documented_parents():
    """The tree in the docstring: each error's name and that of its parent."""
    parents = {}
    for line in errors.__doc__.splitlines():
        if found := re.match(r"^(?:([├└])── (\w+)|(BigBatchError)$)", line):
            parents[found[2] or found[3]] = "BigBatchError" if found[1] else None
    return parents


def test_every_error_is_a_bigbatch_error():
    assert len(ERRORS) > 5
    for error in ERRORS:
        assert issubclass(error, bigbatch.BigBatchError)


def test_the_tree_in_the_docstring_is_the_real_one():
    real = {
        error.__name__: None if error is bigbatch.BigBatchError else error.__bases__[0].__name__ for error in ERRORS
    }
    assert documented_parents() == real


def test_the_tree_mentions_import_error():
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
def test_each_is_also_a_builtin_error(name, builtin):
    with pytest.raises(builtin, match="why"):
        raise getattr(bigbatch, name)("why")


def test_the_parent_is_a_plain_exception():
    assert bigbatch.BigBatchError.__bases__ == (Exception,)


def test_the_warning_is_a_user_warning_and_not_an_error():
    assert issubclass(bigbatch.BigBatchWarning, UserWarning)
    assert not issubclass(bigbatch.BigBatchWarning, bigbatch.BigBatchError)


def test_each_has_a_docstring():
    for error in CLASSES:
        assert error.__doc__
