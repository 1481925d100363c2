"""Bad input, in eager code and in graphs: one sentence, no change, and the next good step is exact."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from bigbatch import BatchError, BigBatchError, GradientError, LossError, OptionError, OrderError, WeightError, Window
from bigbatch.tensorflow import Accumulator
from tests.tensorflow.test_accumulator import (
    add,
    assert_exact_step,
    assert_same,
    assert_untouched,
    full_batch_step,
    gradients,
    loss,
    make,
    make_batch,
    make_model,
    parts,
    snapshot,
)
from tests.tensorflow.training import mirrored

pytestmark = pytest.mark.usefixtures("float64")


def assert_refused(accumulator: Accumulator, call: Callable[[], Any], error: type[BigBatchError], message: str) -> None:
    before = snapshot(accumulator)
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert_untouched(accumulator, before)
    assert accumulator.flush() is None
    assert_nothing_left(accumulator)
    assert_exact_step(accumulator)


def assert_nothing_left(accumulator: Accumulator) -> None:
    """Asserts that the next window of add(), whose sums outlive a call, is exact."""
    if accumulator.accumulation_steps is None:
        return
    accumulator._window.accumulation_steps = 4
    model = make_model()
    model.set_weights(accumulator.model.get_weights())
    for part in parts(make_batch()):
        add(accumulator, part)
    assert accumulator.flush().is_applied
    assert_same(accumulator.model, full_batch_step(model, keras.optimizers.SGD(0.1)))


def vector(model: Any, batch: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], model(batch[0]))


def of_unknown_shape(loss: Any) -> Any:
    """A tensor of unknown shape, as tf.py_function and tf.numpy_function return it."""

    @tf.custom_gradient
    def hidden(value: Any) -> Any:
        unknown = tf.numpy_function(lambda v: v, [value], tf.float64)
        return unknown, lambda upstream: upstream * tf.ones_like(value)

    return lambda model, batch: hidden(loss(model, batch))


# --- weights and losses ----------------------------------------------------------------------------------------


@pytest.mark.compiled
@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["in a graph", "eagerly"])
@pytest.mark.parametrize("kind", ["batch", "window"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weight": lambda b: tf.constant([5.0, -1.0])}, WeightError, "negative or not finite"),
        ({"weight": lambda b: tf.constant([5.0, np.inf])}, WeightError, "negative or not finite"),
        ({"weight": lambda b: tf.constant("4")}, WeightError, "a tensor of string"),
        ({"weight": lambda b: tf.constant(4 + 0j)}, WeightError, "a tensor of complex128"),
        ({"weight": lambda b: ()}, WeightError, "the weight has 0 terms"),
        ({"loss": lambda m, b: ()}, LossError, "0 terms but the weight has 1"),
        ({"loss": of_unknown_shape(vector)}, LossError, "the loss"),
    ],
)
def test_weights_and_losses(
    options: dict[str, Any],
    error: type[BigBatchError],
    message: str,
    kind: str,
    mode: str,
    request: pytest.FixtureRequest,
) -> None:
    if mode == "eagerly":
        request.getfixturevalue("eagerly")
    accumulator = make(4, **options)
    batch = make_batch() if kind == "batch" else Window(parts(make_batch()))
    assert_refused(accumulator, lambda: accumulator.step(batch), error, message)


@pytest.mark.parametrize("kind", ["batch", "window"])
def test_scalar_of_unknown_shape_is_accepted(kind: str) -> None:
    accumulator = make(4, loss=of_unknown_shape(loss))
    accumulator.step(make_batch() if kind == "batch" else Window(parts(make_batch())))
    assert_same(accumulator.model, full_batch_step(make_model(), keras.optimizers.SGD(0.1)))


def test_window_with_different_numbers_of_terms() -> None:
    accumulator = make(None, weight=lambda batch: 1 if batch[2] == "one" else (1, 2))
    pieces = parts(make_batch())
    window = Window([(*pieces[0], "one"), (*pieces[1], "two")])
    assert_refused(accumulator, lambda: accumulator.step(window), WeightError, "micro-batch 2 has 2 weights, .* have 1")


def test_an_array_of_objects() -> None:
    accumulator = make()
    batch = (*make_batch(), np.array([object()] * 11))
    assert_refused(accumulator, lambda: accumulator.step(batch), BatchError, "11 entries of the dtype object")


# --- models and optimizers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["batch", "window", "add"])
def test_model_without_trainable_variables(way: str, when: str) -> None:
    model = make_model()
    model.trainable = when == "after"
    accumulator = Accumulator(
        model, keras.optimizers.SGD(0.1), loss, 4 if way == "batch" else None, accumulation_steps=3
    )
    model.trainable = False
    before = snapshot(accumulator)
    call = {
        "batch": lambda: accumulator.step(make_batch()),
        "window": lambda: accumulator.step(Window(parts(make_batch()))),
        "add": lambda: accumulator.add([], weight=3),
    }[way]
    with pytest.raises(OptionError, match="of the model's 4 variables 0 are trainable"):
        call()
    assert_untouched(accumulator, before)
    model.trainable = True
    assert_exact_step(accumulator)


def test_a_model_without_variables() -> None:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Activation("tanh")])
    accumulator = Accumulator(model, keras.optimizers.Adam(0.1), loss, 4)
    with pytest.raises(OptionError, match="of the model's 0 variables 0 are trainable"):
        accumulator.step(make_batch())
    assert not accumulator.optimizer.built


class Plain(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(np.linspace(-1, 1, 15).reshape(5, 3))
        self.b = tf.Variable(np.zeros(3))

    def __call__(self, x: Any) -> Any:
        return x @ self.w + self.b


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "keras": lambda: keras.optimizers.Adam(0.1),
    "keras that scales": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)),
    "tf_keras": lambda: tf_keras.optimizers.Adam(0.1),
}


@pytest.mark.parametrize("way", ["batch", "window", "add"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_built_for_other_variables(kind: str, way: str) -> None:
    """The variables have the same shapes, so only their identity differs."""
    optimizer = OPTIMIZERS[kind]()
    optimizer.build(list(Plain().trainable_variables))
    model = Plain()
    before = [v.numpy() for v in (*model.variables, *optimizer.variables)]

    def call() -> None:
        accumulator = Accumulator(model, optimizer, loss, 4, accumulation_steps=1)
        if way == "add":
            add(accumulator, make_batch())
        else:
            accumulator.step(make_batch() if way == "batch" else Window(parts(make_batch())))

    with pytest.raises(OptionError, match=r"built for 2 variables, and 2 of the model's 2 .* first\): make a new"):
        call()
    for now, then in zip((*model.variables, *optimizer.variables), before, strict=True):
        np.testing.assert_array_equal(now.numpy(), then)


def test_optimizer_built_before_variables_were_unfrozen() -> None:
    model = make_model()
    model.layers[0].trainable = False
    accumulator = Accumulator(model, keras.optimizers.SGD(0.1, momentum=0.9), loss, 4)
    accumulator.step(make_batch())
    before = snapshot(accumulator)
    model.layers[0].trainable = True
    with pytest.raises(OptionError, match="built for 2 variables, and 2 of the model's 4"):
        accumulator.step(make_batch())
    assert_untouched(accumulator, before)


def test_tf_keras_keeps_the_moments_of_each_variable() -> None:
    """The accumulator trains a part of the optimizer's variables, whose index must not be rebuilt."""

    def run(by: str) -> Any:
        model, optimizer = Plain(), tf_keras.optimizers.Adam(0.1)
        full_batch_step(model, optimizer)
        model.w._trainable = False  # frozen, the first of two
        if by == "us":
            Accumulator(model, optimizer, loss, 4).step(make_batch())
        else:
            full_batch_step(model, optimizer)
        return model

    assert len(run("them").trainable_variables) == 1
    assert_same(run("us"), run("them"))


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: make(loss="mse"), "loss is 'mse': pass a function"),
        (lambda: make(weight=3), "weight is 3: pass a function"),
        (lambda: Accumulator(len, keras.optimizers.SGD(0.1), loss, 4), "has no trainable_variables"),
    ],
)
def test_options(make_it: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_it()


# --- add() -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda found: [g.numpy() for g in found], GradientError, "gradient 0 is a ndarray of float64"),
        (
            lambda found: [tf.cast(g, tf.float32) for g in found],
            GradientError,
            "float32 but its variable is of",
        ),
        (lambda found: [tf.cast(g, tf.int32) for g in found], GradientError, "of int32 but"),
        (lambda found: [1.0, *found[1:]], GradientError, "gradient 0 is a float but"),
        (lambda found: None, OptionError, "got a NoneType"),
        (lambda found: found[0], OptionError, "got a EagerTensor"),
    ],
)
def test_gradients_that_are_none(change: Callable[[Any], Any], error: type[BigBatchError], message: str) -> None:
    accumulator = make(accumulation_steps=2)
    found = change(gradients(accumulator.model, make_batch())[1])
    assert_refused(accumulator, lambda: accumulator.add(found, weight=11), error, message)


@pytest.mark.parametrize(
    ("weight", "value", "error", "message"),
    [
        (np.array([3.0, -1.0]), 1.0, WeightError, "is -1.0"),
        (tf.constant([3.0, -1.0]), 1.0, WeightError, "is -1.0"),
        (tf.constant("4"), 1.0, WeightError, "a tensor of string"),
        (4, tf.ones(3), LossError, r"the shape \(3,\)"),
        (4, np.ones(1), LossError, r"the shape \(1,\)"),
        (4, "low", LossError, "is a str"),
    ],
)
def test_weights_and_losses_of_add(weight: Any, value: Any, error: type[BigBatchError], message: str) -> None:
    accumulator = make(accumulation_steps=2)
    found = gradients(accumulator.model, make_batch())[1]
    assert_refused(accumulator, lambda: accumulator.add(found, weight=weight, loss=value), error, message)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("weight", "value", "error", "message"),
    [
        (-1, 1.0, WeightError, "is -1"),
        (tf.constant("4"), 1.0, WeightError, "a tensor of string"),
        (tf.constant([3.0, -1.0]), 1.0, tf.errors.InvalidArgumentError, "negative or not finite"),
        (4, "low", LossError, "is a str"),
        (4, tf.ones(3), LossError, r"the shape \(3,\)"),
    ],
)
def test_weights_and_losses_of_add_in_a_graph(weight: Any, value: Any, error: type[Exception], message: str) -> None:
    """Errors that are raised while the graph is traced keep their class, although AutoGraph adds source lines."""
    accumulator = make(accumulation_steps=2)

    def feed() -> None:
        accumulator.add(gradients(accumulator.model, make_batch())[1], weight=weight, loss=value)

    before = snapshot(accumulator)
    with pytest.raises(error, match=message):
        tf.function(feed)()
    assert_untouched(accumulator, before)
    assert accumulator.flush() is None
    assert_nothing_left(accumulator)
    assert_exact_step(accumulator)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("steps", "in_graph", "error", "message"),
    [
        (lambda step: 0, False, OptionError, r"accumulation_steps\(0\) is 0"),
        (lambda step: 0, True, OptionError, "is 0"),
        (lambda step: 2.5, True, OptionError, "is 2.5"),
        (lambda step: step * 0 - 1, True, tf.errors.InvalidArgumentError, "less than 1"),
    ],
)
def test_empty_windows(steps: Any, in_graph: bool, error: type[Exception], message: str) -> None:
    accumulator = make(accumulation_steps=steps)
    before = snapshot(accumulator)
    feed = tf.function(lambda: add(accumulator, make_batch())) if in_graph else lambda: add(accumulator, make_batch())
    with pytest.raises(error, match=message):
        feed()
    assert_untouched(accumulator, before)
    assert accumulator.flush() is None
    assert_nothing_left(accumulator)
    assert_exact_step(accumulator)


def slices(rows: list[int], width: int, num_rows: int | None = None) -> tf.IndexedSlices:
    values = tf.ones([len(rows), width], tf.float64)
    return tf.IndexedSlices(values, tf.constant(rows), None if num_rows is None else tf.constant([num_rows, width]))


@pytest.mark.compiled
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    ("last", "message"),
    [
        (lambda: slices([0, 1], 4), r"gradient 2 has the shape \(None, 4\) but its variable \(7, 3\)"),
        (lambda: slices([0, 1], 3, 8), r"gradient 2 has the shape \(8, 3\) but its variable \(7, 3\)"),
    ],
)
def test_sparse_gradients_that_do_not_fit_add_nothing(last: Any, message: str, in_graph: bool) -> None:
    """The gradients before it in the list must not be added."""
    accumulator = make(accumulation_steps=2)

    def feed() -> None:
        found = gradients(accumulator.model, make_batch())[1]
        accumulator.add([*found[:2], last(), *found[3:]], weight=11)

    before = snapshot(accumulator)
    with pytest.raises(GradientError, match=message):
        tf.function(feed)() if in_graph else feed()
    assert_untouched(accumulator, before)
    assert accumulator.flush() is None
    assert_nothing_left(accumulator)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["batch", "window"])
@pytest.mark.parametrize(
    ("nums", "message"),
    [
        ([(4, 4), (4, 3)], "tensor 0 has 4 samples but tensor 1 has 3"),
        ([(3, 4), (4, 4)], "tensor 0 has 3 samples but tensor 1 has 4"),
        ([(4, 4), (3, 1)], "tensor 0 has 3 samples but tensor 1 has 1"),
    ],
)
def test_replicas_whose_axes_do_not_match(nums: list[tuple[int, int]], message: str, kind: str) -> None:
    """A distributed dataset may yield such batches, and a loss that broadcasts would accept them silently."""
    strategy = mirrored()
    with strategy.scope():
        accumulator = make()
    x, y = make_batch()

    def spread(array: Any, column: int) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(array[: nums[context.replica_id_in_sync_group][column]])
        )

    batch = spread(x, 0), spread(y, 1)
    call = batch if kind == "batch" else Window([(x, y), batch])
    assert_refused(accumulator, lambda: accumulator.step(call), BatchError, message)


def test_an_empty_batch_on_several_replicas() -> None:
    with mirrored().scope():
        accumulator = make()
    assert_refused(accumulator, lambda: accumulator.step(make_batch(0)), BatchError, "tensor 0 has 0 samples")


@pytest.mark.compiled
@pytest.mark.each_value
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("bad_replica", [0, 1])
def test_bad_weight_on_one_replica_adds_nothing_on_all(bad_replica: int, in_graph: bool) -> None:
    strategy = mirrored()
    with strategy.scope():
        accumulator = make(None, accumulation_steps=2)
    weights = tf.Variable([4.0, 4.0])

    def on_replica(x: Any, y: Any) -> None:
        place = tf.distribute.get_replica_context().replica_id_in_sync_group
        value, found = gradients(accumulator.model, (x, y))
        accumulator.add(found, weight=tf.gather(weights, place), loss=value)

    def feed(x: Any, y: Any) -> None:
        strategy.run(on_replica, args=(x, y))

    feed = tf.function(feed) if in_graph else feed
    first, second = parts(make_batch())[:2]
    for _ in range(3):
        model = make_model()
        model.set_weights(accumulator.model.get_weights())
        both = [np.concatenate(each) for each in zip(first, second, strict=True)]
        full_batch_step(model, keras.optimizers.SGD(0.1), both)
        feed(*map(tf.constant, first))
        weights[bad_replica].assign(-4.0)
        with pytest.raises((WeightError, tf.errors.InvalidArgumentError), match=r"weight of .* micro-batch is"):
            feed(*map(tf.constant, second))
        weights[bad_replica].assign(4.0)
        feed(*map(tf.constant, second))
        assert_same(accumulator.model, model)


@pytest.mark.compiled
def test_step_inside_a_graph() -> None:
    accumulator = make()
    before = snapshot(accumulator)
    with pytest.raises(OrderError, match=r"step\(\) is a graph by itself"):
        tf.function(lambda: accumulator.step(make_batch()))()
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)
