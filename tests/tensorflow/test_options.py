"""Options that are set after the accumulator was made: each takes effect, or is refused with a sentence."""

import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch import NonFiniteError, OptionError, Window
from bigbatch.tensorflow import Accumulator

from .training import flat

FIXED = {"model", "optimizer", "reduction", "jit_compile", "has_aux", "aux", "batch_norm"}
BAD = {
    "loss": 3,
    "weight": 3,
    "micro_batch_size": 0,
    "accumulation_steps": -1,
    "clip_norm": -1.0,
    "clip_value": float("nan"),
    "on_nonfinite": "explode",
    "max_skipped": 0,
}
LATER = {
    "clip_norm": 0.01,
    "clip_value": 0.01,
    "weight": lambda batch: tf.reduce_sum(batch[1] ** 2),
    "micro_batch_size": 2,
    "loss": lambda model, batch: 2 * loss(model, batch),
}
rng = np.random.default_rng(0)
BATCH = rng.normal(size=(7, 3)), rng.normal(size=(7, 2))
pytestmark = pytest.mark.usefixtures("float64")


def loss(model: Any, batch: Any) -> Any:
    return tf.reduce_mean((model(batch[0]) - batch[1]) ** 2)


def made(**options: Any) -> Accumulator:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    return Accumulator(model, keras.optimizers.SGD(0.1), **{"loss": loss, "micro_batch_size": 3, **options})


def after(accumulator: Accumulator, num_steps: int = 2, way: str = "batch") -> np.ndarray:
    parts = Window([tuple(a[where] for a in BATCH) for where in (slice(0, 3), slice(3, 7))])
    for _ in range(num_steps):
        accumulator.step(BATCH if way == "batch" else parts)
    return flat(accumulator.model)


def add(accumulator: Accumulator, *batch: Any) -> None:
    with tf.GradientTape() as tape:
        value = loss(accumulator.model, batch or BATCH)
    accumulator.add(tape.gradient(value, accumulator.model.trainable_variables), weight=7, loss=value)


def test_every_option_is_either_fixed_or_checked() -> None:
    assert FIXED | BAD.keys() | {"variables"} == set(inspect.signature(Accumulator).parameters) - {"unknown"}


@pytest.mark.parametrize("name", sorted(FIXED))
def test_fixed_options_cannot_be_changed(name: str) -> None:
    accumulator = made()
    before = getattr(accumulator, name)
    with pytest.raises(OptionError, match=f"^{name} cannot be changed after .*: make a new Accumulator$"):
        setattr(accumulator, name, "sum")
    assert getattr(accumulator, name) is before


@pytest.mark.parametrize("name", sorted(BAD))
def test_options_set_later_are_checked_as_in_the_constructor(name: str) -> None:
    with pytest.raises(OptionError, match=name) as at_once:
        made(**{name: BAD[name]})
    accumulator = made()
    before = getattr(accumulator, name)
    with pytest.raises(OptionError) as later:
        setattr(accumulator, name, BAD[name])
    assert str(later.value) == str(at_once.value)
    assert getattr(accumulator, name) == before


@pytest.mark.each_value
@pytest.mark.parametrize("way", ["batch", "window"])
@pytest.mark.parametrize("name", LATER)
def test_options_set_later_are_used(name: str, way: str, request: pytest.FixtureRequest) -> None:
    """They are used even if a step was already compiled without them."""
    accumulator, expected = made(), made(**{name: LATER[name]})
    after(accumulator, 1, way)
    expected.model.set_weights(accumulator.model.get_weights())
    setattr(accumulator, name, LATER[name])
    found = after(accumulator, 1, way)
    request.getfixturevalue("eagerly")
    unchanged = after(made(), 2, way)
    np.testing.assert_allclose(found, after(expected, 1, way), rtol=1e-12)
    assert name == "micro_batch_size" or not np.allclose(found, unchanged, rtol=1e-6)


def test_clipping_and_accumulation_steps_set_later() -> None:
    accumulator = made(accumulation_steps=2)
    add(accumulator)
    accumulator.accumulation_steps, accumulator.clip_norm = 3, 0.01
    before = flat(accumulator.model)
    for number in range(2, 7):
        add(accumulator)
        assert accumulator.num_steps.numpy() == number // 3
    assert np.linalg.norm(flat(accumulator.model) - before) == pytest.approx(0.1 * 0.01 * 2, rel=1e-3)


def test_on_nonfinite_set_later() -> None:
    accumulator = made()
    bad = (BATCH[0] * np.inf, BATCH[1])
    assert not accumulator.step(bad).is_applied
    accumulator.max_skipped = 2
    with pytest.raises(NonFiniteError, match="2 steps were skipped"):
        accumulator.step(bad)
    accumulator.on_nonfinite = "raise"
    with pytest.raises(NonFiniteError, match="in step 3"):
        accumulator.step(bad)
    accumulator.on_nonfinite = "stop"
    accumulator.step(bad)
    assert accumulator.is_stopped


@pytest.mark.parametrize("name", ["accumulation_steps", "clip_norm", "clip_value", "max_skipped"])
def test_options_of_a_traced_graph_cannot_be_changed(name: str) -> None:
    """The graph would ignore the new value."""
    accumulator = made(accumulation_steps=2)
    tf.function(lambda x, y: add(accumulator, x, y))(*map(tf.constant, BATCH))
    before = getattr(accumulator, name)
    with pytest.raises(OptionError, match=rf"^{name} can no longer be changed: your tf.function"):
        setattr(accumulator, name, 1)
    setattr(accumulator, name, before)
    assert getattr(accumulator, name) == before
    accumulator.micro_batch_size = 2  # add() does not use it
