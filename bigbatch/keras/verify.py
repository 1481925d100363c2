"""Compares accumulation with the full batch, in the step that `fit` takes."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from ..core.errors import BigBatchWarning, LossError, OptionError
from ..core.options import positive
from ..core.verify.result import Verification, errors_of, judge, total_error_of
from . import checks
from .accumulate import accumulate
from .backends.step import FitStep

_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
_ROUNDED = 1e-6
"""In float64 on jax and torch, where Keras 3.15 rounds some losses to float32."""


def verify(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    micro_batch_size: int,
    tolerance: float | None = None,
) -> Verification:
    """Compares the gradient that `fit` hands to the optimizer in micro-batches with the one on the full batch.

        print(verify(model, x, y, micro_batch_size=8))

    stands for

        model.optimizer = an optimizer that only keeps gradients
        model.train_on_batch(x, y, sample_weight)                   # full
        accumulate(model, micro_batch_size)
        model.train_on_batch(x, y, sample_weight)                   # accumulated
        error = |accumulated - full| / |full|                       # for each parameter

    Afterwards variables, metrics, random seeds, the optimizer and your own `accumulate` are as before. Dropout and
    noise layers are switched off for the comparison.

    Args:
        model: A compiled model, on one device.
        x: The inputs of one batch, as for `train_on_batch`.
        y: The targets.
        sample_weight: The sample weights, if any.
        micro_batch_size: The number of samples in a micro-batch, smaller than the batch.
        tolerance: The largest relative error that counts as exact. The default depends on the model's dtype: 1e-9
            in float64 (1e-6 on jax and torch, where Keras rounds some losses to float32), 1e-4 in float32, 2e-2 in
            float16, 1e-1 in bfloat16. A float64 model (`keras.config.set_floatx("float64")`) is the strictest test.

    Returns:
        The error of each parameter, and the causes if the gradient is not exact. It is true if the gradient is exact,
        and prints as a table.

    Raises:
        OptionError: The model is not compiled or has several replicas, or the batch would not be cut.
        LossError: The gradient of the full batch is zero.
    """
    checks.check_model(model)
    micro_batch_size = positive("micro_batch_size", micro_batch_size)
    if not model.compiled:
        raise OptionError("the model is not compiled, so it has no loss: call model.compile(optimizer, loss) first")
    batch = (x, y, sample_weight)
    size = checks.batch_size(batch)
    if size == 1:
        raise OptionError("the batch has one sample, so it cannot be cut into micro-batches: pass at least two samples")
    if micro_batch_size >= size:
        raise OptionError(
            f"micro_batch_size={micro_batch_size} leaves the batch of {size} in one piece, which proves nothing: "
            f"pass {size - 1} or less"
        )
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        raise OptionError(
            f"verify() compares on one device, and the model has {strategy.num_replicas_in_sync} replicas: "
            "make and compile it outside of the strategy"
        )
    to_tensor = keras.ops.convert_to_tensor
    model._symbolic_build(data_batch=keras.tree.map_structure(lambda v: None if v is None else to_tensor(v), batch))
    with _restored(model), _without_noise(model) as noisy, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BigBatchWarning)
        full, again = (_gradient(model, batch, None) for _ in range(2))
        ours = _gradient(model, batch, micro_batch_size)
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


def _gradient(model: Any, batch: Any, micro_batch_size: int | None) -> dict[str, np.ndarray]:
    """The gradient by variable name; that of the full batch if micro_batch_size is None."""
    seeds = set(map(id, checks.seeds_of(model)))  # not restored, or two runs would draw the same numbers
    with _unchanged([v for v in model.non_trainable_variables if id(v) not in seeds]):
        model.optimizer = _Probe()
        accumulate(model, micro_batch_size).train_on_batch(*batch)
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
