"""What `Accumulator.state_dict` saves, and how it is read back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.checkpoint.serialize import from_bytes, to_bytes
from ..core.errors import StateError
from ..core.nonfinite import NonFinite
from ..core.weight import Reduction, Weights
from .arrays import from_array, to_array, with_sparse, without_sparse
from .auxiliary import WindowAux
from .distributed.ranks import Ranks
from .distributed.shards import like, local
from .gradients import Gradients
from .sums import Sums
from .window import PartialWindow, fetch_weights

_WindowState = dict[str, Any]
_ASK = "pass what Accumulator.state_dict returned"


@dataclass
class SavedState:
    """A saved state that was read and checked, for an accumulator to continue from."""

    num_steps: int
    skipped: dict[str, Any]
    scaler: dict[str, Any]
    window: PartialWindow | None

    @classmethod
    def read(
        cls,
        state: Any,
        scaler: Any,
        ranks: Ranks,
        gradients: Gradients,
        reduction: Reduction,
        aux: WindowAux | None = None,
    ) -> "SavedState":
        """Raises StateError if this is not a state, or if it does not fit this accumulator.

        `aux` is what to load that of the open window into; None if the accumulator has no aux.
        """
        if not isinstance(state, dict):
            raise StateError(f"the state is a {type(state).__name__}: {_ASK}")
        if missing := {"num_steps", "scaler", "window"} - set(state):
            raise StateError(f"the state has no {', '.join(sorted(missing))}: {_ASK}")
        if (state["scaler"] is None) != (scaler is None):
            has, wants = ("no", "a") if state["scaler"] is None else ("a", "no")
            raise StateError(
                f"the state has {has} GradScaler but this accumulator {wants}: use the precision it was saved with"
            )
        try:
            window = _unpacked(state, ranks)
            return cls(
                int(state["num_steps"]),
                NonFinite.read(state.get("skipped", {})),
                {} if scaler is None else _of_the_same_types(state["scaler"], scaler.state_dict()),
                None if window is None else _load_window(window, gradients, reduction, aux),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"the state cannot be read ({type(error).__name__}: {error}): {_ASK}") from error


def _window_state(window: PartialWindow, parameters: list[Tensor]) -> _WindowState:
    """A window as it is saved. Gradients are copied, so that further micro-batches do not change them."""
    number = {p: k for k, p in enumerate(parameters)}
    return {
        "reduction": window.weights.reduction,
        "weights": fetch_weights(window.weights.weights),
        "reference": window.weights.reference,
        "aux": None if window.aux is None else window.aux.state_dict(),
        "losses": [[float(value) for value in terms] for terms in window.losses],
        "gradients": [{number[p]: local(g).clone() for p, g in sums.items()} for sums in window.sums],
        "units": [float(sums.unit) for sums in window.sums],
        "is_of_step": window.is_of_step,
        "loss_scale": None if window.loss_scale is None else float(window.loss_scale),
        "shapes": [tuple(local(p).shape) for p in parameters],
        "trainable": window.trainable,
        "batch_norm": window.batch_norm,
        "batch_norm_mode": window.batch_norm_mode,
    }


def _load_window(
    state: _WindowState, gradients: Gradients, reduction: Reduction, aux: WindowAux | None
) -> PartialWindow:
    """A window from what was saved; raises StateError if it has other parameters or options."""
    parameters = gradients.parameters()
    shapes = [tuple(local(p).shape) for p in parameters]
    if state["reduction"] != reduction:
        raise StateError(
            f"the state was saved with reduction={state['reduction']!r}, this accumulator has "
            f"{reduction!r}: make it with the same"
        )
    if len(state["shapes"]) != len(shapes):
        raise StateError(
            f"the state is of {len(state['shapes'])} parameters, the optimizer holds {len(shapes)}: "
            "load it into the same model and optimizer"
        )
    for k, (saved, shape) in enumerate(zip(state["shapes"], shapes, strict=True)):
        if tuple(saved) != shape:
            raise StateError(
                f"parameter {k} has the shape {tuple(saved)} in the state but {shape} in the optimizer: "
                "load it into the same model and optimizer"
            )
    if ((saved_aux := state.get("aux")) is None) != (aux is None):
        raise StateError(
            f"the state was saved with has_aux={saved_aux is not None}, this accumulator has has_aux={aux is not None}"
            ": make it with the same"
        )
    if aux is not None and saved_aux is not None:
        aux.load_state_dict(saved_aux, len(state["losses"]))
    weights = Weights(reduction, where=torch.where)
    weights.weights = [tuple(weight) for weight in state["weights"]]
    weights.reference = tuple(state["reference"])
    loss_scale = state["loss_scale"]
    trainable = state["trainable"]
    window = PartialWindow(
        weights,
        [Sums() for _ in state["gradients"]],
        [list(terms) for terms in state["losses"]],
        aux,
        None if loss_scale is None else torch.tensor(loss_scale),
        trainable=None if trainable is None else [bool(is_trained) for is_trained in trainable],
        is_of_step=bool(state["is_of_step"]),
        batch_norm=state.get("batch_norm", {}),
        batch_norm_mode=state.get("batch_norm_mode"),
    )
    for sums, saved, unit in zip(window.sums, state["gradients"], state["units"], strict=True):
        sums.unit = unit
        for k, g in saved.items():
            if not 0 <= k < len(parameters) or tuple(g.shape) != shapes[k]:
                raise StateError(f"the state has a gradient for parameter {k} that fits none of {len(parameters)}")
            if g.dtype != (dtype := gradients.wide_dtype(parameters[k])):
                raise StateError(
                    f"the gradient of parameter {k} is {g.dtype} in the state but adds up in {dtype} here: load it "
                    "into a model of the same dtype, with the same accumulate_dtype"
                )
            sums[parameters[k]] = like(parameters[k], g.to(parameters[k].device, copy=True))
    return window


def packed(window: PartialWindow | None, parameters: list[Tensor], ranks: Ranks) -> dict[str, Any]:
    """The entries of the state for the open window. If ranks train the model together, each has its own, in one piece.

    torch.distributed.checkpoint writes entries of the same name only once, and loads those whose names it is given. So
    the name tells the rank, and the entry is there even if no window is open.
    """
    state = None if window is None else _window_state(window, parameters)
    if not ranks.is_distributed:
        return {"window": state}
    piece = None if state is None else to_bytes(without_sparse(state), to_array)
    return {"num_ranks": ranks.size, "window": {_name(ranks.rank): piece}}


def _unpacked(state: dict[str, Any], ranks: Ranks) -> _WindowState | None:
    """The open window of this rank; raises StateError if it was saved by another number of ranks."""
    num_ranks = state.get("num_ranks", 1)
    windows = state["window"] if "num_ranks" in state else {_name(0): state["window"]}
    is_open = {rank for rank, window in windows.items() if window is not None}
    if not is_open:
        return None
    if num_ranks != ranks.size:
        raise StateError(
            f"the state was saved in the middle of a window by {num_ranks} rank{'s' * (num_ranks != 1)} but "
            f"{ranks.size} load it: load it with as many, or save after a step"
        )
    own = _name(ranks.rank)
    if own not in windows:
        raise StateError(f"the state is that of {min(is_open)} but this is {own}: save one for every rank, and load it")
    window: Any = windows[own]
    found: _WindowState = with_sparse(from_bytes(window, from_array)) if isinstance(window, bytes) else window
    return found


def _of_the_same_types(saved: Any, own: dict[str, Any]) -> dict[str, Any]:
    """The saved values; raises KeyError or TypeError if one is missing, or of another type than our own."""
    return {key: type(value)() + saved[key] for key, value in own.items()}  # text to text, numbers to numbers


def _name(rank: int) -> str:
    return f"rank {rank}"
