"""Full batch against accumulation, by the step that `fit` takes."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from ...core.errors import BigBatchWarning, LossError, OptionError
from ...core.options import positive
from ...core.verify.result import Verification, judge, relative_error
from .. import checks
from ..accumulate import accumulate
from ..backends.step import FitStep

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
ROUNDED = 1e-6
"""In float64 on jax and torch, where Keras 3.15 rounds some losses to float32."""

Gradient = dict[str, np.ndarray]


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

    Both are taken by `train_on_batch` of the compiled model itself: once as Keras has it, once with `accumulate`.
    Nothing moves: the optimizer is replaced by one that only keeps the gradients, and variables, metrics, optimizer and
    an `accumulate` of yours are as they were afterwards. Dropout and noise are switched off for the comparison.

    x, y, sample_weight: one batch, as for `train_on_batch`.
    micro_batch_size: the size to cut it into, smaller than the batch.
    tolerance: the largest relative error that still counts as exact. By default that of the model's dtype: 1e-9 in
        float64 (1e-6 on jax and torch, where Keras rounds some losses to float32), 1e-4 in float32, 2e-2 in float16,
        1e-1 in bfloat16. A float64 model (`keras.config.set_floatx("float64")`) gives the sharpest answer.
    """
    checks.check_model(model)
    micro_batch_size = positive("micro_batch_size", micro_batch_size)
    if not model.compiled:
        raise OptionError("the model is not compiled, so it has no loss: call model.compile(optimizer, loss) first")
    num = len(keras.tree.flatten(x)[0])
    if micro_batch_size >= num:
        raise OptionError(
            f"micro_batch_size={micro_batch_size} leaves the batch of {num} in one piece, which proves nothing: "
            f"pass {num - 1} or less"
        )
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        raise OptionError(
            f"verify() compares on one device, and the model has {strategy.num_replicas_in_sync} replicas: "
            "make and compile it outside of the strategy"
        )
    batch = (x, y, sample_weight)
    model._symbolic_build(data_batch=keras.tree.map_structure(as_array, batch))
    with restored(model), without_noise(model) as noisy, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", BigBatchWarning)
        full, again = (gradient_of(model, batch, None) for _ in range(2))
        ours = gradient_of(model, batch, micro_batch_size)
    told = [str(each.message) for each in said if issubclass(each.category, BigBatchWarning)]
    return compare(model, full, again, ours, tolerance, noisy, list(dict.fromkeys(told)))


class Probe(keras.optimizers.Optimizer):
    """Keeps the gradients that it is given, and moves nothing."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.0, name="bigbatch_probe")

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.kept = [self.add_variable_from_reference(v, name="gradient") for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_add(self.kept[self._get_variable_index(variable)], gradient)  # of zeros: it may be sparse


def gradient_of(model: Any, batch: Any, micro_batch_size: int | None) -> Gradient:
    """By the name of the variable. Of the full batch if there is no size."""
    seeds = {id(seed.state) for layer in model._flatten_layers() for seed in layer._seed_generators}
    variables = [v for v in model.non_trainable_variables if id(v) not in seeds]  # or two runs would draw the same
    with unchanged(variables):
        model.optimizer = Probe()
        accumulate(model, micro_batch_size).train_on_batch(*batch)
    kept = enumerate(zip(model.trainable_variables, model.optimizer.kept, strict=True))
    paths = [v.path for v in model.trainable_variables]
    return {
        v.path if paths.count(v.path) == 1 else f"{v.path} ({i})": numbers(g).astype("float64") for i, (v, g) in kept
    }


def compare(
    model: Any,
    full: Gradient,
    again: Gradient,
    ours: Gradient,
    tolerance: float | None,
    noisy: list[str],
    told: list[str],
) -> Verification:
    total = norm(full)
    if not total:
        raise LossError("the gradient of the full batch is zero, so there is nothing to compare: pass another batch")
    dtype = keras.backend.standardize_dtype(model.compute_dtype)
    if tolerance is None:
        is_rounded = dtype == "float64" and keras.backend.backend() != "tensorflow"
        tolerance = ROUNDED if is_rounded else TOLERANCES[dtype]
    errors = {
        name: relative_error(float(np.linalg.norm(ours[name] - g)), float(np.linalg.norm(g)), total)
        for name, g in full.items()
    }
    causes = []
    if noisy:
        causes.append(f"{', '.join(noisy)} draw random numbers, and were switched off for the comparison")
    if dtype != "float64":
        causes.append(f"compared in {dtype}, the dtype of the model, so the gradients agree to rounding in it at best")
    found = judge(errors, causes, tolerance, norm({name: ours[name] - g for name, g in full.items()}) / total)
    if found.is_exact:
        return found
    random = norm({name: again[name] - g for name, g in full.items()}) / total
    if random > tolerance:
        causes.append(f"the model draws random numbers: the full batch differs from itself by {random:.1e}")
    return judge(errors, [*causes, *told], tolerance, found.total_error)


@contextmanager
def restored(model: Any) -> Iterator[None]:
    """Puts everything back that a step changes."""
    step, optimizer = FitStep.of(model), model.optimizer
    try:
        with unchanged([*model.variables, *model.metrics_variables]):
            yield
    finally:
        model.optimizer = optimizer
        if (ours := FitStep.of(model)) is not None:
            ours.detach()
        if step is not None:
            step.attach()
        model.train_function = model.test_function = None


@contextmanager
def unchanged(variables: list[Any]) -> Iterator[None]:
    values = [numbers(v) for v in variables]
    try:
        yield
    finally:
        for v, value in zip(variables, values, strict=True):
            v.assign(value)


@contextmanager
def without_noise(model: Any) -> Iterator[list[str]]:
    """Switches off what draws random numbers in Keras's own layers; gives their names."""
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


def as_array(leaf: Any) -> Any:
    return None if leaf is None else keras.ops.convert_to_tensor(leaf)


def numbers(v: Any) -> np.ndarray:
    found: np.ndarray = keras.ops.convert_to_numpy(v.value).copy()
    return found


def norm(gradient: Gradient) -> float:
    return math.hypot(*(float(np.linalg.norm(g)) for g in gradient.values()))
