"""A loop over pytrees that is stopped anywhere and resumed ends with the same result."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

from bigbatch import OrderError, StateError
from bigbatch.jax import Checkpoints, multi_steps, value_and_grad
from bigbatch.jax.checkpoints import arrays_of, tree_of, types_of

NUM_BATCHES, EPOCHS = 4, 3
TOTAL = NUM_BATCHES * EPOCHS
X, Y = load_digits(return_X_y=True)


class Shuffled:
    """Batches in an order drawn from NumPy's global generator."""

    def __init__(self, num: int = NUM_BATCHES) -> None:
        self.num = num

    def __iter__(self) -> Iterator[Any]:
        order = np.random.permutation(8 * self.num - 3)
        for rows in np.array_split(order, self.num):
            yield X[rows].astype(np.float32) / 16 + np.float32(0.1 * np.random.rand()), Y[rows]


def loss(params: Any, batch: Any, key: Any) -> Any:
    x, y = batch
    hidden = jnp.tanh(x @ params["in"].astype(jnp.float32))
    hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], y).mean()


@cache
def compiled(is_fed: bool) -> Any:
    optimizer: Any = optax.adamw(optax.cosine_decay_schedule(0.01, TOTAL))
    if is_fed:
        optimizer = multi_steps(optimizer, 3)

    def step(state: Any, batch: Any) -> Any:
        key, own = jax.random.split(state["key"])
        inner = jax.value_and_grad(loss) if is_fed else value_and_grad(loss, 3)
        _, gradient = inner(state["params"], batch, own)
        more = {"weight": len(batch[1])} if is_fed else {}
        updates, opt_state = optimizer.update(gradient, state["opt_state"], state["params"], **more)
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state, "key": key}

    return optimizer, jax.jit(step, donate_argnums=0)


class Loop:
    def __init__(self, folder: Path, is_fed: bool = False) -> None:
        np.random.seed(0)
        draw = np.random.default_rng(0)
        params = {
            "in": jnp.asarray(draw.normal(0, 0.1, (64, 16)), jnp.bfloat16),
            "out": jnp.asarray(draw.normal(0, 0.1, (16, 10)), jnp.float32),
        }
        optimizer, self.step = compiled(is_fed)
        self.state = {"params": params, "opt_state": optimizer.init(params), "key": jax.random.key(3)}
        self.checkpoints = Checkpoints(folder, every=1)

    def run(self, stop: int | None = None) -> "Loop":
        self.state = self.checkpoints.restore(self.state)
        for batch in self.checkpoints.batches(Shuffled(), EPOCHS):
            self.checkpoints.wait()  # like a fast disk, so that every batch has a checkpoint
            if self.checkpoints.num_batches == stop:
                break
            self.state = self.step(self.state, batch)
            self.checkpoints.update(self.state)
        self.checkpoints.close()
        return self

    def ends_as(self, other: "Loop") -> bool:
        def plain(leaf: Any) -> Any:
            return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

        own, theirs = (jax.tree.leaves(jax.tree.map(plain, loop.state)) for loop in (self, other))
        return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(own, theirs, strict=True))


@pytest.mark.parametrize("stops", [(5,), pytest.param(range(TOTAL + 1), marks=pytest.mark.slow)], ids=["5", "all"])
@pytest.mark.parametrize("is_fed", [False, True])
def test_stopped_anywhere(is_fed: bool, stops: Sequence[int], tmp_path: Path) -> None:
    """The loop may also stop in the middle of a window of multi_steps."""
    whole = Loop(tmp_path / "whole", is_fed).run()
    for stop in stops:
        Loop(tmp_path / f"{stop}", is_fed).run(stop)
        assert Loop(tmp_path / f"{stop}", is_fed).run().ends_as(whole), f"stopped after {stop} batches"


def test_saved_by_hand_before_and_after_a_step(tmp_path: Path) -> None:
    """No batch is repeated or left out, whether the current batch is done or not."""
    whole = Loop(tmp_path / "whole").run()
    for stop in (0, 3, 6):
        for is_done in (False, True):
            folder = tmp_path / f"{stop} {is_done}"
            loop = Loop(folder)
            loop.state = loop.checkpoints.restore(loop.state)
            for batch in loop.checkpoints.batches(Shuffled(), EPOCHS):
                if loop.checkpoints.num_batches < stop or is_done:
                    loop.state = loop.step(loop.state, batch)
                    loop.checkpoints.update(loop.state)
                if loop.checkpoints.num_batches == stop:
                    loop.checkpoints.save(wait=True)
                    break
            loop.checkpoints.close()
            assert Loop(folder).run().ends_as(whole), f"stopped at batch {stop}, which was done: {is_done}"


def test_result_differs_without_the_random_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Loop(tmp_path / "whole").run()
    Loop(tmp_path / "other").run(5)
    monkeypatch.setattr(Checkpoints, "_set_random", lambda *_: None)
    assert not Loop(tmp_path / "other").run().ends_as(whole)


def test_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.update({"a": jnp.zeros(3, jnp.float32), "b": 2})
        checkpoints.save(wait=True)
    cases = {
        r"\['a'\] is float32\[3\] in the checkpoint but float32\[4\] here": {"a": jnp.zeros(4, jnp.float32), "b": 0},
        r"\['a'\] is float32\[3\] in the checkpoint but int32\[3\] here": {"a": jnp.zeros(3, jnp.int32), "b": 0},
        r"only the state has \['c'\]": {"a": jnp.zeros(3, jnp.float32), "b": 0, "c": 1},
        r"only the checkpoint has \['b'\]": {"a": jnp.zeros(3, jnp.float32)},
    }
    for message, state in cases.items():
        with Checkpoints(tmp_path) as checkpoints, pytest.raises(StateError, match=message):
            checkpoints.restore(state)
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore({"a": jnp.ones(3, jnp.float32), "b": 0})
    assert found["b"] == 2
    assert type(found["b"]) is int
    assert found["a"].tolist() == [0, 0, 0]


class Params(NamedTuple):
    w: Any


OTHERS = {
    "AdaBelief": (
        optax.adam(0.1),
        optax.adabelief(0.1),
        r"\[1\]\[0\] is ScaleByAdamState .* but ScaleByBeliefState here",
    ),
    "AdamW": (optax.adam(0.1), optax.adamw(0.1), r"\[1\]\[2\] is missing in the checkpoint but EmptyState here"),
    "deep": (
        optax.chain(optax.clip(1.0), optax.masked(optax.adam(0.1), Params(True))),
        optax.chain(optax.clip(1.0), optax.masked(optax.adabelief(0.1), Params(True))),
        r"\[1\]\[1\].inner_state\[0\] is ScaleByAdamState .* but ScaleByBeliefState here",
    ),
    "no momentum": (
        optax.sgd(0.1, 0.9),
        optax.sgd(0.1),
        r"\[1\]\[0\] is TraceState in the checkpoint but EmptyState here",
    ),
    "momentum": (
        optax.sgd(0.1),
        optax.sgd(0.1, 0.9),
        r"\[1\]\[0\] is EmptyState in the checkpoint but TraceState here",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_state_of_another_optimizer_is_refused(kind: str, tmp_path: Path) -> None:
    """Although its leaves have the same paths and shapes."""
    before, after, told = OTHERS[kind]
    params = Params(jnp.arange(3.0))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.restore((params, before.init(params)))
        checkpoints.save(wait=True)
    own = (Params(jnp.ones(3)), after.init(params))
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(StateError, match=f"^{told}: continue with the optimizer that was saved$"):
            checkpoints.restore(own)
        assert checkpoints._tree is own
    with Checkpoints(tmp_path) as checkpoints:
        found, _ = checkpoints.restore((Params(jnp.ones(3)), before.init(params)))
    assert found.w.tolist() == [0, 1, 2]


def test_types_are_found_wherever_they_are() -> None:
    tree = {"a": [None, (Params(Params(None)), 3)], "b": Params({"c": jnp.ones(3)}), "d": (), "e": optax.EmptyState()}
    types = dict.fromkeys(["['a'][1][0]", "['a'][1][0].w", "['b']"], "Params")
    assert types_of(tree) == {**types, "['e']": "EmptyState"}


def test_weakly_typed_number_stays_weak(tmp_path: Path) -> None:
    """Otherwise it would turn bfloat16 values into float32."""
    state = {"rate": jnp.asarray(0.1), "params": jnp.ones(3, jnp.bfloat16)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.restore(state)
        checkpoints.save(wait=True)
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore({"rate": jnp.asarray(0.0), "params": jnp.zeros(3, jnp.bfloat16)})
    assert found["rate"] == state["rate"]
    assert (found["rate"] * found["params"]).dtype == jnp.bfloat16


def test_every_kind_of_leaf_is_restored() -> None:
    state = {
        "weak": jnp.asarray(0.1),
        "scalar": jnp.float32(0.1),
        "low": jnp.ones(3, jnp.bfloat16),
        "key": jax.random.key(3),
        "numpy": np.arange(3),
        "number": 2,
        "rate": 0.5,
    }
    found = tree_of(arrays_of(state), like=jax.tree.map(lambda leaf: leaf, state))
    assert {name: type(leaf) for name, leaf in found.items()} == {name: type(leaf) for name, leaf in state.items()}
    for name in ("weak", "scalar", "low", "key"):
        assert jax.typeof(found[name]) == jax.typeof(state[name]), name
        assert (found[name] == state[name]).all()
    assert (found["number"], found["rate"], found["numpy"].tolist()) == (2, 0.5, [0, 1, 2])


def test_sharded_arrays_return_to_their_devices(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.update(jax.device_put(jnp.arange(8.0), sharding))
        checkpoints.save(wait=True)
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore(jax.device_put(jnp.zeros(8), sharding))
    assert found.sharding == sharding
    assert found.tolist() == list(range(8))


def test_donated_buffers_are_copied_before(tmp_path: Path) -> None:
    checkpoints, state = Checkpoints(tmp_path), jnp.arange(1000.0)
    checkpoints.update(state)
    checkpoints.save()
    state = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(state)
    checkpoints.close()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(state).tolist() == list(range(1000))


def test_save_before_restore_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OrderError, match=r"call restore\(state\) before the loop"):
        Checkpoints(tmp_path).save()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.update({})
        checkpoints.save(wait=True)
    with pytest.raises(OrderError, match=r"call restore\(state\) before the loop"):
        next(Checkpoints(tmp_path).batches([1]))
