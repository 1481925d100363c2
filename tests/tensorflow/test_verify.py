"""The verdict of `verify` on a user's model: exact, or why not."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch.tensorflow import verify

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(53, 6)).astype("float32"), rng.integers(0, 4, 53)


def classifier(*middle):
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((6,)), dense(8, "tanh", dtype="float32"), *middle, dense(4, dtype="float32")])


def loss(model, batch):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], model(batch[0], training=True)))


def only(causes):
    assert len(causes) == 1, causes
    return causes[0]


@pytest.mark.parametrize("size", [1, 2, 3, 52, 53])
def test_exact_in_float64_whatever_the_size(size):
    found = verify(classifier(), (X, Y), loss, size)
    assert found.is_exact, str(found)
    assert found.max_error <= 1e-12
    assert bool(found.causes) == (size == 53)  # one micro-batch proves nothing, and the result says so
    assert len(found.errors) == 4


def test_subclassed_model_is_compared_in_place_and_restored():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = (
                keras.layers.Dense(5),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(4),
            )

        def call(self, x, training=None):
            return self.last(self.norm(self.first(x), training=training))

    model = Own()
    model(X)
    before = model.get_weights()
    found = verify(model, (X, Y), loss, 16)
    assert not found.is_exact
    assert "BatchNormalization in training mode" in only(found.causes)
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))


def test_batch_normalization_is_named():
    found = verify(classifier(keras.layers.BatchNormalization(name="norm")), (X, Y), loss, 16)
    assert not found.is_exact
    assert "BatchNormalization in training mode (norm)" in only(found.causes)


def test_dropout_is_switched_off_and_reported():
    model = classifier(keras.layers.Dropout(0.4, name="drop"))
    found = verify(model, (X, Y), loss, 16)
    assert found.is_exact, str(found)
    assert "dropout (drop) was switched off" in only(found.causes)
    assert model.layers[1].rate == 0.4


def test_wrong_weight_and_coupled_samples_are_named():
    found = verify(classifier(), (X, Y), loss, 16, weight=lambda batch: 1)
    assert "return from `weight` the number of samples or tokens the loss averages over" in only(found.causes)
    found = verify(classifier(), (X, Y), lambda model, batch: tf.math.reduce_variance(model(batch[0])), 16)
    assert "the loss couples the samples" in only(found.causes)


@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
def test_comparison_uses_the_precision_of_the_loss(policy: str) -> None:
    class Own(keras.Model):
        """A model that cannot be rebuilt in float64."""

        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = keras.layers.Dense(8, "tanh", dtype=policy), keras.layers.Dense(3, dtype=policy)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.head(self.hidden(x))

    def loss(model: keras.Model, batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        logits = tf.cast(model(batch[0]), tf.float32)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits))

    generator = np.random.default_rng(0)
    batch = generator.normal(size=(13, 5)), generator.integers(0, 3, 13)
    keras.utils.set_random_seed(0)
    model = Own()
    model(batch[0])
    found = verify(model, batch, loss, 4)
    assert found.is_exact, found
    assert found.tolerance <= 2e-2
    wrong = verify(model, batch, loss, 4, weight=lambda batch: 1)
    assert not wrong.is_exact
    assert ("but `weight` says" if policy == "float32" else "too coarse to tell the cause") in wrong.causes[0]
