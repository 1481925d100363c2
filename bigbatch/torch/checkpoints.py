"""Checkpoints of a training loop, so that it can continue as if it had never been stopped."""

import copy
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.checkpoint.kinds import check_kinds
from ..core.checkpoint.loop import Resumable
from ..core.errors import OptionError, StateError
from ..core.history import History
from ..core.window import stream_of
from .accumulator import Accumulator
from .arrays import from_array, to_array, with_sparse, without_sparse
from .optimizers import numbered


class Checkpoints(Resumable):
    """Saves what an accumulator trains at intervals, and restores it.

        checkpoints = Checkpoints("checkpoints", accumulator, every="10min", history=history)
        for batch in checkpoints.batches(loader, epochs=10):
            history.append(accumulator.step(batch))

    If the process is killed, start it again with the same lines: it ends with the same parameters, bit for bit on a
    CPU. A checkpoint has the model, the optimizers, the schedules, the scaler, the gradients of an open window, the
    random state of Python, NumPy and PyTorch on all devices, the position in the data and the history. It is JSON and
    safetensors, so reading one from somebody else runs no code.

    Args:
        folder: Where checkpoints are kept.
        accumulator: The accumulator to save, with its model, optimizers and schedules.
        every: How often to save: a number of batches, a time such as "10min", or None for `save()` alone.
        keep: How many checkpoints to keep.
        history: A History to save and to restore as well.
        **more: Other objects with state_dict() and load_state_dict(), by name.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        accumulator: Accumulator,
        *,
        every: int | str | None = "10min",
        keep: int = 2,
        history: History | None = None,
        **more: Any,
    ) -> None:
        if accumulator._ranks.is_distributed:
            raise OptionError(
                "the model is trained by several ranks, each with a state of its own: save it with "
                "torch.distributed.checkpoint, which knows them all"
            )
        self._accumulator, self._more = accumulator, more
        self._parts()  # which may refuse a name
        super().__init__(folder, every=every, keep=keep, history=history, to_array=to_array, from_array=from_array)

    def restore(self) -> bool:
        """Loads the newest intact checkpoint; returns False if there is none. `batches` does this by itself.

        A damaged checkpoint is named in a warning and never used. If a checkpoint does not fit, nothing is changed.
        """
        return self._restore()

    def _parts(self) -> dict[str, Any]:
        """What is saved, by name. The accumulator may have another schedule than when this was made."""
        own = parts_of(self._accumulator)
        if taken := sorted(own.keys() & self._more.keys()):
            raise OptionError(f"{taken[0]} is saved already, as that of the accumulator: give yours another name")
        return {**own, **self._more}

    def _state(self) -> tuple[Any, Mapping[str, bytes]]:
        return state_of(self._parts()), {}

    def _load(self, state: Any, files: Mapping[str, bytes]) -> None:
        load_state(self._parts(), state)

    def _progress(self) -> tuple[int, int]:
        """The steps, and the micro-batches of an open window. What an interrupted step has is no whole batch."""
        return self._accumulator.num_steps, self._accumulator.num_fed

    def _random(self, data: Any) -> dict[str, Any]:
        return {
            **super()._random(data),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "loader": [generator.get_state() for generator in _generators_of(data)],
        }

    def _set_random(self, found: dict[str, Any], data: Any) -> None:
        super()._set_random(found, data)
        torch.set_rng_state(found["torch"])
        if len(found["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(found["cuda"])
        for generator, state in zip(_generators_of(data), found["loader"], strict=False):
            generator.set_state(state)


def parts_of(accumulator: Accumulator) -> dict[str, Any]:
    """What a checkpoint saves of an accumulator, by name; of several optimizers, the second is "optimizer 2"."""
    optimizers, schedulers = numbered("optimizer", accumulator.optimizer), numbered("scheduler", accumulator.scheduler)
    return {"model": accumulator.model, **optimizers, "accumulator": accumulator, **schedulers}


def state_of(parts: Mapping[str, Any]) -> Any:
    """The state of each part by its name (the model, the optimizer, the accumulator, others), and what each is."""
    states = without_sparse({name: part.state_dict() for name, part in parts.items()})
    return {"parts": states, "kinds": _kinds(parts), "parameters": _names_of_parameters(parts)}


def load_state(parts: Mapping[str, Any], state: Any) -> None:
    """Loads what `state_of` returned; raises StateError if it does not fit, and then changes nothing."""
    states = with_sparse(state["parts"])
    if states.keys() != parts.keys():
        raise StateError(
            f"the checkpoint has {', '.join(sorted(states))} but this run {', '.join(sorted(parts))}: "
            "give Checkpoints what it was given when it was saved"
        )
    check_kinds(state["kinds"], _kinds(parts))
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            _check_model(states[name], part.state_dict())
        elif isinstance(part, torch.optim.Optimizer):
            _check_optimizer(states[name], part.state_dict())
    for before, now in zip(state["parameters"], _names_of_parameters(parts), strict=False):
        if before != now:
            raise StateError(
                f"the optimizer holds {now} where it held {before} when the checkpoint was saved: pass the parameters "
                "in the same order"
            )
    accumulator = parts["accumulator"]
    checked = {name: part for name, part in parts.items() if isinstance(part, nn.Module | torch.optim.Optimizer)}
    others = {name: part for name, part in parts.items() if name not in checked and part is not accumulator}
    own = {name: copy.deepcopy(part.state_dict()) for name, part in others.items()}
    try:  # what may refuse comes first
        for name, part in others.items():
            part.load_state_dict(states[name])
        accumulator.load_state_dict(states["accumulator"])
    except BaseException:
        for name, part in others.items():
            part.load_state_dict(own[name])
        raise
    for name, part in checked.items():
        if isinstance(part, torch.optim.Optimizer):
            _load_optimizer(part, states[name])
        else:
            part.load_state_dict(states[name])
    accumulator.load_state_dict(states["accumulator"])  # again, since the parameters have changed


def _kinds(parts: Mapping[str, Any]) -> dict[str, str]:
    """The class of each part but the models, which may be compiled or wrapped."""
    return {name: type(part).__qualname__ for name, part in parts.items() if not isinstance(part, nn.Module)}


def _names_of_parameters(parts: Mapping[str, Any]) -> list[str]:
    """The names of the optimizers' parameters, in their order, by which their state is saved."""
    names = {p: name.replace("_orig_mod.", "").removeprefix("module.") for name, p in parts["model"].named_parameters()}
    own = [part for name, part in parts.items() if re.fullmatch("optimizer( [0-9]+)?", name)]
    held = [p for optimizer in own for group in optimizer.param_groups for p in group["params"]]
    return [names.get(p, "a parameter of another model") for p in held]


def _generators_of(data: Any) -> list[torch.Generator]:
    """The generators from which a data loader and its samplers draw the order."""
    data = stream_of(data)
    batch_sampler = getattr(data, "batch_sampler", None)
    parts = (data, getattr(data, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(part): part for part in (getattr(part, "generator", None) for part in parts)}
    return [generator for generator in found.values() if isinstance(generator, torch.Generator)]


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads the state with the dtypes that were saved: load_state_dict casts it to those of the parameters (2.13).

    NAdam and ASGD have float32 state for parameters of any dtype, and would continue with other bits.
    """
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        own = optimizer.state[parameter] if number in state["state"] else {}
        for name, value in state["state"].get(number, {}).items():
            if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) and own[name].dtype != value.dtype:
                own[name] = value.to(own[name].device)


def _check_model(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises StateError before the first parameter is changed, which load_state_dict does not."""
    if other := sorted(found.keys() ^ wanted.keys()):
        where = "the checkpoint" if other[0] in found else "the model"
        raise StateError(f"only {where} has {other[0]}: continue with the model that it was saved with")
    for name, tensor in wanted.items():
        if isinstance(tensor, Tensor):
            there = found[name]
            if not isinstance(there, Tensor) or (there.shape, there.dtype) != (tensor.shape, tensor.dtype):
                what = f"{there.dtype}{list(there.shape)}" if isinstance(there, Tensor) else type(there).__name__
                raise StateError(
                    f"{name} is {what} in the checkpoint but {tensor.dtype}{list(tensor.shape)} in the model: "
                    "continue with the model that it was saved with"
                )


def _check_optimizer(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises StateError for another number of groups or parameters, and for another kind of optimizer."""
    sizes = [[len(group["params"]) for group in state["param_groups"]] for state in (found, wanted)]
    if sizes[0] != sizes[1]:
        raise StateError(
            f"the optimizer has groups of {sizes[0]} parameters in the checkpoint but of {sizes[1]} here: "
            "continue with the optimizer that it was saved with"
        )
    for theirs, own in zip(found["param_groups"], wanted["param_groups"], strict=True):
        if other := sorted(theirs.keys() ^ own.keys()):
            where = "the checkpoint" if other[0] in theirs else "this run"
            raise StateError(
                f"only the optimizer of {where} has the option {other[0]}: continue with the kind that was saved"
            )
