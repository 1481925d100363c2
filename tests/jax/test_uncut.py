"""Arrays of the batch that would not be cut are named, whatever the size; a table is accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigbatch import BatchError
from bigbatch.jax import value_and_grad, verify
from tests.problems import samples

from .training import assert_equal, classifier, gap, samples_loss

BATCH = samples(13)[0]
X, Y = BATCH["x"], BATCH["y"]
SIZES = [1, 2, 3, 12]


def by_keyword(params, x, *, y):
    return samples_loss(params, {"x": x, "y": jnp.asarray(y)})


def in_a_nest(params, batch, *, more):
    return samples_loss(params, {**batch, "y": more["labels"][0]})


def in_a_list(params, batch):
    return samples_loss(params, {"x": batch["x"], "y": jnp.asarray(batch["y"])})


def sliced(params, x, *, y):
    """Works for smaller batches, but uses the first labels every time."""
    return samples_loss(params, {"x": x, "y": jax.lax.dynamic_slice_in_dim(y, 0, len(x))})


def not_named(params, x, y):
    return samples_loss(params, {"x": x, "y": y})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("loss", "args", "kwargs", "options", "name"),
    [
        (by_keyword, (X,), {"y": Y}, {}, "the argument y is passed whole"),
        (by_keyword, (X,), {"y": Y.tolist()}, {}, "a list of 13 numbers is passed whole"),
        (in_a_nest, ({"x": X},), {"more": {"labels": (Y,)}}, {}, r"the argument more\['labels'\]\[0\] is passed whole"),
        (in_a_list, ({"x": X, "y": Y.tolist()},), {}, {}, "a list of 13 numbers is passed whole"),
        (sliced, (X,), {"y": Y}, {}, "the argument y is passed whole"),
        (not_named, (X, Y), {}, {"batch_argnums": 1}, "argument 2 is passed whole"),
    ],
    ids=["keyword", "keyword list", "nest", "list", "sliced", "batch_argnums"],
)
def test_part_of_the_batch_is_named(loss, args, kwargs, options, name, size, compiled):
    function = value_and_grad(loss, size, **options)
    if compiled and "list" not in name:
        function = jax.jit(function)
    with pytest.raises(BatchError, match=name) as caught:
        function(classifier(), *args, **kwargs)
    assert "13" in str(caught.value)


@pytest.mark.parametrize("size", [13, 20])
def test_uncut_batch_names_nothing(size):
    right = jax.value_and_grad(by_keyword)(classifier(), X, y=Y)
    assert_equal(value_and_grad(by_keyword, size)(classifier(), X, y=Y), right)


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_table_with_as_many_rows_is_accepted(size):
    """Class weights, a teacher's kernel and a list of temperatures work for any number of samples."""
    batch, params = samples(10)[0], classifier()
    teacher = np.random.default_rng(0).normal(size=(10, 3))

    def loss(params, batch, *, class_weights, teacher, temperatures):
        each = jnp.square(batch["x"] @ params["first"]["kernel"]).mean(1) * class_weights[batch["y"]]
        return each.mean() + jnp.square(params["second"]["bias"] @ teacher).sum() * sum(temperatures)

    more = {"class_weights": np.linspace(0.5, 2, 10), "teacher": teacher, "temperatures": [0.1] * 10}
    right = jax.value_and_grad(loss)(params, batch, **more)
    assert_equal(value_and_grad(loss, size)(params, batch, **more), right)
    wrong = jax.value_and_grad(loss)(params, {name: part[:size] for name, part in batch.items()}, **more)
    assert gap(wrong, right) > 1e-3


def test_error_of_the_loss_is_raised():
    with pytest.raises(TypeError, match="incompatible shapes"):
        value_and_grad(lambda p, x, *, y: (x[:, 0] + x[0]).mean() + y.sum(), 4)(classifier(), X, y=Y)


def test_devices_that_share_the_batch():
    """Each device has a part of the rows and the whole keyword argument."""
    mesh = jax.make_mesh((4,), ("data",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(np.concatenate([X, X])[:16], spread)
    y = np.concatenate([Y, Y])[:16]
    for size in (4, 8, 16):
        with pytest.raises(BatchError, match=r"the argument y is passed whole .* 16 rows"):
            value_and_grad(by_keyword, size)(classifier(), x, y=y)


def test_verify_names_it():
    with pytest.raises(BatchError, match="the argument y is passed whole"):
        verify(classifier(), X, by_keyword, 4, kwargs={"y": Y})
