"""Ready-made weights: how many tokens, or which sum of class weights, a loss averages over.

    from bigbatch.jax import value_and_grad, weights

    value, grads = value_and_grad(loss, micro_batch_size=8, weight=weights.tokens())(params, batch)

They are traced with the loss. If the loss takes several arguments, `loss(params, x, y)`, the batch is their tuple:
`weights.tokens(1)`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..core import labels as core_labels
from ..core.labels import IGNORED, Where
from .internals import is_traced

__all__ = ["causal_lm_tokens", "class_weights", "sample_weights", "tokens"]

Weight = Callable[..., jax.Array]


def causal_lm_tokens(*batch: Any) -> jax.Array:
    """The number of tokens that a causal language model predicts, if the model or the loss shifts the labels.

        weight = (batch["labels"][..., 1:] != -100).sum()

    Position t predicts label t + 1, so the first label of a sequence is never a target. For labels elsewhere, or
    another `ignore_index`, use `tokens(…, shift=True)`.

    Args:
        batch: A mapping with "labels", or an object with that attribute.
    """
    return _num_tokens("labels", IGNORED, True, *batch)


def tokens(labels: Where = "labels", ignore_index: int = IGNORED, *, shift: bool = False) -> Weight:
    """Returns a weight function that counts the labels that are not ignored.

        weight = lambda batch: (batch[labels] != ignore_index).sum()

    Args:
        labels: The key or attribute of the labels, their index in a tuple, or a function of the batch.
        ignore_index: The label that does not count.
        shift: Whether position t predicts label t + 1, so that the first label of each sequence does not count.
    """
    return partial(_num_tokens, labels, ignore_index, shift)


def class_weights(
    weights: Any, labels: Where = "labels", ignore_index: int = IGNORED, *, shift: bool = False
) -> Weight:
    """Returns a weight function for a cross-entropy that divides by the class weights of its labels.

        weight = lambda batch: weights[batch[labels]].sum()      # without the labels that are ignored

    Args:
        weights: The weight of each class.
        labels: The key or attribute of the labels, their index in a tuple, or a function of the batch.
        ignore_index: The label that does not count.
        shift: Whether position t predicts label t + 1, so that the first label of each sequence does not count.
    """
    table = jnp.asarray(weights)
    is_good = is_traced(table) or bool(jnp.all(jnp.isfinite(table) & (table >= 0)))
    core_labels.check_table(table.shape, is_good=is_good)
    return partial(_of_classes, table, labels, ignore_index, shift)


def sample_weights(where: Where = "sample_weight") -> Weight:
    """Returns a weight function that adds up the weights, or the mask, that the batch holds.

        weight = lambda batch: batch[where].sum()

    It is right for losses that divide by this sum: `(losses * mask).sum() / mask.sum()`.

    Args:
        where: The key or attribute of the weights, their index in a tuple, or a function of the batch.
    """
    return partial(_of_samples, where)


def _num_tokens(where: Where, ignore_index: int, shift: bool, *batch: Any) -> jax.Array:
    return (_labels(batch, where, shift) != ignore_index).sum()


def _of_classes(table: jax.Array, where: Where, ignore_index: int, shift: bool, *batch: Any) -> jax.Array:
    found = _labels(batch, where, shift)
    num = table.shape[0]
    is_counted = found != ignore_index
    is_known = (found >= 0) & (found < num)
    if not is_traced(found) and (counted := found[is_counted & ~is_known]).size:
        raise core_labels.out_of_range(int(counted.min()), int(counted.max()), num)
    # the values of traced labels cannot be checked: one without a weight gives NaN, and so does the whole batch
    each = jnp.where(is_known, table[jnp.clip(found, 0, num - 1)], jnp.nan)
    return jnp.where(is_counted, each, 0).sum()


def _of_samples(where: Where, *batch: Any) -> jax.Array:
    return jnp.asarray(core_labels.find_weights(_batch(batch), where))  # added up where weights are checked


def _labels(batch: tuple[Any, ...], where: Where, shift: bool) -> jax.Array:
    found = jnp.asarray(core_labels.find_labels(_batch(batch), where, shift=shift))
    is_integer = jnp.issubdtype(found.dtype, jnp.integer)
    core_labels.check_labels(found.dtype, found.shape, is_integer=is_integer, shift=shift)
    if found.dtype.itemsize < 4:
        found = found.astype(jnp.int32)  # -100 is 156 in uint8
    return found[..., 1:] if shift else found


def _batch(arguments: tuple[Any, ...]) -> Any:
    """The batch of a loss with one argument, or all arguments."""
    return arguments[0] if len(arguments) == 1 else arguments
