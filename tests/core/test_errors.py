import inspect

import pytest

import bigbatch
from bigbatch.core import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
ERRORS = [c for c in CLASSES if not issubclass(c, Warning)]


def test_every_error_is_a_bigbatch_error():
    assert len(ERRORS) > 5
    for error in ERRORS:
        assert issubclass(error, bigbatch.BigBatchError)


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
