"""Ready-made weights: how many tokens, or which sum of class weights, a loss averages over.

    from bigbatch.torch import Accumulator, weights

    accumulator = Accumulator(model, optimizer, loss, micro_batch_size=8, weight=weights.causal_lm_tokens)

The results stay on the device of the labels; the accumulator fetches those of all micro-batches together.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import labels as core_labels
from ..core.errors import BatchError, OptionError, WeightError
from ..core.labels import IGNORED, Where
from ..core.window import Window
from .batch import tensors

if TYPE_CHECKING:
    from .accumulator import Accumulator

__all__ = ["causal_lm_tokens", "class_weights", "sample_weights", "tokens", "with_total"]

Weight = Callable[[Any], Tensor]


def causal_lm_tokens(batch: Any) -> Tensor:
    """The number of tokens that a causal language model predicts, if the model shifts the labels itself.

        weight = (batch["labels"][..., 1:] != -100).sum()

    Hugging Face's causal models do: position t predicts label t + 1, so the first label of a sequence is never a
    target. For labels elsewhere, or another `ignore_index`, use `tokens(…, shift=True)`.

    Args:
        batch: A mapping with "labels" (a dict, a BatchEncoding), or an object with that attribute.
    """
    return _num_tokens("labels", IGNORED, True, batch)


def tokens(labels: Where = "labels", ignore_index: int = IGNORED, *, shift: bool = False) -> Weight:
    """Returns a weight function that counts the labels that are not ignored.

        weight = lambda batch: (batch[labels] != ignore_index).sum()

    This is what `cross_entropy(…, ignore_index=…)` divides by, with label smoothing too.

    Args:
        labels: The key or attribute of the labels, their index in a tuple, or a function of the batch.
        ignore_index: The label that does not count.
        shift: Whether position t predicts label t + 1, so that the first label of each sequence does not count.
    """
    return partial(_num_tokens, labels, ignore_index, shift)


def class_weights(
    weights: Any, labels: Where = "labels", ignore_index: int = IGNORED, *, shift: bool = False
) -> Weight:
    """Returns a weight function for `cross_entropy(weight=weights)`, which divides by the class weights of its labels.

        weight = lambda batch: weights[batch[labels]].sum()      # without the labels that are ignored

    It is right for `nll_loss` and for label smoothing, too. If both are in use, label smoothing and a class of weight
    zero, use `with_total` instead: then labels of weight zero have a loss. Targets that are probabilities need no
    weight: there, `cross_entropy` divides by the number of samples.

    Args:
        weights: The weight of each class, on the device of the labels.
        labels: The key or attribute of the labels, their index in a tuple, or a function of the batch.
        ignore_index: The label that does not count.
        shift: Whether position t predicts label t + 1, so that the first label of each sequence does not count.
    """
    dtype = None if isinstance(weights, Tensor) else torch.float64  # 0.1 in float32 is not 0.1
    table = torch.as_tensor(weights, dtype=dtype).detach()
    core_labels.check_table(table.shape, is_good=bool((table.isfinite() & (table >= 0)).all()))
    return partial(_of_classes, table, labels, ignore_index, shift)


def sample_weights(where: Where = "sample_weight") -> Weight:
    """Returns a weight function that adds up the weights, or the mask, that the batch holds.

        weight = lambda batch: batch[where].sum()

    It is right for losses that divide by this sum: `(losses * mask).sum() / mask.sum()`.

    Args:
        where: The key or attribute of the weights, their index in a tuple, or a function of the batch.
    """
    return partial(core_labels.find_weights, where=where)  # the accumulator adds them up


def with_total(
    batch: Any,
    count: Callable[[Any], Any],
    key: str = "total",
    *,
    at_least: float = 1,
    over: "Accumulator | None" = None,
) -> Any:
    """Adds a total over the whole batch to it, for losses that are a sum divided by that total.

        def loss(model, batch):         # positives and negatives, divided by the number of positives
            return sigmoid_focal_loss(model(batch["x"]), batch["y"], reduction="sum") / batch["total"]

        accumulator = Accumulator(model, optimizer, loss, micro_batch_size=8, reduction="sum")
        for batch in loader:
            accumulator.step(with_total(batch, lambda batch: batch["y"].sum(), over=accumulator))

    The second line from below stands for

        batch = {**batch, "total": batch["y"].sum().clamp(min=1)}

    A 0-dim tensor is passed whole to every micro-batch, so each of them divides by the total of the whole batch.

    Args:
        batch: A mapping, a tuple or a list, but not a list of samples; or a `Window` of them. None on a rank that has
            no data.
        count: `count(batch)` returns what to add up: the number of positives, of boxes.
        key: Where the total goes in a mapping. In a tuple or a list it becomes the last item.
        at_least: The total is never less than this, so that a batch without positives does not divide by zero.
        over: The accumulator. If several ranks train its model, the total is that of all of them, and every rank calls
            this before each step.
    """
    parts = [] if batch is None else list(batch) if isinstance(batch, Window) else [batch]
    for part in parts:
        _check_no_samples(part, over)
    if over is not None and over._ranks.is_distributed:
        total = _as_tensor(over._ranks.add_up(lambda: _added_up(count, parts).item()), parts)
    elif parts:
        total = _added_up(count, parts)
    else:
        raise BatchError("there is no batch to add a total to: only a rank that has no data passes None")
    total = total.clamp(min=at_least)
    if isinstance(batch, Window):
        return Window([_with(part, key, total) for part in parts])
    return None if batch is None else _with(batch, key, total)


def _num_tokens(where: Where, ignore_index: int, shift: bool, batch: Any) -> Tensor:
    return (_labels(batch, where, shift) != ignore_index).sum()


def _of_classes(table: Tensor, where: Where, ignore_index: int, shift: bool, batch: Any) -> Tensor:
    """The class weight of each label, which the accumulator adds up."""
    found = _labels(batch, where, shift)
    num = table.numel()
    is_counted = found != ignore_index
    is_known = (found >= 0) & (found < num)
    if found.is_cpu and (counted := found[is_counted & ~is_known]).numel():
        raise core_labels.out_of_range(int(counted.min()), int(counted.max()), num)
    # on a device nobody waits for this: there a label without a weight gives NaN, which the accumulator refuses
    on_device = table.float() if found.device.type == "mps" else table  # mps has no float64
    each = on_device.to(found.device)[found.clamp(0, num - 1)]
    return torch.where(is_known, each, torch.nan).where(is_counted, 0)


def _labels(batch: Any, where: Where, shift: bool) -> Tensor:
    found = core_labels.find_labels(batch, where, shift=shift)
    if not isinstance(found, Tensor):
        raise WeightError(f"the labels are a {type(found).__name__}: pass a tensor, which is cut with the batch")
    is_integer = not (found.is_floating_point() or found.is_complex() or found.dtype is torch.bool)
    core_labels.check_labels(found.dtype, found.shape, is_integer=is_integer, shift=shift)
    found = found.long()  # -100 is 156 in uint8
    return found[..., 1:] if shift else found


def _added_up(count: Callable[[Any], Any], parts: list[Any]) -> Tensor:
    return _as_tensor(sum(map(count, parts)), parts).detach().sum()


def _as_tensor(total: Any, parts: list[Any]) -> Tensor:
    """The total as a tensor, a plain number on the device of the batch."""
    if isinstance(total, Tensor):
        return total
    device = next((tensor.device for part in parts for tensor in tensors(part)), None)
    return torch.tensor(total, device=device)


def _check_no_samples(batch: Any, over: "Accumulator | None") -> None:
    """Raises BatchError for a list of samples, in which the total would be one more of them."""
    is_list_of_samples = over is not None and over.cut == "list"
    if type(batch) is list and (is_list_of_samples or not any(isinstance(item, Tensor) for item in batch)):
        raise BatchError(
            f"the batch is a list of {len(batch)} samples, and a total would become one more of them: pass "
            '{"samples": batch}, or tuple(batch) if its items are not samples'
        )


def _with(batch: Any, key: str, total: Tensor) -> Any:
    """The batch with the total in it."""
    if isinstance(batch, Mapping):
        if key in batch:
            raise OptionError(f'the batch has a "{key}" already: pass another key=')
        changed: Any = copy.copy(batch) if hasattr(batch, "__setitem__") else dict(batch)
        changed[key] = total
        return changed
    if type(batch) in (tuple, list):
        return type(batch)((*batch, total))
    raise BatchError(f"a total cannot be added to a {type(batch).__name__}: pass a dict, a tuple or a list")
