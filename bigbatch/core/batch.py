"""The batch axis: its size, which all parts of a batch share, and layers that depend on it."""

from collections.abc import Sequence
from typing import Any

from .errors import BatchError, warn


def shared_size(parts: Sequence[tuple[str, int]], batch: Any, remedy: str = "", *, name: str = "batch") -> int:
    """The number of samples; raises BatchError unless all parts have the same, and at least one.

    Args:
        parts: The name of each array or tensor that has a batch axis, and the size of that axis.
        batch: The batch that these are the parts of.
        remedy: What to do if the sizes differ, in the words of the framework.
        name: What the message calls the batch.
    """
    if not parts:
        raise BatchError(
            f"the {name} has no tensor with a batch axis ({type(batch).__name__}): pass a tensor or a nest of tensors"
        )
    first, size = parts[0]
    for other, num in parts:
        if num != size:
            raise BatchError(
                f"{first} has {size} samples but {other} has {num}: all tensors of a batch share their leading axis"
                f"{remedy}"
            )
    if not size:
        raise BatchError(f"{first} has 0 samples: leave empty batches out of the stream")
    return size


def one_batch(call: str, num: int) -> str:
    """What to do if someone passes the parts of a batch, as in `step(x, y)`."""
    return f"{call}() got {num} arguments: a batch is one, which may be a tuple, so pass {call}((x, y))"


def warn_of_batch_norm(
    names: Sequence[str],
    freeze: str,
    *,
    layer: str = "BatchNorm",
    has_pooled_statistics: bool = False,
    statistics: str = "running statistics are those of the whole batch",
) -> bool:
    """Warns that the gradient depends on where the batch is cut; returns whether there is any such layer.

    Args:
        names: The layers that normalise by the batch they are given.
        freeze: How to freeze them in this framework: "put them into eval mode".
        layer: What the framework calls them.
        has_pooled_statistics: Whether their running statistics are updated once, with those of the whole batch.
        statistics: What to say about that, if not all calls of a framework do it.
    """
    if names:
        which = f"layers in training mode ({names[0]} first) normalise"
        if len(names) == 1:
            which = f"layer in training mode ({names[0]}) normalises"
        pooled = f" ({statistics})" if has_pooled_statistics else ""
        warn(
            f"{len(names)} {layer} {which} by the micro-batch, so the gradient is not that of the full batch{pooled}: "
            f"{freeze}, or use {_other_norms(layer)}, to be exact; verify() shows how far apart it is"
        )
    return bool(names)


def batch_norm_causes(names: Sequence[str], freeze: str, *, layer: str = "BatchNorm") -> list[str]:
    """What verify() says about these layers, if there are any; the arguments are those of `warn_of_batch_norm`."""
    if not names:
        return []
    return [
        f"{layer} in training mode ({', '.join(names)}) normalises by the micro-batch instead of the batch: {freeze}, "
        f"or use {_other_norms(layer)}"
    ]


def _other_norms(layer: str) -> str:
    norm = layer.removeprefix("Batch")
    return f"Group{norm} or Layer{norm}"
