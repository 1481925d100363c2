"""Checks of a model and of a batch, made before anything changes."""

from typing import Any

import keras

from ..core.batch import shared_size, warn_of_batch_norm
from ..core.errors import OptionError


def batch_size(batch: Any, *, may_be_empty: bool = False) -> int:
    """The number of samples; raises BatchError unless x, y and sample_weight have the same, and at least one.

    Args:
        batch: x, y and sample_weight.
        may_be_empty: Whether 0 samples, or sizes that a graph does not know yet, are allowed. Both return 0.
    """
    sizes = [
        (name, leaf.shape[0])
        for name, part in zip(("x", "y", "sample_weight"), batch, strict=True)
        for leaf in keras.tree.flatten(part)
        if leaf is not None and len(leaf.shape) and leaf.shape[0] is not None
    ]
    if may_be_empty and not any(size for _, size in sizes):
        return 0
    return shared_size(sizes, batch)


def check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise OptionError(
            f"the model is a {type(model).__name__}, which is not a keras.Model: pass a Sequential, Functional or "
            "subclassed model of Keras 3"
        )


def check_train_step(model: Any, *, is_ours: bool) -> None:
    """Raises OptionError if the model has its own `train_step`, unless it `is_ours`."""
    cls = type(model)
    is_own = cls.train_step is not keras.Model.train_step or ("train_step" in vars(model) and not is_ours)
    name = "compute_loss_and_updates"  # the part of JAX's step that a class may replace
    if is_own or getattr(cls, name, None) is not getattr(keras.Model, name, None):
        raise OptionError(
            f"{cls.__name__} has a train_step of its own, which accumulate() would replace: pass the part of it that "
            "computes the loss, as accumulate(model, …, loss=function) with function(model, x, y, sample_weight), or "
            "move your changes to compute_loss() or compute_metrics()"
        )


def check_nnx() -> None:
    """Raises OptionError if Keras would not call the step of the model."""
    if keras.backend.backend() == "jax" and getattr(keras.config, "is_nnx_enabled", lambda: False)():
        raise OptionError("Keras in NNX mode does not call the model's own train_step: set KERAS_NNX_ENABLED=false")


def check_loss(loss: Any, weight: Any) -> None:
    """Raises OptionError unless these are functions, and a weight comes with a loss."""
    for name, value, example in (
        ("loss", loss, "loss(model, x, y, sample_weight)"), ("weight", weight, "weight(x, y, sample_weight)")
    ):  # fmt: skip
        if value is not None and (not callable(value) or isinstance(value, keras.losses.Loss)):
            raise OptionError(
                f"{name} is {value!r}: pass a function, which is called as {example}; a loss of Keras belongs into "
                "model.compile()"
            )
    if weight is not None and loss is None:
        raise OptionError("weight= says what loss= divides by, and there is no loss=: pass both, or leave it out")


def check_optimizer(optimizer: Any) -> None:
    """Raises OptionError if the optimizer accumulates by itself."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if steps := getattr(each, "gradient_accumulation_steps", None):
            raise OptionError(
                f"the optimizer has gradient_accumulation_steps={steps}, so it would accumulate whole batches "
                "a second time: leave it out, and pass the batch_size that you want to fit()"
            )


def check_layers(model: Any) -> None:
    """Raises OptionError if a layer or a weight cannot be trained on parts of a batch."""
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", None) is True and hasattr(layer, "reset_state"):
            raise OptionError(
                f"the layer {layer.name} is stateful: it keeps one state for each sample of a batch, "
                "and micro-batches would mix them up: pass stateful=False"
            )
    if names := [v.path for v in model.trainable_weights if getattr(v, "overwrite_with_gradient", False)]:
        raise OptionError(
            f"{names[0]} is overwritten by its gradient (float8 training), and such gradients cannot be added up: "
            "train without float8"
        )


def check_replicas(num_replicas: int, has_own_loss: bool) -> None:
    """Raises OptionError if there are several replicas and the model has its own compute_loss."""
    if num_replicas > 1 and has_own_loss:
        raise OptionError(
            f"the model has a compute_loss of its own, or loss=, and {num_replicas} replicas, and bigbatch cannot tell "
            "whether it divides by them: pass compile() a loss instead, or train on one device"
        )


def check_one_replica(model: Any) -> None:
    """Raises OptionError if the model trains on several replicas of a tf.distribute strategy."""
    strategy = getattr(model, "_distribute_strategy", None)
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        raise OptionError(
            f"accumulation_steps works on one replica, and the model has {strategy.num_replicas_in_sync}: let the "
            "dataset yield whole batches, and pass micro_batch_size to accumulate() instead"
        )


def seeds_of(model: Any) -> list[Any]:
    """The states of the random number generators in a model's layers. Keras 3.15 has no public way to them."""
    return [seed.state for layer in model._flatten_layers() for seed in layer._seed_generators]


def batch_norms(model: Any) -> list[str]:
    """The layers that normalise by the batch; on torch, also wrapped modules (TorchModuleWrapper)."""
    found = list(model._flatten_layers())
    names = [layer.name for layer in found if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable]
    if keras.backend.backend() == "torch":
        from ..torch.internals import BatchNorm

        wrappers = [layer for layer in found if isinstance(layer, keras.layers.TorchModuleWrapper)]
        names += [layer.name for layer in wrappers if any(isinstance(module, BatchNorm) for module in layer.modules())]
    return names


def warn_of_layers(model: Any, batch_norm: str) -> None:
    if batch_norm != "frozen":
        warn_of_batch_norm(
            batch_norms(model),
            'pass batch_norm="frozen"',
            layer="BatchNormalization",
            has_pooled_statistics=batch_norm == "batch",
        )
