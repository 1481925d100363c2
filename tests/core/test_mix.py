"""Loops with classic mistakes, run on random micro-gradients: explain_loop has to name each mistake."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bigbatch.core.verify.mix import Mix, _is_clipped, _whole_times, explain_loop, unmix
from tests.examples import examples

stable = settings(derandomize=True, database=None, deadline=None, max_examples=examples(60))

WEIGHTS = (16, 11, 16, 5)


def micro_gradients(num, seed=0, size=60):
    """Gradients of different norms that have a common part, as those of one model do."""
    draw = np.random.default_rng(seed)
    return (draw.normal(size=size) + draw.normal(size=(num, size))) * draw.uniform(0.3, 3.0, size=(num, 1))


def mix_of(micro, gradient):
    rows = np.vstack([micro, gradient])
    return unmix(rows @ rows.T)


def right_of(weights):
    return np.array(weights, float) / sum(weights)


def named(loop, weights=WEIGHTS, seed=0):
    """What explain_loop says about `loop(micro_gradients, weights)`."""
    micro = micro_gradients(len(weights), seed)
    return explain_loop(mix_of(micro, loop(micro, np.array(weights, float))), right_of(weights))


def mixing(coefficients):
    return lambda micro, weights: np.asarray(coefficients(weights), float) @ micro


# --- unmix -----------------------------------------------------------------------------------------------


@stable
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8), st.integers(0, 1000))
def test_unmix_recovers_the_coefficients(coefficients, seed):
    micro = micro_gradients(len(coefficients), seed)
    mix = mix_of(micro, np.array(coefficients) @ micro)
    assume(np.abs(coefficients).max() > 1e-3)
    np.testing.assert_allclose(mix.coefficients, coefficients, atol=1e-8)
    assert mix.is_unique
    assert mix.is_known
    assert mix.residual < 1e-6


def test_unmix_reports_what_no_micro_batch_explains():
    micro = micro_gradients(3)
    rest = np.random.default_rng(9).normal(size=60)
    rest -= np.linalg.pinv(micro) @ (micro @ rest)  # at right angles to all of them
    gradient = np.array([0.2, 0.3, 0.5]) @ micro
    mix = mix_of(micro, gradient + rest)
    np.testing.assert_allclose(mix.coefficients, [0.2, 0.3, 0.5], atol=1e-8)
    assert mix.residual == pytest.approx(np.linalg.norm(rest) / np.linalg.norm(gradient + rest))
    assert not mix.is_known


@pytest.mark.parametrize("micro", [np.ones((2, 5)), micro_gradients(4, size=3), np.eye(3)[[0, 1, 1]]])
def test_unmix_reports_that_other_coefficients_fit_as_well(micro):
    mix = mix_of(micro, micro.mean(axis=0))
    assert not mix.is_unique
    assert not mix.is_known
    np.testing.assert_allclose(mix.coefficients @ micro, micro.mean(axis=0), atol=1e-9)


def test_unmix_of_a_zero_gradient():
    micro = micro_gradients(3)
    mix = mix_of(micro, np.zeros(60))
    assert mix.residual == 0.0
    np.testing.assert_array_equal(mix.coefficients, np.zeros(3))


# --- a loop that is right --------------------------------------------------------------------------------


@stable
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 1000))
def test_a_right_loop_has_no_mistake(weights, seed):
    assert named(mixing(lambda w: w / w.sum()), weights, seed) is None


def test_a_right_loop_over_an_empty_micro_batch_has_no_mistake():
    assert named(mixing(lambda w: w / w.sum()), (3, 0, 5)) is None


# --- classic mistakes ------------------------------------------------------------------------------------


def divided_by_number(w):
    return np.ones(len(w)) / len(w)


def not_divided(w):
    return np.ones(len(w))


def divided_by_more(w):
    return np.ones(len(w)) / (len(w) + 2)


def divided_by_full_size(w):
    return w / (w.max() * len(w))


def zeroed_between(w):
    return np.where(np.arange(len(w)) < len(w) - 1, 0, w / w.sum())


def zeroed_between_means(w):
    return np.where(np.arange(len(w)) < len(w) - 1, 0, 1 / len(w))


def first_left_out(w):
    return np.where(np.arange(len(w)) == 0, 0, w / w.sum())


def doubled(w):
    return 2 * w / w.sum()


def half_as_large(w):
    return 0.47 * w / w.sum()


MISTAKES = [
    (divided_by_number, "divided by the number of micro-batches ({num}) although their weights differ (a mean"),
    (not_divided, "not divided: the micro-batches' mean losses are added up as they are"),
    (
        divided_by_more,
        "the loop divides by {more}, but this window has only {num} micro-batches, so its gradient is too small",
    ),
    (
        divided_by_full_size,
        "the loop divides by the size of a full window, but this window is smaller, so its gradient is too small",
    ),
    (zeroed_between, "only the last micro-batch counts: gradients are zeroed between micro-batches"),
    (zeroed_between_means, "only the last micro-batch counts: gradients are zeroed between micro-batches"),
    (first_left_out, "micro-batch 1 is left out"),
    (doubled, "2 times too large: gradients of an earlier window were not zeroed"),
    (half_as_large, "the whole gradient is 0.47 times what it should be"),
]


@pytest.mark.parametrize(("mistake", "sentence"), MISTAKES, ids=[m.__name__ for m, _ in MISTAKES])
@stable
@given(weights=st.lists(st.integers(1, 60), min_size=4, max_size=8), seed=st.integers(0, 1000))
def test_the_mistake_is_named(mistake, sentence, weights, seed):
    assume(len(set(weights)) > 1)
    said = named(mixing(mistake), weights, seed)
    num = len(weights)
    assert said.startswith(sentence.format(num=num, more=num + 2)), said
    assert "it weights the micro-batches (" in said


def test_the_message_shows_the_found_and_the_right_coefficients():
    said = named(mixing(divided_by_number), (2, 2, 1))
    assert said.endswith("it weights the micro-batches (0.333, 0.333, 0.333) where (0.4, 0.4, 0.2) is right")


@pytest.mark.parametrize("left_out", [{0}, {2}, {3}, {0, 2}, {1, 3}])
def test_micro_batches_that_are_left_out_are_named(left_out):
    said = named(mixing(lambda w: [0 if k in left_out else x / w.sum() for k, x in enumerate(w)]))
    assert said.startswith(f"micro-batch {', '.join(str(k + 1) for k in sorted(left_out))} is left out"), said


def test_equal_weights_divided_by_a_full_window():
    said = named(mixing(lambda w: np.ones(2) / 4), (8, 8))
    assert said.startswith(
        "the loop divides by 4, but this window has only 2 micro-batches, so its gradient is too small"
    )


def test_mean_of_means_of_three_windows():
    said = named(mixing(lambda w: 3 * np.ones(4) / 4))
    assert said.startswith("3 times too large: gradients of an earlier window were not zeroed")


def test_divided_by_too_few():
    said = named(mixing(lambda w: np.ones(4) / 3))
    assert said.startswith("the loop divides by 3, but this window has 4 micro-batches, so its gradient is too large")


def test_a_short_window_of_uneven_sizes_is_reported_by_its_scale():
    """Sizes 8, 8, 5 divided by 32: what a full window of four would have had."""
    said = named(mixing(lambda w: w / 32), (8, 8, 5))
    assert said.startswith("the whole gradient is 0.656")
    assert "(under-scaled or clipped)" in said


def test_window_of_one():
    assert named(mixing(lambda w: [1.0]), (7,)) is None
    assert named(mixing(lambda w: [0.25]), (7,)).startswith(
        "the loop divides by 4, but this window has only 1 micro-batch, so"
    )
    assert named(mixing(lambda w: [2.0]), (7,)).startswith("2 times too large")


@pytest.mark.parametrize(
    ("coefficients", "sentence"),
    [
        (lambda w: 2 * w / w.sum(), "2 times too large"),
        (lambda w: [0.25, 0.0, 0.125], "it weights the micro-batches ("),
        (lambda w: [0.3, 0.0, 0.6], "it weights the micro-batches ("),
    ],
)
def test_the_mistake_is_named_beside_an_empty_micro_batch(coefficients, sentence):
    assert named(mixing(coefficients), (3, 0, 5)).startswith(sentence)


def test_coefficients_without_a_name_are_shown():
    assert named(mixing(lambda w: [0.9, 0.1, 0.7, 0.3])).startswith("it weights the micro-batches (0.9, 0.1, 0.7, 0.3)")


# --- clipping --------------------------------------------------------------------------------------------


def clipped(gradient, max_norm):
    return gradient * min(1.0, max_norm / (np.linalg.norm(gradient) + 1e-6))  # as torch.nn.utils does


def each_before_scaling(micro, by, max_norm):
    return sum(b * clipped(g, max_norm) for b, g in zip(by, micro, strict=True))


def each_after_scaling(micro, by, max_norm):
    return sum(clipped(b * g, max_norm) for b, g in zip(by, micro, strict=True))


def running_sum(micro, by, max_norm):
    total = np.zeros_like(micro[0])
    for b, g in zip(by, micro, strict=True):
        total = clipped(total + b * g, max_norm)
    return total


SCALES = {
    "by weight": lambda w: w / w.sum(),
    "by number": divided_by_number,
    "undivided": not_divided,
}
CLIPPED = "the gradient is clipped after each micro-batch instead of once per step"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("part", [1.0, 0.3], ids=["some", "all"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("way", [each_before_scaling, each_after_scaling, running_sum], ids=lambda way: way.__name__)
def test_clipping_per_micro_batch_is_named(way, scale, part, seed):
    def loop(micro, weights):
        by = SCALES[scale](weights)
        sizes = np.linalg.norm(micro if way is each_before_scaling else by[:, None] * micro, axis=1)
        return way(micro, by, part * (np.median(sizes) if part == 1.0 else sizes.min()))

    assert named(loop, seed=seed).startswith(CLIPPED)


def test_clipping_once_per_step_is_not_clipping_per_micro_batch():
    said = named(lambda micro, w: clipped(w / w.sum() @ micro, 0.5))
    assert said.startswith("the whole gradient is ")
    assert "(under-scaled or clipped)" in said


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1e3, 1e9])
def test_clipping_once_is_recognised_at_any_size_of_the_gradients(size):
    """Huge gradients clipped to 1 make tiny coefficients: all of them, so no micro-batch is left out."""
    micro = size * micro_gradients(4)
    right = right_of(WEIGHTS)
    max_norm = 0.5 * np.linalg.norm(right @ micro) if size < 1 else 1.0
    said = explain_loop(mix_of(micro, (right @ micro) * max_norm / np.linalg.norm(right @ micro)), right)
    assert said.startswith("the whole gradient is "), said


def test_clipping_that_clips_nothing_is_no_mistake():
    assert named(lambda micro, w: each_before_scaling(micro, w / w.sum(), 1e6)) is None


@pytest.mark.parametrize("seed", range(5))
def test_other_shrinking_is_not_called_clipping(seed):
    shrink = np.random.default_rng(seed).uniform(0.2, 0.9, size=4)
    said = named(mixing(lambda w: shrink * w / w.sum()), seed=seed)
    assert said.startswith("it weights the micro-batches (")


def test_shrinking_too_little_to_be_clipping_does_not_crash():
    """Each running sum shrunk by less than can be seen, all of them together by more."""
    micro = micro_gradients(3)
    right = np.array([0.98, 0.01, 0.01])
    shrunk = right * (1 - 0.99e-5 * np.array([3, 2, 1]))
    assert not _is_clipped(Mix(shrunk, 0.0, True, micro @ micro.T), right)


# --- what cannot be told ---------------------------------------------------------------------------------


def test_a_gradient_of_an_earlier_window_is_noticed():
    rest = np.random.default_rng(3).normal(size=60)
    said = named(lambda micro, w: w / w.sum() @ micro + rest)
    assert said.startswith("the gradient has something in it that is in none of the micro-batches")


def test_a_small_rest_is_noticed():
    rest = np.random.default_rng(3).normal(size=60)
    said = named(lambda micro, w: w / w.sum() @ micro + 1e-4 * rest)
    assert said.startswith("the gradient has something in it")


def test_gradients_that_are_too_alike():
    micro = np.ones((3, 5))
    said = explain_loop(mix_of(micro, 2 * micro[0]), np.full(3, 1 / 3))
    assert said == "the micro-batches' gradients are too alike to tell how each was weighted"


# --- whole_times -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "times"), [(2.0, 2), (3.0 + 1e-9, 3), (1.0, 0), (2.5, 0), (2.01, 0), (0.0, 0), (-2.0, 0), (0.5, 0)]
)
def test_whole_times(scale, times):
    assert _whole_times(scale) == times
