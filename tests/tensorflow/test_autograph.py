"""Functions of the user are converted as tf.function does: `if`, `for` and `len` accept tensors."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch import Window
from bigbatch.tensorflow import Accumulator

from .training import flat

rng = np.random.default_rng(0)
BATCH = rng.normal(size=(11, 3)), rng.normal(size=(11, 2))
pytestmark = pytest.mark.usefixtures("float64")


class Own(tf.Module):
    """A model with a branch and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = tf.Variable(tf.random.stateless_normal([3, 2], [1, 2], dtype=tf.float64))

    def __call__(self, x: Any) -> Any:
        y = x @ self.matrix
        for _ in tf.range(2):
            y = tf.tanh(y)
        if tf.reduce_sum(y) > 1e9:
            y = 0 * y
        return y


def squares(model: Any, batch: Any) -> Any:
    return tf.reduce_mean((model(batch[0]) - batch[1]) ** 2)


def with_a_branch_and_a_loop(model: Any, batch: Any) -> Any:
    value = squares(model, batch)
    if value > 0:
        value = 2 * value
    for k in tf.range(3):
        value += 0.1 * tf.cast(k, value.dtype) * tf.reduce_mean(model(batch[0]) ** 2)
    return value


class Penalised:
    """A callable object that uses `and` with tensors."""

    def __call__(self, model: Any, batch: Any) -> Any:
        value = squares(model, batch)
        return 2 * value if value > 0 and value < 1e9 else value


def by_length(batch: Any) -> Any:
    return len(batch[1])


def by_rows(batch: Any) -> Any:
    total = tf.constant(0)
    for _ in batch[1]:
        total += 1
    return total


def keras_model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "tanh")])


CASES: dict[str, dict[str, Any]] = {
    "a loss": {"loss": with_a_branch_and_a_loop},
    "an object": {"loss": Penalised()},
    "a model": {"model": Own},
    "len": {"weight": lambda batch: len(batch[1])},
    "len in a function": {"weight": by_length},
    "a loop over rows": {"weight": by_rows},
}


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("case", "way"),
    [*((case, way) for case in CASES for way in ("batch", "window")), ("a loss", "xla"), ("len", "xla")],
)
def test_converted_functions_match_the_full_batch(case: str, way: str) -> None:
    options = {"loss": squares, "model": keras_model, **CASES[case]}
    make, loss = options.pop("model"), options.pop("loss")
    model, full = make(), make()
    options = {**options, "jit_compile": True} if way == "xla" else options
    accumulator = Accumulator(model, keras.optimizers.SGD(0.1), loss, 4, **options)
    parts = Window([tuple(a[k : k + 4] for a in BATCH) for k in (0, 4, 8)])
    step = accumulator.step(parts if way == "window" else BATCH)
    with tf.GradientTape() as tape:
        value = loss(full, BATCH)
    for v, g in zip(full.trainable_variables, tape.gradient(value, full.trainable_variables), strict=True):
        v.assign_sub(0.1 * g)
    assert step.weight == 11
    assert step.loss == pytest.approx(float(value), rel=1e-12)
    np.testing.assert_allclose(flat(model), flat(full), rtol=1e-12)


def test_do_not_convert_is_respected() -> None:
    @tf.autograph.experimental.do_not_convert
    def loss(model: Any, batch: Any) -> Any:
        return squares(model, batch) if squares(model, batch) > 0 else 0.0

    accumulator = Accumulator(keras_model(), keras.optimizers.SGD(0.1), loss, 4)
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        accumulator.step(BATCH)


def test_error_of_the_user_is_raised_unchanged() -> None:
    class MineError(Exception):
        def __init__(self, number: int, more: str) -> None:
            super().__init__(number, more)

    def loss(model: Any, batch: Any) -> Any:
        raise MineError(3, "more")

    with pytest.raises(MineError):
        Accumulator(keras_model(), keras.optimizers.SGD(0.1), loss, 4).step(BATCH)


def test_accumulation_steps_with_a_branch() -> None:
    def ramp(step: Any) -> Any:
        if step < 1:
            return 1
        return 2

    def add(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = squares(accumulator.model, (x, y))
        accumulator.add(tape.gradient(value, accumulator.model.trainable_variables), weight=tf.shape(y)[0])

    accumulator = Accumulator(keras_model(), keras.optimizers.SGD(0.1), accumulation_steps=ramp)
    feed, made = tf.function(add), []
    for _ in range(5):
        feed(*map(tf.constant, BATCH))
        made.append(int(accumulator.num_steps.numpy()))
    assert made == [1, 1, 2, 2, 3]


class Outputs(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x: Any) -> dict[str, Any]:
        return {"a": self.dense(x), "b": None, "c": [None, (self.dense(x), None)]}


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["plain", "xla"])
def test_a_model_that_returns_none_in_a_nest(options: dict[str, bool]) -> None:
    accumulator = Accumulator(
        Outputs(),
        keras.optimizers.SGD(0.1),
        lambda model, batch: tf.reduce_mean((model(batch[0])["a"] - batch[1]) ** 2),
        4,
        **options,
    )
    assert accumulator.step(BATCH).is_applied
    assert accumulator.step(Window([BATCH])).is_applied
