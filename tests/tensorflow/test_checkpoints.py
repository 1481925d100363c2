"""A loop that is stopped anywhere and resumed ends with the same result as one that was not stopped."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from bigbatch import BigBatchWarning, History, OrderError, StateError
from bigbatch.tensorflow import Accumulator, Checkpoints

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 41, 12, 3
TOTAL = -(-NUM_SAMPLES // BATCH_SIZE) * EPOCHS
X, Y = load_digits(return_X_y=True)


def loss(model: Any, batch: Any) -> Any:
    x, y = batch
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True))


class Batches:
    """Batches drawn from NumPy's and Python's global generators."""

    def __iter__(self) -> Any:
        order = np.random.permutation(NUM_SAMPLES)
        for start in range(0, NUM_SAMPLES, BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            yield (X[rows] / 16 + 0.1 * random.random()).astype(np.float32), Y[rows]


class Loop:
    def __init__(self, folder: Path, kind: str = "", width: int = 16) -> None:
        keras.utils.set_random_seed(0)
        self.kind = kind
        dense, inputs = keras.layers.Dense, [] if kind == "built late" else [keras.Input((64,))]
        self.model = keras.Sequential([*inputs, dense(width, "relu"), keras.layers.Dropout(0.3), dense(10)])
        rate = keras.optimizers.schedules.CosineDecay(0.01, TOTAL)
        self.optimizer: Any = keras.optimizers.Adam(rate)
        if kind == "scaled":
            self.optimizer = keras.optimizers.LossScaleOptimizer(self.optimizer)
        if kind == "added":
            self.accumulator = Accumulator(self.model, self.optimizer, accumulation_steps=3)
        else:
            self.accumulator = Accumulator(self.model, self.optimizer, loss, micro_batch_size=5, clip_norm=1.0)
        self.data: Any = Batches()
        if kind == "dataset":
            whole = tf.data.Dataset.from_tensor_slices((X[:NUM_SAMPLES].astype(np.float32) / 16, Y[:NUM_SAMPLES]))
            self.data = whole.shuffle(NUM_SAMPLES, seed=3).batch(BATCH_SIZE)
        self.history = History()
        self.checkpoints = Checkpoints(folder, self.accumulator, every=1, history=self.history)

    def run(self, stop: int | None = None) -> "Loop":
        for batch in self.checkpoints.batches(self.data, EPOCHS):
            self.checkpoints.wait()  # like a fast disk, so that every batch has a checkpoint
            if self.checkpoints.num_batches == stop:
                break
            if self.kind == "added":
                with tf.GradientTape() as tape:
                    value = loss(self.model, batch)
                gradients = tape.gradient(value, self.model.trainable_variables)
                self.accumulator.add(gradients, weight=len(batch[1]), loss=value)
            else:
                self.history.append(self.accumulator.step(batch))
        self.checkpoints.close()
        return self

    def ends_as(self, other: "Loop") -> bool:
        own, theirs = ([*loop.model.variables, *loop.optimizer.variables] for loop in (self, other))
        is_same = all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(own, theirs, strict=True))
        return is_same and self.history.to_lines() == other.history.to_lines()


@pytest.mark.parametrize("stops", [(5,), pytest.param(range(1, TOTAL + 1), marks=pytest.mark.slow)], ids=["5", "all"])
@pytest.mark.parametrize("kind", ["", "scaled", "added", "dataset"])
def test_stopped_anywhere(kind: str, stops: Sequence[int], tmp_path: Path) -> None:
    """The loop may stop in the middle of a window of add(); a dataset may shuffle again in every epoch."""
    whole = Loop(tmp_path / "whole", kind).run()
    for stop in stops:
        Loop(tmp_path / f"{stop}", kind).run(stop)
        assert Loop(tmp_path / f"{stop}", kind).run().ends_as(whole), f"stopped after {stop} batches"


@pytest.mark.parametrize("is_done", [False, True])
def test_saved_by_hand_before_and_after_a_step(is_done: bool, tmp_path: Path) -> None:
    """No batch is repeated or left out, whether the current batch is done or not."""
    whole = Loop(tmp_path / "whole").run()
    for stop in (0, 5):
        loop = Loop(tmp_path / f"{stop}")
        for batch in loop.checkpoints.batches(loop.data, EPOCHS):
            if loop.checkpoints.num_batches < stop or is_done:
                loop.history.append(loop.accumulator.step(batch))
            if loop.checkpoints.num_batches == stop:
                loop.checkpoints.save(wait=True)
                break
        loop.checkpoints.close()
        assert Loop(tmp_path / f"{stop}").run().ends_as(whole), f"stopped at batch {stop}"


def test_result_differs_without_the_random_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Loop(tmp_path / "whole").run()
    Loop(tmp_path / "other").run(5)
    monkeypatch.setattr(Checkpoints, "_set_random", lambda *_: None)
    assert not Loop(tmp_path / "other").run().ends_as(whole)


def test_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    Loop(tmp_path).run(2)
    loop = Loop(tmp_path, width=8)
    before = [v.numpy().copy() for v in loop.model.variables]
    with pytest.raises(StateError, match=r"float32\[64, 16\] in the checkpoint but float32\[64, 8\] here|\[16"):
        loop.checkpoints.restore()
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, loop.model.variables, strict=True))


def layers(*names: str) -> Any:
    dense = [keras.layers.Dense(64, name=name) for name in names]
    return keras.Sequential([keras.Input((64,)), *dense, keras.layers.Dropout(0.1)])


class Text(tf.train.experimental.PythonState):  # type: ignore[misc]
    def __init__(self, text: str) -> None:
        self.text = text

    def serialize(self) -> str:
        return self.text

    def deserialize(self, value: Any) -> None:
        if value == b"refused":
            raise ValueError("this text is not for me")
        self.text = value.decode()


adam, sgd = keras.optimizers.Adam, keras.optimizers.SGD
cosine, exponential = keras.optimizers.schedules.CosineDecay, keras.optimizers.schedules.ExponentialDecay
scaled = keras.optimizers.LossScaleOptimizer
generator = tf.random.Generator.from_seed
OTHERS: dict[str, tuple[Any, Any, str]] = {
    "optimizer": (
        lambda: {"optimizer": adam()},
        lambda: {"optimizer": keras.optimizers.Nadam()},
        "the optimizer of the checkpoint is Adam, that of this run is Nadam",
    ),
    "schedule": (
        lambda: {"optimizer": adam(cosine(0.1, 9))},
        lambda: {"optimizer": adam(exponential(0.1, 9, 0.5))},
        "is Adam with the schedule CosineDecay, that of this run is Adam with the schedule ExponentialDecay",
    ),
    "no schedule": (
        lambda: {"optimizer": adam(cosine(0.1, 9))},
        lambda: {"optimizer": adam(0.1)},
        "is Adam with the schedule CosineDecay, that of this run is Adam:",
    ),
    "loss scale": (
        lambda: {"optimizer": scaled(adam(cosine(0.1, 9)))},
        lambda: {"optimizer": scaled(sgd(cosine(0.1, 9)))},
        "is LossScaleOptimizer with Adam with the schedule CosineDecay, that of this run is LossScaleOptimizer",
    ),
    "slots only here": (
        lambda: {"optimizer": sgd(0.1)},
        lambda: {"optimizer": sgd(0.1, momentum=0.9)},
        "only this run has optimizer/_variables/2",
    ),
    "slots only there": (
        lambda: {"optimizer": sgd(0.1, momentum=0.9)},
        lambda: {"optimizer": sgd(0.1)},
        "only the checkpoint has optimizer/_variables/2",
    ),
    "order": (
        lambda: {"model": layers("one", "two")},
        lambda: {"model": layers("two", "one")},
        "the model has sequential/two/kernel where it had sequential/one/kernel when the checkpoint was saved",
    ),
    "seeds": (
        dict,
        lambda: {"model": keras.Sequential(layers("one").layers[:1])},
        "the checkpoint has the seeds of 1 random layers but the model 0",
    ),
    "more there": (
        lambda: {"mine": generator(1)},
        dict,
        "the mine of the checkpoint is Generator, that of this run is missing",
    ),
    "more here": (
        dict,
        lambda: {"mine": generator(1)},
        "the mine of the checkpoint is missing, that of this run is Generator",
    ),
    "other kind of more": (
        lambda: {"mine": generator(1)},
        lambda: {"mine": tf.Variable(1)},
        "the mine of the checkpoint is Generator, that of this run is ResourceVariable",
    ),
    "other shape of more": (
        lambda: {"mine": tf.Variable([1])},
        lambda: {"mine": tf.Variable([1, 2])},
        r"mine/.ATTRIBUTES/VARIABLE_VALUE is int32[1] in the checkpoint but int32[2] here",
    ),
    "one that refuses": (
        lambda: {"a": Text("new"), "b": Text("refused"), "c": Text("new")},
        lambda: {"a": Text("own"), "b": Text("own"), "c": Text("own")},
        "this text is not for me",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_kind_changes_nothing(kind: str, tmp_path: Path) -> None:
    """What does not fit is named, as it was and as it is now; model, optimizer and others stay as they were."""
    save, load, told = OTHERS[kind]

    def made(model: Any = None, optimizer: Any = None, **more: Any) -> tuple[Accumulator, Checkpoints, dict[str, Any]]:
        accumulator = Accumulator(model or layers("one", "two"), optimizer or adam(), loss, 6)
        return accumulator, Checkpoints(tmp_path, accumulator, **more), more

    with made(**save())[1] as checkpoints:
        checkpoints.save(wait=True)
    accumulator, now, more = made(**load())
    variables = [*accumulator.model.variables, *accumulator.optimizer.variables]
    for number, variable in enumerate(variables):
        variable.assign(tf.cast(tf.fill(variable.shape, number + 1), variable.dtype))
    before = [v.numpy().copy() for v in variables]
    with now, pytest.raises(StateError, match=re.escape(told)):
        now.restore()
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, variables, strict=True))
    assert {part.text for part in more.values() if isinstance(part, Text)} <= {"own"}


def test_random_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path).run(2)
    found = loop.checkpoints._store.load()
    assert found is not None
    state = {**found.state, "random": {**found.state["random"], "numpy": "none"}}
    loop.checkpoints._store.save(3, state, found.files, wait=True)
    loop.checkpoints.close()
    other = Loop(tmp_path)
    before, drawn = [v.numpy().copy() for v in other.model.variables], random.getstate()
    with other.checkpoints, pytest.raises(StateError, match="is not a checkpoint of this kind of run"):
        other.checkpoints.restore()
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, other.model.variables, strict=True))
    assert random.getstate() == drawn


def test_more_is_restored(tmp_path: Path) -> None:
    accumulator = Accumulator(layers("one", "two"), adam(), loss, 6)
    drawn, text = generator(1), Text("before")
    drawn.normal([3])
    with Checkpoints(tmp_path, accumulator, drawn=drawn, text=text) as checkpoints:
        checkpoints.save(wait=True)
    other, own = generator(2), Text("own")
    with Checkpoints(tmp_path, accumulator, drawn=other, text=own) as checkpoints:
        assert checkpoints.restore()
    assert other.normal([3]).numpy().tolist() == drawn.normal([3]).numpy().tolist()
    assert own.text == "before"


def test_damaged_checkpoint_is_named_and_the_previous_one_used(tmp_path: Path) -> None:
    whole = Loop(tmp_path / "whole").run()
    Loop(tmp_path / "broken").run(6)
    newest = max((tmp_path / "broken").glob("[0-9]*")) / "tensorflow.index"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(BigBatchWarning, match=r"000006 is damaged \(tensorflow.index has \d+ bytes, \d+ were written\)"):
        assert Loop(tmp_path / "broken").run().ends_as(whole)


def test_a_model_that_is_built_late(tmp_path: Path) -> None:
    Loop(tmp_path, "built late").run(2)
    with pytest.raises(OrderError, match="give its layers an Input"):
        Loop(tmp_path, "built late").checkpoints.restore()


def test_full_temporary_disk_does_not_end_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path)

    def full(self: Any, path: str) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    monkeypatch.setattr(tf.train.Checkpoint, "write", full)
    with (
        pytest.warns(BigBatchWarning, match="could not be written .*No space left on device"),
        pytest.raises(OSError, match="No space left on device"),  # of the last checkpoint, which is waited for
    ):
        loop.run()
    assert len(loop.history) == TOTAL
