"""Compares accumulation with the full batch, in the step that `fit` takes."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np

from ..core.errors import BigBatchWarning, LossError, OptionError
from ..core.options import positive
from ..core.verify.result import Verification, errors_of, judge, total_error_of
from . import checks
from .accumulate import accumulate
from .backends.step import FitStep
from .batch_norm import BatchNorms

_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
_ROUNDED = 1e-6
"""In float64 on jax and torch, where Keras 3.15 rounds some losses to float32."""


def verify(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    micro_batch_size: int | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Compares the gradient that `fit` accumulates from micro-batches with the one on the full batch.

        print(verify(model, x, y))

    stands for

        model.optimizer = an optimizer that only keeps gradients
        accumulate(model, None)
        model.train_on_batch(x, y, sample_weight)                   # full
        accumulate(model, micro_batch_size)                         # or as the model is accumulated now
        model.train_on_batch(x, y, sample_weight)                   # accumulated
        error = |accumulated - full| / |full|                       # for each parameter

    A model that you have accumulated is verified as it is: with its `accumulation_steps`, its `batch_norm` and its
    `loss`, which is compared with the model's own `train_step`. With `accumulation_steps`, `fit` gets the batch in
    micro-batches. Afterwards variables, metrics, random seeds, the optimizer and your own `accumulate` are as before.
    Dropout and noise layers are switched off for the comparison.

    Args:
        model: A compiled model, on one device.
        x: The inputs of one batch, as for `train_on_batch`.
        y: The targets.
        sample_weight: The sample weights, if any.
        micro_batch_size: The number of samples in a micro-batch, smaller than the batch. By default that of your own
            `accumulate`, if it is smaller than the batch; else one that cuts the batch into at least three parts of
            different sizes, if it has enough samples.
        tolerance: The largest relative error that counts as exact. The default depends on the model's dtype: 1e-9
            in float64 (1e-6 on jax and torch, where Keras rounds some losses to float32), 1e-4 in float32, 2e-2 in
            float16, 1e-1 in bfloat16. A float64 model (`keras.config.set_floatx("float64")`) is the strictest test.

    Returns:
        The error of each parameter, and the causes if the gradient is not exact. It is true if the gradient is exact,
        and prints as a table.

    Raises:
        OptionError: The model is not compiled or has several replicas, x is no batch, or it would not be cut.
        LossError: The gradient of the full batch is zero.
    """
    checks.check_model(model)
    if not model.compiled:
        raise OptionError("the model is not compiled, so it has no loss: call model.compile(optimizer, loss) first")
    batch = _as_tensors((x, y, sample_weight))
    size = checks.batch_size(batch)
    if size == 1:
        raise OptionError("the batch has one sample, so it cannot be cut into micro-batches: pass at least two samples")
    step = FitStep.of(model)
    micro_batch_size = _micro_batch_size(micro_batch_size, size, step)
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        raise OptionError(
            f"verify() compares on one device, and the model has {strategy.num_replicas_in_sync} replicas: "
            "make and compile it outside of the strategy"
        )
    model._symbolic_build(data_batch=batch)
    options = {} if step is None else step.options
    with _restored(model), _without_noise(model) as noisy, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BigBatchWarning)
        full, again = (_gradient(model, lambda: _full(model, batch, size, options)) for _ in range(2))
        if step is not None and step.accumulation_steps:
            ours = _gradient(model, lambda: _windows(model, batch, size, micro_batch_size, options))
        else:
            ours = _gradient(model, lambda: _cut(model, batch, micro_batch_size, options))
    if not any(map(np.any, full.values())):
        raise LossError("the gradient of the full batch is zero, so there is nothing to compare: pass another batch")
    dtype = keras.backend.standardize_dtype(model.compute_dtype)
    if tolerance is None:
        is_rounded = dtype == "float64" and keras.backend.backend() != "tensorflow"
        tolerance = _ROUNDED if is_rounded else _TOLERANCES[dtype]
    causes = []
    if noisy:
        causes.append(f"{', '.join(noisy)} draw random numbers, and were switched off for the comparison")
    if dtype != "float64":
        causes.append(f"compared in {dtype}, the dtype of the model, so the gradients agree to rounding in it at best")
    errors, total_error = errors_of(full, ours), total_error_of(full, ours)
    if not judge(errors, causes, tolerance).is_exact:
        if (random := total_error_of(full, again)) > tolerance:
            causes.append(f"the model draws random numbers: the full batch differs from itself by {random:.1e}")
        causes += dict.fromkeys(str(each.message) for each in caught if issubclass(each.category, BigBatchWarning))
    return judge(errors, causes, tolerance, total_error)


class _Probe(keras.optimizers.Optimizer):
    """Keeps the gradients that it is given, and does not change the variables."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.0, name="bigbatch_probe")

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.kept = [self.add_variable_from_reference(v, name="gradient") for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_add(self.kept[self._get_variable_index(variable)], gradient)  # of zeros: it may be sparse


def _as_tensors(batch: Any) -> Any:
    for name, part in zip(("x", "y", "sample_weight"), batch, strict=True):
        for leaf in keras.tree.flatten(part):
            if leaf is not None and not hasattr(leaf, "shape"):
                raise OptionError(
                    f"{name} has a {type(leaf).__name__} in it: verify() takes one batch as arrays or tensors; of a "
                    "dataset, pass *next(iter(dataset))"
                )
    return keras.tree.map_structure(lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), batch)


def _copied(batch: Any) -> Any:
    """On torch, Keras 3.15 multiplies masks into sample weights in place."""
    if keras.backend.backend() != "torch":
        return batch
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf.clone(), batch)


def _micro_batch_size(given: int | None, size: int, step: FitStep | None) -> int:
    """The size to verify; raises OptionError unless it cuts the batch."""
    if given is None:
        own = 0 if step is None else step.micro_batch_size
        uneven = (num for num in range(size // 2, 1, -1) if size % num)
        return own if 0 < own < size else next(uneven, max(1, size // 2))
    given = positive("micro_batch_size", given)
    if given >= size:
        raise OptionError(
            f"micro_batch_size={given} leaves the batch of {size} in one piece, which proves nothing: "
            f"pass {size - 1} or less"
        )
    return given


def _full(model: Any, batch: Any, size: int, options: dict[str, Any]) -> None:
    """A step of the model's own on the full batch."""
    if options.get("loss") is not None and type(model).train_step is keras.Model.train_step:
        accumulate(model, size, **options).train_on_batch(*_copied(batch))  # which has nothing else to be compared with
        return
    accumulate(model, None)
    is_frozen = options.get("batch_norm") == "frozen"
    with BatchNorms(model, "frozen").recording() if is_frozen else nullcontext():
        model.train_on_batch(*_copied(batch))


def _cut(model: Any, batch: Any, micro_batch_size: int, options: dict[str, Any]) -> None:
    """A step on the batch in micro-batches."""
    accumulate(model, micro_batch_size, **options).train_on_batch(*_copied(batch))


def _windows(model: Any, batch: Any, size: int, micro_batch_size: int, options: dict[str, Any]) -> None:
    """One window of `fit`, which gets the batch in micro-batches."""
    starts = range(0, size, micro_batch_size)

    def rows(start: int) -> Any:
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[start : start + micro_batch_size], batch
        )

    accumulate(model, accumulation_steps=len(starts), **options)
    model.fit(_MicroBatches([rows(start) for start in starts]), verbose=0, shuffle=False)


class _MicroBatches(keras.utils.PyDataset):
    """Batches for `fit`."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self._batches = [keras.tree.map_structure(_as_array, batch) for batch in batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return tuple(part for part in self._batches[index] if part is not None)


def _as_array(leaf: Any) -> Any:
    return None if leaf is None else keras.ops.convert_to_numpy(leaf)


def _gradient(model: Any, run: Callable[[], Any]) -> dict[str, np.ndarray]:
    """The gradient that `run()`, which makes a step, hands to the optimizer, by variable name."""
    seeds = set(map(id, checks.seeds_of(model)))  # not restored, or two runs would draw the same numbers
    with _unchanged([v for v in model.non_trainable_variables if id(v) not in seeds]):
        model.optimizer = _Probe()
        run()
    paths = [v.path for v in model.trainable_variables]
    names = [path if paths.count(path) == 1 else f"{path} ({i})" for i, path in enumerate(paths)]
    return {name: _value_of(g).astype("float64") for name, g in zip(names, model.optimizer.kept, strict=True)}


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Restores everything that a step changes."""
    step, optimizer = FitStep.of(model), model.optimizer
    try:
        with _unchanged([*model.variables, *model.metrics_variables]):
            yield
    finally:
        model.optimizer = optimizer
        if (ours := FitStep.of(model)) is not None:
            ours.detach()
        if step is not None:
            step.attach()
        model.train_function = model.test_function = None


@contextmanager
def _unchanged(variables: list[Any]) -> Iterator[None]:
    values = [_value_of(v) for v in variables]
    try:
        yield
    finally:
        for v, value in zip(variables, values, strict=True):
            v.assign(value)


@contextmanager
def _without_noise(model: Any) -> Iterator[list[str]]:
    """Switches off the randomness of Keras's own layers; yields their names."""
    noisy = [
        (layer, name, value)
        for layer in model._flatten_layers()
        for name in ("rate", "stddev", "dropout", "recurrent_dropout")
        if layer._seed_generators and isinstance(value := vars(layer).get(name), float | int) and value > 0
    ]
    try:
        for layer, name, _ in noisy:
            setattr(layer, name, 0.0)
        yield sorted({layer.name for layer, _, _ in noisy})
    finally:
        for layer, name, value in noisy:
            setattr(layer, name, value)


def _value_of(v: Any) -> np.ndarray:
    found: np.ndarray = keras.ops.convert_to_numpy(v.value).copy()
    return found
