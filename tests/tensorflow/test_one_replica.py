"""Losses that divide by the number of replicas or by the size of the whole batch, as TensorFlow's guide teaches it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from bigbatch import BigBatchWarning, LossError, Window
from bigbatch.tensorflow import Accumulator, train_with_accumulation, verify
from bigbatch.tensorflow.distributed.replicas import spread
from tests.problems import samples

from .training import flat, mirrored

Batch = dict[str, Any]
SIZE = 22
SPLITS = {2: ((14, 8), (22, 0)), 3: ((9, 4, 9), (5, 0, 17))}
pytestmark = pytest.mark.usefixtures("float64")


@cache
def three() -> tf.distribute.Strategy:
    """It reduces on one device, because its collectives would conflict with those of `mirrored`."""
    devices = ["CPU:0", "CPU:1", "CPU:2"]
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())


def strategy_of(num_replicas: int) -> tf.distribute.Strategy:
    return {1: tf.distribute.get_strategy, 2: mirrored, 3: three}[num_replicas]()


def make_batch(size: int = SIZE) -> Batch:
    (batch,) = samples(size)
    return {"x": batch["x"], "y": batch["y"]}


def make_model(library: Any = keras) -> Any:
    library.utils.set_random_seed(0)
    layers, l2 = library.layers, library.regularizers.L2(0.1)
    return library.Sequential(
        [
            library.Input((64,), dtype="float64"),
            layers.Dense(5, "tanh", kernel_regularizer=l2, dtype="float64"),
            layers.Dense(10, dtype="float64"),
        ]
    )


def per_sample(model: Any, batch: Batch) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], model(batch["x"], training=True))


def mean(model: Any, batch: Batch) -> Any:
    return tf.reduce_mean(per_sample(model, batch))


def penalty(model: Any) -> Any:
    return 0.1 * tf.reduce_sum(model.trainable_variables[0] ** 2)


def mean_and_penalty(model: Any, batch: Batch) -> Any:
    return mean(model, batch) + penalty(model)


def loss_object(library: Any, reduction: str) -> Any:
    return library.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def by_keras(model: Any, batch: Batch) -> Any:
    return loss_object(keras, "sum_over_batch_size")(batch["y"], model(batch["x"], training=True))


def by_tf_keras(model: Any, batch: Batch) -> Any:
    return loss_object(tf_keras, "auto")(batch["y"], model(batch["x"], training=True))


def by_compile(model: Any, batch: Batch) -> Any:
    """The loss that `fit` would compute."""
    return model.compute_loss(batch["x"], batch["y"], model(batch["x"], training=True))


def average(model: Any, batch: Batch) -> Any:
    losses = loss_object(keras, "none")(batch["y"], model(batch["x"], training=True))
    return tf.nn.compute_average_loss(losses) + tf.nn.scale_regularization_loss(penalty(model))


def average_of_22(model: Any, batch: Batch) -> Any:
    losses = tf.compat.v2.nn.compute_average_loss(per_sample(model, batch), global_batch_size=SIZE)
    return losses + tf.nn.scale_regularization_loss(penalty(model))


def average_of_what_is_in_sync(model: Any, batch: Batch) -> Any:
    num = tf.distribute.get_replica_context().num_replicas_in_sync
    return tf.nn.compute_average_loss(per_sample(model, batch), global_batch_size=tf.shape(batch["y"])[0] * num)


def by_the_strategy(model: Any, batch: Batch) -> Any:
    return mean(model, batch) / tf.distribute.get_strategy().num_replicas_in_sync


LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a mean": (mean, mean),
    "a loss of Keras": (by_keras, mean),
    "a loss of tf_keras": (by_tf_keras, mean),
    "compute_average_loss": (average, mean_and_penalty),
    "global_batch_size": (average_of_22, mean_and_penalty),
    "global_batch_size by replicas": (average_of_what_is_in_sync, mean),
    "get_strategy": (by_the_strategy, mean),
    "the strategy": (lambda model, batch: mean(model, batch) / mirrored().num_replicas_in_sync, mean),
}
EACH = [name for name in LOSSES if name not in ("the strategy", "global_batch_size by replicas")]


def full_batch(loss: Callable[..., Any], num_steps: int = 1, size: int = SIZE) -> tuple[Any, float]:
    """Trains on the plain full batch on one device; returns the model and the loss of the last step."""
    model, optimizer = make_model(), keras.optimizers.SGD(0.1, momentum=0.9)
    for _ in range(num_steps):
        with tf.GradientTape() as tape:
            value = loss(model, make_batch(size))
        found = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
    return model, float(value)


def make(loss: Any, micro_batch_size: int | None = None, num_replicas: int = 2, **options: Any) -> Accumulator:
    with strategy_of(num_replicas).scope():
        model, optimizer = make_model(), keras.optimizers.SGD(0.1, momentum=0.9)
        return Accumulator(model, optimizer, loss, micro_batch_size, **options)


def on_replicas(split: tuple[int, ...], start: int = 0, stop: int | None = None) -> Any:
    """The batch as the replicas have it; of each one's rows those from `start` to `stop`."""
    batch, ends = make_batch(), np.cumsum((0, *split))

    def own(context: Any) -> Any:
        k = context.replica_id_in_sync_group
        return {name: tf.constant(a[ends[k] : ends[k + 1]][start:stop]) for name, a in batch.items()}

    return strategy_of(len(split)).experimental_distribute_values_from_function(own)


def error(model: Any, full: Any) -> float:
    start = flat(make_model())
    return float(np.linalg.norm(flat(model) - flat(full)) / np.linalg.norm(flat(full) - start))


def assert_same(accumulator: Accumulator, step: Any, wanted: tuple[Any, float]) -> None:
    full, loss = wanted
    assert step.is_applied
    assert error(accumulator.model, full) <= 1e-12
    assert step.loss == pytest.approx(loss, rel=1e-12)


# --- step ------------------------------------------------------------------------------------------------------


BATCHES = [*((name, 2) for name in LOSSES), ("compute_average_loss", 3), ("global_batch_size", 3)]
SLOW = [("a mean", 2), ("get_strategy", 2), ("compute_average_loss", 2), ("global_batch_size", 3)]
"""The first is in test_distribute; the others have a number of replicas or a share that another has too."""


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "num_replicas"),
    [pytest.param(*each, marks=[pytest.mark.slow] if each in SLOW else []) for each in BATCHES],
)
def test_a_batch(name: str, num_replicas: int) -> None:
    loss, plain = LOSSES[name]
    accumulator = make(loss, 3, num_replicas)
    for num_steps, split in enumerate(SPLITS[num_replicas], 1):
        assert_same(accumulator, accumulator.step(on_replicas(split)), full_batch(plain, num_steps))
    assert accumulator.num_traces == 1


def test_negative_control_loss_divided_twice() -> None:
    """TensorFlow's own number of replicas halves the update."""

    def halved(model: Any, batch: Batch) -> Any:
        return mean(model, batch) / 2

    accumulator = make(halved, 3)
    accumulator.step(on_replicas((14, 8)))
    assert error(accumulator.model, full_batch(mean)[0]) == pytest.approx(0.5)


@pytest.mark.parametrize("name", EACH)
def test_a_window(name: str) -> None:
    loss, plain = LOSSES[name]
    accumulator = make(loss)
    window = Window([on_replicas((14, 8), start, start + 5) for start in (0, 5, 10)])
    assert_same(accumulator, accumulator.step(window), full_batch(plain))


@pytest.mark.parametrize("name", ["a loss of Keras", "global_batch_size"])
def test_one_device(name: str) -> None:
    """Also: a batch that is smaller than global_batch_size, which the loss divides by all the same."""
    loss, _ = LOSSES[name]
    accumulator = make(loss, 4, num_replicas=1)
    assert_same(accumulator, accumulator.step(make_batch(9)), full_batch(loss, size=9))


def test_a_batch_smaller_than_global_batch_size_on_replicas() -> None:
    accumulator = make(average_of_22, 4)
    assert_same(accumulator, accumulator.step(make_batch(9)), full_batch(average_of_22, size=9))


@pytest.mark.usefixtures("eagerly")
def test_a_weight_and_terms() -> None:
    """Each term has a count of its own; a global_batch_size is refused there, since nobody knows whose it is."""

    def terms(model: Any, batch: Batch) -> Any:
        return by_keras(model, batch), tf.nn.scale_regularization_loss(penalty(model))

    weight = {"weight": lambda batch: (len(batch["y"]), len(batch["y"]) ** 2)}
    accumulator = make(terms, 3, **weight)
    step = accumulator.step(on_replicas((14, 8)))
    assert_same(accumulator, step, full_batch(mean_and_penalty))
    accumulator.loss = lambda model, batch: (average_of_22(model, batch), mean(model, batch))
    with pytest.raises(LossError, match=r"divides by a global_batch_size, but .*: leave global_batch_size out"):
        accumulator.step(on_replicas((14, 8)))


@pytest.mark.usefixtures("eagerly")
def test_reduction_sum() -> None:
    def added_up(model: Any, batch: Batch) -> Any:
        return tf.reduce_sum(per_sample(model, batch)) / SIZE

    def average(model: Any, batch: Batch) -> Any:
        return tf.nn.compute_average_loss(per_sample(model, batch), global_batch_size=SIZE)

    for loss in (added_up, average):
        accumulator = make(loss, 3, reduction="sum")
        assert_same(accumulator, accumulator.step(on_replicas((14, 8))), full_batch(mean))


# --- gradients from a tape -----------------------------------------------------------------------------------


def adder(accumulator: Accumulator, loss: Callable[..., Any], *, is_one: bool = True) -> Callable[[Any], None]:
    def on_replica(batch: Batch) -> None:
        if is_one:
            with tf.GradientTape() as tape, accumulator.one_replica():
                value = loss(accumulator.model, batch)
        else:
            with tf.GradientTape() as tape:
                value = loss(accumulator.model, batch)
        found = tape.gradient(value, accumulator.model.trainable_variables)
        accumulator.add(found, weight=tf.shape(batch["y"])[0], loss=value)

    return lambda batch: accumulator.strategy.run(on_replica, args=(batch,))


@pytest.mark.compiled
@pytest.mark.each_value
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", [name for name in EACH if name != "global_batch_size"])
def test_add(name: str, in_graph: bool) -> None:
    loss, plain = LOSSES[name]
    accumulator = make(None, accumulation_steps=100)
    add = adder(accumulator, loss)
    add = tf.function(add, reduce_retracing=True) if in_graph else add
    for start in (0, 5, 10):
        add(on_replicas((14, 8), start, start + 5))
    accumulator.flush()
    assert_same(accumulator, accumulator.last_step, full_batch(plain))


@pytest.mark.compiled
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "a mean" and name != "a loss of tf_keras"])
def test_add_refuses_gradients_of_a_divided_loss(name: str) -> None:
    loss, _ = LOSSES[name]
    accumulator = make(None, accumulation_steps=2)
    add = adder(accumulator, loss, is_one=False)
    for each in (add, tf.function(add)):
        with pytest.raises(LossError, match=r"asked for the number of replicas \(2\).*accumulator.one_replica\(\):`"):
            each(on_replicas((14, 8)))
    adder(accumulator, mean, is_one=False)(on_replicas((14, 8), 0, 5))  # nothing is left of it
    accumulator.flush()
    assert accumulator.last_step.weight == 10


def test_metric_outside_the_tape_is_ignored() -> None:
    accumulator = make(None, accumulation_steps=1)

    def on_replica(batch: Batch) -> Any:
        with tf.GradientTape() as tape:
            value = mean(accumulator.model, batch)
        accumulator.add(tape.gradient(value, accumulator.model.trainable_variables), tf.shape(batch["y"])[0], value)
        return by_keras(accumulator.model, batch)

    for _ in range(2):
        accumulator.strategy.run(on_replica, args=(on_replicas((14, 8)),))
    assert error(accumulator.model, full_batch(mean, 2)[0]) <= 1e-12


def test_global_batch_size_with_an_unknown_share_is_refused() -> None:
    accumulator = make(None, accumulation_steps=2)
    with pytest.raises(LossError, match="leave global_batch_size out"):
        adder(accumulator, average_of_22)(on_replicas((14, 8)))


def test_strategy_keeps_its_replicas_elsewhere() -> None:
    accumulator = make(by_keras, 3)
    accumulator.step(on_replicas((14, 8)))
    assert mirrored().num_replicas_in_sync == 2
    with accumulator.one_replica():
        assert mirrored().num_replicas_in_sync == 1
    found = mirrored().run(lambda: tf.constant(tf.distribute.get_replica_context().num_replicas_in_sync))
    assert [int(value) for value in mirrored().experimental_local_results(found)] == [2, 2]
    with mirrored().scope():
        assert tf.distribute.has_strategy()


# --- training and verify ----------------------------------------------------------------------------


def test_train_with_accumulation() -> None:
    with mirrored().scope():
        model, optimizer = make_model(), keras.optimizers.SGD(0.1, momentum=0.9)
    data = [on_replicas((14, 8), start, start + 5) for start in (0, 5, 10)]
    history = train_with_accumulation(model, data, optimizer, average, 3, epochs=2)
    full, loss = full_batch(mean_and_penalty, 2)
    assert error(model, full) <= 1e-12
    assert history.losses[1] == pytest.approx(loss, rel=1e-12)


class Module(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = tf.Variable(tf.random.stateless_normal([64, 10], [0, 0], dtype=tf.float64))

    def __call__(self, x: Any, training: bool = False) -> Any:
        return tf.tanh(x @ self.matrix)


@pytest.mark.each_value
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("kind", [make_model, Module], ids=["Keras", "tf.Module"])
@pytest.mark.parametrize("name", EACH)
def test_verify_runs_on_the_replicas(name: str, kind: Callable[[], Any], where: str) -> None:
    loss, _ = LOSSES[name]
    seen = set()

    def told(model: Any, batch: Batch) -> Any:
        context = tf.distribute.get_replica_context()
        seen.add((context.strategy is mirrored(), int(context.replica_id_in_sync_group)))
        return loss(model, batch)

    with mirrored().scope():
        model = kind()
        found = verify(model, make_batch(), told, 5) if where == "inside" else None
    found = found or verify(model, make_batch(), told, 5)
    assert found.is_exact, str(found)
    assert found.causes == ()
    assert seen == {(False, 0), (True, 0), (True, 1)}


@pytest.mark.compiled
@pytest.mark.parametrize("order", ["plainly first", "here first"])
@pytest.mark.parametrize("way", ["batch", "add"])
def test_loss_that_is_a_graph_is_traced_again(way: str, order: str) -> None:
    """A tf.function keeps the number of replicas that it was traced with."""
    loss = tf.function(by_keras, reduce_retracing=True)
    accumulator = make(loss, 3, accumulation_steps=1)

    def divided() -> list[float]:
        found = mirrored().run(lambda batch: loss(accumulator.model, batch), args=(on_replicas((14, 8)),))
        return [float(value) for value in mirrored().experimental_local_results(found)]

    parts = [
        mean(accumulator.model, {n: a[rows] for n, a in make_batch().items()}) for rows in (slice(14), slice(14, 22))
    ]
    wanted = [pytest.approx(float(part) / 2, rel=1e-12) for part in parts]
    if order == "plainly first":
        assert divided() == wanted
    with mirrored().scope():
        before = accumulator.model.get_weights()
    if way == "batch":
        accumulator.step(on_replicas((14, 8)))
    else:
        adder(accumulator, loss)(on_replicas((14, 8)))
    assert error(accumulator.model, full_batch(mean)[0]) <= 1e-12
    accumulator.model.set_weights(before)
    assert divided() == wanted


# --- divided by hand -------------------------------------------------------------------------------------------


def by_hand(model: Any, batch: Batch) -> Any:
    return tf.reduce_sum(per_sample(model, batch)) / SIZE


def by_a_loss_that_adds_up(model: Any, batch: Batch) -> Any:
    return loss_object(keras, "sum")(batch["y"], model(batch["x"], training=True)) * (1.0 / SIZE)


def by_hand_and_a_penalty(model: Any, batch: Batch) -> Any:
    return by_hand(model, batch) + tf.nn.scale_regularization_loss(penalty(model))


@pytest.mark.parametrize("way", ["batch", "window"])
@pytest.mark.parametrize("loss", [by_hand, by_a_loss_that_adds_up, by_hand_and_a_penalty])
def test_a_loss_divided_by_hand_is_refused_with_the_remedy(loss: Any, way: str) -> None:
    accumulator = make(loss, 3)
    before = flat(accumulator.model)
    with pytest.raises(LossError, match=r"the loss adds up over samples, .*return the mean .*reduce_mean") as told:
        accumulator.step(on_replicas((14, 8)) if way == "batch" else Window([on_replicas((14, 8))]))
    np.testing.assert_array_equal(flat(accumulator.model), before)
    assert ('pass reduction="sum"' in str(told.value)) == (loss is not by_hand_and_a_penalty)


@pytest.mark.parametrize("kind", ["tokens", "a term", "one a micro-batch"])
def test_sum_is_refused_if_the_weight_counts_its_items(kind: str) -> None:
    weights: dict[str, Callable[[Batch], Any]] = {
        "tokens": lambda batch: batch["y"] + 1,
        "a term": lambda batch: (len(batch["y"]), tf.shape(batch["y"])[0]),
        "one a micro-batch": lambda batch: 1,
    }
    loss = by_hand if kind != "a term" else lambda model, batch: (mean(model, batch), by_hand(model, batch))
    accumulator = make(loss, 22, weight=weights[kind])
    if kind == "one a micro-batch":  # which says that every micro-batch counts the same, whatever its size
        assert accumulator.step(on_replicas((22, 0))).is_applied
    else:
        with pytest.raises(LossError, match="adds up over samples"):
            accumulator.step(on_replicas((14, 8)))


@pytest.mark.parametrize("loss", [by_hand, by_a_loss_that_adds_up])
def test_remedy_is_exact(loss: Any) -> None:
    accumulator = make(loss, 3, reduction="sum")
    assert_same(accumulator, accumulator.step(on_replicas((22, 0))), full_batch(mean))


def test_loss_set_later_is_tried_too_and_variables_are_restored() -> None:
    def normalised() -> Any:
        model = make_model()
        model.add(keras.layers.BatchNormalization(dtype="float64"))
        model.add(keras.layers.Dropout(0.5, dtype="float64"))
        return model

    with mirrored().scope(), pytest.warns(BigBatchWarning, match="BatchNormalization"):
        model = normalised()
        accumulator = Accumulator(model, keras.optimizers.SGD(0.1), mean, 22)
    accumulator._prepare_for(spread(accumulator.strategy, on_replicas((14, 8))))
    for v, fresh in zip(model.non_trainable_variables, normalised().non_trainable_variables, strict=True):
        if v.dtype == "float64":  # not the seed
            np.testing.assert_array_equal(v.numpy(), fresh.numpy())
    accumulator.loss = by_hand
    with pytest.raises(LossError, match="adds up over samples"):
        accumulator.step(on_replicas((14, 8)))


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("kind", ["a root of a mean", "a product", "half precision", "no scalar"])
def test_other_losses_are_accepted(kind: str) -> None:
    losses: dict[str, Callable[..., Any]] = {
        "a root of a mean": lambda model, batch: tf.sqrt(mean(model, batch)),
        "a product": lambda model, batch: tf.reduce_prod(per_sample(model, batch)),
        "half precision": lambda model, batch: tf.reduce_mean(tf.cast(per_sample(model, batch), tf.bfloat16)),
        "no scalar": per_sample,
    }
    accumulator = make(losses[kind], 3)
    if kind == "no scalar":
        with pytest.raises(LossError, match="the loss has the shape"):
            accumulator.step(on_replicas((14, 8)))
    else:
        assert accumulator.step(on_replicas((14, 8))).is_applied


class Counting(tf.Module):
    """Counts its calls in its own variable."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.kernel = tf.Variable(np.linspace(-1, 1, 640).reshape(64, 10))
        self.calls = tf.Variable(0.0, trainable=False, **options)

    def __call__(self, x: Any, training: bool = False) -> Any:
        self.calls.assign_add(1.0)
        return x @ self.kernel


@pytest.mark.compiled
@pytest.mark.parametrize("is_window", [False, True])
def test_variable_that_waits_for_the_other_replicas(is_window: bool) -> None:
    """It is refused with a remedy that works."""
    batch = make_batch()
    parts = Window([{name: t[:8] for name, t in batch.items()}, {name: t[8:] for name, t in batch.items()}])
    kinds = tf.VariableAggregation, tf.VariableSynchronization
    with mirrored().scope():
        waiting = Counting(aggregation=kinds[0].MEAN)
        right = Counting(aggregation=kinds[0].SUM, synchronization=kinds[1].ON_READ)
    with pytest.raises(LossError, match=r"waits for the other replicas .*ON_READ"):
        Accumulator(waiting, keras.optimizers.SGD(0.125), mean, 4).step(parts if is_window else batch)
    with mirrored().scope():
        optimizer = keras.optimizers.SGD(0.125)
    Accumulator(right, optimizer, mean, 4).step(parts if is_window else batch)
    full = Counting()
    with tf.GradientTape() as tape:
        value = mean(full, batch)
    full.kernel.assign_sub(0.125 * tape.gradient(value, full.kernel))
    np.testing.assert_allclose(right.kernel.numpy(), full.kernel.numpy(), rtol=1e-12)
