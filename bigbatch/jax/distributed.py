"""Several devices: the axes of the mesh over which they share a batch, and a window that runs on all of them."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..core.errors import BatchError, OptionError
from .arguments import Arrays
from .internals import calls, is_traced, varying

Axes = tuple[str, ...]
_SPREADING = ("sharding_constraint", "reshard", "mesh_cast", "shard_map", "custom_partitioning")
_BATCH_AXES = ("batch", "data", "dp", "fsdp", "replica")


@dataclass(frozen=True)
class Placement:
    """A mesh, and its axes over which the samples of a batch are spread."""

    mesh: Any
    axes: Axes
    is_guess: bool = False
    """Whether the axes were guessed: inside of `jit`, automatic axes do not show what is spread over them."""

    @property
    def num_devices(self) -> int:
        """How many devices share the samples."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def local_size(self, micro_batch_size: int, num_samples: int) -> int:
        """How many samples of a micro-batch each device has; all devices take part in every micro-batch."""
        num = self.num_devices
        over = f"the {num} devices of {', '.join(self.axes)}"
        if num_samples % num:
            raise BatchError(
                f"{over} cannot share {num_samples} samples evenly: pad the batch with samples of weight zero "
                "(bigbatch.jax.pad)"
            )
        if micro_batch_size >= num_samples:
            return num_samples // num
        if micro_batch_size % num:
            raise OptionError(
                f"micro_batch_size={micro_batch_size} cannot be shared by {over}: pass a multiple of {num}, since "
                "every micro-batch takes from every device"
            )
        return micro_batch_size // num


def find_placement(rows: Sequence[Any], sharding: Any, micro_batch_size: int) -> Placement | None:
    """Where the batch is: as `sharding` says, else as the arrays show, else guessed. None if it is on one device."""
    if sharding is not None:
        return _as_placement(sharding)
    found = {placement for row in rows if (placement := _placement_of(row)) is not None}
    if len(found) > 1:
        axes = " and over ".join(sorted(str(placement.axes) for placement in found))
        raise BatchError(f"the arrays of the batch are spread over {axes}: spread all of them over the same axes")
    return next(iter(found), None) or _guess(rows, micro_batch_size)


def _guess(rows: Sequence[Any], micro_batch_size: int) -> Placement | None:
    """The only axis of an automatic mesh, or those whose names are usual for a batch."""
    meshes = {jax.typeof(row).sharding.mesh for row in rows if is_traced(row)}
    if len(meshes) != 1 or (mesh := meshes.pop()).empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    if len(axes) > 1:
        axes = tuple(axis for axis in axes if axis in _BATCH_AXES)
    placement = Placement(mesh, axes, is_guess=True)
    try:
        placement.local_size(micro_batch_size, rows[0].shape[0])
    except (BatchError, OptionError):  # if the guess does not fit the sizes, do without it instead of raising
        return None
    return placement if axes else None


def spreads(jaxpr: Any) -> bool:
    """Whether a traced function spreads arrays itself, as with a sharding constraint."""
    return calls(jaxpr, _SPREADING)


def _as_placement(sharding: Any) -> Placement | None:
    """Where a batch with this NamedSharding, PartitionSpec or names of axes is. The first entry is that of the rows."""
    if isinstance(sharding, NamedSharding):
        mesh, spec = sharding.mesh, sharding.spec
    else:
        mesh = jax.sharding.get_abstract_mesh()
        spec = sharding if isinstance(sharding, PartitionSpec) else PartitionSpec(sharding)
        if mesh.empty:
            raise OptionError(
                f"sharding={sharding!r} names axes but no mesh is set: pass NamedSharding(mesh, P(…)), "
                "or set the mesh with jax.set_mesh(mesh)"
            )
    axes = axes_of(spec[0] if len(spec) else None)
    if missing := [axis for axis in axes if axis not in mesh.shape]:
        raise OptionError(f"sharding names the axis {missing[0]!r} but the mesh has {tuple(mesh.shape)}")
    return _spread_over(mesh, axes)


def _placement_of(row: Any) -> Placement | None:
    if isinstance(getattr(row, "sharding", None), SingleDeviceSharding):
        return None
    sharding = _sharding_of(row)
    return _spread_over(sharding.mesh, axes_of(sharding.spec[0] if len(sharding.spec) else None))


def _spread_over(mesh: Any, axes: Axes) -> Placement | None:
    """The placement, or None if these axes have one device, or if this is inside of a `shard_map` over them."""
    if any(axis in jax.sharding.get_abstract_mesh().manual_axes for axis in axes):
        return None
    placement = Placement(mesh, axes)
    return placement if placement.num_devices > 1 else None


def axes_of(entry: Any) -> Axes:
    """The axes in one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


# --- inside of shard_map ---------------------------------------------------------------------------------------


def mark_varying(tree: Any, axes: Iterable[str]) -> Any:
    """The same values, marked as varying over these axes, so that JAX does not reduce their gradients by itself."""

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(set(axes) - varying(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def add_up(tree: Any, axes: Axes) -> Any:
    """The sum over the devices of these axes."""
    return lax.psum(tree, axes) if axes else tree


@dataclass(frozen=True)
class ParameterShard:
    """The part of a parameter, and so of its gradient, that a device has."""

    axes: Axes
    """The axes over which the gradient is added up."""
    dims: tuple[tuple[int, Axes], ...] = ()
    """The dimensions that are spread, and their axes."""

    @classmethod
    def of(cls, parameter: Any, axes: Axes) -> "ParameterShard":
        """The shard over the axes of the batch; a dimension that is spread over other axes stays so."""
        spec = _sharding_of(parameter).spec
        dims = [(dim, tuple(axis for axis in axes_of(entry) if axis in axes)) for dim, entry in enumerate(spec)]
        return cls(axes, tuple((dim, found) for dim, found in dims if found))

    @classmethod
    def inside(cls, parameter: Any, axes: Axes) -> "ParameterShard":
        """In the user's own `shard_map`: a parameter that varies over an axis is the device's own."""
        return cls(tuple(axis for axis in axes if axis not in varying(parameter)))

    @property
    def spec(self) -> PartitionSpec:
        entries: list[Any] = [None] * (1 + max((dim for dim, _ in self.dims), default=-1))
        for dim, axes in self.dims:
            entries[dim] = axes
        return PartitionSpec(*entries)

    def gather(self, part: Any) -> Any:
        """The whole parameter."""
        for dim, axes in self.dims:
            part = lax.all_gather(part, axes, axis=dim, tiled=True)
        return part

    def reduce(self, gradient: Any) -> Any:
        """The gradient added up over devices; each device gets its part of a spread parameter."""
        for dim, axes in self.dims:
            gradient = lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True)
        scattered = {axis for _, axes in self.dims for axis in axes}
        rest = tuple(axis for axis in self.axes if axis not in scattered)
        return add_up(gradient, rest)


def _sharding_of(array: Any) -> NamedSharding:
    """How an array is spread: by its type on explicit axes, by the array itself outside of `jit`."""
    by_type = jax.typeof(array).sharding
    is_seen = any(entry is not None for entry in by_type.spec) or is_traced(array)
    itself = getattr(array, "sharding", None)
    return itself if not is_seen and isinstance(itself, NamedSharding) else by_type


# --- all devices -----------------------------------------------------------------------------------------------


def on_mesh(placement: Placement, function: Callable[..., Any], leaves: list[Any], arrays: Arrays) -> tuple[Any, ...]:
    """Runs a window on every device, each with its own part of the batch.

    `function(parameters, arrays, shards)` returns the value, the gradient, aux with a row for each sample, and other
    aux. It reduces all but the rows over the devices.
    """
    before = [jax.typeof(leaf).sharding for leaf in leaves]
    needs_reshard = [_is_also_spread_over_other_axes(leaf, placement) for leaf in leaves]
    leaves = [_gathered(leaf, placement) if moved else leaf for leaf, moved in zip(leaves, needs_reshard, strict=True)]
    shards = [ParameterShard.of(leaf, placement.axes) for leaf in leaves]
    specs, rows, whole = [shard.spec for shard in shards], PartitionSpec(placement.axes), PartitionSpec()

    def on_device(parts: list[Any], arrays: Arrays) -> tuple[Any, ...]:
        parameters = [shard.gather(part) for shard, part in zip(shards, parts, strict=True)]
        return tuple(function(parameters, arrays, shards))

    mapped = jax.shard_map(
        on_device,
        mesh=placement.mesh,
        in_specs=(specs, Arrays(rows, whole, whole)),
        out_specs=(whole, specs, rows, whole),
        axis_names=set(placement.axes),
        check_vma=False,  # True refuses loops that begin with zeros, as in every RNN
    )
    keys, others = jax.tree.map(lambda leaf: _gathered(leaf, placement), arrays[1:])
    value, gradient, *aux = mapped(leaves, Arrays([_spread(row, placement) for row in arrays.rows], keys, others))
    moved_back = [
        jax.reshard(g, sharding) if moved else g
        for g, sharding, moved in zip(gradient, before, needs_reshard, strict=True)
    ]
    return value, moved_back, *aux


def _is_explicit(placement: Placement) -> bool:
    """Whether arrays have to be resharded explicitly; on other axes shard_map does it."""
    kinds = dict(zip(placement.mesh.axis_names, placement.mesh.axis_types, strict=True))
    return all(kinds[axis] == AxisType.Explicit for axis in placement.axes)


def _spread(leaf: Any, placement: Placement) -> Any:
    """Spreads the rows over the axes of the batch."""
    if not _is_explicit(placement):
        return leaf
    rest = tuple(jax.typeof(leaf).sharding.spec)[1:]
    return jax.reshard(leaf, NamedSharding(placement.mesh, PartitionSpec(placement.axes, *rest)))


def _gathered(leaf: Any, placement: Placement) -> Any:
    """The array, no longer spread over the axes of the batch."""
    spec = jax.typeof(leaf).sharding.spec
    left = [tuple(axis for axis in axes_of(entry) if axis not in placement.axes) or None for entry in spec]
    if not _is_explicit(placement) or [axes_of(entry) for entry in spec] == [axes_of(entry) for entry in left]:
        return leaf
    return jax.reshard(leaf, NamedSharding(placement.mesh, PartitionSpec(*left)))


def _is_also_spread_over_other_axes(leaf: Any, placement: Placement) -> bool:
    """Whether an array is spread over axes of the batch and over others."""
    axes = {axis for entry in jax.typeof(leaf).sharding.spec for axis in axes_of(entry)}
    return _is_explicit(placement) and bool(axes & set(placement.axes)) and bool(axes - set(placement.axes))
