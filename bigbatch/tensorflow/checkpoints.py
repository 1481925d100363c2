"""Checkpoints of a training loop, from which it resumes as if it had never stopped."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from ..core.checkpoint.kinds import check_kinds, check_order, kind_of, order_of
from ..core.checkpoint.loop import Resumable
from ..core.errors import OrderError, StateError
from ..core.history import History
from ..core.window import stream_of
from .accumulator import Accumulator

_PREFIX = "tensorflow"


class Checkpoints(Resumable):
    """Saves everything that a training loop needs to resume, and restores it.

        checkpoints = Checkpoints("checkpoints", accumulator, every="10min", history=history)
        for batch in checkpoints.batches(dataset, epochs=10):
            history.append(accumulator.step(batch))

    If the process is killed, start it again with the same lines: it ends with the same variables, bit for bit on a CPU.
    A checkpoint has the model, the optimizer, the loss scale and the sums of a window that is open, as
    tf.train.Checkpoint writes them. It also has the seeds of the model's random layers, the random numbers of Python
    and NumPy, the place in the data and the history. Reading a checkpoint runs no code.

    Args:
        folder: Where to save the checkpoints.
        accumulator: Its model, optimizer and window are saved.
        every: How often to save: a number of batches, a time such as "10min", or None for never.
        keep: How many checkpoints to keep.
        history: Is saved too, and filled when a checkpoint is restored.
        **more: Other objects that tf.train.Checkpoint can save, by name, such as a tf.random.Generator.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        accumulator: Accumulator,
        *,
        every: int | str | None = "10min",
        keep: int = 2,
        history: History | None = None,
        **more: Any,
    ) -> None:
        self._accumulator, self._model = accumulator, accumulator._trained_model
        self._checkpoint = tf.train.Checkpoint(
            model=self._model, optimizer=accumulator._optimizer.saved, accumulator=accumulator, **more
        )
        self._kinds = {"optimizer": ", ".join(map(kind_of, accumulator._optimizer.optimizers))}
        self._kinds |= {name: type(part).__qualname__ for name, part in more.items()}
        self._num_behind = 0
        super().__init__(folder, every=every, keep=keep, history=history)

    def restore(self) -> bool:
        """Restores the newest undamaged checkpoint; returns False if there is none. `batches` calls this.

        A warning names each damaged checkpoint that it skips. If a checkpoint does not fit, nothing changes.
        """
        return self._restore()

    def _restore(self) -> bool:
        has_found = super()._restore()
        self._num_behind = self.epoch
        return has_found

    def _state(self) -> tuple[Any, Mapping[str, bytes]]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._checkpoint.write(f"{folder}/{_PREFIX}")
            except tf.errors.OpError as error:  # the disk of temporary files is full, say
                text = f"TensorFlow could not write to {tempfile.gettempdir()}: {str(error.message).splitlines()[0]}"
                raise OSError(text) from error
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        seeds = [v.numpy() for v in _seeds_of(self._model)]
        return {"seeds": seeds, "kinds": self._kinds, "order": order_of(self._model.trainable_variables)}, files

    def _load(self, state: Any, files: Mapping[str, bytes]) -> None:
        seeds = _seeds_of(self._model)
        check_kinds(state["kinds"], self._kinds)
        check_order(state["order"], order_of(self._model.trainable_variables))
        if [(seed.shape, seed.dtype.name) for seed in state["seeds"]] != [
            (tuple(seed.shape), tf.as_dtype(seed.dtype).name) for seed in seeds
        ]:
            raise StateError(
                f"the checkpoint has the seeds of {len(state['seeds'])} random layers but the model {len(seeds)}, or "
                "seeds of another kind: resume with the model that it was saved with"
            )
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                if name.startswith(f"{_PREFIX}."):
                    (Path(folder) / name).write_bytes(content)
            path = f"{folder}/{_PREFIX}"
            self._check(path, f"{folder}/now")
            try:
                self._checkpoint.read(path).expect_partial()
            except BaseException:  # by one of `more`
                self._checkpoint.read(f"{folder}/now").expect_partial()
                raise
        for seed, value in zip(seeds, state["seeds"], strict=True):
            seed.assign(value)

    def _check(self, path: str, now: str) -> None:
        """Raises StateError if the checkpoint does not fit, before a variable is changed."""
        if not getattr(self._model, "weights", self._model.variables):
            raise OrderError("the model has no variables before its first batch: give its layers an Input to resume")
        self._checkpoint.write(now)
        found, wanted = (_described(tf.train.load_checkpoint(prefix)) for prefix in (path, now))
        for name, (dtype, shape) in wanted.items():
            if dtype != tf.variant and name in found and found[name] != (dtype, shape):
                raise StateError(
                    f"{name} is {found[name][0].name}{found[name][1]} in the checkpoint but {dtype.name}{shape} here: "
                    "resume with the model and the optimizer that it was saved with"
                )
        is_late = not any(map(_is_slot, wanted))  # TF1's optimizers create their slots in the first step
        for name in sorted(found.keys() ^ wanted.keys()):
            if not name.startswith("accumulator/") and not (is_late and _is_slot(name)):  # a window may be open
                where = "the checkpoint" if name in found else "this run"
                raise StateError(f"only {where} has {name}: resume with what it was saved with")

    def _progress(self) -> "_Progress":
        return _Progress(self._accumulator)

    def _begin_epoch(self, data: Any) -> None:
        """A dataset shuffles anew each time it is iterated, so earlier epochs are started again."""
        super()._begin_epoch(data)
        stream = stream_of(data)
        if isinstance(stream, tf.data.Dataset):
            for _ in range(self._num_behind):
                next(iter(stream), None)
        self._num_behind = 0


class _Progress:
    """How many steps, and micro-batches of the open window, are done. It reads the device only when compared."""

    def __init__(self, accumulator: Accumulator) -> None:
        sums = accumulator._window._sums
        self._counts = [
            tf.identity(count) for count in (accumulator.num_steps, *([] if sums is None else [sums.count]))
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Progress) and self._fetched() == other._fetched()

    def _fetched(self) -> list[int]:
        num_steps, *num_micro_batches = map(int, self._counts)
        return [num_steps, *(num_micro_batches or [0])]


def _is_slot(name: str) -> bool:
    return "/.OPTIMIZER_SLOT/" in name


def _described(reader: Any) -> dict[str, tuple[Any, list[int]]]:
    dtypes = reader.get_variable_to_dtype_map()
    return {name: (dtypes[name], shape) for name, shape in reader.get_variable_to_shape_map().items()}


def _seeds_of(model: Any) -> list[Any]:
    """The seeds of random layers, which Keras lists as variables but not as weights."""
    weights = {id(v) for v in getattr(model, "weights", model.variables)}
    return [v for v in model.variables if id(v) not in weights]
