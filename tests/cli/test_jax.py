"""JAX tasks, where they differ from those of other frameworks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from .command import assert_ends_as_asked, history_of, run, train, train_both, verify
from .jax_task import DROPOUT, EVEN, write


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = load_file(folder / "model.safetensors")
    return found


def assert_same_weights(ours: Path, theirs: Path) -> None:
    one, other = weights_of(ours), weights_of(theirs)
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in other)


def test_task_file_matches_the_full_batch(tmp_path: Path) -> None:
    task = write(tmp_path)
    summary, full, comparison = train_both(task, tmp_path / "run")
    assert summary["framework"] == "jax"
    assert summary["device"] == "cpu"
    assert summary["scores"]["accuracy"] > 0.8
    assert comparison.max_weight_difference < 1e-4
    assert verify(task)["is_exact"]
    assert summary["peak_bytes"] < full["peak_bytes"]
    assert [step["num_micro_batches"] for step in history_of(tmp_path / "run")][:4] == [6, 6, 6, 2]
    assert {name: array.shape for name, array in weights_of(tmp_path / "run").items()} == {
        "dense1.kernel": (6, 12), "dense1.bias": (12,), "dense2.kernel": (12, 3), "dense2.bias": (3,),
    }  # fmt: skip


@pytest.mark.slow
def test_negative_control_wrong_weight(tmp_path: Path) -> None:
    """Every micro-batch counts the same, whatever its size."""
    task = write(tmp_path, "\ndef weight(micro_batch):\n    return 1\n")
    _, _, comparison = train_both(task, tmp_path / "run")
    assert comparison.max_weight_difference > 1e-3
    assert not verify(task)["is_exact"]
    assert [step["weight"] for step in history_of(tmp_path / "run")][:4] == [6, 6, 6, 2]


def test_each_term_has_its_own_weight(tmp_path: Path) -> None:
    code = """
entropy = loss
def loss(params, batch):
    return entropy(params, batch), (logits(params, batch[0]) ** 2).mean(1).mean(where=batch[0][:, 0] > 0)

def weight(batch):
    return len(batch[0]), (batch[0][:, 0] > 0).sum()
"""
    _, _, comparison = train_both(write(tmp_path, code, start=EVEN), tmp_path / "run", "--steps", 3)
    assert comparison.max_weight_difference < 1e-4
    assert comparison.max_loss_difference < 1e-5
    for step in history_of(tmp_path / "run"):
        assert step["weight"][0] == step["num_samples"] > step["weight"][1] > 0
        assert step["loss"] == pytest.approx(sum(step["terms"]))


def test_resuming_repeats_every_random_number(tmp_path: Path) -> None:
    """Keys of the loss and of the optimizer; the run stops in the middle of the second epoch of three steps."""
    task, options = write(tmp_path, DROPOUT, start=EVEN), ["--no-compare", "--precision", "bf16"]
    train(task, tmp_path / "whole", *options, "--steps", 7)
    train(task, tmp_path / "parts", *options, "--steps", 5)
    done = run("train", task, "--resume", tmp_path / "parts", "--steps", 7)
    assert done.returncode == 0, done.stderr
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")
    assert_same_weights(tmp_path / "parts", tmp_path / "whole")


WEAK = """
narrow = model
def model(seed):
    return jax.tree.map(lambda array: array.astype(jnp.bfloat16), narrow(seed))

def optimizer(params, lr):
    def update(updates, scale, params):
        return jax.tree.map(lambda array: -array * scale, updates), scale * 0.9
    return optax.GradientTransformation(lambda params: jnp.asarray(lr * 0 + 0.3), update)
"""


def test_weakly_typed_number_stays_weak_after_a_resume(tmp_path: Path) -> None:
    """Otherwise the updates of bfloat16 parameters would become float32."""
    task = write(tmp_path, WEAK, start=EVEN)
    train(task, tmp_path / "whole", "--no-compare", "--steps", 4)
    train(task, tmp_path / "parts", "--no-compare", "--steps", 2)
    done = run("train", task, "--resume", tmp_path / "parts", "--steps", 4)
    assert done.returncode == 0, done.stderr
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")
    assert_same_weights(tmp_path / "parts", tmp_path / "whole")


def test_bf16_computes_in_bf16_and_keeps_float32(tmp_path: Path) -> None:
    task = write(tmp_path, start=EVEN)
    for precision in ("float32", "bf16"):
        train(task, tmp_path / precision, "--no-compare", "--precision", precision)
    full, half = ([step["loss"] for step in history_of(tmp_path / name)] for name in ("float32", "bf16"))
    assert full != half
    assert half == pytest.approx(full, rel=0.05)
    weights = weights_of(tmp_path / "bf16")["dense1.kernel"]
    assert weights.dtype == np.float32
    assert (weights.view(np.uint32) & 0xFFFF).any()  # bits that bf16 cannot represent


SKIPPED = """
whole = batches
def batches(batch_size, epoch, seed):
    first, (x, y), third, last = whole(batch_size, epoch, seed)
    yield first
    {between}
    yield third

def loss(params, batch):
    x, y = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, x), jnp.maximum(y, 0))
    return losses.mean(where=y >= 0)

def weight(batch):
    return (batch[1] >= 0).sum()
"""


def test_skipped_step_changes_nothing(tmp_path: Path) -> None:
    """One batch has a non-finite sample, another one has weight zero."""
    bad = "x[11, 2] = np.nan; yield x, y; yield x, y * 0 - 1"
    task = write(tmp_path, SKIPPED.format(between=bad))
    done = run("train", task, "--out", tmp_path / "run", "--no-compare", "--epochs", 1)
    assert done.returncode == 0, done.stderr
    assert "step 2 was skipped: the loss is not finite" in done.stderr
    assert "step 3" not in done.stderr
    train(write(tmp_path, SKIPPED.format(between="")), tmp_path / "without", "--no-compare", "--epochs", 1)
    history = history_of(tmp_path / "run")
    assert [step["is_applied"] for step in history] == [True, False, False, True]
    assert [step["weight"] for step in history] == [16, 16, 0, 16]
    assert [step["loss"] for step in history[1:3]] == ["nan", "nan"]
    assert_same_weights(tmp_path / "run", tmp_path / "without")


BAD = """
def batches(batch_size, epoch, seed):
    x, y = np.ones((16, 6), np.float32), np.zeros(16, int)
    for number in range(40):
        yield x * (1 if number < {first} else np.nan), y
"""


def test_non_finite_steps_end_the_run_as_asked(tmp_path: Path) -> None:
    assert_ends_as_asked(write(tmp_path, BAD.format(first=1)), tmp_path)


TRACES = """
from pathlib import Path
quiet = loss
def loss(params, batch):
    with Path(__file__).with_name("traces").open("a") as file:
        file.write("trace\\n")
    return quiet(params, batch)

def optimizer(params, lr):
    return optax.sgd(lr)
"""


def test_the_rate_changes_without_a_new_compilation(tmp_path: Path) -> None:
    task, traces = write(tmp_path, TRACES), tmp_path / "traces"
    nums = []
    for steps in (1, 3):
        options = ["--no-compare", "--warmup-steps", 3, "--steps", steps]
        train(task, tmp_path / f"run{steps}", *options)
        nums.append(traces.read_text().count("trace"))
        traces.unlink()
    assert nums[0] == nums[1] > 0
    assert [step["lr"] for step in history_of(tmp_path / "run3")] == pytest.approx([0.05 / 3, 0.1 / 3, 0.05])


def test_rate_and_clipping_reach_the_optimizer(tmp_path: Path) -> None:
    """A step of SGD is the rate times the gradient, whose norm is that in the history or the clip norm."""
    task = write(tmp_path, "\ndef optimizer(params, lr):\n    return optax.sgd(lr)\n")
    flags: dict[str, list[Any]] = {"still": [1e-30], "free": [0.5], "clipped": [0.5, "--clip-norm", 1e-2]}
    for name, (lr, *others) in flags.items():
        train(task, tmp_path / name, "--no-compare", "--steps", 1, "--lr", lr, *others)
    start, free, clipped = (weights_of(tmp_path / name) for name in flags)

    def moved(weights: dict[str, np.ndarray]) -> float:
        return float(np.sqrt(sum(((weights[name] - start[name]) ** 2).sum() for name in start)))

    assert moved(free) == pytest.approx(0.5 * history_of(tmp_path / "free")[0]["grad_norm"], rel=1e-4)
    assert moved(clipped) == pytest.approx(0.5 * 1e-2, rel=1e-3)


START = """
import numpy as np

def batches(batch_size, epoch, seed):
    x = np.random.default_rng((seed, epoch)).normal(size=(48, 6)).astype(np.float32)
    return [{"x": x[k : k + batch_size], "name": "some text", "power": 2} for k in range(0, 48, batch_size)]

def squares(found, batch):
    return (abs(found[:, 0] - batch["x"].sum(1)) ** batch["power"]).mean()

defaults = {"batch_size": 16, "micro_batch_size": 3}
"""
LIBRARIES = {
    "flax.linen": """
import jax
from flax import linen

net = linen.Dense(1)

def model(seed):
    return net.init(jax.random.key(seed), np.ones((1, 6)))

def loss(variables, batch):
    return squares(net.apply(variables, batch["x"]), batch)
""",
    "flax.nnx": """
from flax import nnx

def model(seed):
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(nnx.Linear(6, 8, rngs=rngs), nnx.tanh, nnx.Linear(8, 1, rngs=rngs))

def loss(net, batch):
    return squares(net(batch["x"]), batch)
""",
    "equinox": """
import jax
import equinox

def model(seed):
    return equinox.nn.MLP(6, 1, 8, 1, key=jax.random.key(seed))

def loss(net, batch):
    return squares(jax.vmap(net)(batch["x"]), batch)

def evaluate(net):
    return {"of one": net(np.ones(6))[0]}
""",
}


@pytest.mark.parametrize(
    "library", ["flax.nnx", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flax.linen", "equinox"))]
)
def test_models_of_libraries(library: str, tmp_path: Path) -> None:
    task = write(tmp_path, LIBRARIES[library], start=START)
    _, _, comparison = train_both(task, tmp_path / "run", "--steps", 3)
    assert comparison.max_weight_difference < 1e-4
    assert verify(task)["is_exact"]
    first, *_, last = (step["loss"] for step in history_of(tmp_path / "run"))
    assert first != last


@pytest.mark.slow
def test_verify_says_that_dropout_is_random(tmp_path: Path) -> None:
    found = verify(write(tmp_path, DROPOUT))
    assert found["is_exact"]
    assert any("was switched off for the comparison" in cause for cause in found["causes"])
