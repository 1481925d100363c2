"""The parts of a step: order of calls, options, schedules, bad input. An error changes nothing."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch import (
    BatchError,
    BigBatchError,
    BigBatchWarning,
    GradientError,
    LossError,
    OptionError,
    OrderError,
    WeightError,
    Window,
)
from bigbatch.tensorflow import Accumulator

pytestmark = pytest.mark.usefixtures("float64")
Batch = tuple[Any, Any]


def make_model() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(3)])


def make_batch(size: int = 11) -> Batch:
    generator = np.random.default_rng(5)
    return generator.normal(size=(size, 5)), generator.integers(0, 3, size)


def parts(batch: Batch, size: int = 4) -> list[Batch]:
    return [(batch[0][k : k + size], batch[1][k : k + size]) for k in range(0, len(batch[1]), size)]


def loss(model: Any, batch: Batch) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], model(batch[0])))


def make(micro_batch_size: int | None = 4, optimizer: Any = None, **options: Any) -> Accumulator:
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    return Accumulator(make_model(), optimizer, options.pop("loss", loss), micro_batch_size, **options)


def gradients(model: Any, batch: Batch, loss: Any = loss) -> tuple[Any, list[Any]]:
    with tf.GradientTape() as tape:
        value = loss(model, batch)
    return value, tape.gradient(value, model.trainable_variables)


def add(accumulator: Accumulator, batch: Batch, weight: Any = None) -> None:
    value, found = gradients(accumulator.model, batch)
    accumulator.add(found, weight=len(batch[1]) if weight is None else weight, loss=value)


def snapshot(accumulator: Accumulator) -> list[np.ndarray]:
    return [v.numpy() for v in [*accumulator.model.variables, *accumulator.optimizer.variables]]


def assert_untouched(accumulator: Accumulator, before: list[np.ndarray]) -> None:
    for now, then in zip(snapshot(accumulator), before, strict=True):
        np.testing.assert_array_equal(now, then)


def assert_same(ours: Any, full: Any, tolerance: float = 1e-12) -> None:
    for a, b in zip(ours.variables, full.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=tolerance, atol=tolerance)


def full_batch_step(model: Any, optimizer: Any, batch: Batch | None = None, loss: Any = loss) -> Any:
    _, found = gradients(model, batch or make_batch(), loss)
    optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
    return model


def assert_exact_step(accumulator: Accumulator) -> None:
    """Asserts that the next step is that of the full batch, so that nothing is left of an earlier error."""
    model = make_model()
    model.set_weights(accumulator.model.get_weights())
    full_batch_step(model, keras.optimizers.SGD(0.1))
    if (accumulator.loss, accumulator.weight) != (loss, None):
        accumulator.loss, accumulator.weight = loss, None
        accumulator._graphs.made.clear()
    accumulator.micro_batch_size = 4
    assert accumulator.step(make_batch()).is_applied
    assert_same(accumulator.model, model)


def test_a_batch_smaller_than_the_micro_batch_just_runs() -> None:
    step = make(micro_batch_size=100).step(make_batch(11))
    assert (step.num_micro_batches, step.weight) == (1, 11)


@pytest.mark.parametrize("way", ["batch", "window", "add"])
def test_step_reports_what_it_did(way: str) -> None:
    accumulator = make(4 if way == "batch" else None, accumulation_steps=3)
    value, found = gradients(make_model(), make_batch())
    if way == "batch":
        step = accumulator.step(make_batch())
    elif way == "window":
        step = accumulator.step(Window(parts(make_batch())))
    else:
        assert accumulator.last_step is None
        for part in parts(make_batch()):
            add(accumulator, part)
        step = accumulator.last_step
    assert step.loss == pytest.approx(float(value), rel=1e-12)
    assert step.grad_norm == pytest.approx(float(tf.linalg.global_norm(found)), rel=1e-12)
    assert (step.num_micro_batches, step.weight, step.is_applied) == (3, 11, True)
    assert accumulator.num_steps.numpy() == 1


def test_add_steps_without_a_loss() -> None:
    accumulator = make(accumulation_steps=2)
    for part in parts(make_batch())[:2]:
        accumulator.add(gradients(accumulator.model, part)[1], weight=len(part[1]))
    assert accumulator.last_step.is_applied
    assert np.isnan(accumulator.last_step.loss)


@pytest.mark.parametrize("way", ["batch", "window", "add"])
def test_reduction_sum_adds_up(way: str) -> None:
    def summed(model: Any, batch: Batch) -> Any:
        return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], model(batch[0])))

    full = full_batch_step(make_model(), keras.optimizers.SGD(0.1), loss=summed)
    accumulator = make(4 if way == "batch" else None, loss=summed, reduction="sum", accumulation_steps=5)
    if way == "batch":
        step = accumulator.step(make_batch())
    elif way == "window":
        step = accumulator.step(Window(parts(make_batch())))
    else:
        for part in parts(make_batch()):
            value, found = gradients(accumulator.model, part, summed)
            accumulator.add(found, loss=value)
        step = accumulator.flush()
    assert step.loss == pytest.approx(float(summed(make_model(), make_batch())), rel=1e-12)
    assert_same(accumulator.model, full)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_weights_in_low_precision_are_summed_exactly(dtype: tf.DType) -> None:
    accumulator = make(4000, weight=lambda batch: tf.fill(tf.shape(batch[1]), tf.constant(20, dtype)))
    assert accumulator.step(make_batch(7001)).weight == 140020


def test_weights_that_float32_cannot_represent() -> None:
    accumulator = make(accumulation_steps=3)
    add(accumulator, make_batch(), weight=0.1)
    assert accumulator.flush().weight == 0.1
    assert make(100, weight=lambda batch: 0.1).step(make_batch()).weight == 0.1


@pytest.mark.compiled
@pytest.mark.parametrize("way", ["batch", "window", "add"])
def test_total_weight_of_zero_changes_nothing_and_is_reported(way: str) -> None:
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    accumulator = make(4 if way == "batch" else None, optimizer, accumulation_steps=3, weight=lambda _: 0)
    before = snapshot(accumulator)
    if way == "batch":
        step = accumulator.step(make_batch())
    elif way == "window":
        step = accumulator.step(Window(parts(make_batch())))
    else:
        for part in parts(make_batch()):
            add(accumulator, part, weight=0)
        step = accumulator.last_step
    assert not step.is_applied
    assert step.weight == 0
    assert np.isnan(step.loss)
    assert_untouched(accumulator, before)
    accumulator.weight = None
    accumulator._graphs.made.clear()
    model = full_batch_step(make_model(), keras.optimizers.AdamW(0.1, weight_decay=0.5))
    accumulator.micro_batch_size = 4
    accumulator.step(make_batch())
    assert_same(accumulator.model, model)


def test_full_window_steps_and_flush_steps_the_rest() -> None:
    accumulator = make(accumulation_steps=2)
    seen = []
    for part in parts(make_batch()):
        add(accumulator, part)
        seen.append((int(accumulator.num_steps.numpy()), accumulator.last_step and accumulator.last_step.weight))
    assert seen == [(0, None), (1, 8), (1, 8)]
    assert accumulator.flush().weight == 3
    assert accumulator.flush() is None
    assert accumulator.num_steps.numpy() == 2


@pytest.mark.compiled
def test_flush_without_a_window_does_nothing() -> None:
    accumulator = make(None, accumulation_steps=3)
    before = snapshot(accumulator)
    assert accumulator.flush() is None
    flush = tf.function(accumulator.flush)
    flush()
    assert_untouched(accumulator, before)
    assert accumulator.last_step is None
    for part in parts(make_batch()):
        add(accumulator, part)
    flush()
    assert accumulator.num_steps.numpy() == 1


@pytest.mark.compiled
@pytest.mark.parametrize("in_graph", [False, True])
def test_accumulation_steps_may_ramp_up(in_graph: bool) -> None:
    accumulator = make(accumulation_steps=lambda step: step + 1)
    feed = tf.function(lambda: add(accumulator, make_batch())) if in_graph else lambda: add(accumulator, make_batch())
    made = []
    for _ in range(6):
        before = accumulator.num_steps.numpy()
        feed()
        made.append(accumulator.num_steps.numpy() > before)
    assert made == [True, False, True, False, False, True]


def test_losses_are_fetched_when_read() -> None:
    """Until then they stay tensors."""
    step = make().step(make_batch())
    assert callable(step._terms)
    assert callable(step._weight)
    assert callable(step._grad_norm)
    assert callable(step._is_applied)
    assert step.loss > 0
    assert not callable(step._terms)


# --- once per step ----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)),
    "ema": lambda: keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7),
    "ema that overwrites": lambda: keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2),
    "weight decay": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.3),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, momentum=0.9, clipvalue=0.01),
    "loss_scale_factor": lambda: keras.optimizers.SGD(0.5, loss_scale_factor=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_everything_of_a_step_happens_once_per_step(kind: str) -> None:
    """The variables, averages and counters of the optimizer are those of the full batch."""
    model, optimizer = make_model(), OPTIMIZERS[kind]()
    scale = getattr(optimizer, "loss_scale_factor", None) or 1
    for _ in range(3):
        full_batch_step(model, optimizer, loss=lambda model, batch: loss(model, batch) * scale)
    accumulator = make(4, OPTIMIZERS[kind](), accumulation_steps=3)
    accumulator.step(make_batch())
    accumulator.step(Window(parts(make_batch())))
    for part in parts(make_batch()):
        value, found = gradients(accumulator.model, part)
        accumulator.add([g * scale for g in found], weight=len(part[1]), loss=value)
    assert accumulator.optimizer.iterations.numpy() == 3
    assert_same(accumulator.model, model)
    assert_same(accumulator.optimizer, optimizer)


@pytest.mark.parametrize("way", ["norm", "value"])
@pytest.mark.parametrize("limit", [0.05, 10.0])
def test_clipping_acts_on_the_whole_gradient(way: str, limit: float) -> None:
    model, optimizer = make_model(), keras.optimizers.SGD(1.0)
    _, found = gradients(model, make_batch())
    clipped = (
        tf.clip_by_global_norm(found, limit)[0]
        if way == "norm"
        else [tf.clip_by_value(g, -limit, limit) for g in found]
    )
    optimizer.apply_gradients(zip(clipped, model.trainable_variables, strict=True))
    accumulator = make(2, keras.optimizers.SGD(1.0), **{f"clip_{way}": limit})
    step = accumulator.step(make_batch())
    assert step.grad_norm == pytest.approx(float(tf.linalg.global_norm(found)), rel=1e-12)
    assert_same(accumulator.model, model)


# --- graphs, and what a batch may be ---------------------------------------------------------------------------


@pytest.mark.compiled
def test_varying_sizes_make_no_new_graph() -> None:
    accumulator = make(16)
    seen = []

    def watched(model: Any, batch: Batch) -> Any:
        seen.append(batch[0].shape)
        return loss(model, batch)

    accumulator.loss = watched
    for size in (53, 50, 17, 8, 3):
        assert accumulator.step(make_batch(size)).weight == size
    assert accumulator.num_traces == 1
    assert all(shape.as_list() == [None, 5] for shape in seen)
    assert len(seen) <= 2


@pytest.mark.compiled
def test_windows_of_any_length_make_one_graph() -> None:
    accumulator = make(None)
    for size in (53, 50, 17, 8, 3):
        assert accumulator.step(Window(parts(make_batch(size)))).weight == size
    assert accumulator.num_traces == 1


def test_unbuilt_model_is_built_with_at_most_a_micro_batch() -> None:
    sizes = []

    class Late(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            sizes.append(x.shape[0])
            return self.dense(x)

    keras.utils.set_random_seed(0)
    ours = Late()
    accumulator = Accumulator(ours, keras.optimizers.Adam(0.1), loss, 4)
    assert accumulator.step(make_batch()).is_applied
    assert all(size is None or size <= 4 for size in sizes)
    keras.utils.set_random_seed(0)
    full = Late()
    full(make_batch()[0])
    assert_same(ours, full_batch_step(full, keras.optimizers.Adam(0.1)))


def test_a_model_of_plain_tensorflow() -> None:
    class Line(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(np.linspace(-1, 1, 15).reshape(5, 3))

        def __call__(self, x: Any) -> Any:
            return x @ self.w

    ours, full = Line(), Line()
    assert Accumulator(ours, keras.optimizers.SGD(0.1), loss, 4).step(make_batch()).is_applied
    assert_same(ours, full_batch_step(full, keras.optimizers.SGD(0.1)))


class Pair(NamedTuple):
    x: Any
    y: Any


NESTS: dict[str, tuple[Callable[[Batch], Any], Callable[[Any], Batch]]] = {
    "tuple": (lambda b: b, lambda n: n),
    "list": (list, lambda n: (n[0], n[1])),
    "dict": (lambda b: {"x": b[0], "y": b[1]}, lambda n: (n["x"], n["y"])),
    "NamedTuple": (lambda b: Pair(*b), lambda n: (n.x, n.y)),
    "nested": (lambda b: {"in": {"x": (b[0],)}, "out": [Pair(b[1], b[1])]}, lambda n: (n["in"]["x"][0], n["out"][0].y)),
    "tensors": (lambda b: tuple(map(tf.constant, b)), lambda n: n),
    "variable": (lambda b: (tf.Variable(b[0]), b[1]), lambda n: n),
    "with others": (
        lambda b: {"x": b[0], "y": b[1], "name": "a name", "temperature": 2.0, "nothing": None},
        lambda n: (n["x"] * {"a name": 0.5}[n["name"]] * n["temperature"], n["y"]),
    ),
    "with a scalar tensor": (lambda b: (*b, tf.constant(2.0, tf.float64)), lambda n: (n[0] * n[2] / 2, n[1])),
}


@pytest.mark.parametrize("kind", NESTS)
def test_a_batch_is_any_nest(kind: str) -> None:
    nest, unnest = NESTS[kind]
    accumulator = make(4, loss=lambda model, batch: loss(model, unnest(batch)))
    accumulator.step(nest(make_batch()))
    model, optimizer = make_model(), keras.optimizers.SGD(0.1)
    full_batch_step(model, optimizer)
    assert_same(accumulator.model, model)
    accumulator.step(Window([nest(part) for part in parts(make_batch())]))
    assert_same(accumulator.model, full_batch_step(model, optimizer))


def test_values_that_are_not_tensors_may_change_between_steps() -> None:
    accumulator = make(4, loss=lambda model, batch: loss(model, batch[:2]) * batch[2])
    model, optimizer = make_model(), keras.optimizers.SGD(0.1)
    for factor in (1.0, 3.0):
        accumulator.step((*make_batch(), factor))
        full_batch_step(model, optimizer, loss=lambda model, batch, factor=factor: loss(model, batch) * factor)
    assert_same(accumulator.model, model)


def words() -> tuple[tf.RaggedTensor, np.ndarray]:
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 6, 11)
    return tf.ragged.constant([list(generator.integers(0, 9, n)) for n in lengths], row_splits_dtype=tf.int64), lengths


@pytest.mark.parametrize("way", ["batch", "window"])
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_ragged_and_sparse_inputs(kind: str, way: str) -> None:
    """Sums of embeddings of sentences with 0 to 5 words: a table multiplied by the counts of the words."""
    sentences, lengths = words()
    target = np.random.default_rng(1).normal(size=(11, 3))

    class Bag(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = tf.Variable(np.random.default_rng(2).normal(size=(9, 3)))

    def of_ragged(model: Bag, batch: Any) -> Any:
        return tf.reduce_mean((tf.reduce_sum(tf.gather(model.table, batch[0]), 1) - batch[1]) ** 2)

    def of_sparse(model: Bag, batch: Any) -> Any:
        return tf.reduce_mean((tf.sparse.sparse_dense_matmul(batch[0], model.table) - batch[1]) ** 2)

    counts = np.stack([np.bincount(row, minlength=9) for row in (r.numpy() for r in sentences)]).astype(float)
    inputs, loss = (sentences, of_ragged) if kind == "ragged" else (tf.sparse.from_dense(counts), of_sparse)
    full = full_batch_step(Bag(), keras.optimizers.SGD(0.1), (inputs, target), loss)
    ours = Bag()
    accumulator = Accumulator(ours, keras.optimizers.SGD(0.1), loss, 4 if way == "batch" else None)
    rows = [slice(k, min(k + 4, 11)) for k in range(0, 11, 4)]
    if way == "batch":
        step = accumulator.step((inputs, target))
    else:
        pieces = [sentences[r] if kind == "ragged" else tf.sparse.from_dense(counts[r]) for r in rows]
        step = accumulator.step(Window(zip(pieces, (target[r] for r in rows), strict=True)))
    assert step.weight == len(lengths) == 11
    assert_same(ours, full)


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"loss": lambda m, b: tf.nn.sparse_softmax_cross_entropy_with_logits(b[1], m(b[0]))},
            LossError,
            r"shape \(None,\)",
        ),
        ({"loss": lambda m, b: 3.0}, LossError, "is a float"),
        ({"loss": lambda m, b: tf.argmax(m(b[0])[0])}, LossError, "tensor of floats"),
        ({"loss": lambda m, b: (loss(m, b), loss(m, b))}, LossError, "2 terms but the weight has 1"),
        ({"loss": lambda m, b: tf.stop_gradient(loss(m, b))}, LossError, "none of the model's"),
        ({"loss": lambda m, b: 1 / 0}, ZeroDivisionError, "division by zero"),
        ({"loss": lambda m, b: keras.Variable(1.0)}, LossError, "is a Variable"),
        ({"weight": lambda b: tf.RaggedTensor.from_row_splits(tf.ones(4), [0, 1, 4])}, WeightError, "a RaggedTensor"),
        ({"weight": lambda b: -1}, WeightError, "is -1: a weight says"),
        ({"weight": lambda b: float("nan")}, WeightError, "is nan"),
        ({"weight": lambda b: None}, WeightError, "is None"),
        ({"weight": lambda b: "4"}, WeightError, "is '4'"),
        ({"weight": lambda b: tf.shape(b[1])[0] - 4}, WeightError, "negative or not finite"),
        ({"weight": lambda b: 1 / (tf.shape(b[1])[0] - 4)}, WeightError, "negative or not finite"),
        ({"weight": lambda b: (1, 2)}, LossError, "1 term but the weight has 2"),
    ],
)
def test_bad_losses_and_weights_change_nothing(options: dict[str, Any], error: type[Exception], message: str) -> None:
    accumulator = make(4, **options)
    before = snapshot(accumulator)
    for batch in (make_batch(), Window(parts(make_batch()))):
        with pytest.raises(error, match=message) as caught:
            accumulator.step(batch)
        assert "\n" not in str(caught.value)
        assert_untouched(accumulator, before)
        assert accumulator.flush() is None


@pytest.mark.parametrize("way", ["batch", "window"])
def test_error_in_the_last_micro_batch_leaves_no_gradients(way: str) -> None:
    def failing(model: Any, batch: Batch) -> Any:
        with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(batch[1])[0], 4, "a loss that fails")]):
            return loss(model, batch)

    accumulator = make(4 if way == "batch" else None, loss=failing)
    before = snapshot(accumulator)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a loss that fails"):
        accumulator.step(make_batch() if way == "batch" else Window(parts(make_batch())))
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((np.zeros((0, 5)), np.zeros(0, int)), "has 0 samples"),
        ((np.zeros((4, 5)), np.zeros(3, int)), "has 4 samples but .* has 3"),
        ("text", "no tensor with a batch axis"),
        (tf.constant(3.0), "no tensor with a batch axis"),
        (Window([]), "0 micro-batches"),
        (Window([(np.zeros((2, 5)), np.zeros(3, int))]), "has 2 samples but .* has 3"),
    ],
)
def test_bad_batches_change_nothing(batch: Any, message: str) -> None:
    accumulator = make()
    before = snapshot(accumulator)
    with pytest.raises(BatchError, match=message):
        accumulator.step(batch)
    assert_untouched(accumulator, before)
    assert accumulator.flush() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size is 0: pass a whole number of at least 1"),
        ({"micro_batch_size": 2.5}, "micro_batch_size is 2.5"),
        ({"micro_batch_size": "auto"}, "micro_batch_size is 'auto'"),
        ({"accumulation_steps": -1}, "accumulation_steps is -1"),
        ({"reduction": "max"}, "reduction='max' is unknown"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"clip_norm": "a"}, "clip_norm is 'a'"),
        ({"clip_value": float("nan")}, "clip_value is nan"),
        ({"optimizer": object()}, "does not know the optimizer builtins.object"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make(None).step(make_batch()), OptionError, "where to cut"),
        (lambda: make(loss=None).step(make_batch()), OptionError, "needs a loss"),
        (lambda: add(make(), make_batch()), OptionError, "accumulation_steps"),
        (lambda: make(accumulation_steps=2).add([None] * 4), OptionError, "needs weight"),
        (lambda: add(make(accumulation_steps=2), make_batch(), weight=-3), WeightError, "-3"),
        (lambda: add(make(accumulation_steps=2), make_batch(), weight=tf.constant(-3)), WeightError, "-3"),
        (lambda: make(accumulation_steps=2).add([None], weight=3), OptionError, "1 gradients for 4 variables"),
        (lambda: make(accumulation_steps=1).add([None] * 4, weight=3), GradientError, "no variable got a gradient"),
    ],
)
def test_calls_that_lack_an_option(call: Callable[[], Any], error: type[BigBatchError], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_gradients_in_wrong_order_are_refused_before_any_is_added() -> None:
    accumulator = make(accumulation_steps=2)
    before = snapshot(accumulator)
    found = gradients(accumulator.model, make_batch())[1]
    with pytest.raises(GradientError, match=r"gradient 1 has the shape \(7, 3\) but its variable \(7,\)"):
        accumulator.add([found[0], found[2], found[1], found[3]], weight=11)
    assert accumulator.flush() is None
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)


@pytest.mark.compiled
def test_bad_weights_in_an_own_graph_raise_when_it_runs() -> None:
    accumulator = make(accumulation_steps=2)
    before = snapshot(accumulator)
    feed = tf.function(lambda weight: add(accumulator, make_batch(), weight))
    with pytest.raises(tf.errors.InvalidArgumentError, match="negative or not finite"):
        feed(tf.constant(-1.0))
    assert_untouched(accumulator, before)
    assert accumulator.flush() is None
    assert_exact_step(accumulator)


def test_list_of_numbers_with_micro_batch_size_1_is_refused() -> None:
    """It would be broadcast silently."""
    accumulator = make(1)
    before = snapshot(accumulator)
    with pytest.raises(BatchError, match="a list of 11 numbers is passed whole to every micro-batch"):
        accumulator.step((*make_batch(), [0.5] * 11))
    assert_untouched(accumulator, before)


def test_step_in_an_open_window_is_refused() -> None:
    accumulator = make(accumulation_steps=3)
    add(accumulator, make_batch())
    for batch in (make_batch(), Window(parts(make_batch()))):
        with pytest.raises(OrderError, match="a window of 1 micro-batches is open"):
            accumulator.step(batch)
    assert accumulator.flush().weight == 11


def test_changed_variables_in_an_open_window_are_refused() -> None:
    accumulator = make(accumulation_steps=3)
    add(accumulator, make_batch())
    accumulator.model.layers[0].trainable = False
    with pytest.raises(OrderError, match=r"in the middle of a window \(4 then, 2 now\)"):
        add(accumulator, make_batch())
    accumulator.model.layers[0].trainable = True
    assert accumulator.flush().weight == 11


@pytest.mark.parametrize("way", ["batch", "window", "add"])
def test_changed_variables_between_windows_are_accepted(way: str) -> None:
    accumulator = make(4 if way == "batch" else None, accumulation_steps=3)
    model, optimizer = make_model(), keras.optimizers.SGD(0.1)
    for trainable in (True, False, True):
        accumulator.model.layers[0].trainable = model.layers[0].trainable = trainable
        full_batch_step(model, optimizer)
        if way == "batch":
            accumulator.step(make_batch())
        elif way == "window":
            accumulator.step(Window(parts(make_batch())))
        else:
            for part in parts(make_batch()):
                add(accumulator, part)
        assert_same(accumulator.model, model)


def test_add_refuses_a_model_without_variables() -> None:
    accumulator = Accumulator(
        keras.Sequential([keras.layers.Dense(3)]), keras.optimizers.SGD(0.1), accumulation_steps=2
    )
    with pytest.raises(OrderError, match="no variables yet"):
        accumulator.add([], weight=1)


@pytest.mark.compiled
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_model_may_get_its_variables_before_its_first_gradient(in_graph: bool) -> None:
    model = keras.Sequential([keras.layers.Dense(3, kernel_initializer="ones")])
    accumulator = Accumulator(model, keras.optimizers.Adam(0.1), accumulation_steps=3)
    model(make_batch()[0])
    feed = tf.function(lambda x, y: add(accumulator, (x, y), tf.shape(y)[0]), reduce_retracing=True)
    for part in parts(make_batch()):
        feed(*part) if in_graph else add(accumulator, part)
    full = keras.Sequential([keras.layers.Dense(3, kernel_initializer="ones")])
    full(make_batch()[0])
    assert_same(model, full_batch_step(full, keras.optimizers.Adam(0.1)))


@pytest.mark.parametrize(
    ("way", "bad"), [("batch", np.nan), ("batch", np.inf), ("window", np.nan), ("add", np.nan), ("add", np.inf)]
)
def test_nonfinite_gradient_is_not_applied_and_is_reported(
    way: str, bad: float, capfd: pytest.CaptureFixture[str]
) -> None:
    accumulator = make(4 if way == "batch" else None, accumulation_steps=3, clip_norm=1e9, clip_value=1e9)
    before = snapshot(accumulator)
    x, y = make_batch()
    x[6, 2] = bad
    if way == "batch":
        step = accumulator.step((x, y))
    elif way == "window":
        step = accumulator.step(Window(parts((x, y))))
    else:
        for part in parts((x, y)):
            add(accumulator, part)
        step = accumulator.last_step
    assert not step.is_applied
    assert "a step was skipped, because its gradient is not finite" in capfd.readouterr().err
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)


def test_a_gradient_too_large_to_square_is_still_finite() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, dtype="float32")])
    accumulator = Accumulator(model, keras.optimizers.SGD(1e-30), lambda m, b: tf.reduce_mean(m(b) * 1e30), 2)
    step = accumulator.step(np.ones((5, 1), np.float32))
    assert step.is_applied
    assert step.grad_norm == pytest.approx(1e30, rel=1e-6)


def test_batch_norm_warns_once() -> None:
    layers = keras.layers
    model = keras.Sequential([keras.Input((5,)), layers.Dense(7), layers.BatchNormalization(), layers.Dense(3)])
    with pytest.warns(BigBatchWarning, match="1 BatchNormalization layer in training mode") as told:
        accumulator = Accumulator(model, keras.optimizers.SGD(0.1), loss, 4)
        accumulator.step(make_batch())
        accumulator.step(make_batch())
    assert len(told) == 1
    model.layers[1].trainable = False
    Accumulator(model, keras.optimizers.SGD(0.1), loss, 4).step(make_batch())


@pytest.mark.parametrize("kind", ["batch", "window"])
def test_objects_in_the_batch_may_change_between_steps(kind: str) -> None:
    """An object of the user's class has new values, or a new object takes its place."""

    class Options:
        def __init__(self, factor: float) -> None:
            self.factor = factor

    def scaled(model: Any, batch: Any) -> Any:
        return batch[2].factor * loss(model, batch[:2])

    accumulator, model = make(loss=scaled), make_model()
    optimizer, options = keras.optimizers.SGD(0.1), Options(1.0)
    for factor in (1.0, 3.0, 0.5):
        options.factor = factor
        batches = [(*part, options) for part in parts(make_batch())]
        accumulator.step((*make_batch(), options) if kind == "batch" else Window(batches))
        full_batch_step(model, optimizer, (*make_batch(), Options(factor)), scaled)
        assert_same(accumulator.model, model)
    assert not accumulator._graphs.made or kind == "window"


@pytest.mark.parametrize("kind", ["batch", "window"])
def test_another_loss_or_weight_between_steps(kind: str) -> None:
    def doubled(model: Any, batch: Batch) -> Any:
        return 2.0 * loss(model, batch)

    def counted(batch: Batch) -> Any:
        return tf.reduce_sum(tf.cast(batch[1] > 0, tf.float64)) + 1.0

    accumulator, model, optimizer = make(), make_model(), keras.optimizers.SGD(0.1)
    for one in (loss, doubled, loss):
        accumulator.loss = one
        accumulator.step(make_batch() if kind == "batch" else Window(parts(make_batch())))
        full_batch_step(model, optimizer, loss=one)
        assert_same(accumulator.model, model)
    accumulator.weight = counted
    step = accumulator.step(make_batch() if kind == "batch" else Window(parts(make_batch())))
    assert step.weight == sum(float(counted(part)) for part in parts(make_batch()))


@pytest.mark.compiled
def test_freezing_and_unfreezing_frees_sums_and_graphs() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    accumulator, model = make(None, optimizer), make_model()
    optimizer.build(accumulator.model.trainable_variables)
    full, left = keras.optimizers.SGD(0.1), []
    full.build(model.trainable_variables)
    for is_trainable in (True, False) * 3:
        accumulator.model.layers[0].trainable = model.layers[0].trainable = is_trainable
        accumulator.step(Window(parts(make_batch())))
        full_batch_step(model, full)
        assert_same(accumulator.model, model)
        left.append(weakref.ref(accumulator._window.sums))
    gc.collect()
    assert [sums() is not None for sums in left] == [False] * 5 + [True]
    assert (
        len(accumulator._graphs.made) == 2
    )  # the graph that weighs, for each set of variables; the others were freed with their sums
