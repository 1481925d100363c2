"""JAX tasks: the parameters are a pytree, and a step is one compiled function."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...core.auxiliary import flattened, metric_name, words_for
from ...core.errors import OptionError
from ...core.loss_result import split
from ...core.nonfinite import NonFinite, place_in
from ...core.step import Step
from ...core.verify.result import Verification
from ...core.weight import as_terms, check_weight, counted, from_terms, is_number, share
from ...core.window import cuts
from ...jax import value_and_grad, verify
from ...jax.arguments import ArgumentLayout, Arrays, num_rows, split_arguments
from ...jax.checkpoints import arrays_of, by_path, check_types, tree_of, types_of
from ...jax.checks import checked_weight, is_finite, parameter_name
from ..config import Config
from ..errors import TaskError
from ..task import Task, call_with, task_errors
from .engine import EPSILON, Engine, scores_of


class JaxEngine(Engine):
    """The engine of JAX tasks. Every floating-point array of the model is a parameter; the rest of it stays fixed."""

    def __init__(self, task: Task, config: Config) -> None:
        if config.precision == "fp16":
            raise OptionError(
                "--precision fp16 needs loss scaling, which JAX tasks do not support: pass --precision bf16"
            )
        self.task, self.config = task, config
        self._device = _device_of(config.device)
        self.device = "cpu" if self._device.platform == "cpu" else f"{self._device.platform}:{self._device.id}"
        self._takes_key = "key" in inspect.signature(task.loss).parameters
        self._lr = config.scaled_lr
        self.num_steps = 0
        self._nonfinite = NonFinite(config.on_nonfinite)  # type: ignore[arg-type]
        with self._on_device():
            model = call_with(task.model, {"seed": config.seed})
            self.parameters, self._rest = _partition(task, model)
            optimizer_state = self._optimizer(self.parameters, self._lr).init(self.parameters)
            self.optimizer_state = jax.tree.map(jnp.array, optimizer_state)  # a copy: an array may be in it twice
        ways = {"sums": "sum", "weights": "sum", **({"aux": task.aux} if task.has_aux else {})}
        self._value_and_grad = value_and_grad(
            self._loss_with_sums, config.micro_batch_size, weight=task.weight, has_aux=True, aux=ways
        )
        self._summed: tuple[str, ...] = ()
        """The names of the metrics that add up over micro-batches."""
        self._step = jax.jit(self._compute_step, static_argnums=0, donate_argnums=(1, 2))
        self._compiled: dict[Any, Any] = {}

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with jax.default_device(self._device), task_errors():
            yield

    # --- one step, compiled ----------------------------------------------------------------------------------

    def _compute_step(
        self, layout: ArgumentLayout, parameters: Any, state: Any, arrays: Arrays, number: Any, lr: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """The next parameters, the next state of the optimizer, and the numbers for the `Step`.

        Parameters and state do not change if the gradient is not finite, as it is with a wrong weight, or if the total
        weight is zero.
        """
        (_, batch), _ = layout.bind(arrays)
        (value, numbers), gradient = self._value_and_grad(parameters, batch, *self._keys(number))
        numbers["metrics"] = self._metrics(numbers.pop("aux", {}))
        numbers["grad_norm"] = optax.tree.norm(gradient)
        has_weight = jnp.stack(numbers["weights"]).any()
        checked = (gradient, value) if self._nonfinite.needs_finite_loss else gradient
        numbers["is_applied"] = is_finite(checked) & has_weight
        if self.config.clip_norm is not None:
            gradient, _ = optax.clip_by_global_norm(self.config.clip_norm).update(gradient, optax.EmptyState())
        optimizer = optax.with_extra_args_support(self._optimizer(parameters, lr))
        updates, next_state = optimizer.update(gradient, state, parameters, value=value)
        after = optax.apply_updates(parameters, updates), next_state
        kept = jax.tree.map(lambda new, old: jnp.where(numbers["is_applied"], new, old), after, (parameters, state))
        return *kept, numbers

    def _loss_with_sums(self, parameters: Any, batch: Any, *keys: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The terms of the loss, and for the `Step` sums over the micro-batches."""
        inputs = _as_bf16((parameters, batch)) if self.config.precision == "bf16" else (parameters, batch)
        returned = self._loss(*inputs, *keys)
        terms, aux = split(returned, sys.maxsize, has_aux=self.task.has_aux, shape_of=_shape_of)
        given = (self.num_samples(batch),) * len(terms) if self.task.weight is None else self.task.weight(batch)
        weights = [jnp.asarray(checked_weight(w, jnp.float32), jnp.float32) for w in as_terms(given)]
        sums = [counted(term, w, jnp.where) for term, w in zip(terms, weights, strict=False)]
        return terms, {"sums": sums, "weights": weights, **({"aux": aux} if self.task.has_aux else {})}

    def _metrics(self, aux: Any) -> dict[str, Any]:
        """The scalars of aux by name; notes which of them are sums."""
        found = {path: leaf for path, leaf in flattened(aux).items() if leaf is not None and not leaf.ndim}
        words = words_for(self.task.aux, aux)
        is_sum = {path: words[path] == "sum" or jnp.issubdtype(leaf.dtype, jnp.integer) for path, leaf in found.items()}
        self._summed = tuple(metric_name(path) for path in found if is_sum[path])
        return {metric_name(path): leaf for path, leaf in found.items()}

    def _loss(self, parameters: Any, batch: Any, *keys: Any) -> Any:
        by_name = {"key": keys[0]} if keys else {}
        return self.task.loss(_combine(parameters, self._rest), batch, **by_name)

    def _keys(self, number: Any) -> list[Any]:
        """The random key of a step, for a loss that takes one."""
        return [jax.random.fold_in(jax.random.key(self.config.seed), number)] if self._takes_key else []

    def _optimizer(self, parameters: Any, lr: Any) -> optax.GradientTransformation:
        """Made anew in every trace: an optax optimizer holds no state, so the learning rate may be an argument."""
        if self.task.optimizer is None:
            return optax.adamw(lr, eps=EPSILON, weight_decay=0.01)  # the weight decay of torch's AdamW
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

    # --- the interface of engine.py --------------------------------------------------------------------------

    def step(self, batch: Any) -> Step:
        layout, arrays = _split(batch)
        given = self.parameters, self.optimizer_state, arrays, self.num_steps, self._lr
        shapes = layout, *((array.shape, array.dtype) for array in jax.tree.leaves(arrays))
        with self._on_device():
            if shapes not in self._compiled:
                self._compiled[shapes] = self._step.lower(layout, *given).compile()
            self.parameters, self.optimizer_state, numbers = self._compiled[shapes](*given)
        self.num_steps += 1
        fetched = jax.device_get(numbers)
        totals = [weight.item() for weight in fetched["weights"]]
        weights = check_weight(tuple(int(w) if w.is_integer() else w for w in totals), of="the batch")
        terms = tuple(map(share, map(float, fetched["sums"]), weights))
        if fetched["is_applied"]:
            self._nonfinite.applied()
        elif any(weights):
            self._nonfinite.skipped(self.num_steps, place_in(terms) or "the gradient", is_overflow=False)
            self._nonfinite.check(self.num_steps)
        size = self.config.micro_batch_size
        return Step(
            terms=terms,
            weight=from_terms(weights),
            grad_norm=float(fetched["grad_norm"]),
            num_micro_batches=len(cuts(num_rows(arrays), size)),
            micro_batch_size=size,
            is_applied=bool(fetched["is_applied"]),
            metrics={name: value.item() for name, value in fetched["metrics"].items()},
            summed=self._summed,
        )

    @property
    def is_stopped(self) -> bool:
        return self._nonfinite.is_stopped

    def set_lr(self, lr: float) -> None:
        self._lr = lr

    def num_samples(self, batch: Any) -> int:
        return num_rows(_split(batch)[1])

    def weights(self) -> dict[str, np.ndarray]:
        leaves = jax.tree.leaves_with_path(self.parameters)
        named = {parameter_name(path): leaf for path, leaf in leaves}  # short names such as dense.kernel
        named = named if len(named) == len(leaves) else by_path(self.parameters)
        return {
            name: np.asarray(leaf, np.float32 if leaf.dtype == jnp.bfloat16 else None) for name, leaf in named.items()
        }

    def scores(self) -> dict[str, float]:
        with self._on_device():
            return scores_of(self.task, _combine(self.parameters, self._rest))

    def peak_bytes(self) -> int | None:
        """The memory that XLA plans for a step. The resident set would include the memory of the compiler."""
        plans = [compiled.memory_analysis() for compiled in self._compiled.values()]
        peaks = [p.temp_size_in_bytes + p.output_size_in_bytes - p.alias_size_in_bytes for p in plans]
        return int(max(peaks)) if peaks else None

    def state(self) -> dict[str, Any]:
        tree = self._all()
        return {
            "arrays": arrays_of(tree),
            "types": types_of(tree),
            "num_steps": self.num_steps,
            "skipped": self._nonfinite.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        check_types(state["types"], self._all())
        num_steps = int(state["num_steps"])
        tree, skipped = tree_of(state["arrays"], like=self._all()), NonFinite.read(state["skipped"])
        self.parameters, self.optimizer_state = tree["parameters"], tree["optimizer"]
        self.num_steps = num_steps
        self._nonfinite.load_state_dict(skipped)

    def _all(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "optimizer": self.optimizer_state}

    def verify(self, batch: Any) -> Verification:
        size, weight = self.config.micro_batch_size, self.task.weight
        with self._on_device():
            has_aux = self.task.has_aux
            return verify(self.parameters, batch, self._loss, size, weight=weight, args=self._keys(0), has_aux=has_aux)


def _shape_of(term: Any) -> Any:
    """The shape of a term of the loss; None if it is no number."""
    return () if is_number(term) else getattr(term, "shape", None)


def _device_of(name: str | None) -> Any:
    """The device of this name: cpu, gpu or gpu:1; cuda is another name for gpu."""
    if name is None:
        return jax.devices()[0]
    platform, _, number = name.lower().partition(":")
    try:
        return jax.devices(platform)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        seen = ", ".join(sorted({"cpu", *(device.platform for device in jax.devices())}))
        raise OptionError(f"--device {name} cannot be used here: JAX sees {seen}") from error


def _partition(task: Task, model: Any) -> tuple[Any, Any]:
    """A copy of the parameters of a model, since each step donates those before it, and the rest of the model."""

    def is_parameter(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.inexact)

    parameters = jax.tree.map(lambda leaf: jnp.array(leaf) if is_parameter(leaf) else None, model)
    if not jax.tree.leaves(parameters):
        raise TaskError(
            f"model() of {task.name} returned a {type(model).__name__} without a floating-point array: return the "
            "parameters, such as a dict of arrays"
        )
    return parameters, jax.tree.map(lambda leaf: None if is_parameter(leaf) else leaf, model)


def _combine(parameters: Any, rest: Any) -> Any:
    """The whole model."""
    return jax.tree.map(
        lambda own, other: other if own is None else own, parameters, rest, is_leaf=lambda leaf: leaf is None
    )


def _as_bf16(tree: Any) -> Any:
    """The tree with every floating-point array in bfloat16."""

    def converted(leaf: Any) -> Any:
        is_floating = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(jnp.bfloat16) if is_floating else leaf

    return jax.tree.map(converted, tree)


def _split(batch: Any) -> tuple[ArgumentLayout, Arrays]:
    """The arrays of a batch, and its layout: everything else in it."""
    layout, _, arrays = split_arguments((None, batch), {}, (0,), None)
    return layout, arrays
