"""The accumulator: one graph a window, on one device or under any tf.distribute strategy."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ..core.errors import BatchError, GradientError, OptionError, OrderError
from ..core.step import Step
from ..core.weight import Reduction, check_reduction, from_terms
from ..core.window import AccumulationSteps, Window, positive, steps_at
from . import checks, gradients, nest, replicas
from .checks import WEIGHT
from .gradients import Gradient
from .optimizer import Optimizer
from .sums import OTHER_VARIABLES, Sums
from .window import WindowGraph

Loss = Callable[[Any, Any], Any]
Weight = Callable[[Any], Any]


class Graphs:
    """The graphs that were made; a plain dict would be taken into checkpoints by tf.Module."""

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}


class Accumulator(tf.Module):
    """Stands for the body of a training loop, and gives the gradient of the whole batch.

        with tf.GradientTape() as tape:
            value = loss(model, batch)                # does not fit into memory
        optimizer.apply_gradients(zip(tape.gradient(value, model.trainable_variables), model.trainable_variables))

    becomes

        accumulator = Accumulator(model, optimizer, loss, micro_batch_size=8)
        step = accumulator.step(batch)

    The window is one `tf.function` with a `tf.while_loop` over the micro-batches. In a loop with a tape of its own:

        accumulator = Accumulator(model, optimizer, accumulation_steps=4)
        accumulator.add(tape.gradient(value, model.trainable_variables), weight=len(y))
        accumulator.flush()                           # the last, shorter window

    For a model that was made under a strategy the batch is the union of all replicas'.
    """

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
        jit_compile: bool = False,
    ) -> None:
        super().__init__(name="accumulator")
        check_reduction(reduction)
        checks.check_clip("clip_norm", clip_norm)
        checks.check_clip("clip_value", clip_value)
        if micro_batch_size is not None:
            micro_batch_size = positive("micro_batch_size", micro_batch_size)
        if accumulation_steps is not None and not callable(accumulation_steps):
            accumulation_steps = positive("accumulation_steps", accumulation_steps)
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.weight = weight
        self.micro_batch_size = micro_batch_size
        self.accumulation_steps = accumulation_steps
        self.reduction: Reduction = reduction
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.jit_compile = jit_compile
        self.num_traces = 0
        """How many graphs were made of batches; it stays the same while only their sizes vary."""
        self.strategy = replicas.strategy_of(model)
        with self.strategy.scope():
            self.num_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="num_steps")
            """How many windows are done, applied or not."""
            self._told = tf.Variable(tf.zeros([5], WEIGHT), trainable=False, name="told")
        self._optimizer = Optimizer(optimizer, self.strategy)
        self._sums: Sums | None = None
        self._graphs = Graphs()
        self._is_ready = False
        if model.trainable_variables:
            self._prepare()

    # --- a batch, or a window of micro-batches -----------------------------------------------------------

    def step(self, batch: Any) -> Step:
        """One step of the optimizer on the whole batch: a nest of tensors that is cut, or a `Window`."""
        if self.loss is None:
            raise OptionError("step() needs a loss: pass Accumulator(model, optimizer, loss, …)")
        if self._sums is not None and (count := int(self._sums.count.numpy())):
            raise OrderError(f"a window of {count} micro-batches is open: call flush() before step()")
        if isinstance(batch, Window):
            return self._step_window(batch)
        if self.micro_batch_size is None:
            raise OptionError("step() does not know where to cut the batch: pass micro_batch_size=…, or a Window")
        layout, tensors = self._spread(batch)
        self._build(layout, tensors)
        with checks.telling_bad_weights():
            found = self._compiled(("batch", self.micro_batch_size), self._on_batch, layout, tensors)(*tensors)
        return self._stepped(*(found if self._optimizer.runs_in_graph else self._applied(*found)))

    def _step_window(self, window: Window[Any]) -> Step:
        if not window:
            raise BatchError("the window has 0 micro-batches: leave empty windows out of the stream")
        spread = [self._spread(micro_batch) for micro_batch in window]
        self._build(*spread[0])
        with checks.telling_bad_weights():
            weights = [self._compiled("weigh", self._on_weigh, *each)(*each[1]) for each in spread]
        total = replicas.total(self.strategy, weights)
        spec = tf.TensorSpec(total.shape, WEIGHT)
        sums = self._sums_for(total.shape[0])
        try:
            for each in spread:
                self._compiled(("add", id(sums)), self._on_add, *each, spec)(total, *each[1])
            close: Any = self._close
            if self._optimizer.runs_in_graph:
                name = ("close", id(sums), tuple(sums.present()))
                close = self._compiled(name, lambda _: self._close, nest.Layout(()), [], spec)
            return self._stepped(*close(total))
        except BaseException:
            self._clear()
            raise

    def _spread(self, batch: Any) -> tuple[nest.Layout, list[Any]]:
        """The batch's layout, and its tensors: one part for each replica where there are several."""
        leaves = tf.nest.flatten(batch)
        if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
            local = self.strategy.experimental_local_results
            layout = nest.Layout(tf.nest.map_structure(lambda leaf: local(leaf)[0], batch))
            return layout, [leaves[k] for k in layout.places]
        layout = nest.Layout(batch)
        batch_size = nest.batch_size(layout)
        if self.strategy.num_replicas_in_sync > 1:
            return layout, [replicas.spread(self.strategy, tensor, batch_size) for tensor in layout.tensors]
        if batch_size == 0:
            raise BatchError(f"{layout.names()[0]} has 0 samples: leave empty batches out of the stream")
        return layout, layout.tensors

    def _compiled(
        self, name: Any, make: Callable[..., Any], layout: nest.Layout, tensors: Sequence[Any], *more: tf.TypeSpec
    ) -> Any:
        """A graph for this kind of batch, of any size; made once."""
        specs = [*more, *map(replicas.any_size, tensors)]
        key = (name, layout.key, tuple(specs), tuple(map(id, self.model.trainable_variables)))
        made = self._graphs.made
        if key not in made:
            made[key] = tf.function(make(layout), input_signature=specs, autograph=False)
        return made[key]

    def _window_graph(self, layout: nest.Layout) -> WindowGraph:
        return WindowGraph(
            layout,
            lambda batch: self.loss(self.model, batch),  # type: ignore[misc]
            self.weight,
            self.reduction,
            self._variables,
            self._optimizer,
            self.jit_compile,
        )

    def _on_batch(self, layout: nest.Layout) -> Callable[..., Any]:
        graph = self._window_graph(layout)

        def on_replica(*tensors: Any) -> Any:
            found, losses, total, num = graph.over(tensors, self.micro_batch_size or 1)
            return (*self._finished(found, total), losses, total, num)

        def window(*tensors: Any) -> Any:
            self.num_traces += 1
            found = self.strategy.run(on_replica, args=tensors)
            return self._applied(*found) if self._optimizer.runs_in_graph else found

        return window

    def _on_weigh(self, layout: nest.Layout) -> Callable[..., Any]:
        graph = self._window_graph(layout)

        return lambda *tensors: self.strategy.run(lambda *own: graph.weight_of(own), args=tensors)

    def _on_add(self, layout: nest.Layout) -> Callable[..., Any]:
        graph = self._window_graph(layout)

        def on_replica(total: tf.Tensor, *tensors: Any) -> None:
            weight = graph.weight_of(tensors)
            scale = graph.scales(weight, total)

            def count() -> None:
                losses, found = graph.micro(tensors, scale)
                self.sums.add(found, weight[0], losses)

            tf.cond(tf.reduce_any(scale > 0), count, lambda: None)

        def add(total: tf.Tensor, *tensors: Any) -> None:
            self.num_traces += 1
            self.strategy.run(on_replica, args=(total, *tensors))
            self.sums.counted()

        return add

    # --- gradients that the user took --------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def add(self, gradients: Sequence[Gradient], weight: Any = None, loss: Any = None) -> None:
        """Adds the gradient of one micro-batch's mean loss over `weight`; makes the step at the window's end.

        In eager code, in a `tf.function`, or in what `strategy.run` runs. `last_step` tells of the step; with `loss`
        it has the loss of the whole batch too.
        """
        if self.accumulation_steps is None:
            raise OptionError("add() does not know how long a window is: pass accumulation_steps=…")
        if weight is None and self.reduction == "mean":
            raise OptionError("add() needs weight=…: over how many samples or tokens the loss is a mean")
        variables = self._variables()
        checks.check_gradients(gradients, variables)
        self._check_eager("add()")
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync != self.strategy.num_replicas_in_sync:
            raise OrderError(
                f"the model is on {self.strategy.num_replicas_in_sync} replicas: call add() in what strategy.run runs"
            )
        counted = checks.weight_at_hand(1 if weight is None else weight)
        factor = tf.ones([], WEIGHT) if self.reduction == "sum" else counted
        value = tf.cast(float("nan") if loss is None else loss, WEIGHT)
        value = value if loss is None else tf.math.multiply_no_nan(value, factor)
        if not self._is_ready or self._sums is None or not self._sums.fits(variables, 1):
            context.merge_call(lambda _: self._prepare_sums())
        self.sums.add(self._weighted(gradients, factor), counted, value[None])
        context.merge_call(lambda _: self._count())

    def _prepare_sums(self) -> None:
        """Across replicas: makes what no replica can make by itself."""
        with tf.init_scope():
            self._sums_for(1)
            self._prepare()

    def _check_eager(self, call: str) -> None:
        if not self._optimizer.runs_in_graph and not tf.executing_eagerly():
            raise OptionError(
                f"{type(self.optimizer).__name__} steps in eager code only: call {call} outside of tf.function"
            )

    @tf.autograph.experimental.do_not_convert
    def flush(self) -> Step | None:
        """Makes the step of the window that is open, however short; in eager code None if none is."""
        self._check_eager("flush()")
        if not tf.executing_eagerly():
            if self.sums.present():
                tf.cond(self.sums.count > 0, self._close_told, lambda: None)
            else:
                tf.debugging.Assert(self.sums.count == 0, [OTHER_VARIABLES])
            return None
        if self._sums is None or not int(self._sums.count.numpy()):
            return None
        self._close_told()
        return self.last_step

    @property
    def last_step(self) -> Step | None:
        """The step that `add` or `flush` made last; None before the first."""
        told = self._told.numpy()
        if not int(told[4]):
            return None
        return self._stepped(told[0:1], told[1:2], told[2], told[3], told[4])

    @property
    def sums(self) -> Sums:
        return self._sums_for(1) if self._sums is None else self._sums

    def _sums_for(self, num_terms: int) -> Sums:
        """Sums for the variables that are trained now."""
        variables = self._variables()
        if not variables:
            raise OrderError("the model has no variables yet: call it on a batch once, then make the accumulator")
        if self._sums is None or not self._sums.fits(variables, num_terms):
            with tf.init_scope():
                if self._sums is not None and int(self._sums.count.numpy()):
                    raise OrderError(
                        f"the trainable variables changed in the middle of a window ({len(self._sums.gradients)} then, "
                        f"{len(variables)} now): call flush() before that"
                    )
                self._sums = Sums(variables, self.strategy, num_terms)
        return self._sums

    def _weighted(self, found: Sequence[Gradient], factor: tf.Tensor) -> list[Gradient]:
        return gradients.weighted([gradients.widened(g) for g in found], factor)

    def _count(self) -> None:
        """Across replicas: one more micro-batch, and the step if it was the window's last."""
        self.sums.counted()
        steps: Any = self.accumulation_steps
        if callable(steps):
            eager = tf.executing_eagerly()
            steps = steps_at(steps, int(self.num_steps.numpy())) if eager else tf.cast(steps(self.num_steps), tf.int32)
        tf.cond(self.sums.count >= steps, self._close_told, lambda: None)

    def _close_told(self) -> None:
        losses, total, norm, is_applied, num = self._close(None)
        told = [tf.reduce_sum(losses), tf.reduce_sum(total), norm, is_applied, num]
        self._told.assign(tf.stack([tf.cast(value, WEIGHT) for value in told]))

    def _close(self, total: tf.Tensor | None) -> Any:
        """Across replicas: the step on what was added up. A total is given if that is divided by it already."""
        present = self.sums.present()

        def on_replica() -> Any:
            found, weight, losses = self.sums.read(present)
            by = total
            if by is None:
                by = weight[None]
                if self.reduction == "mean":
                    inverse = tf.math.divide_no_nan(tf.ones([], WEIGHT), weight)
                    found, losses = gradients.scaled(found, inverse), losses * inverse
            return (*self._finished(found, by), losses, by, tf.identity(self.sums.count))

        try:
            return self._applied(*self.strategy.run(on_replica))
        finally:
            self._clear()

    def _clear(self) -> None:
        self.strategy.run(self.sums.clear)
        self.sums.cleared()

    # --- what all ways share -----------------------------------------------------------------------------

    def _finished(self, found: list[Gradient], total: tf.Tensor) -> tuple[Any, ...]:
        """On a replica: the gradient of the whole batch, checked and clipped; the same on all of them."""
        if all(g is None for g in found):
            raise GradientError("the loss reached none of the model's trainable variables: compute it with the model")
        unit = tf.cast(self._optimizer.scale(), WEIGHT)
        norm = gradients.norm(found) / unit
        has_weight = tf.reduce_any(total > 0) | (self.reduction == "sum")
        found = gradients.clipped(found, norm, self.clip_norm, self.clip_value, unit)
        return found, norm, tf.math.is_finite(norm), has_weight

    def _applied(
        self, found: Any, norm: Any, is_finite: Any, has_weight: Any, losses: Any, total: Any, num: Any
    ) -> tuple[Any, ...]:
        """Across replicas: the step, if the gradient is finite and counts anything."""
        norm, is_finite, has_weight, losses, total, num = (
            self.strategy.experimental_local_results(value)[0]
            for value in (norm, is_finite, has_weight, losses, total, num)
        )

        def on_replica(found: Any) -> None:
            variables = self.model.trainable_variables if self._optimizer.kind == "keras" else self._variables()
            self._optimizer.apply(found, variables)

        def apply() -> None:
            with self._optimizer.reduced_already():
                self.strategy.run(on_replica, args=(found,))

        def skip() -> None:
            if not self._optimizer.is_scaling:
                told = "bigbatch: a step was skipped, since its gradient is not finite; no variable was changed"
                tf.cond(has_weight, lambda: tf.print(told, output_stream=sys.stderr), tf.no_op)

        # an optimizer that scales the loss must see what is not finite, to lower its scale
        tf.cond(has_weight & (is_finite | self._optimizer.is_scaling), apply, skip)
        self.num_steps.assign_add(1)
        return losses, total, norm, has_weight & is_finite, num

    def _stepped(self, losses: Any, total: Any, norm: Any, is_applied: Any, num: Any) -> Step:
        return Step(
            terms=lambda: tuple(map(float, losses)),
            weight=lambda: from_terms(tuple(map(float, total))),
            grad_norm=lambda: float(norm),
            num_micro_batches=int(num),
            micro_batch_size=self.micro_batch_size,
            is_applied=lambda: bool(is_applied),
            reduction=self.reduction,
        )

    def _variables(self) -> list[Any]:
        return [replicas.as_tf_variable(v) for v in self.model.trainable_variables]

    def _build(self, layout: nest.Layout, tensors: Sequence[Any]) -> None:
        """Makes the variables of a model that makes them when it is first called."""

        def on_replica(*own: Any) -> None:
            self.loss(self.model, layout.pack([nest.part(tensor, 0, 1) for tensor in own]))  # type: ignore[misc]

        if not self.model.trainable_variables:
            self.strategy.run(on_replica, args=tensors)
        self._prepare()

    def _prepare(self) -> None:
        """Makes what no graph can make: the optimizer's variables and the sums."""
        if self._is_ready:
            return
        self._is_ready = True
        with self.strategy.scope():
            self._optimizer.build(self.model.trainable_variables)
        if self.micro_batch_size is None:
            self._sums = Sums(self._variables(), self.strategy)
        checks.tell_batch_norm(self.model)
