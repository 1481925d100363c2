"""What can be seen to be wrong before anything is changed."""

import warnings
from typing import Any

import keras

from ..core.errors import BatchError, BigBatchWarning, OptionError


def named_rows(batch: Any) -> list[tuple[str, int]]:
    """The number of samples of each array of x, y and sample_weight, as far as that is known."""
    return [
        (name, leaf.shape[0])
        for name, part in zip(("x", "y", "sample_weight"), batch, strict=True)
        for leaf in keras.tree.flatten(part)
        if leaf is not None and len(leaf.shape) and leaf.shape[0] is not None
    ]


def is_even(batch: Any) -> bool:
    """Whether all arrays of a batch have the same number of samples, and there are some."""
    nums = {num for _, num in named_rows(batch)}
    return len(nums) == 1 and 0 not in nums


def check_rows(batch: Any) -> None:
    """Refuses arrays of x, y and sample_weight that do not share their leading axis, as far as that is known."""
    named = named_rows(batch)
    for name, num in named:
        if num != named[0][1]:
            raise BatchError(
                f"{named[0][0]} has {named[0][1]} samples but {name} has {num}: all arrays of a batch share their "
                "leading axis"
            )


def check_not_empty(size: int) -> None:
    if size == 0:
        raise BatchError("x has 0 samples: leave empty batches out of the stream")


def check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise OptionError(
            f"accumulate() got a {type(model).__name__}, which is no keras.Model: "
            "pass a Sequential, Functional or subclassed model of Keras 3"
        )


def check_train_step(model: Any) -> None:
    """Refuses models whose step is not Keras's own: nobody can tell what is in it."""
    from .backends.step import FitStep

    kind = type(model)
    own = kind.train_step is not keras.Model.train_step or ("train_step" in vars(model) and FitStep.of(model) is None)
    if not own:  # the part of JAX's step that a class may replace
        name = "compute_loss_and_updates"
        own = getattr(kind, name, None) is not getattr(keras.Model, name, None)
    if own:
        raise OptionError(
            f"{kind.__name__} has a train_step of its own, which accumulate() would replace: put what is special "
            "about it into compute_loss() or compute_metrics(), or use the Accumulator of your backend in a loop"
        )
    if keras.backend.backend() == "jax" and getattr(keras.config, "is_nnx_enabled", lambda: False)():
        raise OptionError("Keras in NNX mode does not call the model's own train_step: set KERAS_NNX_ENABLED=false")


def check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer that accumulates by itself: a step would become a part of a step."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if steps := getattr(each, "gradient_accumulation_steps", None):
            raise OptionError(
                f"the optimizer has gradient_accumulation_steps={steps}, so it would accumulate whole batches "
                "a second time: leave it out, and pass fit the batch_size that you want"
            )


def check_layers(model: Any) -> None:
    """Refuses layers that cannot work on parts of a batch."""
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", None) is True and hasattr(layer, "reset_state"):
            raise OptionError(
                f"the layer {layer.name} is stateful: it keeps one state for each sample of a batch, "
                "and a batch that is cut would mix them up: pass stateful=False"
            )
    if names := [v.path for v in model.trainable_weights if getattr(v, "overwrite_with_gradient", False)]:
        raise OptionError(
            f"{names[0]} is overwritten by its gradient (float8 training), and a sum of such gradients means nothing: "
            "train without float8"
        )


def check_replicas(num_replicas: int, has_own_loss: bool) -> None:
    if num_replicas > 1 and has_own_loss:
        raise OptionError(
            f"the model has a compute_loss of its own and {num_replicas} replicas, and nobody can tell whether it "
            "divides by them: pass compile() a loss instead, or train on one device"
        )


def batch_norms(model: Any) -> list[str]:
    """The names of the layers that normalise by what they are fed; on torch, of its own too (TorchModuleWrapper)."""
    ours = [
        layer.name
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]
    if keras.backend.backend() != "torch":
        return ours
    from ..torch.checks import batch_norm_modules

    wrappers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.TorchModuleWrapper)]
    return ours + [layer.name for layer in wrappers if batch_norm_modules(layer)]


def tell_batch_norm(model: Any) -> None:
    """Says that BatchNormalization sees micro-batches, if it does."""
    if names := batch_norms(model):
        warnings.warn(
            f"{len(names)} BatchNormalization layer{'s' * (len(names) != 1)} ({', '.join(names[:3])}"
            f"{', …' * (len(names) > 3)}) normalise by the micro-batch, so the result is not that of the full batch: "
            "set layer.trainable = False, or use GroupNormalization or LayerNormalization, to be exact",
            BigBatchWarning,
            stacklevel=2,
        )


def no_backend(name: str) -> OptionError:
    return OptionError(f"Keras runs on {name}, which cannot train: set KERAS_BACKEND to tensorflow, jax or torch")
