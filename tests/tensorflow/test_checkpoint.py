"""A run saved in the middle of a window continues in another process with the same result."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch import Window
from bigbatch.tensorflow import Accumulator

from .resume import KINDS, NUM_MICRO_BATCHES, Resumable, main


def loaded(folder: Path, kind: str) -> np.ndarray:
    return np.load(folder / f"{kind.replace(' ', '_')}.npy")


def error(folder: Path, other: Path, kind: str) -> float:
    a, b = loaded(folder, kind), loaded(other, kind)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b - Resumable(kind).weights()))


def in_another_process(*arguments: object) -> None:
    command = [sys.executable, "-m", "tests.tensorflow.resume", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    main(0, NUM_MICRO_BATCHES, folder)
    return folder


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs stopped after 6 of 10 micro-batches, two into a window of four, and continued in another process."""
    folder = tmp_path_factory.mktemp("resumed")
    main(0, 6, folder)
    in_another_process(6, NUM_MICRO_BATCHES, folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_continues(kind: str, undisturbed: Path, resumed: Path) -> None:
    """Bit for bit on one device; on two replicas the sums are joined and split again, which rounds."""
    if "replicas" in kind:
        assert error(resumed, undisturbed, kind) <= 1e-12
    else:
        np.testing.assert_array_equal(loaded(resumed, kind), loaded(undisturbed, kind))


@pytest.mark.parametrize("stop", [1, 4, 9, NUM_MICRO_BATCHES])
def test_window_resumes_from_any_micro_batch(stop: int, undisturbed: Path, tmp_path: Path) -> None:
    """At 9 and 10 only flush(), or nothing at all, follows the checkpoint."""
    kinds = ("eager", "branches")
    main(0, stop, tmp_path, kinds=kinds)
    main(stop, NUM_MICRO_BATCHES, tmp_path, kinds=kinds)
    for kind in kinds:
        np.testing.assert_array_equal(loaded(tmp_path, kind), loaded(undisturbed, kind))


def test_negative_control_without_the_accumulators_state_the_result_differs(undisturbed: Path, tmp_path: Path) -> None:
    main(0, 6, tmp_path, is_whole=False, kinds=("eager",))
    main(6, NUM_MICRO_BATCHES, tmp_path, is_whole=False, kinds=("eager",))
    assert error(tmp_path, undisturbed, "eager") > 1e-3


@pytest.mark.usefixtures("float64")
def test_between_steps_of_batches_and_windows(tmp_path: Path) -> None:
    """The state does not contain graphs."""
    x = np.random.default_rng(0).normal(size=(11, 6))

    def make() -> Accumulator:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        return Accumulator(model, keras.optimizers.Adam(0.1), lambda m, b: tf.reduce_mean(m(b) ** 2), 4)

    one = make()
    one.step(x)
    one.step(Window([x[:5], x[5:]]))
    path = tf.train.Checkpoint(accumulator=one).save(str(tmp_path / "saved"))
    other = make()
    tf.train.Checkpoint(accumulator=other).restore(path)
    assert other.num_steps.numpy() == 2
    assert one.step(x).loss == other.step(x).loss
    assert one.step(Window([x[:5], x[5:]])).loss == other.step(Window([x[:5], x[5:]])).loss
    for a, b in zip(one.model.variables, other.model.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
