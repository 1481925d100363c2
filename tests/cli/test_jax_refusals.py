"""Error messages for wrong JAX tasks."""

from pathlib import Path
from typing import Any

import pytest

from bigbatch.cli.task import _framework_of

from .command import history_of, run, train
from .jax_task import TINY, write
from .test_refusals import assert_refused

REFUSED: dict[str, tuple[str, list[Any], str]] = {
    "fp16": ("", ["--precision", "fp16"], "needs loss scaling, which JAX tasks do not support"),
    "a device that is not there": ("", ["--device", "gpu:7"], "--device gpu:7 cannot be used here: JAX sees cpu"),
    "a negative weight": (
        "\ndef weight(batch):\n    return -len(batch[0])\n",
        [],
        "the weight of a micro-batch is -3",
    ),
    "a weight that turns out negative": (
        "\ndef weight(batch):\n    return jnp.asarray([4.0, -1.0])[(batch[1] > 0).all().astype(int)]\n",
        [],
        "the weight of the batch is nan",
    ),
    "a weight too many": (
        "\ndef weight(batch):\n    return 1, 2\n",
        [],
        "the loss has 1 term but the weight has 2",
    ),
    "an optimizer without a rate": (
        "\ndef optimizer(params):\n    return optax.sgd(0.1)\n",
        [],
        "optimizer() of tiny takes no lr",
    ),
    "an optimizer that is none": (
        "\ndef optimizer(params, lr):\n    return lr\n",
        [],
        "optimizer() of tiny returned a float: return an optax optimizer",
    ),
    "a model that is none": (
        "\ndef model():\n    return 'me'\n",
        [],
        "model() of tiny returned a str without a floating-point array",
    ),
    "arrays of two lengths": (
        "\ndef batches():\n    return [(np.ones((5, 6)), np.ones(4, int))]\n",
        [],
        "has 5 samples but",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, tmp_path: Path) -> None:
    code, flags, text = REFUSED[name]
    done = run("train", write(tmp_path, code), "--out", tmp_path / "run", "--no-compare", *flags)
    assert_refused(done, text)
    assert not (tmp_path / "run" / "history.jsonl").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()  # the same --out can be used again


def test_error_of_the_task_is_shown_with_its_traceback(tmp_path: Path) -> None:
    task = write(tmp_path, "\ndef loss(params, batch):\n    return unknown_name\n")
    done = run("train", task, "--out", tmp_path / "run", "--no-compare")
    assert done.returncode == 3, done.stderr
    assert "unknown_name" in done.stderr
    assert "tiny.py" in done.stderr
    assert "bigbatch/cli" not in done.stderr
    assert "bigbatch/jax" not in done.stderr


def test_resuming_with_another_task_is_refused(tmp_path: Path) -> None:
    train(write(tmp_path), tmp_path / "run", "--no-compare", "--steps", 2)
    wider = TINY.replace("12", "13")
    resume = ["--resume", tmp_path / "run", "--steps", 3]
    assert_refused(
        run("train", write(tmp_path, start=wider), *resume), "float32[12]", "float32[13]", "in the checkpoint"
    )
    belief = (
        "\ndef optimizer(params, lr):\n    return optax.adabelief(lr)\n"  # whose leaves have the same paths and shapes
    )
    told = "['optimizer'][0] is ScaleByAdamState in the checkpoint but ScaleByBeliefState here"
    assert_refused(run("train", write(tmp_path, belief), *resume), told)
    (tmp_path / "run" / "checkpoints" / "000001" / "state.safetensors").write_bytes(b"nothing of ours")
    assert_refused(run("train", write(tmp_path), *resume), "000001 is damaged", "no checkpoint in")
    assert len(history_of(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("code", "framework"),
    [
        ("import jax.numpy as jnp", "jax"),
        ("import optax", "jax"),
        ("from flax import nnx", "jax"),
        ("import equinox as eqx", "jax"),
        ("from bigbatch.jax import pad", "jax"),
        ("import jax\nimport keras", "keras"),
        ("import jax\nimport torch", "torch"),
        ("import tensorflow as tf\nfrom jax import tree", "tensorflow"),
    ],
)
def test_framework_is_recognised_by_the_imports(code: str, framework: str, tmp_path: Path) -> None:
    assert _framework_of(write(tmp_path, code, start="")) == framework
