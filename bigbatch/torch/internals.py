"""Every private torch API that bigbatch uses, with the reason.

All of them were read in torch 2.11 and 2.13; a comment names the version where it matters. `torch._foreach_*` is left
out: its names are private, but torch documents it.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _python_dispatch

# What all layers of a kind derive from
BatchNorm = _BatchNorm
Dropout = _DropoutNd

# The only way to see every random draw
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# --- autograd ------------------------------------------------------------------------------------------------

# Where torch (2.4 to 2.13) keeps the hooks of a tensor: a dict, or None. Change it in place: the handles know the dict.
HOOKS_BEFORE = operator.attrgetter("_backward_hooks")
HOOKS_AFTER = operator.attrgetter("_post_accumulate_grad_hooks")

# How often a tensor was changed in place. Fused optimizers do not count their steps (2.13).
VERSION = operator.attrgetter("_version")

# What torch.autograd.backward ends in. The lines before it take a twentieth of a small model's step (2.13).
RUN_ENGINE: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)

# How many tensors lie in the same memory, and one more: torch has no public way to ask.
STORAGE_USERS: Any = torch._C._storage_Use_Count

_one = torch.zeros(())
# What STORAGE_USERS returns for a tensor that shares its memory with no other
ALONE: int = STORAGE_USERS(_one.untyped_storage()._cdata)


def is_in_backward() -> bool:
    """Whether this thread is in a backward pass: activation checkpointing runs layers again there."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_expanded(tensor: Tensor) -> bool:
    """Whether one place in memory stands for several values, so that nobody can write to the tensor."""
    return tensor.layout is torch.strided and torch._debug_has_internal_overlap(tensor) == 1


# --- optimizers ----------------------------------------------------------------------------------------------


def has_step_hooks(optimizer: Any) -> bool:
    """Whether anybody is called at each step of this optimizer."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def is_stepped_in_backward(parameter: Tensor) -> bool:
    """Whether `_apply_optimizer_in_backward` was called on it, whose hooks sit on the graph, out of reach."""
    return hasattr(parameter, "_in_backward_optimizers")


def found_inf(scaler: Any, optimizer: Any) -> list[Tensor]:
    """Whether the GradScaler has seen an overflow since it unscaled, on each device."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def forget_unscaling(scaler: Any, optimizer: Any) -> None:
    """After an error in the middle of a step, a GradScaler would take the next one for a second unscaling."""
    scaler._per_optimizer_states.pop(id(optimizer), None)


# --- modules and torch.compile -------------------------------------------------------------------------------


def uncompiled(module_or_function: Any) -> Any:
    """What torch.compile was given, or the argument itself."""
    found = getattr(module_or_function, "_orig_mod", module_or_function)
    return getattr(found, "_torchdynamo_orig_callable", found)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile or `module.compile()` would trace this module's hooks."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def has_plain_forward(module: nn.Module, kind: Any = _BatchNorm) -> bool:
    """Whether this layer runs the code of torch's own BatchNorm, and not that of a subclass."""
    return type(module).forward is kind.forward


def batch_norm_into(module: Any, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """What `_BatchNorm.forward` does in training (2.13), but leaves the statistics of `x` in `mean` and `var`."""
    module._check_input_dim(x)
    return F.batch_norm(x, mean, var, module.weight, module.bias, True, 1.0, module.eps)


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict of a module's buffers, without those of its children: here one can be swapped for another."""
    return module._buffers


def places_of_parameters(module: nn.Module) -> list[tuple[Any, Any, Any]]:
    """Container, key and value of every parameter; recurrent layers have a second list of theirs."""
    weights: Any = getattr(module, "_flat_weights", ())
    return [
        *[(module._parameters, name, p) for name, p in module._parameters.items()],
        *[(weights, number, p) for number, p in enumerate(weights)],
    ]


# --- CUDA graphs ---------------------------------------------------------------------------------------------


def end_pool(device: torch.device, pool: Any) -> None:
    """Ends the use of a memory pool by a recording that failed, which torch leaves open."""
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)


# --- DistributedDataParallel ---------------------------------------------------------------------------------


def ddp_num_parameters(model: Any, default: int) -> int:
    """How many parameters were trainable when DDP was made: it reduces those, whatever is trainable now."""
    num: int = model._get_ddp_logging_data().get("num_parameter_tensors", default)
    return num


def ddp_is_joining(model: Any) -> bool:
    """Whether this is inside of `model.join()`."""
    return bool(model._join_config.enable)


def ddp_reset(model: Any) -> None:
    """Lets DDP forget a forward pass without a backward pass: it would reduce in the next one, even the user's."""
    model.reducer._reset_state()
    if (used := model.reducer._get_local_used_map()) is not None:
        used.zero_()


def ddp_rebuild_buckets(model: Any) -> None:
    """Does now what DDP does before its next forward pass, which one rank may make alone."""
    model.reducer._rebuild_buckets()


class ReducerWithoutRebuild:
    """A reducer of DDP that leaves its buckets as they are for now: to rebuild them takes all ranks."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def before_each_ddp_forward(call: Callable[[Any], None]) -> None:
    """Calls `call(model)` before each forward pass of any DDP. It has no such hook (2.13): its method is wrapped."""
    kind: Any = nn.parallel.DistributedDataParallel
    before = kind._pre_forward

    @functools.wraps(before)
    def pre_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            call(model)
        return before(model, *args, **kwargs)

    kind._pre_forward = pre_forward


# --- fully_shard (FSDP2) -------------------------------------------------------------------------------------


def fsdp_groups(module: Any) -> Iterator[Any]:
    """The groups of parameters of one FSDPModule, each of which is gathered and reduced at once."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # several from torch 2.12 on
    yield from [state._fsdp_param_group] if groups is None and state._fsdp_param_group else groups or []


def fsdp_reduce(model: Any) -> None:
    """Reduces the gradients that are inside of the model, as the last backward pass of a window does at its end."""
    model._get_fsdp_state()._root_post_backward_final_callback()


def fsdp_drop_gradients(group: Any) -> None:
    """Drops the gradients that were kept inside of the model until the last backward pass of a window."""
    for p in group.fsdp_params:
        p.unsharded_accumulated_grad = None
        if hasattr(p, "_unsharded_param"):
            p._unsharded_param.grad = None


def fsdp_reset(model: Any, groups: list[Any]) -> None:
    """Lets the model forget a pass that was never finished."""
    if hasattr(model, "reset_iter_state"):  # from torch 2.12 on
        model.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    context = model._get_fsdp_state()._state_ctx
    context.post_backward_final_callback_queued = False
    context.iter_forward_root = None
    for state in (*context.all_states, *groups):
        state._training_state = TrainingState.IDLE
    model.reshard()


def flattened(mesh: Any) -> Any:
    """A device mesh of several dimensions as one of a single dimension."""
    return mesh._flatten()
