"""Ready-made weights in TensorFlow: each gives the gradient of the full batch, and its near misses do not."""

import warnings
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch import BigBatchWarning, WeightError, Window
from bigbatch.tensorflow import Accumulator, weights
from tests.problems import IGNORED, Problem, samples, tokens

from .training import make_model

pytestmark = pytest.mark.usefixtures("float64")
TOKENS = Problem("tokens", "tokens", (tokens(3, 60, 0, 40, 21),), 1)
DIGITS = Problem("digits", "samples", samples(13), 4)
LABELS = np.array([[1, 2, IGNORED], [IGNORED, 4, 5]])
CLASSES = np.array([0.1, 3, 0.5, 1, 2, 0.3, 5, 0.7, 1.3, 0.2])


def error(problem: Problem, loss: Any, batch: Any, size: int, **options: Any) -> float:
    """The relative error of the update of one SGD step against that of the plain full batch."""
    model, plain = make_model(problem), make_model(problem)
    start = flat(plain)
    plain_batch = {name: tf.convert_to_tensor(array) for name, array in batch.items()}
    with tf.GradientTape() as tape:
        value = loss(plain, plain_batch)
    pairs = zip(tape.gradient(value, plain.trainable_variables), plain.trainable_variables, strict=True)
    for gradient, variable in pairs:
        if gradient is not None:
            variable.assign_sub(tf.convert_to_tensor(gradient))
    assert Accumulator(model, keras.optimizers.SGD(1.0), loss, size, **options).step(batch).is_applied
    return float(np.linalg.norm(flat(model) - flat(plain)) / np.linalg.norm(flat(plain) - start))


def flat(model: Any) -> Any:
    return np.concatenate([np.ravel(v.numpy()) for v in model.trainable_variables])


def mean(each: Any, kept: Any) -> Any:
    kept = tf.cast(kept, each.dtype)
    return tf.reduce_sum(each * kept) / tf.reduce_sum(kept)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)


def shifted_loss(model: Any, batch: Any) -> Any:
    labels = batch["labels"][:, 1:]
    return mean(cross_entropy(model(batch["x"])[0][:, :-1], labels), labels != IGNORED)


def tokens_loss(model: Any, batch: Any) -> Any:
    return mean(cross_entropy(model(batch["x"])[0], batch["labels"]), batch["labels"] != IGNORED)


def classes_loss(model: Any, batch: Any) -> Any:
    return mean(cross_entropy(model(batch["x"]), batch["y"]), tf.gather(CLASSES, batch["y"]))


def texts() -> Any:
    batch = tokens(3, 60, 17, 40, 2)
    return {"x": batch["x"], "labels": np.where(np.arange(60) < [[4], [60], [18], [41], [3]], batch["x"], IGNORED)}


@pytest.mark.parametrize("size", [1, 2])
def test_causal_lm_tokens_is_exact_and_unshifted_counting_is_not(size: int) -> None:
    assert error(TOKENS, shifted_loss, texts(), size, weight=weights.causal_lm_tokens) <= 1e-12
    assert error(TOKENS, shifted_loss, texts(), size, weight=weights.tokens()) > 1e-3


def test_tokens_where_a_micro_batch_has_none() -> None:
    batch = {"x": TOKENS.batches[0]["x"], "labels": TOKENS.batches[0]["y"]}
    assert error(TOKENS, tokens_loss, batch, 1, weight=weights.tokens()) <= 1e-12


def test_class_weights() -> None:
    assert error(DIGITS, classes_loss, DIGITS.batches[0], 3, weight=weights.class_weights(CLASSES, "y")) <= 1e-12
    assert error(DIGITS, classes_loss, DIGITS.batches[0], 3) > 1e-2
    with pytest.raises(WeightError, match="the weight of a micro-batch is negative or not finite"):
        error(DIGITS, classes_loss, DIGITS.batches[0], 3, weight=weights.class_weights(CLASSES[:9], "y"))


def test_sample_weights() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return mean(cross_entropy(model(batch["x"]), batch["y"]), batch["mask"])

    batch = {**DIGITS.batches[0], "mask": np.arange(13) % 3 == 0}
    assert error(DIGITS, loss, batch, 2, weight=weights.sample_weights("mask")) <= 1e-12


def test_a_total_of_the_whole_batch() -> None:
    """A sum divided by the positives of the batch, which every micro-batch gets whole."""

    def loss(model: Any, batch: Any) -> Any:
        each = cross_entropy(model(batch["x"]), batch["y"])
        return tf.reduce_sum(each) / tf.cast(batch["total"], each.dtype)

    batch = {**DIGITS.batches[0]}
    batch["total"] = tf.maximum(tf.math.count_nonzero(batch["y"]), 1)
    assert error(DIGITS, loss, batch, 3, reduction="sum") <= 1e-12


class Named(NamedTuple):
    x: Any
    labels: Any


CASES = [
    (weights.tokens(), Named(LABELS, LABELS), 4),
    (weights.tokens(1), (LABELS, LABELS), 4),
    (weights.tokens(lambda batch: batch[1]["y"]), (LABELS, {"y": LABELS}), 4),
    (weights.tokens("y", 5), {"y": LABELS}, 5),
    (weights.tokens("y"), {"y": np.array([156, 3], np.uint8)}, 2),
    (weights.tokens("y"), {"y": tf.ragged.constant([[1, IGNORED, 2], [4]])}, 3),
    (weights.tokens("y", shift=True), {"y": tf.ragged.constant([[1, IGNORED, 2], [4]])}, 1),
    (weights.causal_lm_tokens, {"labels": LABELS}, 3),
    (weights.tokens(), {"labels": np.full((2, 3), IGNORED)}, 0),
    (weights.class_weights([9, 0.5, 2, 9, 1, 4]), {"labels": LABELS}, 7.5),
    (weights.class_weights([9, 0.5, 2, 9, 1, 4], shift=True), {"labels": LABELS}, 7),
    (weights.sample_weights(), {"sample_weight": np.array([0.5, 2.25])}, 2.75),
]


@pytest.mark.parametrize("k", range(len(CASES)))
def test_where_labels_are_found_and_what_is_counted(k: int) -> None:
    weight, batch, expected = CASES[k]
    assert np.sum(weight(batch)) == expected
    assert np.sum(tf.function(lambda batch: weight(batch))(batch)) == expected


REFUSED = [
    (lambda: weights.causal_lm_tokens({"y": LABELS}), r"a dict with 'y'\) has no \"labels\""),
    (lambda: weights.tokens()({"labels": np.zeros(3)}), "the labels are of float"),
    (lambda: weights.tokens()({"labels": LABELS > 0}), "the labels are of bool"),
    (lambda: weights.causal_lm_tokens({"labels": LABELS[0]}), "without an axis of time"),
    (lambda: weights.class_weights([1.0, 2.0])({"labels": LABELS}), "labels is 5, but there are 2 class weights"),
    (lambda: weights.class_weights([[1.0]]), "the class weights have the shape"),
    (lambda: weights.class_weights([-1.0]), "negative or not finite"),
    (lambda: weights.sample_weights()({}), 'no "sample_weight"'),
]


@pytest.mark.parametrize("k", range(len(REFUSED)))
def test_what_is_refused(k: int) -> None:
    call, message = REFUSED[k]
    with pytest.raises(WeightError, match=message):
        call()


def accumulated(**options: Any) -> Accumulator:
    return Accumulator(make_model(TOKENS), keras.optimizers.SGD(0.1), tokens_loss, 5, **options)


@pytest.mark.parametrize("feed", [lambda batch: batch, lambda batch: Window([batch])])
def test_labels_that_nobody_counts_are_warned_of_once(feed: Any) -> None:
    accumulator = accumulated()
    message = r'the batch has "labels" with -100 in them but no weight was given.*bigbatch.tensorflow.weights'
    with pytest.warns(BigBatchWarning, match=message) as caught:
        accumulator.step(feed(texts()))
        accumulator.step(feed(texts()))
    assert len([each for each in caught if each.category is BigBatchWarning]) == 1


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"weight": weights.tokens()}])
def test_no_warning_if_something_counts(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", BigBatchWarning)
        accumulated(**options).step(texts())
