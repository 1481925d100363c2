"""Folding a gradient is linear, and leaves small gradients as they are."""

import numpy as np
import pytest

from bigbatch.core.verify.sketch import SIZE, sizes_of, sketch


def gradient(seed, *shapes):
    draw = np.random.default_rng(seed)
    return {f"p{k}": draw.normal(size=shape) for k, shape in enumerate(shapes)}


@pytest.mark.parametrize("shapes", [((3, 4), (5,)), ((300, 400), (5,), (SIZE,))])
def test_the_sketch_of_a_mix_is_the_mix_of_the_sketches(shapes):
    one, other = gradient(1, *shapes), gradient(2, *shapes)
    sizes = sizes_of(one)
    mixed = sketch({name: 0.3 * one[name] + 2 * other[name] for name in one}, sizes)
    np.testing.assert_allclose(mixed, 0.3 * sketch(one, sizes) + 2 * sketch(other, sizes), rtol=1e-9, atol=1e-9)
    assert len(mixed) <= SIZE


def test_sketches_roughly_keep_norms_and_angles():
    one, other = gradient(1, (300, 400)), gradient(2, (300, 400))
    sizes = sizes_of(one)
    a, b = sketch(one, sizes), sketch(other, sizes)
    assert np.linalg.norm(a) == pytest.approx(np.linalg.norm(one["p0"]), rel=0.1)
    assert abs(a @ b) < 0.1 * np.linalg.norm(a) * np.linalg.norm(b)


def test_a_missing_parameter_counts_as_zero():
    one = gradient(1, (3,), (2,))
    np.testing.assert_array_equal(sketch({"p0": one["p0"]}, sizes_of(one)), [*one["p0"], 0, 0])


def test_complex_numbers_keep_both_parts():
    one = {"p": np.array([1 + 2j, 3 - 1j])}
    np.testing.assert_array_equal(sketch(one, sizes_of(one)), [1, 3, 2, -1])
