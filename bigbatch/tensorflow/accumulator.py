"""The accumulator: cut, accumulate, reduce, clip, apply, on one device or under a tf.distribute strategy."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Never, get_args

import tensorflow as tf

from ..core.auxiliary import check_aux
from ..core.batch import one_batch
from ..core.errors import BatchError, OptionError, OrderError
from ..core.exclusive import Exclusive
from ..core.nonfinite import NonFinite, OnNonFinite
from ..core.options import (
    Fixed,
    Option,
    OptionOf,
    check_callable,
    check_choice,
    check_known,
    check_loss,
    check_size,
    described,
)
from ..core.step import Step
from ..core.verify.result import Verification
from ..core.weight import Reduction, check_reduction
from ..core.window import AccumulationSteps, Window, check_lists
from . import checks, gradients, models, optimizers
from .auxiliary import Auxiliary, without_aux
from .backward import Backward, Beside, Loss, Weight
from .batch import Layout, any_size, batch_size, num_samples, slice_rows
from .batch_norm import BatchNorm, BatchNorms, Missed, MomentSums
from .distributed import replicas
from .distributed.check_mean import check_mean
from .distributed.one_replica import LossContext, check_not_divided, one_replica
from .gradients import Gradient
from .graphs import Graphs
from .loop import accumulate
from .micro_batch import MicroBatch
from .nonfinite import SkippedSteps
from .sums import OTHER_VARIABLES, BatchGradient
from .update import Result, Update
from .weight import WEIGHT, as_weight
from .window import PartialWindow

_Finish = Callable[[BatchGradient], Any]
"""What is done with the gradient of the whole batch, across replicas."""


_ELSEWHERE = {
    "backward": "call gradients(batch), which returns the gradient of the whole batch and does not step; or "
    "micro.backward(loss) in a micro_batch() block",
    "apply_gradients": "call add(gradients, weight=…), or flush() to end a window early",
    "apply": "call add(gradients, weight=…), or flush() to end a window early",
    "train_step": "call step(batch)",
    "zero_grad": "leave it out, because a window starts with sums of zero",
    "no_sync": "leave it out, because replicas reduce once per window",
    "scheduler": "pass the optimizer a schedule as its learning rate",
    "value_and_grad": "call gradients(batch)",
}


class _Traced(NamedTuple):
    """A graph, and what was found when it was traced."""

    call: Callable[..., Any]
    auxiliary: Auxiliary | None
    batch_norms: BatchNorms


def _check_not_traced(accumulator: "Accumulator", name: str) -> None:
    if accumulator._is_traced:
        raise OptionError(
            f"{name} can no longer be changed: your tf.function that calls add() or flush() was traced with it; "
            "set it before, or make a new Accumulator"
        )


class Accumulator(tf.Module):
    """Trains on batches that do not fit into memory, with exactly the gradient of the whole batch.

        for batch in dataset:
            with tf.GradientTape() as tape:
                value = loss(model, batch)                # does not fit into memory
            optimizer.apply_gradients(zip(tape.gradient(value, model.trainable_variables), model.trainable_variables))

    becomes

        accumulator = Accumulator(model, optimizer, loss, micro_batch_size=8)
        for batch in dataset:
            step = accumulator.step(batch)

    The batch is cut into micro-batches. Each adds its share of the gradient, by its weight. Unscaling, the finite
    check, clipping and the optimizer happen once, on the gradient of the whole batch. A step is one `tf.function` with
    a `tf.while_loop` over the micro-batches.

    In your own loop with a GradientTape, pass the gradients to `add`:

        accumulator = Accumulator(model, optimizer, accumulation_steps=4)
        accumulator.add(tape.gradient(value, model.trainable_variables), weight=len(y))
        accumulator.flush()                               # the last, shorter window

    A model that was made under a strategy is trained by all replicas together: the batch of a step is that of all of
    them, and gradients are reduced once a window. Make the accumulator in the scope of the strategy, too.

    Options such as `accumulator.clip_norm = 0.5` can be changed at any time; they are checked, and used from the next
    step on. The model, the optimizer, `reduction` and `jit_compile` are fixed. A `tf.function` of yours keeps the
    options it was traced with, so those that `add` uses cannot be changed after that.

    Args:
        model: A model of Keras, or a tf.Module with `trainable_variables`. A list, tuple or dict of models is trained
            together; the loss then gets that list.
        optimizer: An optimizer of Keras, tf_keras or tf.compat.v1.train. It may scale the loss. Several optimizers of
            Keras are a list of pairs `(optimizer, variables)`; all step or none. `variables` is a list, or the model or
            layer that has them.
        loss: `loss(model, micro_batch)` returns the mean over the micro-batch, as a scalar tensor. It may return a
            tuple of terms, each a mean over a count of its own, or a mapping with "loss". Leave it out if you compute
            gradients yourself, for `add()` and `micro_batch()`.
        micro_batch_size: Samples per micro-batch, on each replica, for `step(batch)`.
        accumulation_steps: How many micro-batches a window has, for `add()`: a number, or a function of the step
            number.
        weight: `weight(micro_batch)` returns over how many the loss is a mean: samples if left out; tokens in a
            language model. Weights per sample are added up. A tuple if the loss has several terms.
        reduction: "mean", or "sum" to add losses up undivided.
        clip_norm: Scales the gradient of the batch down to this norm, as `tf.clip_by_global_norm` does. None for no
            limit.
        clip_value: Clamps each value of that gradient, after `clip_norm`. None for no limit.
        on_nonfinite: If the gradient is not finite, "skip" the step, "raise" NonFiniteError, or "stop" training.
        max_skipped: After how many skipped steps in a row to raise NonFiniteError. None for never.
        jit_compile: Whether XLA compiles the loop over the micro-batches.
        has_aux: Whether the loss returns the pair `(loss, aux)`. Aux is a nest of metrics, logits and so on, which
            arrives in `step.aux` for the whole batch, with its numbers in `step.metrics`. If the loss returns a mapping
            with "loss", its other items are aux.
        aux: How aux is combined: "mean" (by the weight of the first term), "sum", "concatenate", a function of the
            values and the weights of all micro-batches, or a nest of these. "auto": a float is a mean, an integer a
            sum, and a tensor with a row for each sample is concatenated, in the order of the batch.
        batch_norm: What BatchNormalization layers do with their moving statistics: "batch" updates them once per step,
            with the mean and variance of the whole batch; "micro_batch" lets each micro-batch do its own update;
            "frozen" normalises with them and leaves them as they are. With `add()` your own code decides.
        variables: The variables to train. None for all trainable variables of the model.

    Attributes:
        num_traces: How many graphs were traced. A new batch size adds none; other axes add at most one each.
        strategy: The strategy that the model was made under.
    """

    model, optimizer, reduction, jit_compile = Fixed(), Fixed(), Fixed(), Fixed()
    has_aux, aux, batch_norm = Fixed(), Fixed(), Fixed()
    loss, weight = Option(check_loss), Option(check_callable)
    micro_batch_size = Option(check_size)
    accumulation_steps = OptionOf("_window", _check_not_traced)
    clip_norm, clip_value = OptionOf("_update", _check_not_traced), OptionOf("_update", _check_not_traced)
    on_nonfinite, max_skipped = OptionOf("_nonfinite", _check_not_traced), OptionOf("_nonfinite", _check_not_traced)

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss: Loss | None = None,
        micro_batch_size: int | None = None,
        *,
        accumulation_steps: AccumulationSteps | None = None,
        weight: Weight | None = None,
        reduction: Reduction = "mean",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        on_nonfinite: OnNonFinite = "skip",
        max_skipped: int | None = 32,
        jit_compile: bool = False,
        has_aux: bool = False,
        aux: Any = "auto",
        batch_norm: BatchNorm = "batch",
        variables: Sequence[Any] | None = None,
        **unknown: Never,
    ) -> None:
        check_known(unknown, Accumulator)
        super().__init__(name="accumulator")
        check_reduction(reduction)
        check_choice("batch_norm", batch_norm, get_args(BatchNorm))
        self._trained_model = models.trained(model, variables)
        optimizer = tuple(optimizer) if isinstance(optimizer, list) else optimizer
        check_aux("aux", aux, has_aux=has_aux)
        for name, value in (("model", model), ("optimizer", optimizer), ("aux", aux)):
            if isinstance(value, list | tuple | dict):  # which tf.Module would wrap
                object.__setattr__(self, name, value)
            else:
                setattr(self, name, value)
        self.loss, self.weight, self.has_aux, self.batch_norm = loss, weight, has_aux, batch_norm
        self.micro_batch_size, self.reduction, self.jit_compile = micro_batch_size, reduction, jit_compile
        self.num_traces = 0
        self.strategy = replicas.strategy_of(self._trained_model)
        self._optimizer = optimizers.of(optimizer, self.strategy)
        self._exclusive = Exclusive(self._trained)
        resume = "set accumulator.is_stopped = False to continue"
        self._nonfinite = NonFinite(on_nonfinite, max_skipped, warns=False, resume=resume)
        self._skipped_steps = SkippedSteps(self._nonfinite, self.strategy)
        of_model = self._trained_model, self._optimizer, self.strategy, reduction
        self._update = Update(*of_model, batch_norm, self._skipped_steps, self._exclusive, clip_norm, clip_value)
        self._missed = Missed()
        moments = MomentSums(self._trained_model, self.strategy, self._missed)
        self._window = PartialWindow(*of_model, accumulation_steps, moments)
        self._graphs = Graphs()
        self._has_seen_labels = False
        self._is_traced = False
        """Whether the user has a tf.function that was traced with `add` or `flush` in it."""
        self._mean_loss: Loss | None = None
        """The loss that was last found to be a mean."""
        with self.strategy.scope():
            self._last_step = tf.Variable(tf.zeros([5], WEIGHT), trainable=False, name="last_step")
            """Loss, total weight, norm, is_applied and num_micro_batches of the last step by `add` or `flush`."""
        if self._trained_model.trainable_variables:
            self._prepare()

    def __repr__(self) -> str:
        """The options that are not at their default, and the number of steps."""
        return f"{described(self)} after {int(self.num_steps)} step{'s' * (int(self.num_steps) != 1)}"

    @property
    def num_steps(self) -> tf.Variable:
        """How many steps were taken, applied or not."""
        return self._update.num_steps

    @property
    def is_stopped(self) -> bool:
        """Whether a step was skipped with `on_nonfinite="stop"`; set it to False to continue."""
        return self._nonfinite.is_stopped

    @is_stopped.setter
    def is_stopped(self, value: bool) -> None:
        self._nonfinite.is_stopped = value

    # --- a batch, or a window of micro-batches -----------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def step(self, batch: Any, *more: Never) -> Step:
        """Takes one step of the optimizer on the whole batch.

        Args:
            batch: A nest of tensors, which is cut along its leading axis, or a `Window` of micro-batches. Under a
                strategy it may come from a distributed dataset; plain tensors are spread over the replicas. A
                micro-batch of a Window counts once in `num_micro_batches`, however many replicas share it.
        """
        if more:
            raise BatchError(one_batch("step", 1 + len(more)))
        return self._run("step()", batch, self._update)

    @tf.autograph.experimental.do_not_convert
    def gradients(self, batch: Any, *more: Never) -> tuple[list[Gradient], Step]:
        """The gradient of the whole batch, without a step of the optimizer.

            gradients, step = accumulator.gradients(batch)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        stands for

            with tf.GradientTape() as tape:
                value = loss(model, batch)                # does not fit into memory
            gradients = tape.gradient(value, model.trainable_variables)

        The gradient is reduced over replicas, unscaled, and clipped if `clip_norm` or `clip_value` is set. It may not
        be finite: look at `step.grad_norm`. There is one for each trainable variable, in their order; it is None where
        the loss does not depend on the variable, and a tf.IndexedSlices where it is sparse. `step.is_applied` is False.

        Args:
            batch: As for `step`.
        """
        if more:
            raise BatchError(one_batch("gradients", 1 + len(more)))
        return self._run("gradients()", batch, self._update.without_step)

    def _run(self, call: str, batch: Any, finish: _Finish) -> Any:
        self._check_before(call)
        with self._exclusive.hold(call, range(self.strategy.num_replicas_in_sync)):
            self._window.check_whole()
            is_window = isinstance(batch, Window)
            if not self._has_seen_labels:
                self._has_seen_labels = True  # only the first batch is looked at, since that waits for the device
                if self.weight is None and self.reduction == "mean":
                    checks.warn_of_uncounted_labels(batch[0] if is_window and batch else batch)
            traced, result = self._run_window(batch, finish) if is_window else self._run_batch(batch, finish)
            size = None if is_window else self.micro_batch_size
            if finish is self._update:
                return self._update.step(result, size, traced.auxiliary)
            grads, result = result
            return grads, self._update.step(result, size, traced.auxiliary)

    def _run_batch(self, batch: Any, finish: _Finish) -> tuple[_Traced, Any]:
        """One graph: cut, weigh, forward and backward of each micro-batch, reduce, update."""
        if self.micro_batch_size is None:
            raise OptionError("step() does not know where to cut the batch: pass micro_batch_size=…, or a Window")
        layout = replicas.spread(self.strategy, batch)
        if self.micro_batch_size == 1:
            check_lists(batch, batch_size(layout))
        self._prepare_for(layout)
        name = "batch", self.micro_batch_size, finish is self._update
        with checks.explained():
            graph = self._graph(name, lambda backward: self._make_whole_batch_graph(backward, finish), layout)
            result = graph.call(*layout.tensors)
        return graph, result if self._optimizer.runs_in_graph else finish(result)

    def _run_window(self, window: Window[Any], finish: _Finish) -> tuple[_Traced, Any]:
        """A graph for each part: weigh every micro-batch; forward and backward of each; reduce and update."""
        if not window:
            raise BatchError("the window has 0 micro-batches: leave empty windows out of the stream")
        layouts = [replicas.spread(self.strategy, micro_batch) for micro_batch in window]
        self._prepare_for(layouts[0])
        with checks.explained():
            weights = [self._graph("weigh", self._make_weigh_graph, layout).call(*layout.tensors) for layout in layouts]
        total = replicas.total(self.strategy, weights)
        spec = tf.TensorSpec(total.shape, WEIGHT)
        sums = self._window.prepare_sums(total.shape[0])
        try:
            found = []
            with checks.explained():
                for layout in layouts:
                    add = self._graph("add", self._make_micro_batch_graph, layout, spec, graphs=sums.graphs)
                    found.append(add.call(total, *layout.tensors))
            aux = self._finish_beside(add, found, total)
            if not self._optimizer.runs_in_graph:
                return add, self._finish_window(total, finish, aux)
            return add, self._finish_graph(spec, finish, aux)(total, *aux)
        except BaseException:
            self._window.clear()
            raise

    def _finish_beside(self, traced: _Traced, found: Sequence[Beside], total: tf.Tensor) -> list[tf.Tensor]:
        """Across replicas: updates the moving statistics; returns the leaves of aux."""
        if any(each.moments for each in found):

            def pool(*moments: Any) -> None:
                pooled = traced.batch_norms.start()
                for each in moments:
                    pooled = traced.batch_norms.pool(pooled, each)
                traced.batch_norms.update(pooled)

            self.strategy.run(pool, args=tuple(each.moments for each in found))
        if traced.auxiliary is None:
            return []
        return traced.auxiliary.over_window(self.strategy, [each.aux for each in found], total[0])

    def _finish_window(
        self, total: tf.Tensor | None = None, finish: _Finish | None = None, aux: Sequence[tf.Tensor] = ()
    ) -> Any:
        """Across replicas: the update. Losses are checked only if `step` computed them: `add` may get none."""
        try:
            gradient = self._window.batch_gradient(total)._replace(aux=aux)
            if finish is not None:
                return finish(gradient)
            self._window.moments.update()
            return self._update(gradient, is_loss_checked=False)
        finally:
            self._window.clear()

    def _check_before(self, call: str) -> None:
        if self.loss is None:
            raise OptionError(f"{call} needs a loss: pass Accumulator(model, optimizer, loss, …)")
        if not tf.executing_eagerly():
            raise OrderError(f"{call} is a graph by itself: call it outside of tf.function, or use add() inside")
        self._nonfinite.check_not_stopped()
        if num := self._window.num_micro_batches():
            raise OrderError(f"a window of {num} micro-batches is open: call flush() before {call}")

    # --- graphs of step() --------------------------------------------------------------------------------

    def _graph(
        self,
        name: Any,
        make: Callable[[Backward], Callable[..., Any]],
        layout: Layout,
        *before: tf.TypeSpec,
        graphs: Graphs | None = None,
    ) -> _Traced:
        """The graph for batches of this structure. It is kept unless the batch holds objects that may change.

        `make(backward)` returns the function to trace. Its arguments have the types `before`, then those of the batch.
        A graph that uses the variables of a window is in the cache `graphs`, because they may be replaced.
        """

        def compiled(specs: Sequence[tf.TypeSpec]) -> Any:
            options = self.loss, self.weight, self.reduction, self.jit_compile
            auxiliary, batch_norms = (
                Auxiliary(self.aux) if self.has_aux else None,
                BatchNorms(self.batch_norm, self._missed),
            )
            model = self._trained_model, self.model
            backward = Backward(layout, *model, self._optimizer, *options, auxiliary, batch_norms)
            return _Traced(self._compiled(make(backward), [*before, *specs]), auxiliary, batch_norms)

        cache = (graphs or self._graphs) if layout.can_keep_graph else Graphs()
        made_of = self.loss, self.weight  # kept alive, so that their ids are not reused
        key = self._key(name, layout.structure, before)
        traced: _Traced = cache.get(key, layout.shapes, lambda: map(any_size, layout.tensors), compiled, made_of)
        return traced

    def _finish_graph(self, total: tf.TensorSpec, finish: _Finish, aux: Sequence[tf.Tensor]) -> Any:
        """The graph that ends a `Window`, as a function of the total weight and of the leaves of aux."""
        sums = self._window.sums
        specs = [total, *map(any_size, aux)]
        key = self._key(("finish", tuple(sums.present()), finish is self._update), *specs)

        def finish_window(total: tf.Tensor, *aux: tf.Tensor) -> Any:
            return self._finish_window(total, finish, aux)

        return sums.graphs.get(key, (), lambda: specs, lambda specs: self._compiled(finish_window, specs), ())

    def _key(self, name: Any, *types: Any) -> tuple[Any, ...]:
        """Everything a graph depends on besides the values of its arguments. If it changes, a new graph is traced."""
        ids = tuple(map(id, (self.loss, self.weight, *self._trained_model.trainable_variables)))
        return name, types, self._update.options(), ids, tf.config.functions_run_eagerly()

    def _compiled(self, function: Callable[..., Any], specs: Sequence[tf.TypeSpec]) -> Any:
        checks.check_trainable(self._trained_model, is_called=True)
        self._optimizer.check_knows(self._trained_model)
        graph = tf.function(function, input_signature=specs, autograph=False)
        # a concrete function is cheaper to call, but ignores run_functions_eagerly(True)
        return graph if tf.config.functions_run_eagerly() else graph.get_concrete_function()

    def _make_whole_batch_graph(self, backward: Backward, finish: _Finish) -> Callable[..., Any]:
        micro_batch_size: Any = self.micro_batch_size

        def whole_batch(*tensors: Any) -> Any:
            self.num_traces += 1
            gradient = self.strategy.run(lambda *own: accumulate(backward, own, micro_batch_size), args=tensors)
            if backward.auxiliary is not None:
                gradient = gradient._replace(aux=backward.auxiliary.of_replicas(self.strategy, gradient.aux))
            return finish(gradient) if self._optimizer.runs_in_graph else gradient

        return whole_batch

    def _make_weigh_graph(self, backward: Backward) -> Callable[..., Any]:
        return lambda *tensors: self.strategy.run(lambda *own: backward.weigh(own), args=tensors)

    def _make_micro_batch_graph(self, backward: Backward) -> Callable[..., Any]:
        def on_replica(total: tf.Tensor, *tensors: Any) -> Beside:
            weight = backward.weigh(tensors)
            share = backward.shares(weight, total)
            # reduction="sum" gives the share 1 even to a replica that has no sample
            share = tf.where(num_samples(tensors) > 0, share, tf.zeros_like(share))

            auxiliary = backward.auxiliary
            if auxiliary is not None or backward.may_have_moments:
                backward.traced(tensors, share.shape[0])  # now it is known what is beside

            def add(backward: Any, share: tf.Tensor) -> Beside:
                losses, grads, own = backward(tensors, share)
                self._window.sums.add(grads, weight[0], losses)
                return own if auxiliary is None else own._replace(aux=auxiliary.counted(own.aux, weight[0]))

            def skip() -> Beside:
                return Beside([] if auxiliary is None else auxiliary.nothing(), backward.batch_norms.start())

            own: Beside = backward.run_or_skip(share, num_samples(tensors), add, skip)
            return own

        def micro_batch(total: tf.Tensor, *tensors: Any) -> Beside:
            self.num_traces += 1
            own: Beside = self.strategy.run(on_replica, args=(total, *tensors))
            self._window.sums.end()
            return own

        return micro_batch

    # --- one micro-batch at a time -----------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def add(self, gradients: Sequence[Gradient], weight: Any = None, loss: Any = None) -> None:
        """Adds the gradient of one micro-batch of your own loop; the last one of a window takes the step.

            for x, y in dataset:
                with tf.GradientTape() as tape:
                    value = cross_entropy(y, model(x, training=True))
                accumulator.add(tape.gradient(value, model.trainable_variables), weight=len(y), loss=value)
            accumulator.flush()                               # the last, shorter window

        stands for

            for number, (x, y) in enumerate(dataset, 1):
                ...
                sums = [s + g * len(y) / total for s, g in zip(sums, gradients)]    # if the total were known
                if number % accumulation_steps == 0:
                    optimizer.apply_gradients(zip(sums, model.trainable_variables))

        It works in eager code, in your own `tf.function`, and in what `strategy.run` runs. `last_step` is the step.

        Args:
            gradients: The gradient of the micro-batch's mean loss: `tape.gradient(loss, model.trainable_variables)`.
            weight: Over how many samples or tokens the loss is a mean. Weights per sample are added up.
            loss: That loss. Without it the loss of the step is NaN.
        """
        weight = self._check_own_loop("add()", weight)
        with self._hold("add()"):
            self._missed.warn_in_add(self._trained_model, self.batch_norm)
            self._add(gradients, weight, float("nan") if loss is None else loss)

    @tf.autograph.experimental.do_not_convert
    @contextmanager
    def micro_batch(self, weight: Any = None) -> Iterator[MicroBatch]:
        """One micro-batch of your own loop, as `add` but with a tape of ours; the last one of a window takes the step.

            for x, y in dataset:
                with accumulator.micro_batch(weight=len(y)) as micro:
                    micro.backward(cross_entropy(y, model(x, training=True)))
            accumulator.flush()                               # the last, shorter window

        The block is a `tf.GradientTape()` and a `one_replica()`. `micro.backward(loss)` takes the gradient for the
        trainable variables, of the scaled loss if the optimizer scales it. `micro.skip()` leaves the micro-batch out.

        Args:
            weight: Over how many samples or tokens the loss is a mean. Weights per sample are added up.
        """
        weight = self._check_own_loop("micro_batch()", weight)
        with self._hold("micro_batch()"):
            is_pooled = self.batch_norm == "batch"
            batch_norms = self._window.moments if is_pooled else BatchNorms(self.batch_norm)
            with self.one_replica(), batch_norms.recording() as moments, tf.GradientTape() as tape:
                micro = MicroBatch(tape, replicas.trainable(self._trained_model), self._optimizer)
                try:
                    yield micro
                finally:
                    micro.is_over = True
            micro.check_fed()
            if micro.is_skipped or micro.gradients is None:
                return
            can_read = tf.executing_eagerly() and not replicas.is_shared()
            num_steps = int(self.num_steps.numpy()) if can_read else None
            self._add(micro.gradients, weight, micro.loss, moments)
            if can_read and int(self.num_steps.numpy()) != num_steps:
                micro.step = self.last_step

    def _check_own_loop(self, call: str, weight: Any) -> Any:
        """The weight of a micro-batch of the user's own loop; raises OptionError if something is missing for it."""
        if self.accumulation_steps is None:
            raise OptionError(f"{call} does not know how long a window is: pass accumulation_steps=…")
        if weight is None and self.reduction == "mean":
            raise OptionError(f"{call} needs weight=…: over how many samples or tokens the loss is a mean")
        return 1 if weight is None else weight

    @tf.autograph.experimental.do_not_convert  # the block of micro_batch() is code of the user's
    def _add(self, grads: Sequence[Gradient], weight: Any, loss: Any, moments: Sequence[Any] = ()) -> None:
        """On a replica."""
        context = self._check_before_add(grads)
        num_wanted = self._window.num_wanted(self.num_steps)
        weight = self._skipped_steps.checked(as_weight(weight))
        share = tf.ones([], WEIGHT) if self.reduction == "sum" else weight  # see PartialWindow
        losses = tf.math.multiply_no_nan(checks.as_loss(loss), share)[None]
        # if one replica is refused, none adds anything
        layers = [layer for layer, _ in moments]
        is_ready = context.merge_call(
            lambda _, *checked: self._begin_micro_batch(checked, layers), args=(weight, num_wanted, losses)
        )
        with tf.control_dependencies([is_ready]):
            grads = gradients.weighted([gradients.widened(g) for g in grads], share)
            self._window.sums.add(grads, weight, losses)
            self._window.moments.add(moments, None if self.reduction == "sum" else weight)
            context.merge_call(lambda _: self._end_micro_batch(num_wanted))

    def _check_before_add(self, grads: Any) -> Any:
        """Refuses what cannot be added; returns the replica context."""
        checks.check_trainable(self._trained_model, is_called=False)
        checks.check_gradients(grads, self._trained_model.trainable_variables)
        self._check_graph("add()")
        self._nonfinite.check_not_stopped()
        context = tf.distribute.get_replica_context()
        num = self.strategy.num_replicas_in_sync
        if context is None or context.num_replicas_in_sync != num:
            raise OrderError(f"the model is on {num} replicas: call add() in what strategy.run runs")
        if self.reduction == "mean":
            check_not_divided()
        return context

    def _begin_micro_batch(self, checked: Sequence[Any], layers: Sequence[Any]) -> tf.Tensor:
        """Across replicas, before any of them adds: waits for the checks of all replicas, also in a graph."""
        self._window.prepare_sums(1)
        self._update.prepare()
        if tf.executing_eagerly():
            self._window.check_whole()
            self._window.check_unchanged(self._num_changes())
            self._window.sums.begin()
        self._window.moments.begin(layers)
        local = self.strategy.experimental_local_results
        with tf.control_dependencies([result for each in checked for result in local(each)]):
            return tf.zeros([])

    def _end_micro_batch(self, num_wanted: tf.Tensor) -> None:
        """Across replicas, after all of them added: takes the step if the window is full."""
        self._window.sums.end(self._optimizer.num_steps())
        tf.cond(self._window.sums.count >= num_wanted, self._close, lambda: None)

    @tf.autograph.experimental.do_not_convert
    def flush(self) -> Step | None:
        """Takes the step of the open window, however short; None if none is open.

        In your own `tf.function` it always returns None: read `last_step`.
        """
        with self._hold("flush()"):
            self._check_graph("flush()")
            if not tf.executing_eagerly():
                sums = self._window.sums
                if sums.present():
                    tf.cond(sums.count > 0, self._close, lambda: None)
                else:
                    tf.debugging.Assert(sums.count == 0, [OTHER_VARIABLES])
                return None
            self._window.check_whole()
            if not self._window.num_micro_batches():
                return None
            self._window.check_unchanged(self._num_changes())
            self._close()
            return self.last_step

    def _close(self) -> None:
        """Across replicas: takes the step of the window that `add` filled."""
        result = self._finish_window()
        values = tf.reduce_sum(result.losses), tf.reduce_sum(result.total), *result[2:5]
        self._last_step.assign(tf.stack([tf.cast(value, WEIGHT) for value in values]))
        if tf.executing_eagerly():
            self._update.step(result)

    def verify(self, batch: Any, **options: Any) -> Verification:
        """Compares the gradient of the full batch with the accumulated one; `bigbatch.tensorflow.verify` describes it.

        Args:
            batch: A batch that fits into memory.
            **options: `tolerance` and `dtype` of `verify`.
        """
        from .verify.verify import verify  # it uses Accumulator

        if self.loss is None or self.micro_batch_size is None:
            raise OptionError("verify() needs a loss and a micro_batch_size: pass both to Accumulator")
        own: dict[str, Any] = {"weight": self.weight, "reduction": self.reduction}
        own |= {"has_aux": self.has_aux, "batch_norm": self.batch_norm}
        return verify(self.model, batch, self.loss, self.micro_batch_size, **own, **options)

    @property
    def last_step(self) -> Step | None:
        """The last step that `add` or `flush` took; None before the first."""
        loss, total, norm, is_applied, num_micro_batches = self._last_step.numpy()
        if not num_micro_batches:
            return None
        return self._update.step(Result([loss], [total], norm, is_applied, num_micro_batches))

    def one_replica(self) -> AbstractContextManager[None]:
        """Makes a loss whose gradient goes to `add` divide by one replica instead of all of them.

            def on_replica(x, y):
                with tf.GradientTape() as tape, accumulator.one_replica():
                    value = tf.nn.compute_average_loss(cross_entropy(y, model(x, training=True)))
                accumulator.add(tape.gradient(value, model.trainable_variables), weight=len(y), loss=value)

        Keras's losses, tf.nn.compute_average_loss, tf.nn.scale_regularization_loss and everything else that reads
        `strategy.num_replicas_in_sync` then give the mean over this replica's micro-batch, which `add` expects. `step`
        computes its loss in this way.
        """
        return one_replica(LossContext(1 if self.reduction == "sum" else None))

    def _hold(self, call: str) -> AbstractContextManager[None]:
        """Refuses concurrent calls, per replica where replicas call. A running graph cannot be tracked."""
        if not tf.executing_eagerly():
            return nullcontext()
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            return self._exclusive.hold(call, [int(context.replica_id_in_sync_group)])
        return self._exclusive.hold(call, range(self.strategy.num_replicas_in_sync))

    def __getattr__(self, name: str) -> Any:
        """Names of other frameworks, and what to call here instead."""
        remedy = _ELSEWHERE.get(name)
        text = f"{type(self).__name__} has no {name}"
        raise AttributeError(f"{text} in TensorFlow: {remedy}" if remedy else text, name=name, obj=self)

    def _trained(self) -> list[Any]:
        """What only one call at a time may train."""
        return [self.model, *self._optimizer.optimizers, *replicas.trainable(self._trained_model)]

    def _num_changes(self) -> int:
        """How often the variables were changed. Frozen ones have no lock, so a sum is compared and not a list."""
        _num_variables, *num_changes = self._exclusive.num_changes()
        return sum(num_changes)

    def _check_graph(self, call: str) -> None:
        """Refuses options that need to raise or to run Python, which the user's own graph cannot."""
        if tf.executing_eagerly():
            return
        if not self._optimizer.runs_in_graph:
            name = type(self.optimizer).__name__
            raise OptionError(f"{name} steps in eager code only: call {call} outside of tf.function")
        if self.on_nonfinite != "skip":
            raise OptionError(
                f'on_nonfinite="{self.on_nonfinite}" works in eager code only: pass "skip" for your own tf.function, '
                "and look at last_step"
            )
        self._is_traced = True

    # --- before the first step ---------------------------------------------------------------------------

    def _prepare_for(self, layout: Layout) -> None:
        """Builds the model if it has no variables; on replicas, checks that the loss is a mean."""
        if not self._update.is_ready and not self._trained_model.trainable_variables:

            def on_replica(*own: Any) -> None:
                # building it leaves moving statistics alone
                with one_replica(LossContext(1)), BatchNorms("frozen").recording():
                    self.loss(self.model, layout.pack([slice_rows(tensor, 0, 1) for tensor in own]))

            self.strategy.run(on_replica, args=layout.tensors)
            checks.check_trainable(self._trained_model, is_called=True)
        self._prepare()
        # on replicas, losses are divided by the size of the whole batch
        if self.strategy.num_replicas_in_sync > 1 and self.reduction == "mean" and self._mean_loss is not self.loss:
            loss = without_aux(self.loss, self.model, has_aux=self.has_aux)
            check_mean(self._trained_model, loss, self.weight, self.strategy, layout)
            self._mean_loss = self.loss

    def _prepare(self) -> None:
        if self._update.is_ready:
            return
        self._update.prepare()
        if self.micro_batch_size is None:  # a checkpoint in the middle of a window needs its variables
            self._window.prepare_sums(1)
            if self.batch_norm == "batch":
                self._window.moments.prepare()
