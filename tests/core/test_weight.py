import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bigbatch import LossError, OptionError, WeightError
from bigbatch.core.weight import (
    Weights,
    as_terms,
    check_reduction,
    check_terms,
    check_weight,
    from_terms,
    is_number,
    shares,
    totals,
    weighted,
)
from tests.examples import examples

stable = settings(max_examples=examples(100), derandomize=True, database=None, deadline=None)

WHOLE = st.integers(0, 10_000)
WEIGHTS = st.one_of(st.just(0), WHOLE, st.floats(1e-3, 1e6))
LOSSES = st.floats(-100, 100)


@st.composite
def windows_of_terms(draw, max_terms=3):
    """The weights and mean losses of a window, term by term."""
    num_terms = draw(st.integers(1, max_terms))
    num_micro_batches = draw(st.integers(1, 12))
    weights = [tuple(draw(WEIGHTS) for _ in range(num_terms)) for _ in range(num_micro_batches)]
    losses = [tuple(draw(LOSSES) for _ in range(num_terms)) for _ in range(num_micro_batches)]
    return weights, losses


def by_formula(weights, losses):
    """sum_k w_k * l_k / W in exact fractions; 0 for a term whose total is zero."""
    result = []
    for weight, loss in zip(zip(*weights, strict=True), zip(*losses, strict=True), strict=True):
        total = sum(map(Fraction, weight))
        products = sum(Fraction(w) * Fraction(x) for w, x in zip(weight, loss, strict=True))
        result.append(float(products / total) if total else 0.0)
    return result


def counting_first(weights, losses):
    total = totals(weights)
    return weighted(losses, [shares(weight, total) for weight in weights])


def dividing_at_the_end(weights, losses):
    tally = Weights()
    sums = [0.0] * len(weights[0])
    for weight, loss in zip(weights, losses, strict=True):
        sums = [s + scale * x for s, scale, x in zip(sums, tally.share(weight), loss, strict=True)]
        tally.add(weight)
    return [s * factor for s, factor in zip(sums, tally.rest(totals(weights)), strict=True)]


def mean_of_means(weights, losses):
    return [sum(term) / len(losses) for term in zip(*losses, strict=True)]


def assert_formula(way, weights, losses):
    # cancellation may make the result small, so the error is measured against what was added up
    size = max((abs(x) for loss in losses for x in loss), default=0.0)
    np.testing.assert_allclose(way(weights, losses), by_formula(weights, losses), rtol=1e-12, atol=1e-12 * size)


# --- the two ways, and the wrong one ---------------------------------------------------------------------


@pytest.mark.parametrize("way", [counting_first, dividing_at_the_end])
@stable
@given(window=windows_of_terms())
def test_both_ways_are_the_formula(way, window):
    assert_formula(way, *window)


@stable
@given(window=windows_of_terms())
def test_both_ways_agree(window):
    np.testing.assert_allclose(counting_first(*window), dividing_at_the_end(*window), rtol=1e-11, atol=1e-10)


def test_mean_of_means_is_not_the_formula():
    with pytest.raises(AssertionError):
        assert_formula(mean_of_means, [(16,), (16,), (5,)], [(1.0,), (2.0,), (7.0,)])


@stable
@given(window=windows_of_terms(max_terms=1))
def test_mean_of_means_is_right_only_where_it_cannot_show(window):
    """Wherever the weights differ and the losses do too, the naive mean is off by what theory says."""
    weights, losses = window
    w = np.array(weights, float)[:, 0]
    x = np.array(losses)[:, 0]
    assume(w.sum() > 0)
    covariance = np.mean((w - w.mean()) * (x - x.mean()))
    difference = counting_first(*window)[0] - mean_of_means(*window)[0]
    np.testing.assert_allclose(difference, covariance / w.mean(), rtol=1e-6, atol=1e-9)


def test_each_term_is_divided_by_its_own_total():
    weights = [(3, 1), (60, 2), (17, 5)]
    losses = [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]
    tokens, samples = counting_first(weights, losses)
    assert tokens == pytest.approx((3 * 1 + 60 * 2 + 17 * 3) / 80)
    assert samples == pytest.approx((10 + 40 + 150) / 8)


def test_order_of_micro_batches_does_not_matter():
    weights, losses = [(5,), (0,), (2,)], [(1.0,), (9.0,), (4.0,)]
    assert dividing_at_the_end(weights[::-1], losses[::-1]) == pytest.approx(dividing_at_the_end(weights, losses))


# --- totals and scales -----------------------------------------------------------------------------------


def test_totals_term_by_term():
    assert totals([(1, 10), (2, 20), (4, 40)]) == (7, 70)


def test_totals_refuse_a_window_of_uneven_terms():
    with pytest.raises(ValueError, match="shorter"):
        totals([(1, 2), (3,)])


@stable
@given(window=windows_of_terms())
def test_scales_add_up_to_one_or_nothing(window):
    weights, _ = window
    total = totals(weights)
    by = [shares(weight, total) for weight in weights]
    for t, whole in zip(totals(by), total, strict=True):
        assert t == (pytest.approx(1.0) if whole else 0.0)


def test_scale_over_nothing_is_zero():
    assert shares((0, 3), (0, 6)) == (0.0, 0.5)


def test_sum_scales_nothing():
    assert shares((7, 0), (14, 0), "sum") == (1.0, 1.0)


# --- weighted --------------------------------------------------------------------------------------------


def test_weighted_leaves_out_what_counts_nothing():
    assert weighted([(math.nan,), (2.0,), (math.inf,)], [(0.0,), (0.5,), (0.0,)]) == (1.0,)


def test_weighted_keeps_a_nan_that_counts():
    assert math.isnan(weighted([(math.nan,), (2.0,)], [(0.5,), (0.5,)])[0])


def test_weighted_leaves_out_term_by_term():
    assert weighted([(math.nan, 1.0), (4.0, math.nan)], [(0.0, 1.0), (1.0, 0.0)]) == (4.0, 1.0)


def test_weighted_gives_plain_floats():
    (value,) = weighted([(np.float32(2.0),)], [(0.5,)])
    assert type(value) is float


# --- Tally -----------------------------------------------------------------------------------------------


def fed(tally, *weights):
    """The scales of micro-batches that are fed one after the other."""
    found = []
    for weight in weights:
        found += tally.share((weight,))
        tally.add((weight,))
    return found


def test_tally_scales_by_the_first_weight():
    tally = Weights()
    assert fed(tally, 4, 8, 1) == [1.0, 2.0, 0.25]
    assert tally.rest((13,)) == (4 / 13,)
    assert tally.weights == [(4,), (8,), (1,)]


def test_tally_keeps_sums_as_large_as_a_mean():
    """Weights of 50,000 tokens would overflow float16 if sums were not kept relative to the first."""
    assert fed(Weights(), *[50_000] * 8) == [1.0] * 8


def test_tally_that_starts_with_nothing():
    tally = Weights()
    assert fed(tally, 0, 6) == [0.0, 6.0]
    assert tally.rest((6,)) == (pytest.approx(1 / 6),)


def test_tally_of_nothing_at_all():
    tally = Weights()
    assert fed(tally, 0, 0) == [0.0, 0.0]
    assert tally.rest((0,)) == (0.0,)


def test_tally_of_sums_scales_nothing():
    tally = Weights("sum")
    assert fed(tally, 4, 0, 9) == [1.0, 1.0, 1.0]
    assert tally.rest((13,)) == (1.0,)


def test_asking_for_a_scale_counts_nothing():
    tally = Weights()
    tally.share((4,))
    tally.share((2,))
    assert tally.weights == []
    assert fed(tally, 8, 4) == [1.0, 0.5]


def test_tally_refuses_other_terms():
    tally = Weights()
    tally.add((1, 2))
    with pytest.raises(WeightError, match=r"has 1 weights, those before it in the window have 2"):
        tally.add((1,))
    assert tally.weights == [(1, 2)]  # what was refused was not counted


# --- checks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, -1e-300, math.nan, math.inf, -math.inf, "4", None, [1, 2], 1j, np.array([1, 2])])
def test_refuses_a_weight(bad):
    with pytest.raises(WeightError, match=r"the weight of micro-batch 3 is .*finite number of at least 0") as caught:
        check_weight((bad,), of="micro-batch 3")
    assert repr(bad) in str(caught.value)


def test_refuses_a_bad_weight_behind_a_good_one():
    with pytest.raises(WeightError, match=r"-2"):
        check_weight((1, -2), of="this micro-batch")


def test_a_long_weight_is_told_in_short():
    with pytest.raises(WeightError) as caught:
        check_weight((np.ones(300),), of="micro-batch 3")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("good", [0, 0.0, 5, 2.5, True, np.int64(3), np.float32(1.5), Fraction(1, 3)])
def test_takes_a_weight(good):
    assert check_weight((good,), of="this micro-batch") == (good,)
    assert is_number(good)


@pytest.mark.parametrize(
    ("num_losses", "num_weights", "words"),
    [(1, 2, "1 term but the weight has 2"), (3, 1, "3 terms but the weight has 1")],
)
def test_refuses_terms_without_weights(num_losses, num_weights, words):
    with pytest.raises(LossError, match=words):
        check_terms(num_losses, num_weights)
    check_terms(num_losses, num_losses)


@pytest.mark.parametrize("bad", ["none", "Mean", "", None])
def test_refuses_a_reduction(bad):
    with pytest.raises(OptionError, match='pass "mean" or "sum"'):
        check_reduction(bad)


@pytest.mark.parametrize("good", ["mean", "sum"])
def test_takes_a_reduction(good):
    check_reduction(good)


def test_terms_there_and_back():
    assert as_terms(3.0) == (3.0,)
    assert as_terms((3.0, 4.0)) == (3.0, 4.0)
    assert from_terms((3.0,)) == 3.0
    assert from_terms((3.0, 4.0)) == (3.0, 4.0)
