"""The accumulator: one graph a window, on one device or under any tf.distribute strategy."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from ..core.errors import BatchError, OptionError, OrderError
from ..core.options import Fixed, Option, check_callable, check_size
from ..core.step import Step
from ..core.weight import Reduction, check_reduction
from ..core.window import AccumulationSteps, Window, check_lists
from . import batch as nest
from . import checks
from .checks import WEIGHT
from .distributed import replicas
from .distributed.is_mean import check_is_mean
from .distributed.one_replica import Share, one_replica
from .gradients import Gradient
from .graphs import Graphs
from .nonfinite import OnNonFinite, Outcome
from .partial_window import OpenWindow
from .update import Update
from .window import WindowGraph

Loss = Callable[[Any, Any], Any]
Weight = Callable[[Any], Any]


class PartOption:
    """An option that a part of the accumulator holds; a graph of the user's that has add() in it was made with it."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, accumulator: Any, owner: type | None = None) -> Any:
        return self if accumulator is None else getattr(getattr(accumulator, self._part), self._name)

    def __set__(self, accumulator: Any, value: Any) -> None:
        if accumulator._window.is_traced and value != self.__get__(accumulator):
            raise OptionError(
                f"{self._name} cannot be changed any more, since a tf.function of yours that calls add() or flush() "
                "was made with it: set it before, or make a new Accumulator"
            )
        setattr(getattr(accumulator, self._part), self._name, value)


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

    `accumulator.clip_norm = 0.5` and the like are checked as here, and used from the next step on. What is built when
    the accumulator is made (model, optimizer, reduction, jit_compile) cannot be changed.
    """

    model, optimizer, reduction, jit_compile = Fixed(), Fixed(), Fixed(), Fixed()
    loss, weight = Option(check_callable), Option(check_callable)
    micro_batch_size = Option(check_size)
    accumulation_steps = PartOption("_window")
    clip_norm, clip_value = PartOption("_update"), PartOption("_update")
    on_nonfinite, max_skipped = PartOption("_outcome"), PartOption("_outcome")

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
    ) -> None:
        super().__init__(name="accumulator")
        check_reduction(reduction)
        checks.check_model(model)
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.weight = weight
        self.micro_batch_size = micro_batch_size
        self.reduction = reduction
        self.jit_compile = jit_compile
        self.num_traces = 0
        """How many graphs were made of batches; it stays the same while only their sizes vary, or soon does."""
        self.strategy = replicas.strategy_of(model)
        self._outcome = Outcome(on_nonfinite, max_skipped, self.strategy)
        self._update = Update(model, optimizer, self.strategy, reduction, clip_norm, clip_value, self._outcome)
        self._window = OpenWindow(self._update, accumulation_steps)
        self._graphs = Graphs()
        self._is_mean: Loss | None = None
        """The loss that was tried and is a mean."""
        if model.trainable_variables:
            self._prepare()

    # --- a batch, or a window of micro-batches -----------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def step(self, batch: Any) -> Step:
        """One step of the optimizer on the whole batch: a nest of tensors that is cut, or a `Window`."""
        if self.loss is None:
            raise OptionError("step() needs a loss: pass Accumulator(model, optimizer, loss, …)")
        if not tf.executing_eagerly():
            raise OrderError("step() is a graph by itself: call it outside of tf.function, or use add() inside")
        self._outcome.check_going()
        if count := self._window.num_micro_batches():
            raise OrderError(f"a window of {count} micro-batches is open: call flush() before step()")
        with self._update.alone():
            self._window.check_whole()
            return self._step_window(batch) if isinstance(batch, Window) else self._step_batch(batch)

    def _step_batch(self, batch: Any) -> Step:
        if self.micro_batch_size is None:
            raise OptionError("step() does not know where to cut the batch: pass micro_batch_size=…, or a Window")
        layout, tensors = self._spread(batch)
        if self.micro_batch_size == 1:
            check_lists(batch, nest.batch_size(layout))
        self._build(layout, tensors)
        self._check_is_mean(layout, tensors)
        with checks.telling():
            found = self._compiled(("batch", self.micro_batch_size), self._on_batch, layout, tensors)(*tensors)
        return self._told(found if self._update.optimizer.runs_in_graph else self._update.applied(*found))

    def _step_window(self, window: Window[Any]) -> Step:
        if not window:
            raise BatchError("the window has 0 micro-batches: leave empty windows out of the stream")
        spread = [self._spread(micro_batch) for micro_batch in window]
        self._build(*spread[0])
        self._check_is_mean(*spread[0])
        with checks.telling():
            weights = [self._compiled("weigh", self._on_weigh, *each)(*each[1]) for each in spread]
        replicas.check_terms(self.strategy, weights)
        total = replicas.total(self.strategy, weights)
        spec = tf.TensorSpec(total.shape, WEIGHT)
        sums = self._window.sums_for(total.shape[0])
        try:
            with checks.telling():
                for each in spread:
                    self._compiled("add", self._on_add, *each, spec, graphs=sums.graphs)(total, *each[1])
            close: Any = self._window.close
            if self._update.optimizer.runs_in_graph:
                name = ("close", tuple(sums.present()))
                close = self._compiled(
                    name, lambda _: self._window.close, nest.Layout(()), [], spec, graphs=sums.graphs
                )
            return self._told(close(total))
        except BaseException:
            self._window.clear()
            raise

    def _check_is_mean(self, layout: nest.Layout, tensors: Sequence[Any]) -> None:
        """Once for every loss, on replicas only: that is where losses are divided by the size of the whole batch."""
        if self.strategy.num_replicas_in_sync == 1 or self.reduction == "sum" or self._is_mean is self.loss:
            return

        def loss(own: Sequence[Any]) -> Any:
            return self.loss(self.model, layout.pack(own))

        def weight(own: Sequence[Any]) -> Any:
            batch = layout.pack(own)
            return nest.batch_size(nest.Layout(batch)) if self.weight is None else self.weight(batch)

        check_is_mean(self.model, loss, weight, self.strategy, tensors)
        self._is_mean = self.loss

    def _told(self, found: Any) -> Step:
        self._update.check(found)
        return self._update.told(found, self.micro_batch_size)

    def _spread(self, batch: Any) -> tuple[nest.Layout, list[Any]]:
        """The batch's layout, and its tensors: one part for each replica where there are several."""
        num_replicas = self.strategy.num_replicas_in_sync
        is_spread = num_replicas > 1 and replicas.is_spread(batch)
        layouts = [nest.Layout(part) for part in (replicas.parts(self.strategy, batch) if is_spread else [batch])]
        layout = layouts[0]
        layout.others = layouts[1:]
        batch_size = sum(map(nest.batch_size, layouts))
        if batch_size == 0 and not is_spread and replicas.are_all_here(self.strategy):
            raise BatchError(f"{layout.names()[0]} has 0 samples: leave empty batches out of the stream")
        if is_spread:
            leaves = tf.nest.flatten(batch)
            return layout, [leaves[k] for k in layout.places]
        if num_replicas > 1:
            return layout, [replicas.spread(self.strategy, tensor, batch_size) for tensor in layout.tensors]
        return layout, layout.tensors

    def _compiled(
        self,
        name: Any,
        make: Callable[..., Any],
        layout: nest.Layout,
        tensors: Sequence[Any],
        *more: tf.TypeSpec,
        graphs: Graphs | None = None,
    ) -> Any:
        """A graph for this kind of batch, of any size; made once, unless something in the batch may change.

        `graphs` are those that use certain sums.
        """
        in_python = tf.config.functions_run_eagerly()  # to be looked into
        functions = (self.loss, self.weight)  # kept with the graph, so that nothing else gets their ids
        options = self.clip_norm, self.clip_value, self.on_nonfinite
        ids = tuple(map(id, (*functions, *self.model.trainable_variables)))
        key = (name, layout.kind, more, options, ids, in_python)

        def compiled(specs: Sequence[tf.TypeSpec]) -> Any:
            checks.check_trainable(self.model, is_called=True)
            self._update.optimizer.check_knows(self.model.trainable_variables)
            function = tf.function(make(layout), input_signature=[*more, *specs], autograph=False)
            return function if in_python else function.get_concrete_function()  # which is cheaper to call

        kept = (graphs or self._graphs) if layout.is_lasting else Graphs()
        return kept.graph(key, layout.shapes, lambda: map(replicas.any_size, tensors), compiled, functions)

    def _window_graph(self, layout: nest.Layout) -> WindowGraph:
        return WindowGraph(
            layout,
            functools.partial(self.loss, self.model),
            self.weight,
            self.reduction,
            self._update.variables_now,
            self._update.optimizer,
            self.jit_compile,
        )

    def _on_batch(self, layout: nest.Layout) -> Callable[..., Any]:
        graph = self._window_graph(layout)

        def on_replica(*tensors: Any) -> Any:
            found, losses, total, num = graph.over(tensors, self.micro_batch_size or 1)
            return (*self._update.finished(found, total), losses, total, num)

        def window(*tensors: Any) -> Any:
            self.num_traces += 1
            found = self.strategy.run(on_replica, args=tensors)
            return self._update.applied(*found) if self._update.optimizer.runs_in_graph else found

        return window

    def _on_weigh(self, layout: nest.Layout) -> Callable[..., Any]:
        graph = self._window_graph(layout)

        return lambda *tensors: self.strategy.run(lambda *own: graph.weight_of(own), args=tensors)

    def _on_add(self, layout: nest.Layout) -> Callable[..., Any]:
        graph = self._window_graph(layout)

        def on_replica(total: tf.Tensor, *tensors: Any) -> None:
            weight = graph.weight_of(tensors)
            scale = graph.scales(weight, total)

            def count(micro: Any) -> None:
                losses, found = micro(tensors, scale)
                self._window.sums.add(found, weight[0], losses)

            graph.counted(scale, count, lambda: None)

        def add(total: tf.Tensor, *tensors: Any) -> None:
            self.num_traces += 1
            self.strategy.run(on_replica, args=(total, *tensors))
            self._window.sums.counted()

        return add

    # --- gradients that the user took --------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def add(self, gradients: Sequence[Gradient], weight: Any = None, loss: Any = None) -> None:
        """Adds the gradient of one micro-batch's mean loss over `weight`; makes the step at the window's end.

        In eager code, in a `tf.function`, or in what `strategy.run` runs. `last_step` tells of the step; with `loss`
        it has the loss of the whole batch too.
        """
        with self._alone_if_eager():
            self._window.add(gradients, weight, loss)

    @tf.autograph.experimental.do_not_convert
    def flush(self) -> Step | None:
        """Makes the step of the window that is open, however short; in eager code None if none is."""
        with self._alone_if_eager():
            return self._window.flush()

    def one_replica(self) -> AbstractContextManager[None]:
        """Around a loss whose gradient goes to `add`: a loss that divides by the number of replicas divides by one.

            def on_replica(x, y):
                with tf.GradientTape() as tape, accumulator.one_replica():
                    value = tf.nn.compute_average_loss(cross_entropy(y, model(x, training=True)))
                accumulator.add(tape.gradient(value, model.trainable_variables), weight=len(y), loss=value)

        Keras's losses, tf.nn.compute_average_loss, tf.nn.scale_regularization_loss and whatever else reads
        `strategy.num_replicas_in_sync` give the mean over this replica's micro-batch then, which is what `add` wants.
        `step` computes its loss so by itself.
        """
        return one_replica(Share(1 if self.reduction == "sum" else None))

    def _alone_if_eager(self) -> AbstractContextManager[None]:
        """On the replica that calls, if one does; when a graph is run, nobody sees who runs it."""
        if not tf.executing_eagerly():
            return nullcontext()
        context = tf.distribute.get_replica_context()
        is_on_replica = context is not None and context.num_replicas_in_sync > 1
        return self._update.alone(int(context.replica_id_in_sync_group) if is_on_replica else None)

    @property
    def last_step(self) -> Step | None:
        """The step that `add` or `flush` made last; None before the first."""
        return self._window.last_step

    @property
    def num_steps(self) -> tf.Variable:
        """How many windows are done, applied or not."""
        return self._update.num_steps

    @property
    def is_stopped(self) -> bool:
        """Whether a gradient that is not finite ended the run (on_nonfinite="stop"); set it to False to go on."""
        return self._outcome.is_stopped

    @is_stopped.setter
    def is_stopped(self, value: bool) -> None:
        self._outcome.is_stopped = value

    # --- before the first step ---------------------------------------------------------------------------

    def _build(self, layout: nest.Layout, tensors: Sequence[Any]) -> None:
        """Makes the variables of a model that makes them when it is first called."""
        if self._update.is_ready:
            return

        def on_replica(*own: Any) -> None:
            with one_replica(Share(1)):
                self.loss(self.model, layout.pack([nest.part(tensor, 0, 1) for tensor in own]))

        if not self.model.trainable_variables:
            self.strategy.run(on_replica, args=tensors)
            checks.check_trainable(self.model, is_called=True)
        self._prepare()

    def _prepare(self) -> None:
        self._update.prepare()
        if self.micro_batch_size is None:  # a checkpoint of the middle of a window wants to find them
            self._window.sums_for(1)
