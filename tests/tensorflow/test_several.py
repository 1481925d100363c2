"""Several models, or some variables, in one accumulator; several optimizers that step all or none."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from bigbatch import OptionError, Window
from bigbatch.tensorflow import Accumulator, Checkpoints

from .test_distribute import make_batch
from .training import cut, flat, mirrored

pytestmark = pytest.mark.usefixtures("float64")
Batch = dict[str, Any]


def make_models() -> tuple[Any, Any]:
    keras.utils.set_random_seed(0)
    encoder = keras.Sequential([keras.Input((64,)), keras.layers.Dense(6, "tanh")])
    return encoder, keras.Sequential([keras.Input((6,)), keras.layers.Dense(10)])


def loss(models: Any, batch: Batch) -> Any:
    encoder, decoder = models.values() if isinstance(models, dict) else models
    logits = decoder(encoder(batch["x"]))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], logits))


def full_batch(models: Any, optimizers: Any, *batches: Batch) -> np.ndarray:
    """The plain loop: each optimizer steps one model."""
    for batch in batches:
        variables = [model.trainable_variables for model in models]
        with tf.GradientTape() as tape:
            value = loss(models, batch)
        for optimizer, own, found in zip(optimizers, variables, tape.gradient(value, variables), strict=True):
            optimizer.apply_gradients(zip(found, own, strict=True))
    return np.concatenate([*map(flat, models)])


def optimizers() -> tuple[Any, Any]:
    return keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.01)


BATCHES = make_batch(13), make_batch(9)


def expected(num: int = 2) -> np.ndarray:
    return full_batch(make_models(), optimizers(), *BATCHES[:num])


def values(models: Any) -> np.ndarray:
    return np.concatenate([*map(flat, models)])


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_models_with_one_optimizer(kind: Any) -> None:
    encoder, decoder = make_models()
    models: Any = {"encoder": encoder, "decoder": decoder} if kind is dict else kind([encoder, decoder])
    seen = []

    def own_loss(given: Any, batch: Batch) -> Any:
        seen.append(given)
        return loss(given, batch)

    accumulator = Accumulator(models, keras.optimizers.SGD(0.1), own_loss, 4)
    assert accumulator.model is models
    for batch in BATCHES:
        assert accumulator.step(batch).is_applied
    assert seen
    assert all(each is models for each in seen)
    one = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
    np.testing.assert_allclose(values((encoder, decoder)), full_batch(make_models(), one, *BATCHES), rtol=1e-12)


@pytest.mark.parametrize("way", ["batch", "window"])
def test_several_optimizers(way: str) -> None:
    encoder, decoder = make_models()
    sgd, adam = optimizers()
    pairs = [(sgd, encoder), (adam, decoder.trainable_variables)]
    accumulator = Accumulator([encoder, decoder], pairs, loss, 4 if way == "batch" else None)
    assert accumulator.optimizer == tuple(pairs)
    for batch in BATCHES:
        assert accumulator.step(batch if way == "batch" else Window(cut(batch, 4))).is_applied
    np.testing.assert_allclose(values((encoder, decoder)), expected(), rtol=1e-12)
    assert sgd.iterations.numpy() == adam.iterations.numpy() == 2
    step_of_one = full_batch(make_models(), (optimizers()[0], keras.optimizers.SGD(0.0)), *BATCHES)
    assert np.abs(step_of_one - expected()).max() > 1e-3  # a skipped optimizer would be seen


def test_several_optimizers_on_replicas() -> None:
    with mirrored().scope():
        encoder, decoder = make_models()
        sgd, adam = optimizers()
        accumulator = Accumulator([encoder, decoder], [(sgd, encoder), (adam, decoder)], loss, 4)
    for batch in BATCHES:
        accumulator.step(batch)
    np.testing.assert_allclose(values((encoder, decoder)), expected(), rtol=1e-12)


@pytest.mark.usefixtures("eagerly")
def test_optimizers_that_were_built_may_stand_alone() -> None:
    encoder, decoder = make_models()
    sgd, adam = optimizers()
    sgd.build(encoder.trainable_variables)
    adam.build(decoder.trainable_variables)
    Accumulator((encoder, decoder), [sgd, adam], loss, 4).step(BATCHES[0])
    np.testing.assert_allclose(values((encoder, decoder)), expected(1), rtol=1e-12)


@pytest.mark.usefixtures("eagerly")
def test_all_or_none_step() -> None:
    encoder, decoder = make_models()
    sgd, adam = optimizers()
    accumulator = Accumulator([encoder, decoder], [(sgd, encoder), (adam, decoder)], loss, 4)
    before = values((encoder, decoder))
    bad = {**BATCHES[0], "x": BATCHES[0]["x"] * np.nan}
    assert not accumulator.step(bad).is_applied
    np.testing.assert_array_equal(values((encoder, decoder)), before)
    assert sgd.iterations.numpy() == adam.iterations.numpy() == 0


@pytest.mark.usefixtures("eagerly")
def test_some_variables() -> None:
    encoder, decoder = make_models()
    before = flat(encoder)
    accumulator = Accumulator(
        [encoder, decoder], keras.optimizers.SGD(0.1), loss, 4, variables=decoder.trainable_variables
    )
    found, _ = accumulator.gradients(BATCHES[0])
    assert len(found) == 2
    accumulator.step(BATCHES[0])
    np.testing.assert_array_equal(flat(encoder), before)
    other = make_models()
    full_batch(other, (keras.optimizers.SGD(0.0), keras.optimizers.SGD(0.1)), BATCHES[0])
    np.testing.assert_allclose(flat(decoder), flat(other[1]), rtol=1e-12)


@pytest.mark.usefixtures("eagerly")
def test_variables_without_a_model() -> None:
    w = tf.Variable([1.0, 2.0], dtype=tf.float64)
    options: Any = {"loss": lambda _, x: tf.reduce_mean(x @ w[:, None]), "micro_batch_size": 2, "variables": [w]}
    Accumulator(None, tf_keras.optimizers.SGD(0.5), **options).step(np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 5.0]]))
    np.testing.assert_allclose(w, [1 - 0.5, 2 - 1.0], rtol=1e-12)


@pytest.mark.usefixtures("eagerly")
def test_saved_and_resumed(tmp_path: Path) -> None:
    def make() -> Accumulator:
        encoder, decoder = make_models()
        sgd, adam = optimizers()
        return Accumulator([encoder, decoder], [(sgd, encoder), (adam, decoder)], loss, 4)

    first, second = make(), make()
    first.step(BATCHES[0])
    Checkpoints(tmp_path, first).save()
    second.step(BATCHES[1])
    assert Checkpoints(tmp_path, second).restore()
    second.step(BATCHES[1])
    np.testing.assert_allclose(values(second.model), expected(), rtol=1e-12)


def owners(which: str) -> Any:
    encoder, decoder = make_models()
    sgd, adam = optimizers()
    scaling = keras.optimizers.LossScaleOptimizer(adam)
    return (encoder, decoder), {
        "none": [],
        "forgotten": [(sgd, encoder)],
        "twice": [(sgd, [*encoder.trainable_variables, *decoder.trainable_variables]), (adam, decoder)],
        "unknown": [sgd, adam],
        "scaling": [(sgd, encoder), (scaling, decoder)],
        "turned": [(encoder, sgd), (decoder, adam)],
        "no optimizer": decoder,
        "v1": [(tf.compat.v1.train.GradientDescentOptimizer(0.1), encoder), (adam, decoder)],
    }[which]


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("none", r"no optimizer in it: pass pairs: \[\(optimizer, variables\)"),
        ("forgotten", "belongs to 0 of the 1 optimizers"),
        ("twice", "belongs to 2 of the 2 optimizers"),
        ("unknown", "SGD does not know its variables yet: pass pairs"),
        ("scaling", "LossScaleOptimizer can only be the one optimizer"),
        ("turned", r"^optimizer is a Sequential, a model or layer: .* pairs \[\(optimizer, variables\), …\] with the"),
        ("no optimizer", r"^optimizer is a Sequential, a model or layer: pass Accumulator\(model, optimizer, …\)"),
        ("v1", "GradientDescentOptimizer can only be the one optimizer"),
    ],
)
def test_refusals(which: str, message: str) -> None:
    models, pairs = owners(which)
    with pytest.raises(OptionError, match=message):
        Accumulator(models, pairs, loss, 4)


@pytest.mark.usefixtures("eagerly")
def test_models_that_are_none() -> None:
    with pytest.raises(OptionError, match="no model in it"):
        Accumulator([], keras.optimizers.SGD(0.1), loss, 4)
    with pytest.raises(OptionError, match="the model is a int"):
        Accumulator([make_models()[0], 3], keras.optimizers.SGD(0.1), loss, 4)
    with pytest.raises(OptionError, match="is not trainable"):
        Accumulator(None, keras.optimizers.SGD(0.1), loss, 4, variables=[tf.Variable(1.0, trainable=False)])


@pytest.mark.usefixtures("eagerly")
def test_verify_takes_several_models() -> None:
    accumulator = Accumulator([*make_models()], keras.optimizers.SGD(0.1), loss, 4)
    assert accumulator.verify(BATCHES[0]).is_exact
