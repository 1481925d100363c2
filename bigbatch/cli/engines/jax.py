"""Tasks of JAX: parameters are a pytree, and a step is one compiled function."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...core.errors import OptionError, WeightError
from ...core.step import Step
from ...core.verify.result import Verification
from ...core.weight import as_plain, as_terms, from_terms
from ...core.window import cuts
from ...jax import value_and_grad, verify
from ...jax.batch import Arrays, Form, num_rows, take_apart
from ...jax.checkpoints import arrays_of, by_path, tree_of
from ...jax.verify.trial import name_of
from ..config import Config
from ..errors import TaskError
from ..task import Task, call_with, their_own_errors
from .engine import EPSILON, Engine, scores_of

WEIGHT_DECAY = 0.01  # as torch's AdamW has it


class JaxEngine(Engine):
    """As engine.py wants it. Every floating-point array of the model is a parameter; what else is in it stays."""

    def __init__(self, task: Task, config: Config) -> None:
        if config.precision == "fp16":
            raise OptionError(
                f"--precision fp16 needs a scaled loss, which {task.name}, a task of jax, does not have: "
                "pass --precision bf16"
            )
        self.task, self.config = task, config
        self._device = device_of(config.device)
        self.device = "cpu" if self._device.platform == "cpu" else f"{self._device.platform}:{self._device.id}"
        self._takes_key = "key" in inspect.signature(task.loss).parameters
        self._lr = config.scaled_lr
        self.num_steps = 0
        with self._at_work():
            model = call_with(task.model, {"seed": config.seed})
            self.parameters, self._rest = own_parameters(task, model)
            self.state_of_optimizer = copied(self._optimizer(self.parameters, self._lr).init(self.parameters))
        options: dict[str, Any] = {"weight": task.weight, "has_aux": True, "aux": "sum"}
        self._value_and_grad = value_and_grad(self._counted_loss, config.micro_batch_size, **options)
        self._step = jax.jit(self._stepped, static_argnums=0, donate_argnums=(1, 2))
        self._compiled: dict[Any, Any] = {}

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with jax.default_device(self._device), their_own_errors():
            yield

    # --- one step, as it is compiled -------------------------------------------------------------------------

    def _stepped(
        self, form: Form, parameters: Any, state: Any, arrays: Arrays, number: Any, lr: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """What one step makes of the parameters and the optimizer's state; both stay if it cannot be applied."""
        (_, batch), _ = form.bind((None,), arrays)
        (value, found), gradient = self._value_and_grad(parameters, batch, *self._keys(number))
        found["grad_norm"] = optax.tree.norm(gradient)
        is_finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)]).all()
        has_weight = jnp.stack([weight != 0 for weight in found["weights"]]).any()
        found["is_applied"] = is_finite & has_weight & (found["num_wrong"] == 0)
        if clipping := self.config.for_framework():
            gradient, _ = optax.clip_by_global_norm(**clipping).update(gradient, optax.EmptyState())
        optimizer = optax.with_extra_args_support(self._optimizer(parameters, lr))
        updates, next_state = optimizer.update(gradient, state, parameters, value=value)
        after = optax.apply_updates(parameters, updates), next_state
        kept = jax.tree.map(lambda new, old: jnp.where(found["is_applied"], new, old), after, (parameters, state))
        return *kept, found

    def _counted_loss(self, parameters: Any, batch: Any, *keys: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The terms of the loss, and beside them what a Step tells: sums over the micro-batches."""
        dtype = jnp.bfloat16 if self.config.precision == "bf16" else None
        terms = as_terms(self._loss(cast(parameters, dtype), cast(batch, dtype), *keys))
        terms = tuple(jnp.asarray(term, jnp.promote_types(jnp.result_type(term), jnp.float32)) for term in terms)
        if self.task.weight is None:
            weights = [jnp.asarray(self.num_samples(batch))] * len(terms)
        else:
            weights = [jnp.sum(jnp.asarray(weight)) for weight in as_terms(self.task.weight(batch))]
        return terms, {
            "sums": [jnp.where(w == 0, 0, term * w) for term, w in zip(terms, weights, strict=False)],
            "weights": weights,
            "num_wrong": sum(jnp.where((weight >= 0) & jnp.isfinite(weight), 0, 1) for weight in weights),
        }

    def _loss(self, parameters: Any, batch: Any, *keys: Any) -> Any:
        by_name = {"key": keys[0]} if keys else {}
        return self.task.loss(combined(parameters, self._rest), batch, **by_name)

    def _keys(self, number: Any) -> list[Any]:
        """The random key of a step, for a loss that takes one."""
        return [jax.random.fold_in(jax.random.key(self.config.seed), number)] if self._takes_key else []

    def _optimizer(self, parameters: Any, lr: Any) -> optax.GradientTransformation:
        """Made anew in every trace: transformations are functions without a state, so the rate may be an argument."""
        if self.task.optimizer is None:
            return optax.adamw(lr, eps=EPSILON, weight_decay=WEIGHT_DECAY)
        if "lr" not in inspect.signature(self.task.optimizer).parameters:
            raise TaskError(
                f"optimizer() of {self.task.name} takes no lr, and the rate of an optax optimizer cannot be set later: "
                "define optimizer(params, lr)"
            )
        optimizer = call_with(self.task.optimizer, {"params": parameters, "lr": lr})
        if not isinstance(optimizer, optax.GradientTransformation):
            raise TaskError(
                f"optimizer() of {self.task.name} returned a {type(optimizer).__name__}: return an optax optimizer, "
                "such as optax.adam(lr)"
            )
        return optimizer

    # --- as a run asks ---------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Step:
        form, arrays = apart(batch)
        given = self.parameters, self.state_of_optimizer, arrays, self.num_steps, self._lr
        shapes = form, *((array.shape, array.dtype) for array in jax.tree.leaves(arrays))
        with self._at_work():
            if shapes not in self._compiled:
                self._compiled[shapes] = self._step.lower(form, *given).compile()
            self.parameters, self.state_of_optimizer, found = self._compiled[shapes](*given)
        self.num_steps += 1
        size = self.config.micro_batch_size

        @cache
        def told() -> dict[str, Any]:
            fetched: dict[str, Any] = jax.device_get(found)
            check_weights(self.task, fetched)
            fetched["terms"] = [s / w if w else 0.0 for s, w in zip(fetched["sums"], fetched["weights"], strict=True)]
            return fetched

        return Step(
            terms=lambda: tuple(map(float, told()["terms"])),
            weight=lambda: from_terms(tuple(as_plain(weight.item()) for weight in told()["weights"])),
            grad_norm=lambda: float(told()["grad_norm"]),
            num_micro_batches=len(cuts(num_rows(arrays), size)),
            micro_batch_size=size,
            is_applied=lambda: bool(told()["is_applied"]),
        )

    def set_lr(self, lr: float) -> None:
        self._lr = lr

    def num_samples(self, batch: Any) -> int:
        return num_rows(apart(batch)[1])

    def weights(self) -> dict[str, np.ndarray]:
        return {
            name: np.asarray(leaf, np.float32 if leaf.dtype == jnp.bfloat16 else None)
            for name, leaf in named(self.parameters).items()
        }

    def scores(self) -> dict[str, float]:
        with self._at_work():
            return scores_of(self.task, combined(self.parameters, self._rest))

    def peak_bytes(self) -> int | None:
        """XLA plans the memory of a step before it runs; the resident set would have that of the compiler in it."""
        plans = [compiled.memory_analysis() for compiled in self._compiled.values()]
        peaks = [p.temp_size_in_bytes + p.output_size_in_bytes - p.alias_size_in_bytes for p in plans]
        return int(max(peaks)) if peaks else None

    def state(self) -> dict[str, Any]:
        return {"arrays": arrays_of(self._all()), "num_steps": self.num_steps}

    def load(self, state: dict[str, Any]) -> None:
        found = tree_of(state["arrays"], like=self._all())
        self.parameters, self.state_of_optimizer = found["parameters"], found["optimizer"]
        self.num_steps = state["num_steps"]

    def _all(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "optimizer": self.state_of_optimizer}

    def verify(self, batch: Any) -> Verification:
        size, weight = self.config.micro_batch_size, self.task.weight
        with self._at_work():
            return verify(self.parameters, batch, self._loss, size, weight=weight, args=self._keys(0))


def device_of(name: str | None) -> Any:
    """cpu, gpu or gpu:1; cuda is another name for gpu."""
    if name is None:
        return jax.devices()[0]
    platform, _, number = name.lower().partition(":")
    try:
        return jax.devices(platform)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        seen = ", ".join(sorted({"cpu", *(device.platform for device in jax.devices())}))
        raise OptionError(f"--device {name} cannot be used here: JAX sees {seen}") from error


def own_parameters(task: Task, model: Any) -> tuple[Any, Any]:
    """The parameters of a model, copied since each step gives up those before it, and what is left of it."""

    def is_parameter(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.inexact)

    parameters = jax.tree.map(lambda leaf: leaf if is_parameter(leaf) else None, model)
    if not jax.tree.leaves(parameters):
        raise TaskError(
            f"model() of {task.name} returned a {type(model).__name__} without a floating-point array: return the "
            "parameters, such as a dict of arrays"
        )
    return copied(parameters), jax.tree.map(lambda leaf: None if is_parameter(leaf) else leaf, model)


def combined(parameters: Any, rest: Any) -> Any:
    """The whole model."""
    return jax.tree.map(
        lambda own, other: other if own is None else own, parameters, rest, is_leaf=lambda leaf: leaf is None
    )


def copied(tree: Any) -> Any:
    """Arrays of our own: one that is there twice could not be given up."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


def cast(tree: Any, dtype: Any) -> Any:
    """With floating-point arrays in this dtype; None leaves them as they are."""

    def converted(leaf: Any) -> Any:
        is_floating = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_floating else leaf

    return tree if dtype is None else jax.tree.map(converted, tree)


def apart(batch: Any) -> tuple[Form, Arrays]:
    """The arrays of a batch, and all else of it."""
    form, _, arrays = take_apart((None, batch), {}, (0,), None)
    return form, arrays


def check_weights(task: Task, found: dict[str, Any]) -> None:
    """Refuses what weight() should not have returned; the step has left everything as it was."""
    if num := int(found["num_wrong"]):
        raise WeightError(
            f"weight() of {task.name} returned a number that is negative or not finite {num} time{'s' * (num != 1)} in "
            "one batch: a weight says over how many samples or tokens the loss is a mean"
        )


def named(tree: Any) -> dict[str, Any]:
    """The leaves by short names such as dense.kernel; by path if two short names are the same."""
    paths = jax.tree.leaves_with_path(tree)
    found = {name_of(path): leaf for path, leaf in paths}
    return found if len(found) == len(paths) else by_path(tree)
