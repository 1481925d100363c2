"""The accumulator: cut, accumulate, reduce, clip, apply."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ..core.errors import BatchError, Interrupted, OptionError, OrderError, StateError
from ..core.nonfinite import NonFinite, OnNonFinite
from ..core.options import Fixed, Option, check_callable, check_size
from ..core.step import Step
from ..core.weight import Reduction, check_reduction, totals
from ..core.window import AccumulationSteps, Window
from . import batch as nest
from . import checks
from .capture.capture import capture_for
from .capture.optimizer import CapturedOptimizer
from .distributed.detect import replicas_of
from .distributed.ranks import Reduce
from .distributed.totals import Share
from .feeding import Feeding
from .gradients import Gradients
from .passes import Loss
from .precision import Precision
from .state import like_its_own, packed, unpacked
from .transfer import Transfer
from .verify.time_major import TimeAxis
from .weight import Weight, weigh
from .window import OpenWindow

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Accumulator(Feeding):
    """Stands for the body of a training loop, and gives the gradient of the whole batch.

        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()     # does not fit into memory
            optimizer.step()

    becomes

        accumulator = Accumulator(model, optimizer, loss, micro_batch_size=8)
        for batch in loader:
            step = accumulator.step(batch)

    The batch is cut into micro-batches; each adds its share of the gradient, weighted by what it counts;
    unscaling, the finite check, clipping, the optimizer and the schedule happen once.

    `loss(model, micro_batch)` returns the mean over the micro-batch, `weight(micro_batch)` over how many that
    is a mean: the samples if not given. Both may be tuples of the same length, one entry for each term.
    After a step the parameters hold no gradients. Parameters that the optimizer does not hold are left alone.

    `accumulator.clip_norm = 0.5` and the like are checked as here, and used from the next step on. What is built when
    the accumulator is made (model, optimizer, reduction, precision, …) cannot be changed.

    A model in DistributedDataParallel or fully_shard is trained by all its ranks together: the batch of a step is what
    all of them pass, and gradients are reduced once a window.
    """

    micro_batch_size = Option(check_size)
    weight = Option(check_callable)
    precision, accumulate_dtype = Fixed(), Fixed()
    capture, group, reduce = Fixed(), Fixed(), Fixed()

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None = None,
        micro_batch_size: int | None = None,
        *,
        accumulation_steps: AccumulationSteps | None = None,
        weight: Weight | None = None,
        reduction: Reduction = "mean",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        precision: str | None = None,
        scaler: GradScaler | None = None,
        scheduler: Any = None,
        accumulate_dtype: torch.dtype | None = None,
        capture: bool | Literal["auto"] = False,
        group: "ProcessGroup | None" = None,
        reduce: Reduce = "window",
        on_nonfinite: OnNonFinite = "skip",
        max_skipped: int | None = 32,
    ) -> None:
        check_reduction(reduction)
        checks.check_model(model)
        checks.check_optimizer(model, optimizer)
        checks.check_dtype(accumulate_dtype)
        self.loss, self.weight = loss, weight
        self.micro_batch_size = micro_batch_size
        self.accumulation_steps = accumulation_steps
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        gradients = Gradients(optimizer, names, accumulate_dtype)
        super().__init__(
            optimizer,
            gradients,
            Precision(precision, scaler, gradients.parameters, gradients.is_widened),
            replicas_of(model, gradients, group, reduce),
            reduction,
            clip_norm,
            clip_value,
            scheduler,
            NonFinite(on_nonfinite, max_skipped),
        )
        self.model = model
        self.precision, self.accumulate_dtype = precision, accumulate_dtype
        self.capture, self.group, self.reduce = capture, group, reduce
        self._batch_norms = checks.batch_norm_modules(model)
        self._transfer = Transfer(gradients.parameters)
        self._time_axis = TimeAxis(model, can_run_twice=not self._replicas.is_shared)
        self._capture = capture_for(capture, model, loss, gradients, self._precision, self._replicas)
        if self._capture is not None:
            self._captured_optimizer = CapturedOptimizer(optimizer, self._capture.device, self._capture.pool)

    # --- a batch, or a window of micro-batches -----------------------------------------------------------

    def step(self, batch: Any) -> Step:
        """One step of the optimizer on the whole batch: a nest of tensors that is cut, or a `Window`.

        Where several ranks train the model together, the whole batch is that of all ranks, and every rank calls this;
        one that has no data this time passes None.
        """
        with self._exclusive.hold("step()"):
            self._check_nonfinite()
            self._stop_before_beginning("batch")
            return self._step_on(batch)

    def _step_on(self, batch: Any) -> Step:
        if self._open is not None:
            raise OrderError(f"a window of {len(self._open)} micro-batches is open: call flush() before step()")
        if self.loss is None:
            raise OptionError("step() needs a loss: pass Accumulator(model, optimizer, loss, …)")
        with self._replicas.telling():
            checks.refuse_held_back(self.optimizer, self.scheduler)
            self._gradients.refuse_multi_grad_hooks()
            micro_batches, sizes = self._micro_batches(batch)
            weights = [(size,) for size in sizes] if self.weight is None else weigh(micro_batches, self.weight)
            self._replicas.check(self._gradients, weights if self.reduction == "mean" else ())
            if self._so_far is not None:
                self._so_far.check_same(weights)
                self._so_far.check_unchanged(self._seen())
                self._so_far.check_trainable(self._gradients.parameters)
        passes = [
            (micro_batch, weight)
            for micro_batch, weight in zip(micro_batches, weights, strict=True)
            if self.reduction == "sum" or any(weight)  # what counts nothing is left out: its mean may be 0/0
        ]
        agreed = self._replicas.agree(
            Share(totals(weights), len(passes), len(weights), num_hooks=self._gradients.num_hooks())
        )
        self._tell_batch_norm(len(weights))
        is_counted = self.weight is None and self.reduction == "mean"
        self._time_axis.begin(micro_batches, is_cut=not isinstance(batch, Window), is_counted=is_counted)
        window = OpenWindow.of_step(self.reduction, weights) if self._so_far is None else self._so_far
        was_interrupted, self._so_far = self._so_far is not None, None
        try:
            window.check_scale(self._precision.loss_scale())
            with checks.one_sample_explained(sizes):
                return self._step(self.loss, passes, agreed, max(sizes, default=None), window)
        except Exception as error:
            if was_interrupted and not isinstance(error, Interrupted):
                error.add_note("bigbatch: what the interrupted step had is dropped; step() begins the batch anew")
            raise

    def _micro_batches(self, batch: Any) -> tuple[Sequence[Any], list[int]]:
        """The micro-batches, and their sizes where those are known or needed."""
        if self._replicas.is_shared and nest.is_empty(batch):
            return [], []
        if not isinstance(batch, Window):
            if self.micro_batch_size is None:
                raise OptionError("step() does not know where to cut the batch: pass micro_batch_size=…, or a Window")
            is_one_too_few = any(map(checks.normalises_by_batch, self._batch_norms))
            return nest.cut(batch, self.micro_batch_size, is_one_too_few=is_one_too_few)
        if not batch:
            raise BatchError("the window has 0 micro-batches: leave empty windows out of the stream")
        if self.weight is not None:
            return batch, []
        return batch, [nest.batch_size(m, f"micro_batch[{k}]") for k, m in enumerate(batch)]

    def forget(self) -> None:
        """Drops the window that is open or was interrupted, if there is one; the next one starts clean.

        Where several ranks train the model together, every rank calls this.
        """
        self._exclusive.recover()
        with self._exclusive.hold("forget()"):
            self._so_far = None
            if self._open is not None:
                self._open = None
                self._replicas.drop()

    # --- saving ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the accumulator knows, in the middle of a window too: gradients, weights, scaler.

        The model, the optimizer and the scheduler are the user's and are saved beside it, as always. Where several
        ranks train the model together, each has a state of its own, for torch.distributed.checkpoint.
        """
        with self._exclusive.hold("state_dict()"):
            return self._state_dict()

    def _state_dict(self) -> dict[str, Any]:
        self.settle()
        if self._open is not None:
            self._replicas.check_saving(len(self._open))
        kept = self._so_far if self._open is None else self._open
        window = None if kept is None else kept.state_dict(self._gradients.parameters)
        return {
            "num_steps": self.num_steps,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "skipped": self._nonfinite.state_dict(),
            **packed(window, self._replicas),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave, in this process or another."""
        with self._exclusive.hold("load_state_dict()"):
            self._load_state_dict(state)

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict):
            raise StateError(f"the state is a {type(state).__name__}: pass what Accumulator.state_dict gave")
        if missing := {"num_steps", "scaler", "window"} - set(state):
            raise StateError(f"the state has no {', '.join(sorted(missing))}: pass what Accumulator.state_dict gave")
        if (state["scaler"] is None) != (self.scaler is None):
            has, wants = ("no", "a") if state["scaler"] is None else ("a", "no")
            raise StateError(
                f"the state has {has} GradScaler but this accumulator {wants}: use the precision it was saved with"
            )
        window = unpacked(state, self._replicas)
        try:
            num_steps, skipped = int(state["num_steps"]), NonFinite.read(state.get("skipped", {}))
            scaler = {} if self.scaler is None else like_its_own(state["scaler"], self.scaler.state_dict())
            opened = None if window is None else OpenWindow.load(window, self._gradients, self.reduction)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(
                f"the state cannot be read ({type(error).__name__}: {error}): pass what Accumulator.state_dict gave"
            ) from error
        if self.scaler is not None:
            self.scaler.load_state_dict(scaler)
        self._open, self._so_far = (None, opened) if opened is not None and opened.is_of_step else (opened, None)
        self.num_steps = num_steps
        self._nonfinite.load_state_dict(skipped)
