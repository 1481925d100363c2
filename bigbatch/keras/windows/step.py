"""The step of `fit` on a window of micro-batches: the part that all backends share."""

from collections.abc import Callable
from typing import Any, Protocol

import keras
from keras import ops

from ...core.errors import LossError, OptionError
from .. import checks, loss
from ..backends.step import Apply, Backend, FitStep
from ..loss import Batch, LossSpec, Reductions
from .epoch import Window, group


class Passes(Protocol):
    """What a window needs from each backend. Each function is compiled once, for micro-batches of any size."""

    def make(self) -> None:
        """Makes the functions, after `compile`."""

    def batch(self, data: Any) -> Batch:
        """x, y and sample_weight of a micro-batch, as tensors."""

    def inspect(self, state: Any, batch: Batch) -> LossSpec:
        """The spec of micro-batches like this one."""

    def weigh(self, state: Any, batch: Batch) -> Any:
        """The weights of the terms of a micro-batch's loss; the model runs without gradients."""

    def begin(self, state: Any, spec: LossSpec) -> Any:
        """The sums of an empty window."""

    def backward(self, sums: Any, state: Any, batch: Batch, sample_share: Any, term_shares: Any) -> tuple[Any, Any]:
        """Adds a micro-batch to the sums, and updates the metrics. Returns the sums, and what compute_metrics logs."""

    def finish(self, sums: Any, state: Any, size: Any, logs: Any) -> Any:
        """Applies the gradient, and returns what the train_function returns."""


class WindowStep(Backend):
    """The train_function for windows.

    Args:
        step: The step that this belongs to.
        passes: The class of what the backend does.
        cut: The class of how it cuts batches, which also says how it tries the loss on the first batch.
    """

    def __init__(
        self, step: FitStep, passes: Callable[[FitStep, Any], Passes], cut: Callable[[FitStep], Backend]
    ) -> None:
        self.step = step
        self.model = step.model
        self.cut = cut(step)
        self.passes = passes(step, self.cut)
        self._epoch_iterator: Any = None
        name = "_maybe_symbolic_build" if keras.backend.backend() == "tensorflow" else "_symbolic_build"
        self._build = getattr(type(self.model), name)
        self.replaces = {name: self.symbolic_build}
        checks.check_one_replica(self.model)

    def train_function(self, *args: Any) -> Any:
        """One step. `args` are those of Keras's train_function: on jax, the state comes first."""
        step, passes = self.step, self.passes
        state = args[0] if len(args) > 1 else None
        batches = [passes.batch(data) for data in _window(args[-1])]
        sizes = [checks.batch_size(batch) for batch in batches]
        total = sum(sizes)
        specs = [step.spec(batch, lambda: passes.inspect(state, batch)) for batch in batches]  # noqa: B023
        step.check()
        _check_spec(specs[0])
        term_shares: list[Any] = [None] * len(batches)
        if specs[0].needs_model_for_weights:
            weights = [passes.weigh(state, batch) for batch in batches]
            term_shares = [loss.share(w, sum(weights)) for w in weights]
        sums, logs = passes.begin(state, specs[0]), None
        for batch, num, shares in zip(batches, sizes, term_shares, strict=True):
            sample_share = ops.convert_to_tensor(loss.share(num, total), step.dtype)
            sums, logs = passes.backward(sums, state, batch, sample_share, shares)
        return passes.finish(sums, state, ops.convert_to_tensor(total, step.dtype), logs)

    def symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """`fit` passes its epochs here, before it asks for the train_function; `evaluate` does, too."""
        self._build(self.model, iterator=iterator, data_batch=data_batch)
        self._epoch_iterator = iterator

    def before_fit(self) -> None:
        if self.model.steps_per_execution != 1:
            raise OptionError(
                f"the model was compiled with steps_per_execution={self.model.steps_per_execution}, and "
                f"accumulation_steps={self.step.accumulation_steps} already runs several batches in one call: leave "
                "steps_per_execution out of compile()"
            )
        if self._epoch_iterator is not None:
            group(self._epoch_iterator, self.step.accumulation_steps)
            self._epoch_iterator = None

    def make_function(self, model: Any, force: bool) -> Callable[..., Any]:
        self.passes.make()
        return self.train_function

    def first_batch(self, *args: Any) -> tuple[Any, tuple[Any, ...]]:
        """The largest micro-batch of the first window, which shows best what the loss divides by."""
        *state, data = args
        window = _window(data)
        sizes = [checks.batch_size(self.passes.batch(each), may_be_empty=True) for each in window]
        return window[sizes.index(max(sizes))], (*state, window)

    def infer_reductions(self, batch: Batch, *args: Any) -> Reductions:
        return self.cut.infer_reductions(batch, *args)

    def if_finite(self, checked: list[Any], gradients: list[Any], apply: Apply, skip: Callable[[], Any]) -> Any:
        return self.cut.if_finite(checked, gradients, apply, skip)


def _window(data: Any) -> Window:
    """The micro-batches of a step, as Keras passes them: on torch in a list of one. `train_on_batch` has only one."""
    if isinstance(data, Window):
        return data
    if isinstance(data, list):
        return data[0] if isinstance(data[0], Window) else Window(data)
    return Window(data)


def track_loss(model: Any, value: Any, terms: Any, size: Any) -> None:
    """Puts the loss of a window into the history, and that of each output if there are several."""
    model._loss_tracker.update_state(value, sample_weight=size)
    trackers = [] if model._compile_loss is None else model._compile_loss.metrics
    for tracker, term in zip(trackers, terms, strict=False):
        tracker.update_state(term, sample_weight=size)


def update_metrics(step: FitStep, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> dict[str, Any]:
    """Updates the metrics with a micro-batch, unless the loss function does.

    Returns what the model's own compute_metrics logs; {} if it has none, since metrics are read at the end of a step.
    """
    if step.own is not None:
        return {}
    logs = step.model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    return dict(logs) if type(step.model).compute_metrics is not keras.Model.compute_metrics else {}


def _check_spec(spec: LossSpec) -> None:
    if spec.is_vector:
        raise LossError(
            'a loss has the reduction "none", which accumulation_steps cannot put into the history: pass '
            'reduction="sum", which has the same gradient'
        )
