"""A batch whose leading axis is time gives a warning if it is cut, and is a cause that verify names."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax

from bigbatch import BigBatchWarning
from bigbatch.jax import value_and_grad, verify

from .training import assert_equal, gap

draw = np.random.default_rng(0)
SEQUENCES = jnp.asarray(draw.normal(size=(12, 5, 6)))  # (time, sample, feature) or (sample, time, feature)
WEIGHT = {"w": jnp.asarray(draw.normal(size=(6, 4))), "u": jnp.asarray(draw.normal(size=(4, 4)))}


def states(params, x):
    """The states of a recurrent layer that runs along the leading axis."""

    def body(h, row):
        h = jnp.tanh(row @ params["w"] + h @ params["u"])
        return h, h

    return lax.scan(body, jnp.zeros((x.shape[1], 4)), x)[1]


def scanned(params, x):
    return jnp.square(states(params, x)).mean()


def looped(params, x):
    """The same with fori_loop, which is a scan without rows."""

    def body(k, h):
        return jnp.tanh(x[k] @ params["w"] + h @ params["u"])

    return jnp.square(lax.fori_loop(0, len(x), body, jnp.zeros((x.shape[1], 4)))).mean()


def remembered(params, x):
    """Each row is combined with the previous one."""
    rows = x @ params["w"]
    return (lax.scan(lambda last, row: (row, jnp.tanh(row - last)), rows[0], rows)[1] ** 2).mean()


CELL = linen.RNN(linen.GRUCell(4), time_major=True)
GRU = CELL.init(jax.random.key(0), SEQUENCES.astype(np.float32))  # its carry is always float32


def of_flax(params, x):
    return jnp.square(CELL.apply(params, x)).mean()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("loss", [scanned, looped, remembered, of_flax, jax.jit(scanned), jax.checkpoint(scanned)])
def test_scan_over_time_warns(loss, compiled):
    params, batch = (GRU, SEQUENCES.astype(np.float32)) if loss is of_flax else (WEIGHT, SEQUENCES)
    function = value_and_grad(loss, 5)
    with pytest.warns(BigBatchWarning, match="scans over the leading axis") as caught:
        found = (jax.jit(function) if compiled else function)(params, batch)
    assert len(caught) == 1
    assert gap(found, jax.value_and_grad(loss)(params, batch)) > 1e-3


@pytest.mark.parametrize("size", [4, 12])
def test_devices_that_share_time(size):
    """Each device has a part of every sequence, also if no part is cut further."""
    mesh = jax.make_mesh((4,), ("data",))
    spread = jax.device_put(SEQUENCES, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    with pytest.warns(BigBatchWarning, match="scans over the leading axis"):
        value_and_grad(remembered, size)(WEIGHT, spread)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value_and_grad(mapped, size)(WEIGHT, spread)


def mapped(params, x):
    return lax.map(lambda sample: jnp.tanh(sample @ params["w"]).mean() ** 2, x).mean()


def added_up(params, x):
    def body(sums, sample):
        total, worst, by_class = sums
        loss = jnp.square(sample @ params["w"]).mean()
        return (total + loss, jnp.maximum(worst, loss), by_class.at[0].add(loss)), None

    return lax.scan(body, (0.0, 0.0, jnp.zeros(3)), x)[0][0] / len(x)


def written(params, x):
    def body(k, found):
        return found.at[k].set(jnp.square(x[k] @ params["w"]).mean())

    return lax.fori_loop(0, len(x), body, jnp.zeros(len(x))).mean()


def with_keys(params, x):
    def body(key, sample):
        key, _ = jax.random.split(key)
        return key, jnp.square(sample @ params["w"]).mean()

    return lax.scan(body, jax.random.key(0), x)[1].mean()


def samples_first(params, x):
    return scanned(params, x.swapaxes(0, 1))


def layers(params, x):
    """A scan over as many layers as the micro-batch has samples."""

    def body(h, _):
        return jnp.tanh(h @ params["u"]), None

    return jnp.square(lax.scan(body, x @ params["w"], None, length=5)[0]).mean()


@pytest.mark.parametrize("size", [1, 5, 12])
@pytest.mark.parametrize("loss", [mapped, added_up, written, with_keys, samples_first, layers])
def test_other_scans_do_not_warn(loss, size):
    """`samples_first` has sequences as long as the micro-batch has samples, `layers` has as many layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = value_and_grad(loss, size)(WEIGHT, SEQUENCES)
    assert_equal(found, jax.value_and_grad(loss)(WEIGHT, SEQUENCES), 1e-11)


def test_uncut_batch_does_not_warn():
    assert_equal(value_and_grad(scanned, 12)(WEIGHT, SEQUENCES), jax.value_and_grad(scanned)(WEIGHT, SEQUENCES), 1e-11)


def unrolled(params, x):
    h = jnp.zeros((x.shape[1], 4))
    for row in x:
        h = jnp.tanh(row @ params["w"] + h @ params["u"])
    return jnp.square(h).mean()


def attended(params, x):
    """Attention over time."""
    rows = x @ params["w"]
    shares = jax.nn.softmax(jnp.einsum("tnf,snf->nts", rows, rows))
    return jnp.square(jnp.einsum("nts,snf->tnf", shares, rows)).mean()


@pytest.mark.filterwarnings("ignore::bigbatch.BigBatchWarning")
@pytest.mark.parametrize(
    "loss", [pytest.param(scanned, marks=pytest.mark.slow), unrolled, pytest.param(attended, marks=pytest.mark.slow)]
)
def test_verify_names_a_time_major_batch(loss):
    found = verify(WEIGHT, SEQUENCES, loss, 5)
    assert not found.is_exact
    assert len(found.causes) == 1
    assert "probably time" in found.causes[0]
    swapped = verify(WEIGHT, SEQUENCES, lambda p, x: loss(p, x.swapaxes(0, 1)), 5)
    assert swapped.is_exact
    assert not swapped.causes


def test_a_loss_that_couples_samples_is_not_called_time_major():
    def standardised(params, x):
        x = x.mean(1) @ params["w"]
        return jnp.tanh((x - x.mean(0)) / x.std(0)).mean() + (x**2).mean() ** 0.5

    found = verify(WEIGHT, SEQUENCES, standardised, 5)
    assert not found.is_exact
    assert "couples the samples" in found.causes[0]
