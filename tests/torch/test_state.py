"""A run saved in the middle of a window continues in another process, bit for bit like one that was not stopped."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbatch import StateError
from bigbatch.torch import Accumulator

from .resume import KINDS, NUM_MICRO_BATCHES, Run, main


def assert_bitwise_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_bitwise_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_bitwise_equal(x, y)
    else:
        assert a == b


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one state per kind: this process saved it after 6 micro-batches, another one completed it."""
    folder = tmp_path_factory.mktemp("resumed")
    for kind in KINDS:
        main(kind, 0, 6, str(folder / kind))
        assert torch.load(folder / kind, weights_only=True)["accumulator"]["window"] is not None
    arguments = ["6", str(NUM_MICRO_BATCHES), *(str(folder / kind) for kind in KINDS)]
    subprocess.run([sys.executable, "-m", "tests.torch.resume", *arguments], check=True, timeout=120)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_continues_bit_for_bit(kind: str, resumed: Path, tmp_path: Path) -> None:
    main(kind, 0, NUM_MICRO_BATCHES, str(tmp_path / kind))
    assert_bitwise_equal(*(torch.load(folder / kind, weights_only=True) for folder in (resumed, tmp_path)))


@pytest.mark.parametrize("stop", [1, 2, 4, 9])
def test_window_resumes_from_any_micro_batch(stop: int, tmp_path: Path) -> None:
    main("plain", 0, NUM_MICRO_BATCHES, str(tmp_path / "undisturbed"))
    main("plain", 0, stop, str(tmp_path / "stopped"))
    main("plain", stop, NUM_MICRO_BATCHES, str(tmp_path / "stopped"))
    undisturbed, resumed = (torch.load(tmp_path / name, weights_only=True) for name in ("undisturbed", "stopped"))
    assert_bitwise_equal(resumed, undisturbed)


def test_negative_control_without_the_accumulators_state_the_result_differs(tmp_path: Path) -> None:
    main("plain", 0, NUM_MICRO_BATCHES, str(tmp_path / "undisturbed"))
    main("plain", 0, 6, str(tmp_path / "stopped"))
    state = torch.load(tmp_path / "stopped", weights_only=True)
    state["accumulator"]["window"] = None
    torch.save(state, tmp_path / "stopped")
    main("plain", 6, NUM_MICRO_BATCHES, str(tmp_path / "stopped"))
    undisturbed, resumed = (torch.load(tmp_path / name, weights_only=True) for name in ("undisturbed", "stopped"))
    with pytest.raises(AssertionError):
        assert_bitwise_equal(resumed["model"], undisturbed["model"])


def test_continuing_does_not_change_the_saved_state() -> None:
    run = Run("plain")
    run.feed(0)
    saved = run.accumulator.state_dict()
    kept = copy.deepcopy(saved)
    run.feed(1)
    run.feed(2)
    assert_bitwise_equal(saved, kept)


def damaged(**changes: Any) -> dict[str, Any]:
    run = Run("plain")
    run.feed(0)
    state = run.accumulator.state_dict()
    state["window"].update(changes)
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "no num_steps, scaler, window"),
        (damaged(shapes=[(2, 2)]), "of 1 parameters, the optimizer holds 5"),
        (damaged(shapes=[(2, 2), *damaged()["window"]["shapes"][1:]]), r"parameter 0 has the shape \(2, 2\)"),
        (
            damaged(gradients=[{0: torch.zeros(damaged()["window"]["shapes"][0], dtype=torch.float16)}]),
            "is torch.float16",
        ),
        (damaged(reduction="sum"), "reduction='sum'"),
        ({**damaged(), "scaler": {"scale": 1.0}}, "a GradScaler but this accumulator no"),
    ],
)
def test_state_that_does_not_fit_changes_nothing(state: dict[str, Any], message: str) -> None:
    run = Run("plain")
    run.feed(0)
    before = run.accumulator.state_dict()
    with pytest.raises(StateError, match=message):
        run.accumulator.load_state_dict(state)
    assert_bitwise_equal(run.accumulator.state_dict(), before)


def test_state_between_windows_has_only_the_count() -> None:
    run = Run("plain")
    for number in range(4):
        run.feed(number)
    skipped = {"num_steps": 0, "first_step": 0, "first_place": ""}
    assert run.accumulator.state_dict() == {"num_steps": 1, "scaler": None, "skipped": skipped, "window": None}
    fresh = Accumulator(run.model, run.optimizer, accumulation_steps=4)
    fresh.load_state_dict(run.accumulator.state_dict())
    assert fresh.num_steps == 1


def test_scale_loaded_in_the_middle_of_a_window_is_used_from_there() -> None:
    first = Run("fp16")
    first.feed(0)
    other = Run("fp16")
    state = other.accumulator.state_dict()
    other.accumulator.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 2.0**8}})
    other.feed(0)
    first.accumulator.load_state_dict(other.accumulator.state_dict())
    for run in (first, other):
        run.feed(1)
    assert first.accumulator.flush().grad_norm == other.accumulator.flush().grad_norm
