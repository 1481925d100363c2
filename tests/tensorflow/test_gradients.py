"""All kinds of variables: frozen, unused, sparse, tied, low precision."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch import Window
from bigbatch.tensorflow import Accumulator

WAYS = ("batch", "window", "add", "add in a graph")
Batch = tuple[Any, Any]


def data(size: int = 11, dtype: str = "float64") -> Batch:
    generator = np.random.default_rng(1)
    return generator.normal(size=(size, 6)).astype(dtype), generator.normal(size=(size, 4)).astype(dtype)


def mse(model: Any, batch: Batch) -> Any:
    out = model(batch[0])
    return tf.reduce_mean((out - tf.cast(batch[1], out.dtype)) ** 2)


def taken(model: Any, loss: Any, batch: Batch) -> tuple[Any, list[Any]]:
    with tf.GradientTape() as tape:
        value = loss(model, batch)
    return value, tape.gradient(value, model.trainable_variables)


def parts(batch: Batch, size: int = 3) -> list[Batch]:
    return [tuple(leaf[k : k + size] for leaf in batch) for k in range(0, len(batch[0]), size)]


def train(model: Any, optimizer: Any, loss: Any, batch: Batch, way: str, **options: Any) -> Any:
    """Three steps with the plain full batch, or in micro-batches of 3, fed in one of the ways."""
    accumulator = Accumulator(model, optimizer, loss, 3 if way == "batch" else None, accumulation_steps=100, **options)

    def add(part: Batch) -> None:
        value, found = taken(model, loss, part)
        accumulator.add(found, weight=tf.shape(part[0])[0], loss=value)

    signature = [tuple(tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in batch)]
    in_graph = tf.function(add, input_signature=signature)
    for _ in range(3):
        if way == "full":
            found = [None if g is None else tf.convert_to_tensor(g) for g in taken(model, loss, batch)[1]]
            pairs = zip(found, model.trainable_variables, strict=True)
            optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])
        elif way == "batch":
            assert accumulator.step(batch).is_applied
        elif way == "window":
            assert accumulator.step(Window(parts(batch))).is_applied
        else:
            for part in parts(batch):
                (in_graph if way == "add in a graph" else add)(part)
            assert accumulator.flush().is_applied
    return model


def assert_same(ours: Any, full: Any, tolerance: float = 1e-12) -> None:
    for a, b in zip(ours.variables, full.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=0, atol=tolerance * np.abs(b.numpy()).max())


def adamw() -> Any:
    return keras.optimizers.AdamW(0.05, weight_decay=0.3)


def momentum() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.1)


class Branches(keras.Model):
    """One layer is frozen, one is never used, and one is used only on request."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)
        self.used = keras.layers.Dense(4)
        self.frozen = keras.layers.Dense(4)
        self.unused = keras.layers.Dense(4)
        self.sometimes = keras.layers.Dense(4)
        for layer, width in ((self.used, 6), (self.frozen, 4), (self.unused, 6), (self.sometimes, 6)):
            layer.build((None, width))
        self.frozen.trainable = False
        self.built = True

    def call(self, x: Any, asks: bool = False) -> Any:
        out = self.frozen(self.used(x))
        return out + self.sometimes(x) if asks else out


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make_optimizer", [adamw, momentum])
@pytest.mark.usefixtures("float64")
def test_variables_without_gradient_match_the_full_batch(way: str, make_optimizer: Any) -> None:
    full, ours = (train(Branches(), make_optimizer(), mse, data(), w) for w in ("full", way))
    assert_same(ours, full)
    start = Branches()
    for layer in ("unused", "frozen", "sometimes"):
        for now, then in zip(getattr(ours, layer).variables, getattr(start, layer).variables, strict=True):
            np.testing.assert_array_equal(now.numpy(), then.numpy())
    assert not np.array_equal(ours.used.kernel.numpy(), start.used.kernel.numpy())


def asking(model: Branches, batch: Batch) -> Any:
    return tf.reduce_mean((model(batch[0], asks=True) - batch[1]) ** 2)


@pytest.mark.usefixtures("float64")
def test_variable_with_a_gradient_in_some_micro_batches_and_windows() -> None:
    """One of three micro-batches uses the layer in the first window, none in the second, and all in the third."""
    ours, full = Branches(), Branches()
    optimizer = adamw()
    accumulator = Accumulator(ours, adamw(), accumulation_steps=3)
    batch = data(9)
    for asks in ((False, True, False), (False, False, False), (True, True, True)):
        for part, does in zip(parts(batch), asks, strict=True):
            accumulator.add(taken(ours, asking if does else mse, part)[1], weight=3)
        with tf.GradientTape() as tape:
            losses = [(asking if does else mse)(full, part) for part, does in zip(parts(batch), asks, strict=True)]
            value = tf.add_n(losses) / 3
        before = full.sometimes.kernel.numpy()
        found = tape.gradient(value, full.trainable_variables)
        pairs = zip(found, full.trainable_variables, strict=True)
        optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])
        assert np.array_equal(full.sometimes.kernel.numpy(), before) == (not any(asks))
        assert_same(ours, full)


@pytest.mark.usefixtures("float64")
def test_windows_of_micro_batches_of_different_kinds() -> None:
    """A layer that is first used in the second window gets its gradient too."""

    def loss(model: Branches, batch: dict[str, Any]) -> Any:
        out = model(batch["x"], asks="z" in batch)
        return tf.reduce_mean((out - batch["y"]) ** 2)

    ours, full, optimizer = Branches(), Branches(), adamw()
    optimizer.build(full.trainable_variables)
    accumulator = Accumulator(ours, adamw(), loss)
    x, y = data(6)
    plain, with_z = {"x": x[:3], "y": y[:3]}, {"x": x[3:], "y": y[3:], "z": y[3:]}
    for window in ([plain, plain], [with_z, plain], [plain, plain], [plain, with_z]):
        accumulator.step(Window(window))
        with tf.GradientTape() as tape:
            value = tf.add_n([loss(full, micro_batch) for micro_batch in window]) / 2
        found = tape.gradient(value, full.trainable_variables)
        pairs = zip(found, full.trainable_variables, strict=True)
        optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])
        assert_same(ours, full)


@pytest.mark.usefixtures("float64")
def test_graph_that_would_lose_a_gradient_is_refused_and_changes_nothing() -> None:
    model = Branches()
    accumulator = Accumulator(model, momentum(), accumulation_steps=2)
    x, y = data(3)

    @tf.function
    def add(asks: bool) -> None:
        accumulator.add(taken(model, asking if asks else mse, (x, y))[1], weight=3)

    add(False)
    add(False)
    add(True)
    before = [v.numpy() for v in model.variables]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"variables that got a gradient are not.*in eager code"):
        add(False)
    for now, then in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(now.numpy(), then)


# --- sparse ----------------------------------------------------------------------------------------------------


def tokens(rows: int) -> Batch:
    """Texts of few different words, so that words repeat within and between micro-batches."""
    generator = np.random.default_rng(2)
    return generator.integers(0, 6, (11, 5)) * (rows // 6), generator.normal(size=(11, 4))


def embedding(rows: int, tied: bool = False) -> Any:
    keras.utils.set_random_seed(0)

    class Words(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed = keras.layers.Embedding(rows, 4)
            self.embed.build()
            self.built = True

        def call(self, ids: Any) -> Any:
            out = tf.reduce_sum(self.embed(ids), 1)
            return out @ tf.cast(self.embed.embeddings[:4], out.dtype) if tied else out

    return Words()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [9, 12_000])
@pytest.mark.usefixtures("float64")
def test_embeddings_equal_a_dense_full_batch(way: str, rows: int) -> None:
    full, ours = (train(embedding(rows), keras.optimizers.Adam(0.05), mse, tokens(rows), w) for w in ("full", way))
    used = np.unique(tokens(rows)[0])
    np.testing.assert_allclose(ours.embed.embeddings.numpy()[used], full.embed.embeddings.numpy()[used], 1e-12, 1e-12)
    unused = np.setdiff1d(np.arange(rows), used)
    start = embedding(rows).embed.embeddings.numpy()
    np.testing.assert_array_equal(ours.embed.embeddings.numpy()[unused], start[unused])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", [9, 12_000])
@pytest.mark.usefixtures("float64")
def test_micro_batch_with_weight_zero(rows: int, compiled: bool) -> None:
    """The second of four micro-batches has no words that count, so its mean would be 0/0."""
    ids, _ = tokens(rows)
    mask = np.ones(len(ids))
    mask[3:6] = 0
    mask[7] = 0

    def masked(model: Any, batch: Any) -> Any:
        words, counts = batch
        return tf.reduce_sum(tf.reduce_sum(model(words) ** 2, 1) * counts) / tf.reduce_sum(counts)

    full, ours = embedding(rows), embedding(rows)
    with tf.GradientTape() as tape:
        value = masked(full, (ids, mask))
    (found,) = tape.gradient(value, full.trainable_variables)
    keras.optimizers.SGD(0.05).apply([tf.convert_to_tensor(found)], full.trainable_variables)
    weight = lambda batch: tf.reduce_sum(batch[1])  # noqa: E731
    accumulator = Accumulator(ours, keras.optimizers.SGD(0.05), masked, 3, weight=weight, jit_compile=compiled)
    step = accumulator.step((ids, mask))
    assert step.loss == pytest.approx(float(value), rel=1e-12)
    assert_same(ours, full)


@pytest.mark.parametrize("kind", ["Adam", "momentum", "clipnorm", "scaled"])
@pytest.mark.usefixtures("float64")
def test_sparse_rows_that_only_some_steps_use(kind: str) -> None:
    """Rows that momentum moves on although they get no gradient any more."""
    optimizers = keras.optimizers

    def make_optimizer() -> Any:
        return {
            "Adam": lambda: optimizers.Adam(0.05),
            "momentum": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
            "clipnorm": lambda: optimizers.SGD(0.05, clipnorm=0.1),
            "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.05)),
        }[kind]()

    full, optimizer = embedding(12_000), make_optimizer()
    optimizer.build(full.trainable_variables)
    ours = embedding(12_000)
    accumulator = Accumulator(ours, make_optimizer(), mse, 3)
    ids, target = tokens(12_000)
    for step in range(4):
        batch = (ids + step // 2, target)
        with tf.GradientTape() as tape:
            value = optimizer.scale_loss(mse(full, batch))
        (found,) = tape.gradient(value, full.trainable_variables)
        optimizer.apply_gradients([(tf.convert_to_tensor(found), full.trainable_variables[0])])
        assert accumulator.step(batch).is_applied
    assert_same(ours, full)


@pytest.mark.parametrize("rows", [9, 12_000])
@pytest.mark.usefixtures("float64")
def test_clipping_measures_summed_rows(rows: int) -> None:
    """Entries of the same row are summed before the norm is taken, as in the dense gradient."""
    found = tf.convert_to_tensor(taken(embedding(rows), mse, tokens(rows))[1][0])
    model = embedding(rows)
    before = model.embed.embeddings.numpy()
    step = Accumulator(model, keras.optimizers.SGD(1.0), mse, 3, clip_norm=0.1).step(tokens(rows))
    assert step.grad_norm == pytest.approx(np.linalg.norm(found), rel=1e-12)
    assert np.linalg.norm(model.embed.embeddings.numpy() - before) == pytest.approx(0.1, rel=1e-12)


class Watching(keras.optimizers.SGD):
    """Keeps what it is given."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.seen = list(grads)
        super().apply(grads, trainable_variables)


@pytest.mark.usefixtures("float64")
def test_large_tables_stay_sparse_and_small_ones_do_not() -> None:
    for rows, kind in ((9, tf.Tensor), (10_000, tf.Tensor), (12_000, tf.IndexedSlices)):
        optimizer = Watching(0.1)
        Accumulator(embedding(rows), optimizer, mse, 3).step(tokens(rows))
        (found,) = optimizer.seen
        assert isinstance(found, kind)


@pytest.mark.parametrize("rows", [9, 12_000])
@pytest.mark.usefixtures("float64")
def test_tied_tables(rows: int) -> None:
    full, ours = (
        train(embedding(rows, tied=True), keras.optimizers.Adam(0.05), mse, tokens(rows), w) for w in ("full", "batch")
    )
    used = np.unique([*tokens(rows)[0].ravel(), 0, 1, 2, 3])
    np.testing.assert_allclose(ours.embed.embeddings.numpy()[used], full.embed.embeddings.numpy()[used], 1e-12, 1e-12)


@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "xla"])
def test_large_table_and_a_batch_with_weight_zero(jit_compile: bool) -> None:
    model, counts = embedding(12_000), tf.Variable(0.0)
    options: dict[str, Any] = {"weight": lambda _: counts.read_value(), "jit_compile": jit_compile}
    accumulator = Accumulator(model, keras.optimizers.SGD(0.1), mse, 2, **options)
    before = model.get_weights()
    assert not accumulator.step(tokens(12_000)).is_applied
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    counts.assign(1.0)
    assert accumulator.step(tokens(12_000)).is_applied


@pytest.mark.pairwise
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rows", [9, 12_000])
@pytest.mark.parametrize("way", ["batch", "window"])
@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "xla"])
@pytest.mark.parametrize("counts_nothing", [slice(3, 6), slice(0, None)], ids=["in a micro-batch", "in all of them"])
def test_term_with_weight_zero_is_left_out(rows: int, way: str, jit_compile: bool, counts_nothing: slice) -> None:
    """The mean of that term and its gradient are 0/0."""
    ids, y = tokens(rows)
    mask = np.ones(len(ids))
    mask[counts_nothing] = 0.0

    def count(batch: Any) -> Any:
        return tf.reduce_sum(batch[2]), tf.shape(batch[0])[0]

    def terms(model: Any, batch: Any) -> Any:
        out = model(batch[0])
        errors = tf.reduce_mean(tf.reshape((out - batch[1]) ** 2, [tf.shape(out)[0], -1]), 1)
        return tf.reduce_sum(errors * batch[2]) / tf.reduce_sum(batch[2]), tf.reduce_mean(out**4)

    def together(model: Any, batch: Any) -> Any:
        first, second = terms(model, batch)
        return first + second if mask.any() else second

    full = train(embedding(rows), keras.optimizers.SGD(0.1), together, (ids, y, mask), "full")
    ours = embedding(rows)
    options: dict[str, Any] = {"weight": count, "jit_compile": jit_compile}
    assert_same(train(ours, keras.optimizers.SGD(0.1), terms, (ids, y, mask), way, **options), full)


@pytest.mark.usefixtures("float64")
def test_sparse_and_compiled_by_xla() -> None:
    full = train(embedding(9), keras.optimizers.Adam(0.05), mse, tokens(9), "full")
    assert_same(train(embedding(9), keras.optimizers.Adam(0.05), mse, tokens(9), "batch", jit_compile=True), full)


# --- low precision ---------------------------------------------------------------------------------------------


def low(dtype: str) -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,), dtype=dtype), layers.Dense(32, "tanh", dtype=dtype), layers.Dense(4, dtype=dtype)]
    )


def accumulation_errors(dtype: str, size: int, micro: int, way: str) -> dict[str, float]:
    """The error of the gradient that reaches the optimizer against float32 sums: ours, and plain sums."""
    model = low(dtype)
    batch = data(size, "float32")
    batch = tuple(tf.cast(leaf, dtype) for leaf in batch)
    in_graph = tf.function(lambda part: taken(model, mse, part)[1], reduce_retracing=True)
    found = [in_graph(part) for part in parts(batch, micro)]
    weights = np.array([len(part[0]) for part in parts(batch, micro)], np.float32) / size

    def flat(each: Any) -> np.ndarray:
        return np.concatenate([np.ravel(tf.cast(g, tf.float32)) for g in each])

    exact = sum(flat(each) * w for each, w in zip(found, weights, strict=True))
    plain = [tf.zeros_like(v) for v in model.trainable_variables]
    for each, w in zip(found, weights, strict=True):
        plain = [total + g * tf.cast(w, dtype) for total, g in zip(plain, each, strict=True)]

    before = flat(model.trainable_variables)
    accumulator = Accumulator(model, Wide(1.0), mse, micro if way == "batch" else None, accumulation_steps=1000)
    if way == "batch":
        accumulator.step(batch)
    else:
        for part, each in zip(parts(batch, micro), found, strict=True):
            accumulator.add(each, weight=len(part[0]))
        accumulator.flush()
    np.testing.assert_array_equal(flat(model.trainable_variables), before)
    ours = flat(g.numpy() for g in accumulator.optimizer.found)
    return {
        "ours": float(np.linalg.norm(ours - exact) / np.linalg.norm(exact)),
        "plain": float(np.linalg.norm(flat(plain) - exact) / np.linalg.norm(exact)),
    }


class Wide(keras.optimizers.SGD):
    """Keeps the gradients that it is given in float32, and moves nothing."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.found = [tf.Variable(tf.zeros(v.shape)) for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.found[self._get_variable_index(variable)].assign(tf.cast(gradient, tf.float32))


@pytest.mark.pairwise
@pytest.mark.parametrize("way", ["batch", "add"])
@pytest.mark.parametrize(("size", "micro"), [(256, 4), (1003, 16)], ids=["equal", "uneven"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_summed_in_float32(dtype: str, size: int, micro: int, way: str) -> None:
    errors = accumulation_errors(dtype, size, micro, way)
    assert errors["ours"] * 20 <= errors["plain"], errors


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "is_same"), [("SGD", True), ("momentum", True), ("Adam", False)], ids=["SGD", "momentum", "Adam"]
)
def test_keras_on_repeated_rows_as_documented(name: str, is_same: bool) -> None:
    """What a plain loop with a sparse gradient gives, against a dense one; bigbatch gives the dense one's."""
    optimizers: dict[str, Any] = {
        "SGD": lambda: keras.optimizers.SGD(0.1),
        "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "Adam": lambda: keras.optimizers.Adam(0.1),
    }
    ids, wanted = np.array([1, 1, 1, 3, 3, 4]), np.arange(18.0).reshape(6, 3)

    def squares(model: Any, batch: Any) -> Any:
        return tf.reduce_mean((model(batch[0]) - batch[1]) ** 2)

    def after(kind: str) -> np.ndarray:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((), dtype="int64"), keras.layers.Embedding(6, 3)])
        optimizer = optimizers[name]()
        accumulator = Accumulator(model, optimizer, squares, 4)
        for _ in range(3):
            if kind == "ours":
                accumulator.step((ids, wanted))
                continue
            with tf.GradientTape() as tape:
                value = squares(model, (ids, wanted))
            (found,) = tape.gradient(value, model.trainable_variables)
            assert isinstance(found, tf.IndexedSlices)
            optimizer.apply_gradients(
                [(found if kind == "sparse" else tf.convert_to_tensor(found), *model.trainable_variables)]
            )
        return np.asarray(model.get_weights()[0])

    dense = after("dense")
    np.testing.assert_allclose(after("ours"), dense, rtol=1e-12)
    assert np.allclose(after("sparse"), dense, rtol=1e-9) == is_same


class InPython(tf.Module):
    """A layer whose gradient has no shape that TensorFlow knows."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(np.linspace(-1, 1, 12).reshape(4, 3))
        self.last = tf.Variable(np.ones((3, 1)))

    def __call__(self, x: Any) -> Any:
        hidden = tf.py_function(lambda x, kernel: tf.tanh(x @ kernel), [x, self.kernel], tf.float64)
        return tf.ensure_shape(hidden, (None, 3)) @ self.last


@pytest.mark.parametrize("num_terms", [1, 2])
def test_gradients_of_a_python_function(num_terms: int) -> None:
    x, y = (np.random.default_rng(0).normal(size=(13, n)) for n in (4, 1))

    def loss(model: Any, batch: Any) -> Any:
        value = tf.reduce_mean((model(batch[0]) - batch[1]) ** 2)
        return value if num_terms == 1 else (value, value)

    def weight(batch: Any) -> Any:
        return (len(batch[1]),) * num_terms

    ours, full = InPython(), InPython()
    accumulator = Accumulator(ours, keras.optimizers.SGD(0.125), loss, 4, weight=weight)
    accumulator.step((x, y))
    with tf.GradientTape() as tape:
        value = num_terms * tf.reduce_mean((full(x) - y) ** 2)
    for v, g in zip(full.trainable_variables, tape.gradient(value, full.trainable_variables), strict=True):
        v.assign_sub(0.125 * g)
    for ours_v, v in zip(ours.trainable_variables, full.trainable_variables, strict=True):
        np.testing.assert_allclose(ours_v, v, rtol=1e-12)
