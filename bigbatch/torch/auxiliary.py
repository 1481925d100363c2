"""The aux of a loss (`has_aux=True`): kept micro-batch by micro-batch without waiting for a device, then combined."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import auxiliary
from ..core.auxiliary import Kind, Path, Way, flattened, name_of, rebuilt
from ..core.errors import LossError, OptionError, RankError, StateError, warn
from ..core.loss_result import split
from ..core.step import Step
from ..core.weight import Terms, as_plain, from_terms, is_number, share
from .distributed.ranks import Ranks

_FUNCTION = "a function"
_NUMBERS = {"float": "floating-point numbers", "integer": "integers", "bool": "booleans"}


def terms_and_aux(returned: Any, num_weights: int | None, *, has_aux: bool) -> tuple[Terms, Any]:
    """What a loss returned, as the terms of the loss and aux; see `core.loss_result`."""
    return split(returned, num_weights, has_aux=has_aux, shape_of=_shape_of)


def without_aux(loss: Callable[[Any, Any], Any], *, has_aux: bool) -> Callable[[Any, Any], Any]:
    """The same loss, which returns a scalar or a tuple of terms only."""

    def terms_of(model: Any, micro_batch: Any) -> Any:
        return from_terms(terms_and_aux(loss(model, micro_batch), None, has_aux=has_aux)[0])

    return terms_of


def _shape_of(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


class _Described(NamedTuple):
    """What a rank tells the others about its aux, so that one without data knows what the others have.

    Args:
        like: A nest of plain dicts, lists and tuples, without values.
        ways: How each leaf is combined; functions cannot be sent.
        kinds: What each leaf is, and its dtype if it is a tensor.
        values: The numbers that a function combines, by leaf.
        weights: The weight of each micro-batch.
    """

    like: Any
    ways: dict[Path, str]
    kinds: dict[Path, tuple[Kind, torch.dtype | None]]
    values: dict[Path, list[Any]]
    weights: list[Any]


class WindowAux:
    """The aux of the micro-batches of a window so far.

        for micro_batch in window:
            loss, aux = …
            window_aux.add(aux, len(micro_batch))
        window_aux.combined(weights, total, ranks).onto(step)     # step.aux, step.metrics, step.summed

    Args:
        words: The option `aux`.
        is_deferred: Whether `combined` raises what is wrong with an aux, on all ranks, since others wait there.
    """

    def __init__(self, words: Any, *, is_deferred: bool = False) -> None:
        self._words = words
        self._is_deferred = is_deferred
        self._failed: Exception | None = None
        self._like: Any = None
        self._ways: dict[Path, Way] = {}
        self._kinds: dict[Path, Kind] = {}
        self._values: list[dict[Path, Any]] = []

    def add(self, aux: Any, num_samples: int | None, *, is_weighted: bool = True) -> None:
        """Keeps the aux of the next micro-batch, without its graph and in memory of its own.

        Args:
            aux: What the loss returned.
            num_samples: How many samples the micro-batch has; None if that is not known.
            is_weighted: Whether it is known how much the micro-batch counts.
        """
        if self._failed is not None:
            return
        try:
            self._add(aux, num_samples, is_weighted=is_weighted)
        except Exception as error:
            if not self._is_deferred:
                raise
            self._failed = error

    def _add(self, aux: Any, num_samples: int | None, *, is_weighted: bool) -> None:
        leaves = flattened(aux)
        kinds = {path: _kind_of(leaf) for path, leaf in leaves.items()}
        words = auxiliary.words_for(self._words, aux)
        ways = {path: auxiliary.way_of(path, kind, words[path], num_samples) for path, kind in kinds.items()}
        if not is_weighted and (means := [path for path, way in ways.items() if way == "mean"]):
            raise OptionError(
                f"{name_of(means[0])} becomes a mean over micro-batches, and micro_batch() was not told how much each "
                'of them counts: pass micro_batch(weight=len(y)), or aux="sum" to add it up'
            )
        if self._values:
            auxiliary.check_same(self._kinds, kinds)
            for path, kind in kinds.items():
                _check_alike(path, self._kinds[path], kind, ways[path])
        else:
            self._like = rebuilt(aux, dict.fromkeys(leaves))
            self._kinds, self._ways = kinds, ways
        self._values.append({path: _kept(leaf) for path, leaf in leaves.items()})

    def combined(self, weights: Sequence[Terms], total: Terms, ranks: Ranks, num_skipped: int = 0) -> "BatchAux":
        """The aux of the whole batch; all ranks call this, before the parameters are changed.

        Nothing is waited for but the other ranks' descriptions; values are fetched when they are first read.

        Args:
            weights: The weights of this rank's micro-batches.
            total: The total weight, of all ranks.
            ranks: The ranks that train the model together.
            num_skipped: How many micro-batches of weight zero were not run.
        """
        own = self._failed is not None, None if self._failed else self._described(weights, is_sent=ranks.is_distributed)
        of_ranks = ranks.gathered(own)
        self._raise_failed([has_failed for has_failed, _ in of_ranks])
        known = [described for _, described in of_ranks if described is not None]
        if not known:
            return BatchAux()
        first = known[0]
        for other in known[1:]:
            _check_ranks_agree(first, other)
        ways, kinds = first.ways, {path: kind for path, (kind, _) in first.kinds.items()}
        if num_skipped and "concatenate" in ways.values():
            warn(
                f"{num_skipped} micro-batches of weight zero were not run, which fully_shard does not allow on one "
                "rank alone, so their rows are missing in step.aux: leave them out of the batch"
            )
        by = [share(weight[0], total[0]) for weight in weights]
        get_numbers = self._added_numbers(first, by, ranks, has_weight=bool(total[0]))
        get_tensors = self._added_tensors(first, by, ranks, has_weight=bool(total[0]))
        get_rows = {path: self._rows(first, path) for path, way in ways.items() if way == "concatenate"}
        called = self._called(first, known, weights, ranks)
        called_numbers = {path: _numbers_in(value) for path, value in called.items()}
        like = first.like if self._like is None else self._like

        def aux() -> Any:
            others = {path: _fetched(value) for path, value in called.items()}
            rows = {path: get() for path, get in get_rows.items()}
            return rebuilt(like, {**dict.fromkeys(ways), **get_numbers(), **get_tensors(), **others, **rows})

        def metrics() -> dict[str, float]:  # has no rows, which a History would keep in memory otherwise
            others = {path: _fetched(value) for path, value in called_numbers.items()}
            return auxiliary.metrics(rebuilt(like, {**dict.fromkeys(ways), **get_numbers(), **others}))

        return BatchAux(aux, metrics, auxiliary.summed(ways, kinds))

    def _raise_failed(self, has_failed: list[bool]) -> None:
        """On the rank whose aux could not be kept raises why, and on all others that there is one."""
        if self._failed is not None:
            raise self._failed
        if True in has_failed:
            raise RankError(
                f"the aux that the loss returned on rank {has_failed.index(True)} cannot be combined, so no rank made "
                "this step: its own message says why"
            )

    # --- how leaves are combined -------------------------------------------------------------------------

    def _added_numbers(
        self, first: _Described, by: list[Any], ranks: Ranks, *, has_weight: bool
    ) -> Callable[[], dict[Path, Any]]:
        """Returns how to fetch the means and sums of numbers, over all ranks."""
        found = {p: w for p, w in first.ways.items() if w in ("mean", "sum") and not first.kinds[p][0].shape}
        values = [tuple(leaves[path] for path in found) for leaves in self._values]
        factors = [tuple(part if way == "mean" else 1.0 for way in found.values()) for part in by]
        fetch = ranks.add_up_numbers(values, factors, len(found)) if found else tuple

        @functools.cache
        def fetched() -> dict[Path, Any]:
            numbers = {}
            for (path, way), number in zip(found.items(), fetch() or [0.0] * len(found), strict=True):
                if way == "mean":
                    numbers[path] = number if has_weight else torch.nan
                else:
                    numbers[path] = number if first.kinds[path][0].numbers == "float" else round(number)
            return numbers

        return fetched

    def _added_tensors(
        self, first: _Described, by: list[Any], ranks: Ranks, *, has_weight: bool
    ) -> Callable[[], dict[Path, Tensor]]:
        """Returns how to get the means and sums of tensors, value by value, over all ranks."""
        waits = {}
        for path, way in first.ways.items():
            kind, dtype = first.kinds[path]
            if way not in ("mean", "sum") or not kind.shape or dtype is None:
                continue
            wide = torch.promote_types(dtype, torch.float32)
            if kind.numbers != "float":
                wide = torch.int64 if way == "sum" else torch.float64
            values = [leaves[path].to(wide) for leaves in self._values]
            added: Any = auxiliary.mean(values, by) if way == "mean" else sum(values)
            if not isinstance(added, Tensor):  # a rank without data, or without weight
                device = values[0].device if values else ranks.device
                added = torch.zeros(kind.shape, dtype=wide, device=device)  # type: ignore[arg-type]
            if way == "mean" and not has_weight:
                added = torch.full_like(added, torch.nan)
            narrow = dtype if way == "mean" and kind.numbers == "float" else wide  # a sum may not fit into float16
            waits[path] = functools.partial(_narrowed, ranks.add_up_tensor(added), narrow)
        return lambda: {path: wait() for path, wait in waits.items()}

    def _rows(self, first: _Described, path: Path) -> Callable[[], Tensor]:
        """Returns how to get the rows of this rank's samples, in the order of its part of the batch."""
        parts = [leaves[path] for leaves in self._values]
        kind, dtype = first.kinds[path]
        if not parts:
            return lambda: torch.empty((0, *kind.shape[1:]), dtype=dtype)  # type: ignore[arg-type]

        def rows() -> Tensor:
            device = parts[-1].device  # those of an interrupted step may have been loaded to another
            return torch.cat([part.to(device) for part in parts])

        return rows

    def _called(
        self, first: _Described, known: list[_Described], weights: Sequence[Terms], ranks: Ranks
    ) -> dict[Path, Any]:
        """What functions of the user return. If one fails on this rank, an error is raised on all ranks."""
        words = {path: word for path, word in auxiliary.words_for(self._words, first.like).items() if callable(word)}
        failed: Exception | None = None
        called = {}
        try:
            called = {path: self._call(word, path, known, weights) for path, word in words.items()}
        except Exception as error:
            failed = error
        if words and ranks.is_distributed and any(has_failed := ranks.gathered(failed is not None)) and failed is None:
            raise RankError(
                f"a function that combines aux failed on rank {has_failed.index(True)}, so no rank made this step: its "
                "own message says why"
            )
        if failed is not None:
            raise failed
        return called

    def _call(self, word: Any, path: Path, known: list[_Described], weights: Sequence[Terms]) -> Any:
        """What a function makes of a leaf: of the numbers of all ranks, or of the tensors of this one."""
        if path in known[0].values:
            values = [value for described in known for value in described.values[path]]
            return word(values, [weight for described in known for weight in described.weights])
        if not self._values:  # a rank without data
            return None
        return word([leaves[path] for leaves in self._values], [weight[0] for weight in weights])

    def _described(self, weights: Sequence[Terms], *, is_sent: bool) -> _Described | None:
        if not self._values:
            return None
        first = self._values[0]
        ways = {path: _FUNCTION if callable(way) else way for path, way in self._ways.items()}
        dtypes = {path: leaf.dtype if isinstance(leaf, Tensor) else None for path, leaf in first.items()}
        values = {
            path: [_fetched(leaves[path]) if is_sent else leaves[path] for leaves in self._values]
            for path, way in ways.items()
            if way == _FUNCTION and not self._kinds[path].shape and self._kinds[path].numbers != "other"
        }
        kinds = {path: (kind, dtypes[path]) for path, kind in self._kinds.items()}
        return _Described(auxiliary.plain(self._like), ways, kinds, values, [weight[0] for weight in weights])

    # --- saving ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is kept so far, in plain dicts and lists."""
        values = [{path: _fetched(leaf) for path, leaf in leaves.items()} for leaves in self._values]
        return {"like": auxiliary.plain(self._like), "values": values}

    def load_state_dict(self, state: dict[str, Any], num_micro_batches: int) -> None:
        """Continues from a saved state; raises StateError if it does not have the aux of so many micro-batches."""
        self._like, values = state["like"], state["values"]
        if len(values) != num_micro_batches:
            raise StateError(
                f"the state has the aux of {len(values)} micro-batches of {num_micro_batches}: load it as it was saved"
            )
        words = auxiliary.words_for(self._words, self._like)
        for leaves in values:
            self._kinds = {path: _kind_of(leaf) for path, leaf in leaves.items()}
            self._ways = {
                path: auxiliary.way_of(path, kind, words[path], kind.shape[0] if kind.shape else None)
                for path, kind in self._kinds.items()
            }
        self._values = [*values]


@dataclass(frozen=True)
class BatchAux:
    """The aux of a whole batch: what `Step.aux`, `Step.metrics` and `Step.summed` are set to."""

    aux: Callable[[], Any] | None = None
    metrics: Callable[[], dict[str, float]] = dict
    summed: tuple[str, ...] = ()

    def onto(self, step: Step) -> Step:
        """Gives the step its aux, and returns it."""
        if self.aux is not None:
            step.aux, step.metrics, step.summed = self.aux, self.metrics, self.summed
        return step


def _kind_of(leaf: Any) -> Kind:
    name = type(leaf).__name__
    if isinstance(leaf, Tensor):
        if leaf.dtype is torch.bool:
            return Kind(tuple(leaf.shape), "bool", name)
        if leaf.is_complex() and not leaf.ndim:
            return Kind((), "other", f"complex {name}")
        is_float = leaf.is_floating_point() or leaf.is_complex()
        return Kind(tuple(leaf.shape), "float" if is_float else "integer", name)
    if leaf is None:
        return Kind((), "none", name)
    if not is_number(leaf):
        return Kind((), "other", name)
    if isinstance(leaf, bool):
        return Kind((), "bool", name)
    return Kind((), "integer" if isinstance(as_plain(leaf), int) else "float", name)


def _kept(leaf: Any) -> Any:
    """A number on the host; a copy of a tensor, since a view keeps more memory alive and a CUDA graph overwrites it."""
    if not isinstance(leaf, Tensor):
        return as_plain(leaf)
    if leaf.ndim == 0 and leaf.is_cpu:
        return leaf.item()
    return leaf.detach().clone()


def _fetched(value: Any) -> Any:
    """Tensors with one number as that number, in a nest or alone."""
    leaves = flattened(value)
    if not any(isinstance(leaf, Tensor) and not leaf.ndim for leaf in leaves.values()):
        return value
    plain = {p: leaf.item() if isinstance(leaf, Tensor) and not leaf.ndim else leaf for p, leaf in leaves.items()}
    return rebuilt(value, plain)


def _numbers_in(value: Any) -> Any:
    """The nest with None in place of tensors with axes."""
    leaves = flattened(value)
    return rebuilt(value, {p: None if isinstance(x, Tensor) and x.ndim else x for p, x in leaves.items()})


def _narrowed(wait: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    return wait().to(dtype)


def _check_alike(path: Path, first: Kind, now: Kind, way: Way) -> None:
    """Raises LossError if a leaf of one micro-batch cannot be combined with that of another."""
    if callable(way) or way == _FUNCTION:
        return
    start = int(way == "concatenate")
    if (first.numbers, len(first.shape), first.shape[start:]) != (now.numbers, len(now.shape), now.shape[start:]):
        remedy = "return the same for each, or pass a function of the values and the weights as aux"
        if first.numbers == now.numbers and 0 in (len(first.shape), len(now.shape)):
            remedy = "return the same for each (squeeze() also drops the axis of a single sample, squeeze(-1) does not)"
        raise LossError(
            f"{name_of(path)} is {_text(first)} for one micro-batch and {_text(now)} for another, which cannot be "
            f"combined: {remedy}"
        )


def _text(kind: Kind) -> str:
    if kind.numbers == "none":
        return "None"
    if kind.shape:
        return f"a tensor of shape {kind.shape} with {_NUMBERS.get(kind.numbers, kind.numbers)}"
    one = {"float": "one floating-point number", "integer": "one integer", "bool": "one true or false"}
    return one.get(kind.numbers, f"of type {kind.type_name}")


def _check_ranks_agree(first: _Described, other: _Described) -> None:
    """Raises RankError, on all ranks, if their losses return aux that cannot be combined."""
    if first.ways != other.ways:
        texts = [", ".join(f"{name_of(p)} ({way})" for p, way in d.ways.items()) or "nothing" for d in (first, other)]
        raise RankError(f"the loss returned {texts[0]} on one rank and {texts[1]} on another: return the same on all")
    for path, (kind, _) in first.kinds.items():
        try:
            _check_alike(path, kind, other.kinds[path][0], first.ways[path])
        except LossError as error:
            raise RankError(f"on two ranks: {error}") from None
