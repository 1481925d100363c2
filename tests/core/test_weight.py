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
    window = Weights()
    sums = [0.0] * len(weights[0])
    for weight, loss in zip(weights, losses, strict=True):
        sums = [s + scale * x for s, scale, x in zip(sums, window.share(weight), loss, strict=True)]
        window.add(weight)
    return [s * factor for s, factor in zip(sums, window.rest(totals(weights)), strict=True)]


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
def test_both_ways_give_the_formula(way, window):
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
def test_mean_of_means_is_off_by_the_covariance_of_weight_and_loss(window):
    """So it is right only if weights or losses are all the same."""
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


# --- totals and shares -----------------------------------------------------------------------------------


def test_totals_are_summed_term_by_term():
    assert totals([(1, 10), (2, 20), (4, 40)]) == (7, 70)


def test_totals_need_the_same_number_of_terms():
    with pytest.raises(ValueError, match="shorter"):
        totals([(1, 2), (3,)])


@stable
@given(window=windows_of_terms())
def test_shares_add_up_to_one_or_zero(window):
    weights, _ = window
    total = totals(weights)
    by = [shares(weight, total) for weight in weights]
    for t, whole in zip(totals(by), total, strict=True):
        assert t == (pytest.approx(1.0) if whole else 0.0)


def test_a_share_of_zero_is_zero():
    assert shares((0, 3), (0, 6)) == (0.0, 0.5)


def test_shares_of_a_sum_are_one():
    assert shares((7, 0), (14, 0), "sum") == (1.0, 1.0)


# --- weighted --------------------------------------------------------------------------------------------


def test_weighted_skips_a_micro_batch_without_weight_even_if_its_loss_is_nan():
    assert weighted([(math.nan,), (2.0,), (math.inf,)], [(0.0,), (0.5,), (0.0,)]) == (1.0,)


def test_weighted_keeps_a_nan_with_weight():
    assert math.isnan(weighted([(math.nan,), (2.0,)], [(0.5,), (0.5,)])[0])


def test_weighted_skips_each_term_by_itself():
    assert weighted([(math.nan, 1.0), (4.0, math.nan)], [(0.0, 1.0), (1.0, 0.0)]) == (4.0, 1.0)


def test_weighted_returns_plain_floats():
    (value,) = weighted([(np.float32(2.0),)], [(0.5,)])
    assert type(value) is float


# --- Weights ---------------------------------------------------------------------------------------------


def fed(window, *weights):
    """The shares of micro-batches that are added one after the other."""
    found = []
    for weight in weights:
        found += window.share((weight,))
        window.add((weight,))
    return found


def test_shares_are_relative_to_the_first_weight():
    window = Weights()
    assert fed(window, 4, 8, 1) == [1.0, 2.0, 0.25]
    assert window.rest((13,)) == (4 / 13,)
    assert window.weights == [(4,), (8,), (1,)]


def test_sums_stay_as_large_as_a_mean():
    """Weights of 50,000 tokens would overflow float16 if sums were not kept relative to the first."""
    assert fed(Weights(), *[50_000] * 8) == [1.0] * 8


def test_a_window_may_start_with_an_empty_micro_batch():
    window = Weights()
    assert fed(window, 0, 6) == [0.0, 6.0]
    assert window.rest((6,)) == (pytest.approx(1 / 6),)


def test_a_window_of_empty_micro_batches_has_shares_of_zero():
    window = Weights()
    assert fed(window, 0, 0) == [0.0, 0.0]
    assert window.rest((0,)) == (0.0,)


def test_all_shares_are_one_with_reduction_sum():
    window = Weights("sum")
    assert fed(window, 4, 0, 9) == [1.0, 1.0, 1.0]
    assert window.rest((13,)) == (1.0,)


def test_asking_for_a_share_adds_nothing():
    window = Weights()
    window.share((4,))
    window.share((2,))
    assert window.weights == []
    assert fed(window, 8, 4) == [1.0, 0.5]


def test_every_micro_batch_needs_the_same_number_of_terms():
    window = Weights()
    window.add((1, 2))
    with pytest.raises(WeightError, match=r"has 1 weights, those before it in the window have 2"):
        window.add((1,))
    assert window.weights == [(1, 2)]  # the refused one was not added


# --- checks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, -1e-300, math.nan, math.inf, -math.inf, "4", None, [1, 2], 1j, np.array([1, 2])])
def test_a_bad_weight_is_refused(bad):
    with pytest.raises(WeightError, match=r"the weight of micro-batch 3 is .*finite number of at least 0") as caught:
        check_weight((bad,), of="micro-batch 3")
    assert repr(bad) in str(caught.value)


def test_every_term_of_a_weight_is_checked():
    with pytest.raises(WeightError, match=r"-2"):
        check_weight((1, -2), of="this micro-batch")


def test_the_message_about_a_long_weight_is_short():
    with pytest.raises(WeightError) as caught:
        check_weight((np.ones(300),), of="micro-batch 3")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("good", [0, 0.0, 5, 2.5, True, np.int64(3), np.float32(1.5), Fraction(1, 3)])
def test_a_good_weight_is_returned(good):
    assert check_weight((good,), of="this micro-batch") == (good,)
    assert is_number(good)


@pytest.mark.parametrize(
    ("num_losses", "num_weights", "words"),
    [(1, 2, "1 term but the weight has 2"), (3, 1, "3 terms but the weight has 1")],
)
def test_loss_and_weight_need_the_same_number_of_terms(num_losses, num_weights, words):
    with pytest.raises(LossError, match=words):
        check_terms(num_losses, num_weights)
    check_terms(num_losses, num_losses)


@pytest.mark.parametrize("bad", ["none", "Mean", "", None])
def test_an_unknown_reduction_is_refused(bad):
    with pytest.raises(OptionError, match='pass "mean" or "sum"'):
        check_reduction(bad)


@pytest.mark.parametrize("good", ["mean", "sum"])
def test_mean_and_sum_are_reductions(good):
    check_reduction(good)


def test_as_terms_and_from_terms_are_inverses():
    assert as_terms(3.0) == (3.0,)
    assert as_terms((3.0, 4.0)) == (3.0, 4.0)
    assert from_terms((3.0,)) == 3.0
    assert from_terms((3.0, 4.0)) == (3.0, 4.0)
