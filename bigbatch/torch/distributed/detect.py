"""Recognises how a model is trained: by one process, in DistributedDataParallel or with fully_shard."""

from __future__ import annotations  # some builds of torch have no process groups

from typing import Any, get_args

import torch.distributed as dist
from torch import nn

from ...core.errors import OptionError, warn
from ...core.options import check_choice
from .. import internals
from ..gradients import Gradients
from .ranks import Ranks, Reduce

_REMEDY = {
    "DistributedDataParallel": "is a part of the model: wrap the whole model in it",
    "FullyShardedDataParallel": "is the first FSDP, which torch has replaced: call fully_shard(model) instead",
    "FSDPModule": "is a part of the model: call fully_shard on the whole model too",
    "DTensor": "holds parameters that nobody reduces over ranks: call fully_shard on the model",
}


def ranks_of(model: nn.Module, gradients: Gradients, group: dist.ProcessGroup | None, reduce: Reduce) -> Ranks:
    """Returns the ranks of this model; raises OptionError if they could not compute the whole batch's gradient."""
    check_choice("reduce", reduce, get_args(Reduce))
    inner = internals.uncompiled(model)
    own_kinds = {kind.__name__ for kind in type(inner).__mro__}
    if "DistributedDataParallel" in own_kinds:
        from .ddp import DataParallel

        return DataParallel(inner, gradients, group)
    if "FSDPModule" in own_kinds:
        from .fsdp import Sharded

        return Sharded(inner, gradients, group, reduce)
    if kinds := [kind for kind in _REMEDY if kind in _kinds_in(model)]:
        raise OptionError(f"{kinds[0]} {_REMEDY[kinds[0]]}")
    if group is not None:
        raise OptionError(
            f"group has {dist.get_world_size(group)} ranks but the model is a plain {type(model).__name__}: wrap it in "
            "DistributedDataParallel, or call fully_shard"
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warn(
            f"the model is a plain {type(model).__name__}, so each of {dist.get_world_size()} ranks trains its own: "
            "wrap it in DistributedDataParallel, or call fully_shard, to train it together"
        )
    return Ranks()


def _kinds_in(model: nn.Module) -> set[str]:
    """The names of all classes of its modules and parameters, base classes included."""
    parts: list[Any] = [*model.modules(), *model.parameters()]
    return {kind.__name__ for part in parts for kind in type(part).__mro__}
