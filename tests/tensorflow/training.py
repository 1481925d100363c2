"""Trains the shared problems in TensorFlow, with the plain full batch and in all ways to feed bigbatch."""

from collections.abc import Callable
from functools import cache
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bigbatch import Step, Window
from bigbatch.core.window import cuts
from bigbatch.tensorflow import Accumulator
from tests.problems import IGNORED, VOCABULARY, Problem

WAYS = ("batch", "window", "add")
Batch = dict[str, Any]
MakeOptimizer = Callable[[], Any]


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, step: Any) -> Any:
        return self.rate * tf.minimum((tf.cast(step, tf.float64) + 1) / 3, 1.0)

    def get_config(self) -> dict[str, Any]:
        return {"rate": self.rate}


@cache
def mirrored() -> tf.distribute.Strategy:
    """One strategy for the whole process, because the collectives of several conflict (TensorFlow 2.21)."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def sgd() -> Any:
    return keras.optimizers.SGD(0.1)


def adam() -> Any:
    return keras.optimizers.Adam(WarmUp(1e-2), weight_decay=0.1)


def momentum() -> Any:
    return keras.optimizers.SGD(WarmUp(0.1), momentum=0.9, nesterov=True)


class Language(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed = keras.layers.Embedding(VOCABULARY, 12)
        self.mix = keras.layers.Dense(16, "tanh")
        self.head = keras.layers.Dense(VOCABULARY)
        self.length = keras.layers.Dense(1)

    def call(self, ids: Any) -> tuple[Any, Any]:
        seen = tf.cumsum(self.embed(ids), 1)
        position = tf.range(1, tf.shape(ids)[1] + 1)[:, None]
        hidden = self.mix(seen / tf.cast(position, seen.dtype))
        return self.head(hidden), self.length(tf.reduce_mean(hidden, 1))[:, 0]


def make_model(problem: Problem) -> Any:
    keras.utils.set_random_seed(0)
    if problem.kind == "samples":
        layers = keras.layers
        return keras.Sequential([keras.Input((64,)), layers.Dense(24, "tanh"), layers.Dense(10)])
    model = Language()
    model(np.zeros((1, 1), np.int64))
    return model


def make_batches(problem: Problem) -> list[Batch]:
    def typed(array: np.ndarray) -> np.ndarray:
        return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array

    return [{name: typed(array) for name, array in batch.items()} for batch in problem.batches]


def make_loss(problem: Problem) -> Callable[[Any, Batch], Any]:
    def cross_entropy(logits: Any, classes: Any) -> Any:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits)

    def mean_of_tokens(logits: Any, y: Any) -> Any:
        kept = tf.cast(y != IGNORED, logits.dtype)
        return tf.reduce_sum(cross_entropy(logits, tf.maximum(y, 0)) * kept) / tf.reduce_sum(kept)

    def of_samples(model: Any, batch: Batch) -> Any:
        return tf.reduce_mean(cross_entropy(model(batch["x"]), batch["y"]))

    def of_tokens(model: Any, batch: Batch) -> Any:
        return mean_of_tokens(model(batch["x"])[0], batch["y"])

    def of_terms(model: Any, batch: Batch) -> tuple[Any, Any]:
        logits, length = model(batch["x"])
        return mean_of_tokens(logits, batch["y"]), tf.reduce_mean((length - batch["z"]) ** 2)

    return {"samples": of_samples, "tokens": of_tokens, "terms": of_terms}[problem.kind]


def make_weight(problem: Problem) -> Callable[[Batch], Any] | None:
    def num_tokens(batch: Batch) -> Any:
        return tf.math.count_nonzero(tf.convert_to_tensor(batch["y"]) != IGNORED)

    if problem.kind == "samples":
        return None
    if problem.kind == "tokens":
        return num_tokens
    return lambda batch: (num_tokens(batch), tf.shape(batch["y"])[0])


def cut(batch: Batch, size: int) -> list[Batch]:
    return [{name: rows[where] for name, rows in batch.items()} for where in cuts(len(batch["x"]), size)]


class Run:
    """One training run: the variables before and after, and the loss of each step."""

    def __init__(self, problem: Problem, make_optimizer: MakeOptimizer = sgd, epochs: int = 1, **options: Any) -> None:
        self.problem = problem
        self.model = make_model(problem)
        self.before = flat(self.model)
        self.optimizer = make_optimizer()
        self.epochs = epochs
        self.options = {"clip_norm": problem.clip_norm, **options}
        self.loss = make_loss(problem)
        self.losses: list[float] = []
        self.steps: list[Step] = []

    def again(self, problem: Problem, epochs: int) -> "Run":
        """Starts again on another problem of the same kind, with the existing graphs."""
        self.problem, self.epochs = problem, epochs
        for v, value in self._start:
            v.assign(value)
        self.losses, self.steps = [], []
        return self

    def full(self) -> "Run":
        """Trains on the plain full batch, without bigbatch."""
        for batch in make_batches(self.problem) * self.epochs:
            loss, found = self._gradients(batch)
            self._step_plainly(found)
            self.losses.append(float(loss))
        return self

    def naive(self) -> "Run":
        """Trains with the usual loop, which divides by the number of micro-batches."""
        for batch in make_batches(self.problem) * self.epochs:
            all_found = [self._gradients(micro_batch) for micro_batch in cut(batch, self.problem.micro_batch_size)]
            of_each = zip(*(found for loss, found in all_found if np.isfinite(loss)), strict=True)
            num = self.problem.accumulation_steps
            self._step_plainly([None if each[0] is None else tf.add_n(each) / num for each in of_each])
        return self

    def accumulated(self, way: str) -> "Run":
        for batch in make_batches(self.problem) * self.epochs:
            step = getattr(self, f"_by_{way}")(batch)
            assert step.is_applied
            self.steps.append(step)
            self.losses.append(step.loss)
        return self

    def _by_batch(self, batch: Batch) -> Step:
        return self.accumulator(micro_batch_size=self.problem.micro_batch_size).step(batch)

    def _by_window(self, batch: Batch) -> Step:
        return self.accumulator().step(Window(cut(batch, self.problem.micro_batch_size)))

    def _by_add(self, batch: Batch) -> Step:
        accumulator = self.accumulator(accumulation_steps=self.problem.accumulation_steps)
        weigh = make_weight(self.problem) or (lambda micro_batch: len(micro_batch["y"]))
        num_steps = int(accumulator.num_steps.numpy())
        for micro_batch in cut(batch, self.problem.micro_batch_size):
            loss, found = self._gradients(micro_batch, dense=False)
            accumulator.add(found, weight=weigh(micro_batch), loss=loss)
        if int(accumulator.num_steps.numpy()) == num_steps:
            accumulator.flush()
        assert int(accumulator.num_steps.numpy()) == num_steps + 1
        return accumulator.last_step

    def accumulator(self, **how: Any) -> Accumulator:
        if not hasattr(self, "_made"):
            weight = make_weight(self.problem)
            self._made = Accumulator(self.model, self.optimizer, self.loss, weight=weight, **self.options, **how)
            self._start = [(v, v.numpy()) for v in (*self.model.variables, *self.optimizer.variables)]
        return self._made

    def _gradients(self, batch: Batch, dense: bool = True) -> tuple[Any, list[Any]]:
        """Dense gradients, because Keras's optimizers treat repeated rows of sparse ones differently."""
        with tf.GradientTape() as tape:
            loss = self.loss(self.model, batch)
            loss = tf.add_n(loss) if isinstance(loss, tuple) else loss
        found = tape.gradient(loss, self.model.trainable_variables)
        return loss, [None if g is None else tf.convert_to_tensor(g) for g in found] if dense else found

    def _step_plainly(self, found: list[Any]) -> None:
        if self.options["clip_norm"] is not None:
            found, _ = tf.clip_by_global_norm(found, self.options["clip_norm"])
        pairs = zip(found, self.model.trainable_variables, strict=True)
        self.optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])

    @property
    def update(self) -> np.ndarray:
        return flat(self.model) - self.before


def flat(model: Any) -> np.ndarray:
    return np.concatenate([np.ravel(v.numpy()) for v in model.trainable_variables])


def update_error(run: Run, reference: Run) -> float:
    """The relative error of the update against that of the reference."""
    return float(np.linalg.norm(run.update - reference.update) / np.linalg.norm(reference.update))


def assert_same_update(run: Run, reference: Run, tolerance: float) -> None:
    error = update_error(run, reference)
    assert error <= tolerance, f"{run.problem.name}: the update is {error:.1e} off, allowed is {tolerance:.0e}"
