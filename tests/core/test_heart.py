"""core/weight.py is the only file that divides by a total weight, and it gives the same for every kind of number."""

import math
from fractions import Fraction

import numpy as np
import pytest

from bigbatch.core.weight import Weights, counted, share, shares, totals
from tests import house
from tests.house import divisions, places_that_divide

HEART = "core/weight.py"

# --- one division --------------------------------------------------------------------------------------------


def copies_of_the_heart():
    return [place for place in places_that_divide() if not place.startswith(HEART)]


def test_only_the_heart_divides_by_a_total_weight() -> None:
    assert copies_of_the_heart() == []
    assert len([place for place in places_that_divide() if place.startswith(HEART)]) == 1


def test_a_file_with_a_second_division_fails_this_test(tmp_path, monkeypatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "gradients.py").write_text("def scaled(gradient, total):\n    return gradient / total\n")
    monkeypatch.setattr(house, "PACKAGE", tmp_path)
    monkeypatch.setattr(house, "sources", lambda: sorted(tmp_path.rglob("*.py")))
    assert copies_of_the_heart() == ["torch/gradients.py: gradient / total"]


@pytest.mark.parametrize(
    "source",
    [
        "loss * w / total",
        "gradient / self._weights.total",
        "loss *= 1 / jnp.where(total == 0, 1, total)",
        "gradient /= num_samples",
        "tf.math.divide_no_nan(value, by)",
        "torch._foreach_div_(sums, total_weight)",
        "sums.div_(count)",
        "share = size / _divisor(weights)",
        "def scaled(g):\n    return [each / sum(weights) for each in g]",
    ],
)
def test_divisions_by_a_total_are_found(source: str) -> None:
    assert len(divisions(source)) == 1


@pytest.mark.parametrize(
    "source",
    ["share(weight, total)", "distance_norm / total", "folder / name", "clip_norm / (total_norm + 1e-6)", "a // size"],
)
def test_other_expressions_are_not_found(source: str) -> None:
    assert divisions(source) == []


# --- every kind of number ------------------------------------------------------------------------------------

KINDS = {
    "Fraction": (Fraction, {}),
    "float": (float, {}),
    "array": (lambda number: np.array([float(number)] * 3), {"where": np.where}),  # three windows at a time
    "0-dim array": (lambda number: np.array(float(number)), {"where": np.where}),
}
WINDOWS = {
    "a ragged end": [(16,), (16,), (5,)],
    "one micro-batch": [(7,)],
    "an empty one first": [(0,), (3,), (9,)],
    "an empty one in the middle": [(2,), (0,), (1,)],
    "nothing counts": [(0,), (0,)],
    "huge ratios": [(1,), (10**15,), (Fraction(1, 10**9),)],
    "tokens and samples": [(120, 4), (3, 4), (77, 1)],
    "one term counts nothing": [(5, 0), (6, 0)],
    "fractions": [(Fraction(1, 3), Fraction(5, 7)), (Fraction(8, 9), Fraction(1, 11))],
}
LOSSES = [Fraction(5, 2), Fraction(-7, 3), Fraction(11)]


def losses_of(weights):
    return [tuple(loss + 2 * term for term in range(len(weights[0]))) for loss in LOSSES[: len(weights)]]


def by_formula(weights, reduction):
    """sum_k w_k * l_k / W, in exact arithmetic; a mean over nothing is 0 here."""
    found = []
    for w, x in zip(zip(*weights, strict=True), zip(*losses_of(weights), strict=True), strict=True):
        products = [Fraction(a) * b for a, b in zip(w, x, strict=True)]
        total = sum(map(Fraction, w))
        found.append(sum(x) if reduction == "sum" else sum(products) / total if total else Fraction(0))
    return found


def counting_first(weights, losses, reduction, options):
    total = totals(weights)
    by = [shares(weight, total, reduction, **options) for weight in weights]
    return added_up(losses, by, options)


def dividing_at_the_end(weights, losses, reduction, options):
    window, by = Weights(reduction, **options), []
    for weight in weights:
        by.append(window.share(weight))
        window.add(weight)
    sums = added_up(losses, by, options)
    return [s * kept(s, rest) for s, rest in zip(sums, window.rest(totals(weights)), strict=True)]


def added_up(losses, by, options):
    """Every loss times its share, summed term by term."""
    return [
        sum(kept(x, counted(x, kept(x, part), **options)) for x, part in zip(term, of_term, strict=True))
        for term, of_term in zip(zip(*losses, strict=True), zip(*by, strict=True), strict=True)
    ]


def kept(like, value):
    """Converts to a Fraction if the losses are: the heart returns 0.0 and 1.0 for all kinds."""
    return Fraction(value) if isinstance(like, Fraction) else value


def mean_of_means(weights, losses, reduction, options):
    return [sum(term) / len(losses) for term in zip(*losses, strict=True)]


def assert_formula(way, weights, kind, reduction="mean"):
    of, options = KINDS[kind]
    found = way(
        [tuple(map(of, weight)) for weight in weights],
        [tuple(map(of, terms)) for terms in losses_of(weights)],
        reduction,
        options,
    )
    expected = by_formula(weights, reduction)
    if kind == "Fraction":
        assert found == expected
    else:
        for term, value in zip(found, expected, strict=True):
            np.testing.assert_allclose(term, float(value), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("way", [counting_first, dividing_at_the_end])
def test_every_kind_of_number_gives_the_formula(way, window, kind, reduction) -> None:
    assert_formula(way, WINDOWS[window], kind, reduction)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", ["a ragged end", "an empty one first", "huge ratios", "tokens and samples"])
def test_the_mean_of_means_is_not_the_formula(window, kind) -> None:
    with pytest.raises(AssertionError):
        assert_formula(mean_of_means, WINDOWS[window], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_without_weight_is_left_out_even_if_it_is_nan(kind) -> None:
    of, options = KINDS[kind]
    value = np.nan * of(1) if options else math.nan
    assert np.all(counted(value, share(of(0), of(8), **options), **options) == 0)
    assert np.all(np.isnan(counted(value, share(of(1), of(8), **options), **options)))


def test_windows_side_by_side_have_their_own_totals() -> None:
    """In one array: an empty window neither divides by zero nor affects the others."""
    weights, total = np.array([1.0, 0.0, 3.0]), np.array([4.0, 0.0, 4.0])
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(share(weights, total, np.where), [0.25, 0.0, 0.75])
