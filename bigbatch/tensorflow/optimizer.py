"""Steps an optimizer of any library with a gradient that is already reduced over all replicas."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from ..core.errors import OptionError
from .checks import name_of
from .distributed.replicas import as_tf_variable, trainable
from .gradients import Gradient
from .internals import without_reduction


class Optimizer:
    """One interface to the optimizers of Keras 3, of tf_keras (new and legacy) and of tf.compat.v1.train."""

    def __init__(self, optimizer: Any, strategy: tf.distribute.Strategy) -> None:
        self.optimizer = optimizer
        self._family = _family_of(optimizer)
        if self._family == "v1" and strategy.num_replicas_in_sync > 1:
            raise OptionError(
                f"{type(optimizer).__name__} reduces gradients by itself, so it cannot step on the reduced gradient of "
                f"{strategy.num_replicas_in_sync} replicas: use an optimizer of Keras"
            )
        if num := getattr(self._inner, "gradient_accumulation_steps", None):
            raise OptionError(
                f"the optimizer has gradient_accumulation_steps={num}, so it would accumulate whole batches a second "
                "time: leave it out"
            )

    @property
    def optimizers(self) -> list[Any]:
        """The user's optimizers, of which there is one."""
        return [self.optimizer]

    @property
    def saved(self) -> Any:
        """What a checkpoint saves as the optimizer."""
        return self.optimizer

    @property
    def runs_in_graph(self) -> bool:
        """TF1's optimizers step in eager code only, because they create their slots in the first step."""
        return self._family != "v1"

    def num_steps(self) -> Any:
        """How often it has stepped, whoever called it; -1 if it does not count."""
        iterations = as_tf_variable(getattr(self.optimizer, "iterations", None))
        return tf.cast(-1 if iterations is None else iterations, tf.int64)

    @property
    def is_scaling(self) -> bool:
        """Whether it adapts a loss scale, and itself skips a step that is not finite."""
        return hasattr(self.optimizer, "dynamic_scale") or getattr(self.optimizer, "dynamic", False)

    def _variables_of(self, model: Any) -> list[Any]:
        """The trainable variables of a model, as the optimizer takes them: Keras 3's own, or TensorFlow's."""
        return list(model.trainable_variables) if self._family == "keras" else trainable(model)

    def build(self, model: Any) -> None:
        """Creates the optimizer's variables, if it has none."""
        variables = self._variables_of(model)
        if self._family == "keras" and not self.optimizer.built:
            self.optimizer.build(variables)
            self.optimizer.built = True
        elif self._family == "tf_keras":
            if not hasattr(self.optimizer, "build"):  # legacy
                self.optimizer._create_all_weights(variables)
            elif not getattr(self._inner, "_built", False):  # a second time, it would mix up the variables' moments
                self.optimizer.build(variables)

    def check_knows(self, model: Any) -> None:
        """Raises OptionError if the optimizer was built, but not for all trainable variables of the model."""
        inner, variables = self._inner, model.trainable_variables
        if self._family == "keras" and inner.built:
            known = {id(as_tf_variable(v)) for v in inner._trainable_variables}
            strange = [v for v in variables if id(as_tf_variable(v)) not in known]
        elif self._family == "tf_keras" and getattr(inner, "_built", False):
            known = inner._index_dict
            strange = [v for v in variables if inner._var_key(as_tf_variable(v)) not in known]
        else:
            return
        if strange:
            raise OptionError(
                f"the optimizer was built for {len(known)} variables, and {len(strange)} of the model's "
                f"{len(variables)} are not among them ({name_of(strange[0])} first): make a new optimizer, or build it "
                "for all variables that are trained at any time"
            )

    @property
    def _inner(self) -> Any:
        return getattr(self.optimizer, "inner_optimizer", self.optimizer)

    def scaled(self, value: tf.Tensor) -> tf.Tensor:
        """A value times the optimizer's loss scale."""
        if hasattr(self.optimizer, "dynamic_scale"):
            scale: Any = tf.convert_to_tensor(self.optimizer.dynamic_scale)
        elif hasattr(self.optimizer, "get_scaled_loss"):  # of tf_keras, which warns if nobody calls it
            scale = self.optimizer.get_scaled_loss(tf.constant(1.0))
        elif (factor := getattr(self.optimizer, "loss_scale_factor", None)) is not None:
            scale = tf.constant(factor, tf.float64)
        else:
            return value
        return value * tf.cast(scale, value.dtype)

    def apply(self, gradients: Sequence[Gradient], model: Any) -> None:
        variables: Sequence[Any] = self._variables_of(model)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        if self._family != "keras":  # Keras 3 clips and unscales in float32 and rounds by itself
            pairs = [(g if g.dtype == v.dtype else tf.cast(g, v.dtype), v) for g, v in pairs]
        if self._family == "v1":
            self.optimizer.apply_gradients(pairs, global_step=tf.compat.v1.train.get_global_step())
            return
        if self._family == "keras":
            self.optimizer.apply_gradients(pairs)
            return
        if hasattr(self.optimizer, "get_unscaled_gradients"):  # unlike Keras 3, it leaves that to its caller
            grads, variables = zip(*pairs, strict=True)
            pairs = list(zip(self.optimizer.get_unscaled_gradients(grads), variables, strict=True))
        is_legacy = any("legacy" in cls.__module__ for cls in type(self.optimizer).__mro__)
        options = {"experimental_aggregate_gradients": False} if is_legacy else {"skip_gradients_aggregation": True}
        self.optimizer.apply_gradients(pairs, **options)

    def without_reduction(self) -> AbstractContextManager[None]:
        """In this block Keras does not sum the gradient over replicas a second time."""
        return without_reduction(self._inner) if self._family == "keras" else nullcontext()


def _family_of(optimizer: Any) -> str:
    if hasattr(optimizer, "trainable_variables") and not hasattr(optimizer, "apply_gradients"):
        raise OptionError(
            f"optimizer is a {type(optimizer).__name__}, a model or layer: pass Accumulator(model, optimizer, …), or "
            "pairs [(optimizer, variables), …] with the optimizer first"
        )
    names = {cls.__module__.split(".")[0] for cls in type(optimizer).__mro__}
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return "v1"
    for family in ("keras", "tf_keras"):
        if family in names:
            return family
    raise OptionError(
        f"bigbatch does not know the optimizer {type(optimizer).__module__}.{type(optimizer).__name__}: "
        "pass one of keras, tf_keras or tf.compat.v1.train"
    )
