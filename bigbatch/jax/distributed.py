"""Devices: over which axes of a mesh a batch is spread, and what that means for a window."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..core.errors import BatchError, OptionError

Axes = tuple[str, ...]
SPREADING = ("sharding_constraint", "reshard", "mesh_cast", "shard_map", "custom_partitioning")
OF_A_BATCH = ("batch", "data", "dp", "fsdp", "replica")


@dataclass(frozen=True)
class Placement:
    """A mesh and those of its axes over which the samples of a batch are spread."""

    mesh: Any
    axes: Axes
    is_guess: bool = False
    """Inside of `jit`, automatic axes do not show what is spread over them."""

    def share(self, micro_batch_size: int, num_samples: int) -> int:
        """How much of each micro-batch one device has: all take part in every one."""
        num = num_devices(self.mesh, self.axes)
        over = f"the {num} devices of {', '.join(self.axes)}"
        if num_samples % num:
            raise BatchError(
                f"{over} cannot share {num_samples} samples evenly: pad the batch with samples of weight zero, see "
                "bigbatch.jax.pad"
            )
        if micro_batch_size >= num_samples:
            return num_samples // num
        if micro_batch_size % num:
            raise OptionError(
                f"micro_batch_size={micro_batch_size} cannot be shared by {over}: pass a multiple of {num}, since "
                "every micro-batch takes from every device"
            )
        return micro_batch_size // num


def num_devices(mesh: Any, axes: Axes) -> int:
    """Among how many devices the samples are shared."""
    return math.prod(mesh.shape[axis] for axis in axes)


def find_placement(rows: Sequence[Any], sharding: Any, micro_batch_size: int) -> Placement | None:
    """Where the batch is, if that was told, or can be seen or guessed."""
    if sharding is not None:
        return as_placement(sharding)
    found = {placement for row in rows if (placement := placement_of(row)) is not None}
    if len(found) > 1:
        axes = " and over ".join(sorted(str(placement.axes) for placement in found))
        raise BatchError(f"the arrays of the batch are spread over {axes}: spread all of them over the same axes")
    return next(iter(found), None) or guess(rows, micro_batch_size)


def guess(rows: Sequence[Any], micro_batch_size: int) -> Placement | None:
    """The only axis of an automatic mesh, or those that are named as axes of a batch are."""
    meshes = {jax.typeof(row).sharding.mesh for row in rows if isinstance(row, jax.core.Tracer)}
    if len(meshes) != 1 or (mesh := meshes.pop()).empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    if len(axes) > 1:
        axes = tuple(axis for axis in axes if axis in OF_A_BATCH)
    placement = Placement(mesh, axes, is_guess=True)
    try:
        placement.share(micro_batch_size, rows[0].shape[0])
    except (BatchError, OptionError):  # who was only guessed at is not asked to change sizes
        return None
    return placement if axes else None


def names_axes(jaxpr: Any) -> bool:
    """Whether a traced function says itself how something is spread, as in a sharding constraint."""
    return any(eqn.primitive.name in SPREADING or any(map(names_axes, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The functions that an equation calls: the body of a loop, the branches of a cond."""
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if (found := getattr(part, "jaxpr", part)) is not None and hasattr(found, "eqns"):
                yield found


def as_placement(sharding: Any) -> Placement | None:
    """A NamedSharding, a PartitionSpec, or the names of axes: of a batch, so the first entry counts."""
    if isinstance(sharding, NamedSharding):
        mesh, spec = sharding.mesh, sharding.spec
    else:
        mesh = current_mesh()
        spec = sharding if isinstance(sharding, PartitionSpec) else PartitionSpec(sharding)
        if mesh.empty:
            raise OptionError(
                f"sharding={sharding!r} names axes but no mesh is set: pass NamedSharding(mesh, P(…)), "
                "or set the mesh with jax.set_mesh(mesh)"
            )
    axes = axes_of(spec[0] if len(spec) else None)
    if missing := [axis for axis in axes if axis not in mesh.shape]:
        raise OptionError(f"sharding names the axis {missing[0]!r} but the mesh has {tuple(mesh.shape)}")
    return spread_over(mesh, axes)


def current_mesh() -> Any:
    """The mesh that `jax.set_mesh` set."""
    return jax.sharding.get_abstract_mesh()


def placement_of(row: Any) -> Placement | None:
    if isinstance(getattr(row, "sharding", None), SingleDeviceSharding):
        return None
    sharding = sharding_of(row)
    return spread_over(sharding.mesh, axes_of(sharding.spec[0] if len(sharding.spec) else None))


def spread_over(mesh: Any, axes: Axes) -> Placement | None:
    """None where the axes are those of a `shard_map` that we are in, or lead to one device."""
    if any(axis in current_mesh().manual_axes for axis in axes):
        return None
    return Placement(mesh, axes) if num_devices(mesh, axes) > 1 else None


def axes_of(entry: Any) -> Axes:
    """The axes in one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


# --- inside of shard_map ---------------------------------------------------------------------------------------


def varying(tree: Any) -> frozenset[str]:
    """The axes of a `shard_map` over which any leaf differs from device to device."""
    found: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(tree):
        kind = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        if hasattr(kind, "vma"):  # its name in other versions than JAX 0.10
            found |= kind.vma or frozenset()
        elif kind.manual_axis_type is not None:
            found |= kind.manual_axis_type.varying
    return found


def vary(tree: Any, axes: Iterable[str]) -> Any:
    """The same, allowed to differ over these axes: what is computed from it is then not reduced behind our back."""

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(set(axes) - varying(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


@dataclass(frozen=True)
class Shard:
    """Which part of a parameter a device has, and so of its gradient."""

    axes: Axes
    """Those over which the gradient is added up."""
    dims: tuple[tuple[int, Axes], ...] = ()
    """The dimensions that are spread, and over which axes."""

    @classmethod
    def of(cls, parameter: Any, axes: Axes) -> "Shard":
        """Only axes of the batch count: what is spread over others stays as it is."""
        spec = sharding_of(parameter).spec
        dims = [(dim, tuple(axis for axis in axes_of(entry) if axis in axes)) for dim, entry in enumerate(spec)]
        return cls(axes, tuple((dim, found) for dim, found in dims if found))

    @classmethod
    def inside(cls, parameter: Any, axes: Axes) -> "Shard":
        """In a `shard_map` of the user's: what differs from device to device already is the device's own."""
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
        """The gradient added up over devices; of a spread parameter each gets its part."""
        for dim, axes in self.dims:
            gradient = lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True)
        scattered = {axis for _, axes in self.dims for axis in axes}
        rest = tuple(axis for axis in self.axes if axis not in scattered)
        return lax.psum(gradient, rest) if rest else gradient


def sharding_of(array: Any) -> NamedSharding:
    """How an array is spread, as far as that can be seen: its type says so on explicit axes, itself outside of jit."""
    by_type = jax.typeof(array).sharding
    is_seen = any(entry is not None for entry in by_type.spec) or isinstance(array, jax.core.Tracer)
    itself = getattr(array, "sharding", None)
    return itself if not is_seen and isinstance(itself, NamedSharding) else by_type


def is_explicit(placement: Placement) -> bool:
    """Whether arrays have to be moved by name; on other axes shard_map does it."""
    kinds = dict(zip(placement.mesh.axis_names, placement.mesh.axis_types, strict=True))
    return all(kinds[axis] == AxisType.Explicit for axis in placement.axes)


def spread(leaf: Any, placement: Placement) -> Any:
    """Rows over the axes of the batch."""
    if not is_explicit(placement):
        return leaf
    rest = tuple(jax.typeof(leaf).sharding.spec)[1:]
    return jax.reshard(leaf, NamedSharding(placement.mesh, PartitionSpec(placement.axes, *rest)))


def gathered(leaf: Any, placement: Placement) -> Any:
    """The same, not spread over the axes of the batch."""
    spec = jax.typeof(leaf).sharding.spec
    left = [tuple(axis for axis in axes_of(entry) if axis not in placement.axes) or None for entry in spec]
    if not is_explicit(placement) or [axes_of(entry) for entry in spec] == [axes_of(entry) for entry in left]:
        return leaf
    return jax.reshard(leaf, NamedSharding(placement.mesh, PartitionSpec(*left)))


def is_spread_both_ways(leaf: Any, placement: Placement) -> bool:
    """Over axes of the batch and over others."""
    axes = {axis for entry in jax.typeof(leaf).sharding.spec for axis in axes_of(entry)}
    return is_explicit(placement) and bool(axes & set(placement.axes)) and bool(axes - set(placement.axes))
