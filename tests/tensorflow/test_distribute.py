"""Replicas accumulate locally and reduce once per window; the batch is the union of their batches."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from bigbatch import LossError, OrderError, Step, Window
from bigbatch.core.window import cuts
from bigbatch.tensorflow import Accumulator
from bigbatch.tensorflow.batch import any_size
from tests.problems import samples, tokens

from .training import Language, flat, make_loss, make_weight, mirrored

Batch = dict[str, np.ndarray]


def make_batch(size: int) -> Batch:
    (batch,) = samples(size)
    return {"x": batch["x"].astype(keras.config.floatx()), "y": batch["y"]}


def make_model(library: Any = keras) -> Any:
    library.utils.set_random_seed(0)
    layers = library.layers
    return library.Sequential([library.Input((64,)), layers.Dense(6, "tanh"), layers.Dense(10)])


def make_optimizer() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def loss(model: Any, batch: Batch) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], model(batch["x"])))


def rows(batch: Batch, start: int, stop: int) -> Batch:
    return {name: array[start:stop] for name, array in batch.items()}


def on_replicas(batch: Batch, split: tuple[int, int], strategy: tf.distribute.Strategy | None = None) -> Any:
    """The batch split over two replicas."""
    starts = (0, split[0])

    def own(context: Any) -> Any:
        k = context.replica_id_in_sync_group
        return {name: tf.constant(a) for name, a in rows(batch, starts[k], starts[k] + split[k]).items()}

    return (strategy or mirrored()).experimental_distribute_values_from_function(own)


def micro_batches(batch: Batch, split: tuple[int, int], size: int = 4) -> list[Any]:
    """Each replica's part in micro-batches; a replica that has none left gets an empty one."""
    own = [rows(batch, 0, split[0]), rows(batch, split[0], sum(split))]
    cut = [[rows(part, where.start, where.stop) for where in cuts(len(part["y"]), size)] for part in own]
    nothing = rows(batch, 0, 0)
    for mine in cut:
        mine.extend([nothing] * (max(map(len, cut)) - len(mine)))
    return [
        mirrored().experimental_distribute_values_from_function(
            lambda context, pair=pair: {
                name: tf.constant(a) for name, a in pair[context.replica_id_in_sync_group].items()
            }
        )
        for pair in zip(*cut, strict=True)
    ]


def full_batch(
    model: Any, optimizer: Any, batches: list[Batch], loss: Callable[..., Any] = loss, unit: float = 1.0
) -> Any:
    for batch in batches:
        with tf.GradientTape() as tape:
            value = loss(model, batch)
            value = (tf.add_n(value) if isinstance(value, tuple) else value) * unit
        found = tape.gradient(value, model.trainable_variables)
        pairs = zip(found, model.trainable_variables, strict=True)
        optimizer.apply_gradients([(tf.convert_to_tensor(g), v) for g, v in pairs if g is not None])
    return model


def on_each(variable: Any) -> list[np.ndarray]:
    inner = getattr(variable, "value", variable)
    inner = variable if callable(inner) else inner
    return [part.numpy() for part in mirrored().experimental_local_results(inner)]


def assert_same(ours: Any, full: Any, start: Any, tolerance: float = 1e-12) -> None:
    """Asserts that every replica has these values."""
    update = np.linalg.norm(flat(full) - flat(start))
    assert update > 1e-3
    squares = 0.0
    for a, b in zip(ours.trainable_variables, full.trainable_variables, strict=True):
        for value in on_each(a):
            squares += np.sum((value - b.numpy()) ** 2)
    assert squares**0.5 <= tolerance * update, f"{squares**0.5 / update:.1e}"


def make(micro_batch_size: int | None = 4, **options: Any) -> Accumulator:
    with mirrored().scope():
        optimizer = options.pop("make_optimizer", make_optimizer)()
        model = options.pop("make_model", make_model)()
        return Accumulator(model, optimizer, options.pop("loss", loss), micro_batch_size, **options)


def adder(accumulator: Accumulator, in_graph: bool, loss: Callable[..., Any] = loss) -> Callable[[Any], None]:
    def on_replica(batch: Batch) -> None:
        size = tf.shape(batch["y"])[0]
        with tf.GradientTape() as tape:
            value = loss(accumulator.model, batch)
        found = tape.gradient(value, accumulator.model.trainable_variables)
        accumulator.add(found, weight=size, loss=value)

    def add(batch: Any) -> None:
        accumulator.strategy.run(on_replica, args=(batch,))

    return OneGraph(add) if in_graph else add


class OneGraph:
    """A tf.function that accepts batches of any size."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function, self.made = function, None

    def __call__(self, batch: Any) -> None:
        if self.made is None:
            signature = [{name: any_size(value) for name, value in batch.items()}]
            self.made = tf.function(self.function, input_signature=signature)
        self.made(batch)


# --- every way of feeding --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
def test_distributed_batch() -> None:
    accumulator, full, optimizer = make(), make_model(), make_optimizer()
    for split in ((16, 16), (14, 8), (9, 8), (13, 8), (11, 0), (0, 5)):
        batch = make_batch(sum(split))
        value = float(loss(full, batch))
        full_batch(full, optimizer, [batch])
        step = accumulator.step(on_replicas(batch, split))
        assert_same(accumulator.model, full, make_model())
        assert step.loss == pytest.approx(value, rel=1e-12)
        assert step.weight == sum(split)
        assert step.num_micro_batches == sum(-(-size // 4) for size in split)
    assert accumulator.num_traces == 1


def test_a_batch_that_is_empty_on_all_replicas_changes_nothing() -> None:
    """With reduction "sum" too: Adam would move by its momentum."""
    accumulator = make(reduction="sum", make_optimizer=keras.optimizers.Adam)
    accumulator.step(on_replicas(make_batch(9), (5, 4)))
    before = accumulator.model.get_weights()
    step = accumulator.step(on_replicas(make_batch(0), (0, 0)))
    assert (step.is_applied, step.num_micro_batches) == (False, 0)
    for a, b in zip(accumulator.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("float64")
def test_a_plain_batch_of_any_size() -> None:
    batches = [make_batch(size) for size in (53, 5, 1, 20)]
    accumulator = make()
    assert [accumulator.step(batch).weight for batch in batches] == [53, 5, 1, 20]
    assert_same(accumulator.model, full_batch(make_model(), make_optimizer(), batches), make_model())
    assert accumulator.num_traces == 1


@pytest.mark.usefixtures("float64")
def test_windows() -> None:
    accumulator, full, optimizer = make(None), make_model(), make_optimizer()
    for split in ((16, 16), (14, 8), (11, 0)):
        batch = make_batch(sum(split))
        value = float(loss(full, batch))
        full_batch(full, optimizer, [batch])
        step = accumulator.step(Window(micro_batches(batch, split)))
        assert_same(accumulator.model, full, make_model())
        assert step.loss == pytest.approx(value, rel=1e-12)
        assert step.weight == sum(split)
    batch = make_batch(23)
    accumulator.step(
        Window([rows(batch, 0, 9), rows(batch, 9, 10), rows(batch, 10, 23)])
    )  # spread over the replicas by bigbatch
    assert_same(accumulator.model, full_batch(full, optimizer, [batch]), make_model())


@pytest.mark.parametrize("in_graph", [True, False], ids=["graph", "eager"])
@pytest.mark.usefixtures("float64")
def test_add_in_strategy_run(in_graph: bool) -> None:
    """Windows of 4 micro-batches and shorter ones; on an empty replica the mean is 0/0."""
    accumulator, full, optimizer = make(None, accumulation_steps=4), make_model(), make_optimizer()
    add = adder(accumulator, in_graph)
    for split in ((14, 8), (6, 1), (13, 0), (0, 5), (16, 16)):
        batch = make_batch(sum(split))
        micros = micro_batches(batch, split)
        for micro_batch in micros:
            add(micro_batch)
        assert (accumulator.flush() is None) == (len(micros) == 4)
        assert accumulator.last_step.weight == sum(split)
        assert_same(accumulator.model, full_batch(full, optimizer, [batch]), make_model())
    assert accumulator.num_steps.numpy() == 5


@pytest.mark.usefixtures("float64")
def test_flush_in_a_graph() -> None:
    batch = make_batch(22)
    accumulator = make(None, accumulation_steps=100)
    add = adder(accumulator, in_graph=True)
    flush = tf.function(accumulator.flush)
    for _ in range(2):
        for micro_batch in micro_batches(batch, (14, 8)):
            add(micro_batch)
        flush()
        flush()
    assert accumulator.num_steps.numpy() == 2
    assert accumulator.last_step.weight == 22
    assert_same(accumulator.model, full_batch(make_model(), make_optimizer(), [batch, batch]), make_model())


@pytest.mark.usefixtures("float64", "eagerly")
def test_without_graphs() -> None:
    batch = make_batch(22)
    accumulator = make()
    accumulator.step(on_replicas(batch, (14, 8)))
    accumulator.step(Window(micro_batches(batch, (14, 8))))
    assert_same(accumulator.model, full_batch(make_model(), make_optimizer(), [batch, batch]), make_model())


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("sizes", [(14, 8), (22, 0)], ids=["uneven", "one is empty"])
def test_compiled_by_xla(sizes: tuple[int, ...]) -> None:
    batch = make_batch(22)
    accumulator = make(jit_compile=True)
    accumulator.step(on_replicas(batch, sizes))
    assert_same(accumulator.model, full_batch(make_model(), make_optimizer(), [batch]), make_model())


@pytest.mark.usefixtures("float64")
def test_a_distributed_dataset_whose_last_batch_does_not_divide() -> None:
    """37 samples in global batches of 16: 8/8, 8/8, 5/0."""
    batch = make_batch(37)
    dataset = tf.data.Dataset.from_tensor_slices(batch).batch(16)
    parts = [rows(batch, 0, 16), rows(batch, 16, 32), rows(batch, 32, 37)]
    full = full_batch(make_model(), make_optimizer(), parts * 2)
    accumulator = make(3)
    steps = [accumulator.step(each) for _ in range(2) for each in mirrored().experimental_distribute_dataset(dataset)]
    assert [step.weight for step in steps] == [16, 16, 5] * 2
    assert_same(accumulator.model, full, make_model())


@pytest.mark.usefixtures("float64")
def test_one_device_strategy() -> None:
    batch = make_batch(22)
    strategy = tf.distribute.OneDeviceStrategy("CPU:1")
    with strategy.scope():
        model = make_model()
        accumulator = Accumulator(model, make_optimizer(), loss, 4, accumulation_steps=3)
    assert accumulator.step(batch).weight == 22
    accumulator.step(Window([rows(batch, 0, 9), rows(batch, 9, 22)]))
    for add in (adder(accumulator, in_graph=True), adder(accumulator, in_graph=False)):
        for start, stop in ((0, 4), (4, 5), (5, 22)):
            add({name: tf.constant(a) for name, a in rows(batch, start, stop).items()})
    assert accumulator.num_steps.numpy() == 4
    full = full_batch(make_model(), make_optimizer(), [batch] * 4)
    np.testing.assert_allclose(flat(model), flat(full), rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("float64")
def test_unbuilt_model() -> None:
    def late() -> Any:
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.layers.Dense(6, "tanh"), keras.layers.Dense(10)])

    batch = make_batch(22)
    full, start = late(), late()
    for model in (full, start):
        keras.utils.set_random_seed(0)
        model(batch["x"])
    full_batch(full, make_optimizer(), [batch])
    accumulator = make(make_model=late)
    keras.utils.set_random_seed(0)
    accumulator.step(on_replicas(batch, (14, 8)))
    assert_same(accumulator.model, full, start)


# --- losses ----------------------------------------------------------------------------------------------------


class TwoTerms:
    kind = "terms"


def language() -> Any:
    keras.utils.set_random_seed(0)
    model = Language()
    model(np.zeros((1, 1), np.int64))
    return model


@pytest.mark.parametrize("way", ["batch", "window"])
@pytest.mark.usefixtures("float64")
def test_two_terms_each_by_its_own_count(way: str) -> None:
    """This includes embeddings, and a replica with far fewer tokens."""
    batch = tokens(3, 60, 17, 40, 5, 0, 2)
    terms, weigh = make_loss(TwoTerms), make_weight(TwoTerms)
    full = full_batch(language(), keras.optimizers.Adam(0.01), [batch, batch], terms)
    accumulator = make(
        2 if way == "batch" else None,
        loss=terms,
        weight=weigh,
        make_model=language,
        make_optimizer=lambda: keras.optimizers.Adam(0.01),
    )
    for _ in range(2):
        if way == "batch":
            step = accumulator.step(on_replicas({**batch, "z": batch["z"]}, (4, 3)))
        else:
            step = accumulator.step(Window(_micro_batches_of_text(batch)))
        assert step.weight == (127, 7)
        assert len(step.terms) == 2
    assert_same(accumulator.model, full, language(), 1e-11)


def _micro_batches_of_text(batch: Batch) -> list[Any]:
    places = [((0, 2), (4, 6)), ((2, 4), (6, 7))]
    return [
        mirrored().experimental_distribute_values_from_function(
            lambda context, pair=pair: {
                name: tf.constant(a) for name, a in rows(batch, *pair[context.replica_id_in_sync_group]).items()
            }
        )
        for pair in places
    ]


@pytest.mark.usefixtures("float64")
def test_reduction_sum() -> None:
    def summed(model: Any, batch: Batch) -> Any:
        return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], model(batch["x"]))) / 10

    batch = make_batch(22)
    full = full_batch(make_model(), make_optimizer(), [batch], summed)
    accumulator = make(loss=summed, reduction="sum")
    step = accumulator.step(on_replicas(batch, (14, 8)))
    assert step.loss == pytest.approx(float(summed(make_model(), batch)))
    assert step.weight == 22
    assert_same(accumulator.model, full, make_model())


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("way", ["batch", "window"])
def test_a_replica_without_a_sample_adds_nothing_to_a_sum(way: str) -> None:
    """The loss is never called with 0 samples: a mean over nothing would be NaN, and some losses raise."""

    def loss(model: Any, batch: Batch) -> Any:
        with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(batch["y"])[0])]):
            values = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], model(batch["x"]))
        return tf.reduce_mean(values)

    batch = make_batch(3)
    full = full_batch(make_model(), make_optimizer(), [batch], loss)
    accumulator = make(loss=loss, reduction="sum")
    spread = on_replicas(batch, (3, 0))
    step = accumulator.step(Window([spread]) if way == "window" else spread)
    assert step.loss == pytest.approx(float(loss(make_model(), batch)))
    assert_same(accumulator.model, full, make_model())


@pytest.mark.parametrize("way", ["batch", "window"])
def test_a_loss_without_the_model_is_refused(way: str) -> None:
    accumulator = make(loss=lambda model, batch: tf.reduce_mean(batch["x"]))
    batch = on_replicas(make_batch(6), (4, 2))
    with pytest.raises(LossError, match="reached none of the model's trainable variables"):
        accumulator.step(Window([batch]) if way == "window" else batch)


def test_a_batch_without_a_sample_changes_nothing() -> None:
    accumulator = make()
    before = [on_each(v) for v in accumulator.model.variables]
    step = accumulator.step(on_replicas(make_batch(1), (0, 0)))
    assert (step.is_applied, step.weight) == (False, 0)
    for v, then in zip(accumulator.model.variables, before, strict=True):
        np.testing.assert_array_equal(on_each(v), then)
    assert accumulator.optimizer.iterations.numpy() == 0


# --- once per step, on the whole gradient ------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "AdamW with averages": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.5),
    "a schedule and global_clipnorm": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5), momentum=0.9, global_clipnorm=0.05
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.usefixtures("float64")
def test_optimizers_step_once(kind: str) -> None:
    batch = make_batch(22)
    optimizer = OPTIMIZERS[kind]()
    full = full_batch(make_model(), optimizer, [batch] * 2)
    accumulator = make(make_optimizer=OPTIMIZERS[kind])
    for _ in range(2):
        accumulator.step(on_replicas(batch, (14, 8)))
    assert_same(accumulator.model, full, make_model())
    assert accumulator.optimizer.iterations.numpy() == 2
    for a, b in zip(accumulator.optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_allclose(on_each(a)[1], b.numpy(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_optimizers_of_tf_keras(kind: str) -> None:
    optimizers = tf_keras.optimizers.legacy if kind == "legacy" else tf_keras.optimizers
    batch = make_batch(22)
    full = full_batch(make_model(tf_keras), optimizers.SGD(0.1, momentum=0.9), [batch] * 3)
    accumulator = make(
        make_model=lambda: make_model(tf_keras),
        make_optimizer=lambda: optimizers.SGD(0.1, momentum=0.9),
        accumulation_steps=len(micro_batches(batch, (14, 8))),
    )
    accumulator.step(on_replicas(batch, (14, 8)))
    accumulator.step(Window(micro_batches(batch, (14, 8))))
    for micro_batch in micro_batches(batch, (14, 8)):
        adder(accumulator, in_graph=False)(micro_batch)
    assert_same(accumulator.model, full, make_model(tf_keras), 1e-5)


def one_weight() -> Any:
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])


def product(model: Any, batch: Batch) -> Any:
    return tf.reduce_mean(model(batch["x"]))


CLIPPED: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "optimizer's clipnorm": ({"clipnorm": 1.0}, {}),
    "optimizer's global_clipnorm": ({"global_clipnorm": 1.0}, {}),
    "optimizer's clipvalue": ({"clipvalue": 1.0}, {}),
    "clip_norm": ({}, {"clip_norm": 1.0}),
    "clip_value": ({}, {"clip_value": 1.0}),
}


@pytest.mark.parametrize(
    ("kind", "way"), [*((kind, "batch") for kind in CLIPPED), ("optimizer's clipvalue", "add"), ("clip_norm", "add")]
)
@pytest.mark.usefixtures("float64")
def test_clipping_sees_the_whole_gradient(kind: str, way: str) -> None:
    """+10.1 on one replica and -9.9 on the other sum to 0.2, which needs no clipping. Clipped first, they give 0."""
    theirs, ours = CLIPPED[kind]
    accumulator = make(
        1,
        loss=product,
        reduction="sum",
        accumulation_steps=1,
        make_model=one_weight,
        make_optimizer=lambda: keras.optimizers.SGD(1.0, **theirs),
        **ours,
    )
    batch = on_replicas({"x": np.array([[10.1], [-9.9]]), "y": np.zeros(2)}, (1, 1))
    if way == "batch":
        step = accumulator.step(batch)
    else:
        adder(accumulator, in_graph=True, loss=product)(batch)
        step = accumulator.last_step
    assert step.grad_norm == pytest.approx(0.2, rel=1e-12)
    for value in on_each(accumulator.model.trainable_variables[0]):
        assert value[0, 0] == pytest.approx(-0.2, rel=1e-12)
    clipped = on_replicas({"x": np.array([[10.1], [9.9]]), "y": np.zeros(2)}, (1, 1))
    accumulator.step(clipped)
    for value in on_each(accumulator.model.trainable_variables[0]):
        assert value[0, 0] == pytest.approx(-1.2, rel=1e-12)


def with_an_inf_on_replica_1(batch: Batch) -> Any:
    x = batch["x"].copy()
    x[18, 3] = np.inf
    return {**batch, "x": x}


def feed(accumulator: Accumulator, batch: Batch, way: str) -> Step | None:
    if way == "batch":
        return accumulator.step(on_replicas(batch, (14, 8)))
    if way == "window":
        return accumulator.step(Window(micro_batches(batch, (14, 8))))
    for micro_batch in micro_batches(batch, (14, 8)):
        adder(accumulator, in_graph=False)(micro_batch)
    return accumulator.flush()


@pytest.mark.parametrize("way", ["batch", "window", "add"])
@pytest.mark.usefixtures("float64")
def test_inf_on_one_replica_skips_the_step_on_all(way: str, capfd: pytest.CaptureFixture[str]) -> None:
    batch = make_batch(22)
    accumulator = make(4 if way == "batch" else None, accumulation_steps=100)
    feed(accumulator, batch, way)
    before = [on_each(v) for v in (*accumulator.model.variables, *accumulator.optimizer.variables)]
    assert not feed(accumulator, with_an_inf_on_replica_1(batch), way).is_applied
    assert "a step was skipped" in capfd.readouterr().err
    for v, then in zip((*accumulator.model.variables, *accumulator.optimizer.variables), before, strict=True):
        np.testing.assert_array_equal(on_each(v), then)
    assert feed(accumulator, batch, way).is_applied
    assert_same(accumulator.model, full_batch(make_model(), make_optimizer(), [batch, batch]), make_model())


def scaled(kind: str) -> Any:
    if kind == "keras":
        return keras.optimizers.LossScaleOptimizer(make_optimizer(), initial_scale=1024.0)
    return tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=1024.0)


@pytest.mark.parametrize(("kind", "way"), [("keras", "batch"), ("keras", "window"), ("tf_keras", "batch")])
def test_a_scale_of_the_loss(kind: str, way: str) -> None:
    library = keras if kind == "keras" else tf_keras
    batch = make_batch(22)
    accumulator = make(
        4 if way == "batch" else None,
        clip_norm=100.0,
        make_model=lambda: make_model(library),
        make_optimizer=lambda: scaled(kind),
    )
    assert feed(accumulator, batch, way).is_applied
    before = [on_each(v) for v in accumulator.model.variables]
    assert not feed(accumulator, with_an_inf_on_replica_1(batch), way).is_applied
    for v, then in zip(accumulator.model.variables, before, strict=True):
        np.testing.assert_array_equal(on_each(v), then)
    scale = accumulator.optimizer.dynamic_scale if kind == "keras" else accumulator.optimizer.loss_scale
    assert float(scale.numpy()) == 512
    assert feed(accumulator, batch, way).is_applied
    plain = make_optimizer() if kind == "keras" else tf_keras.optimizers.SGD(0.1, momentum=0.9)
    assert_same(accumulator.model, full_batch(make_model(library), plain, [batch] * 2), make_model(library), 1e-5)
    if kind == "keras":  # tf_keras also counts skipped steps
        assert accumulator.optimizer.iterations.numpy() == 2


# --- reductions ------------------------------------------------------------------------------------------


class Counting(tf.distribute.HierarchicalCopyAllReduce):
    """Records the number of tensors and the graph of each group of reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[tuple[int, str]] = []

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        self.groups.append((len(value_destination_pairs), getattr(graph, "name", "eager")))
        return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)


def reductions(num_micro_batches: int, way: str) -> tuple[list[tuple[int, str]], int]:
    """The groups of reductions in a window, and the number of single values besides."""
    counting = Counting()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=counting)
    size = 64 // num_micro_batches
    with strategy.scope():
        accumulator = Accumulator(
            make_model(),
            keras.optimizers.AdamW(0.01, global_clipnorm=1.0),
            loss,
            size // 2 if way == "batch" else None,
            accumulation_steps=num_micro_batches,
        )
    batch = make_batch(64)
    parts = [rows(batch, start, start + size) for start in range(0, 64, size)]
    singles, reduce = [], strategy.reduce
    strategy.reduce = lambda *args, **kwargs: (singles.append(args), reduce(*args, **kwargs))[1]
    counting.groups.clear()
    if way == "batch":
        step = accumulator.step(batch)
    elif way == "window":
        step = accumulator.step(Window(parts))
    else:
        add = adder(accumulator, in_graph=way == "add in a graph")
        for part in parts:
            add(on_replicas(part, (size // 2, size // 2), strategy))
        step = accumulator.last_step
    assert step.weight == 64
    return counting.groups, len(singles)


@pytest.mark.parametrize("way", ["batch", "window", "add", "add in a graph"])
def test_one_group_of_reductions_per_window(way: str) -> None:
    """Four gradients, the loss, the weight and the count form one group; the total weight of a Window goes first."""
    groups, num_singles = reductions(8, way)
    ((num_tensors, graph),) = groups
    assert num_tensors == (7 if way == "batch" else 6)
    assert "while" not in graph
    assert num_singles == (1 if way == "window" else 0)
    if way == "batch":
        assert reductions(1, way) == (groups, num_singles)


# --- refusals --------------------------------------------------------------------------------------------


def test_add_outside_the_replicas_is_refused() -> None:
    accumulator = make(None, accumulation_steps=2)
    found = [tf.zeros(v.shape, v.dtype) for v in accumulator.model.trainable_variables]
    with pytest.raises(OrderError, match=r"on 2 replicas: call add\(\) in what strategy.run runs"):
        accumulator.add(found, weight=1)
    with mirrored().scope(), pytest.raises(OrderError, match="on 2 replicas"):
        accumulator.add(found, weight=1)
    assert accumulator.flush() is None
