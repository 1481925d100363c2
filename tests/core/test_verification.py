import math

import pytest

from bigbatch import Verification
from bigbatch.core.verify.result import _FLOOR, _relative_error, judge

# --- the verdict -----------------------------------------------------------------------------------------


def test_exact_up_to_the_tolerance():
    verification = judge({"weight": 1e-15, "bias": 1e-9}, [], 1e-9)
    assert verification.is_exact
    assert bool(verification)
    assert verification.max_error == 1e-9
    assert verification.errors == {"weight": 1e-15, "bias": 1e-9}
    assert verification.causes == ()


def test_not_exact_beyond_it():
    verification = judge({"weight": 1e-15, "bias": 2e-9}, ["a mean of means"], 1e-9)
    assert not verification.is_exact
    assert not verification
    assert verification.max_error == 2e-9
    assert verification.causes == ("a mean of means",)


@pytest.mark.parametrize("order", [("weight", "bias"), ("bias", "weight")])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_error_that_is_not_finite_is_not_exact(order, bad):
    """Python's max() drops a NaN that is not the first."""
    errors = {"weight": 1e-15, "bias": bad}
    verification = judge({name: errors[name] for name in order}, [], 1e-9)
    assert not verification.is_exact
    assert not verification.max_error <= 1e-9


def test_no_parameters_are_exact():
    assert judge({}, [], 1e-9).is_exact
    assert "exact: largest error of a parameter 0.0e+00" in str(judge({}, [], 1e-9))


def test_judge_copies_what_it_is_given():
    errors, causes = {"weight": 0.5}, ["one"]
    verification = judge(errors, causes, 1e-9)
    errors["weight"] = 0.0
    causes.append("two")
    assert verification.errors == {"weight": 0.5}
    assert verification.causes == ("one",)


# --- the table -------------------------------------------------------------------------------------------


def test_table_of_an_exact_one():
    text = str(judge({"a": 2e-16, "encoder.weight": 3.4e-15, "b": 0.0}, [], 1e-9, 1e-15))
    assert text == "\n".join(
        [
            "parameter       relative error",
            "--------------  --------------",
            "encoder.weight         3.4e-15",
            "a                      2.0e-16",
            "b                      0.0e+00",
            "exact: largest error of a parameter 3.4e-15, of the whole gradient 1.0e-15; up to 1e-09 is allowed",
        ]
    )


def test_table_of_an_inexact_one():
    text = str(judge({"a": 2e-16, "b": 0.31}, ["divided by 4", "dropout"], 1e-6, 0.2))
    assert text == "\n".join(
        [
            "parameter  relative error",
            "---------  --------------",
            "b                 3.1e-01",
            "a                 2.0e-16",
            "NOT exact: largest error of a parameter 3.1e-01, of the whole gradient 2.0e-01; up to 1e-06 is allowed",
            "- divided by 4",
            "- dropout",
        ]
    )


def test_the_table_of_a_large_model_fits_on_a_screen():
    errors = {f"layers.{k}.weight": k * 1e-13 for k in range(300)}
    found = judge(errors, [f"BatchNorm ({', '.join(errors)})"], 1e-9)
    lines = str(found).splitlines()
    assert len(lines) == 15
    assert lines[2].split() == ["layers.299.weight", "3.0e-11"]
    assert lines[11].split() == ["layers.290.weight", "2.9e-11"]
    assert lines[12] == "and 290 more with an error of at most 2.9e-11"
    assert lines[13].startswith("exact")
    assert len(lines[14]) < 1100
    assert len(found.errors) == 300
    assert found.causes[0].endswith("layers.299.weight)")


@pytest.mark.parametrize("num", [10, 11])
def test_ten_errors_are_shown(num):
    lines = str(judge({f"p{k}": 0.0 for k in range(num)}, [], 1e-9)).splitlines()
    assert [line for line in lines if line.startswith("and ")] == ["and 1 more with an error of at most 0.0e+00"] * (
        num - 10
    )


def test_an_error_of_nan_comes_first():
    errors = {f"p{k}": 0.5 for k in range(20)} | {"bad": math.nan}
    assert str(judge(errors, [], 1e-9)).splitlines()[2].split() == ["bad", "nan"]


def test_print_shows_the_table(capsys):
    verification = judge({"a": 0.5}, [], 1e-9)
    print(verification)
    assert capsys.readouterr().out == str(verification) + "\n"


def test_a_verification_can_be_made_by_hand_and_not_changed():
    verification = Verification(True, 0.0, {})
    assert verification.tolerance == 1e-9
    with pytest.raises(AttributeError):
        verification.is_exact = False


# --- relative error --------------------------------------------------------------------------------------


def test_relative_to_the_parameters_own_gradient():
    assert _relative_error(0.5, norm=2.0, total_norm=10.0) == 0.25


def test_small_gradients_are_measured_against_the_whole():
    """A bias in front of a BatchNorm: its true gradient is zero and only rounding is left."""
    assert _relative_error(1e-17, norm=1e-17, total_norm=1.0) == pytest.approx(1e-17 / _FLOOR)
    assert _relative_error(1e-17, norm=0.0, total_norm=1.0) == pytest.approx(1e-13)


def test_the_floor_hides_no_real_error():
    assert _relative_error(0.01, norm=0.0, total_norm=1.0) > 1.0


def test_no_distance_is_no_error():
    assert _relative_error(0.0, norm=0.0, total_norm=0.0) == 0.0


def test_a_distance_from_zero_is_infinite():
    assert _relative_error(1e-300, norm=0.0, total_norm=0.0) == math.inf


def test_a_distance_of_nan_is_an_error_of_nan():
    assert math.isnan(_relative_error(math.nan, norm=1.0, total_norm=1.0))
