"""Ready-made weights in JAX: each gives the gradient of the full batch, and its near misses do not."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bigbatch import WeightError
from bigbatch.jax import value_and_grad, weights
from tests.problems import IGNORED, samples, tokens

from .training import apply, assert_equal, classifier, gap, hidden_of, language, logits_of, tokens_loss

TEXT = tokens(3, 60, 0, 40, 21)
LABELS = np.array([[1, 2, IGNORED], [IGNORED, 4, 5]])


def shifted_loss(params: Any, batch: Any) -> Any:
    """The labels are the tokens themselves: position t predicts label t + 1."""
    labels = batch["labels"][:, 1:]
    logits = apply(params["head"], hidden_of(params, batch["x"]))[:, :-1]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return (each * (labels != IGNORED)).sum() / (labels != IGNORED).sum()


def texts() -> Any:
    batch = tokens(3, 60, 17, 40, 2)
    return {"x": batch["x"], "labels": np.where(np.arange(60) < [[4], [60], [18], [41], [3]], batch["x"], IGNORED)}


@pytest.mark.parametrize("size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 5))])
def test_causal_lm_tokens_is_exact_and_unshifted_counting_is_not(size: int) -> None:
    params, batch = language(), texts()
    full = jax.value_and_grad(shifted_loss)(params, batch)
    assert_equal(value_and_grad(shifted_loss, size, weight=weights.causal_lm_tokens)(params, batch), full)
    if size < 5:
        assert gap(value_and_grad(shifted_loss, size, weight=weights.tokens())(params, batch)[1], full[1]) > 1e-3


def test_tokens_where_a_micro_batch_has_none() -> None:
    params = language()
    full = jax.value_and_grad(tokens_loss)(params, TEXT)
    found = jax.jit(value_and_grad(tokens_loss, 1, weight=weights.tokens("y")))(params, TEXT)
    assert_equal(found, full)


def classes_loss(params: Any, x: Any, y: Any) -> Any:
    each = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), y)
    return (each * CLASSES[y]).sum() / CLASSES[y].sum()


CLASSES = jnp.array([0.1, 3, 0.5, 1, 2, 0, 5, 0.7, 1.3, 0.2])


@pytest.mark.parametrize("size", [1, 3, 13])
def test_class_weights_of_a_loss_with_two_arguments(size: int) -> None:
    params, batch = classifier(), samples(13)[0]
    x, y = batch["x"], batch["y"]
    full = jax.value_and_grad(classes_loss)(params, x, y)
    assert_equal(value_and_grad(classes_loss, size, weight=weights.class_weights(CLASSES, 1))(params, x, y), full)
    if size == 3:
        assert gap(value_and_grad(classes_loss, size)(params, x, y)[1], full[1]) > 1e-2
        few = weights.class_weights(CLASSES[:9], 1)
        assert jnp.isnan(value_and_grad(classes_loss, size, weight=few)(params, x, y)[0])  # traced: not silently wrong


def test_sample_weights() -> None:
    def loss(params: Any, batch: Any) -> Any:
        each = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch["x"]), batch["y"])
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    params, batch = classifier(), {**samples(13)[0], "mask": np.arange(13) % 3 == 0}
    found = value_and_grad(loss, 2, weight=weights.sample_weights("mask"))(params, batch)
    assert_equal(found, jax.value_and_grad(loss)(params, batch))


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_total_of_the_whole_batch(by_keyword: bool) -> None:
    """A sum divided by the positives. As a weight they would drop the micro-batches that have none."""

    def loss(params: Any, batch: Any, total: Any = None) -> Any:
        each = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch["x"]), batch["y"])
        return each.sum() / (batch["total"] if total is None else total)

    def own(params: Any, batch: Any) -> Any:
        return loss(params, batch, jnp.maximum((batch["y"] > 7).sum(), 1))

    params, batch = classifier(), samples(13)[0]
    full = jax.value_and_grad(own)(params, batch)
    total = (batch["y"] > 7).sum()
    args, kwargs = ((batch,), {"total": total}) if by_keyword else (({**batch, "total": total},), {})
    assert_equal(value_and_grad(loss, 3, reduction="sum")(params, *args, **kwargs), full)
    positives = value_and_grad(own, 3, weight=lambda batch: (batch["y"] > 7).sum())
    assert gap(positives(params, batch)[1], full[1]) > 1e-2


class Named(NamedTuple):
    x: Any
    labels: Any


@pytest.mark.parametrize(
    ("weight", "batch", "expected"),
    [
        (weights.tokens(), (Named(LABELS, LABELS),), 4),
        (weights.tokens(1), (LABELS, LABELS), 4),
        (weights.tokens(lambda batch: batch[1]["y"]), ((LABELS, {"y": LABELS}),), 4),
        (weights.tokens("y", 5), ({"y": LABELS},), 5),
        (weights.tokens("y"), ({"y": np.array([156, 3], np.uint8)},), 2),
        (weights.causal_lm_tokens, ({"labels": LABELS},), 3),
        (weights.tokens(), ({"labels": np.full((2, 3), IGNORED)},), 0),
        (weights.class_weights([9, 0.5, 2, 9, 1, 4]), ({"labels": LABELS},), 7.5),
        (weights.class_weights([9, 0.5, 2, 9, 1, 4], shift=True), ({"labels": LABELS},), 7),
        (weights.sample_weights(), ({"sample_weight": np.array([True, False])},), 1),
    ],
)
def test_where_labels_are_found_and_what_is_counted(weight: Any, batch: Any, expected: float) -> None:
    assert weight(*batch).sum() == expected
    if not any(isinstance(part, tuple) for part in batch):
        assert jax.jit(weight)(*batch).sum() == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: weights.causal_lm_tokens({"y": LABELS}), r"a dict with 'y'\) has no \"labels\""),
        (lambda: weights.tokens(2)(LABELS, LABELS), r"a tuple of 2\) has no item 2"),
        (lambda: weights.tokens()({"labels": np.zeros(3)}), "the labels are of float"),
        (lambda: weights.tokens()({"labels": LABELS > 0}), "the labels are of bool"),
        (lambda: weights.causal_lm_tokens({"labels": LABELS[0]}), "without an axis of time"),
        (lambda: weights.class_weights([1.0, 2.0])({"labels": LABELS}), "labels is 5, but there are 2 class weights"),
        (lambda: weights.class_weights([[1.0]]), "the class weights have the shape"),
        (lambda: weights.class_weights([-1.0]), "negative or not finite"),
        (lambda: weights.sample_weights()({}), 'no "sample_weight"'),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        call()
