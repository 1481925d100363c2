"""Every private or undocumented part of JAX that bigbatch uses (JAX 0.10 and 0.11)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp


def is_traced(tree: Any) -> bool:
    """Whether any leaf is a tracer, as inside of `jit`."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


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


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a traced function, and those of the functions it calls: bodies of loops, branches of a cond."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if inner is not None and hasattr(inner, "eqns"):
                    yield from equations(inner)


def calls(jaxpr: Any, names: tuple[str, ...]) -> bool:
    """Whether a traced function uses any of these primitives."""
    return any(equation.primitive.name in names for equation in equations(jaxpr))


def scans(jaxpr: Any) -> Iterator[tuple[int, Any, list[Any], list[Any]]]:
    """Every scan: its length, its body, and the body's variables for the carry before and after a step."""
    for equation in equations(jaxpr):
        if equation.primitive.name == "scan":
            params, body = equation.params, equation.params["jaxpr"].jaxpr
            if "ft_in" in params:  # JAX 0.11
                first, num, _ = map(len, params["ft_in"].unpack())
            else:
                first, num = params["num_consts"], params["num_carry"]
            yield params["length"], body, body.invars[first : first + num], body.outvars[:num]


@contextmanager
def dropout_off() -> Iterator[None]:
    """Inside, every mask of Flax, Equinox and `jax.random.bernoulli` keeps everything.

    Nothing is compiled there, because a compiled function of the user's would remember the masks.
    """
    bernoulli = jax.random.bernoulli

    def keep(key: Any, p: Any = 0.5, shape: Any = None, **options: Any) -> Any:
        return jnp.ones(jnp.shape(p) if shape is None else shape, bool)

    jax.random.bernoulli = keep
    try:
        with jax.disable_jit():
            yield
    finally:
        jax.random.bernoulli = bernoulli
