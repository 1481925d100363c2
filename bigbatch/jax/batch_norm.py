"""Flax's BatchNorm under accumulation: running statistics are updated once per step, with those of the whole batch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath, keystr

from ..core.errors import OptionError


class MicroBatchStats(NamedTuple):
    """What a loss returns as aux for `pooled_batch_stats`.

    Args:
        after: The running statistics after the micro-batch.
        squares: For each running mean, the square of its change; from these follows the variance between micro-batches.
    """

    after: Any
    squares: dict[str, Any]


def micro_batch_stats(before: Any, after: Any) -> MicroBatchStats:
    """What the loss returns as aux, so that `pooled_batch_stats` can update the running statistics after the step.

        def loss(params, batch, stats):
            variables = {"params": params, "batch_stats": stats}
            logits, updated = model.apply(variables, batch["x"], mutable=["batch_stats"])
            return cross_entropy(logits, batch["y"]), micro_batch_stats(stats, updated["batch_stats"])

    Args:
        before: The running statistics that the model was given: Linen's `batch_stats`, or NNX's `BatchStat` state.
        after: Those that it has updated.
    """
    old, new = _by_path(before), _by_path(after)
    _check_same(old, new)
    means = _variance_of(new)
    if all(new[path] is leaf for path, leaf in old.items()):  # a merged NNX model changes the state it was made of
        raise OptionError(
            "the running statistics before and after the micro-batch are the same arrays: merge an NNX model with "
            "nnx.merge(…, copy=True), and put its BatchNorm into training mode (use_running_average=False)"
        )
    return MicroBatchStats(after, {path: jnp.square(new[path] - old[path]) for path in means})


def pooled_batch_stats(before: Any, found: MicroBatchStats, momentum: Any) -> Any:
    """The running statistics after the step, updated once with the mean and variance of the whole batch.

        (value, found), grads = value_and_grad(loss, micro_batch_size=8, has_aux=True)(params, batch, stats=stats)
        stats = pooled_batch_stats(stats, found, momentum=0.9)

    The variance of the batch is that inside of the micro-batches, which value_and_grad has averaged, and that between
    their means. With more than one micro-batch the plain average of `updated["batch_stats"]` lacks the second part.

    Args:
        before: The running statistics that the loss was given.
        found: What the loss returned as aux, for the whole batch.
        momentum: That of the model's BatchNorm layers (`nn.BatchNorm(momentum=…)`; Flax's default is 0.99). A dict of
            dicts with the names of the layers if they differ.
    """
    if not isinstance(found, MicroBatchStats):
        raise OptionError(_not_found(before, found))
    old, new = _by_path(before), _by_path(found.after)
    _check_same(old, new)
    for mean, var in _variance_of(new).items():
        between = jnp.maximum(found.squares[mean] - jnp.square(new[mean] - old[mean]), 0)  # of means times (1 - m)
        new[var] = (new[var] + between / (1 - _momentum_of(mean, momentum))).astype(new[var].dtype)
    return jax.tree.unflatten(jax.tree.structure(found.after), new.values())


def _by_path(stats: Any) -> dict[str, Any]:
    """The leaves by their path: "BatchNorm_0/mean"."""
    return {"/".join(_names(path)): leaf for path, leaf in jax.tree.leaves_with_path(stats)}


def _check_same(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises OptionError if these are the running statistics of other layers."""
    if others := old.keys() ^ new.keys():
        raise OptionError(
            f"the running statistics before and after the micro-batch are not of the same layers ({min(others)!r} is "
            'in one of them only): pass updated["batch_stats"] if the model was given batch_stats'
        )


def _not_found(before: Any, found: Any) -> str:
    """What to do if `found` is not what `micro_batch_stats` returned."""
    remedy = "let the loss return micro_batch_stats(before, after) as aux, and pass that"
    if isinstance(before, MicroBatchStats):
        remedy = "pass it as the second argument, and the running statistics as the first"
    elif isinstance(found, Mapping):
        names = [name for name, each in found.items() if isinstance(each, MicroBatchStats)]
        remedy = f"pass its item {names[0]!r}" if names else remedy
    return f"found is a {type(found).__name__}, not what micro_batch_stats() returns: {remedy}"


def _names(path: KeyPath) -> list[str]:
    """The names in a path, without the one inside of an NNX variable."""
    names = [keystr((key,), simple=True) for key in path]
    return names[:-1] if names[-1:] == ["value"] else names


def _variance_of(stats: Mapping[str, Any]) -> dict[str, str]:
    """The path of the variance by that of the mean; raises OptionError if there is anything else."""
    pairs = {path: f"{path[:-4]}var" for path in stats if path.rpartition("/")[2] == "mean"}
    if others := stats.keys() ^ {*pairs, *pairs.values()}:
        raise OptionError(
            f"the running statistics have {min(others)!r}, but are to have a mean and a var for each BatchNorm: pass "
            "Linen's batch_stats or NNX's BatchStat state, and what else changes by itself as aux of your own"
        )
    return pairs


def _momentum_of(path: str, momentum: Any) -> float:
    for name in path.split("/")[:-1]:
        if isinstance(momentum, Mapping):
            if name not in momentum:
                raise OptionError(f"momentum has no number for {name!r} of {path!r}, only for {', '.join(momentum)}")
            momentum = momentum[name]
    if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise OptionError(
            f"momentum is {momentum!r}: pass that of the BatchNorm layers, at least 0 and less than 1, or a dict of "
            "dicts with one for each"
        )
    return momentum
