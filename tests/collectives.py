"""Counts the collectives in a program that JAX has compiled."""

import re

import jax

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def collectives(function, *args):
    """How many of each kind the compiled program has outside of loops, and inside."""
    text = jax.jit(function).lower(*args).compile().as_text()
    inside, outside = {}, {}
    for name, body in computations(text).items():
        where = inside if name in loops(text) else outside
        for kind in COLLECTIVES:
            where[kind] = where.get(kind, 0) + len(re.findall(rf"\s{kind}(?:-start)?\(", body))
    count = {kind: num for kind, num in outside.items() if num}
    return count, {kind: num for kind, num in inside.items() if num}


def computations(text):
    """The computations of a program by name."""
    return dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) .*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))


def loops(text):
    """The computations that a loop calls, directly or indirectly."""
    bodies = computations(text)
    called = {
        name: set(re.findall(r"(?:body|condition|to_apply|calls)=%?([\w.\-]+)", body)) for name, body in bodies.items()
    }
    found = set(re.findall(r"body=%?([\w.\-]+)", text))
    while more := {name for one in found for name in called.get(one, ())} - found:
        found |= more
    return found
