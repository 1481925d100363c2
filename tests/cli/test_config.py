"""The options of a run: declared once, and passed on by the name that the framework has for them."""

import subprocess
from pathlib import Path

import pytest

from bigbatch.cli.config import Config
from bigbatch.cli.run.compare import _task_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("framework", "passed_on"),
    [
        ("torch", {"clip_norm": 2.0, "precision": "bf16", "on_nonfinite": "stop"}),
        ("tensorflow", {"clip_norm": 2.0, "on_nonfinite": "stop"}),
        ("keras", {"global_clipnorm": 2.0}),
        ("jax", {"max_norm": 2.0}),
    ],
)
def test_options_are_passed_on(framework: str, passed_on: dict[str, object]) -> None:
    assert Config("task", framework=framework).for_framework() == {}
    config = Config("task", framework=framework, clip_norm=2.0, precision="bf16", on_nonfinite="stop")
    assert config.for_framework() == passed_on


@pytest.mark.parametrize("option", ["clip_norm", "on_nonfinite"])
def test_an_option_is_declared_once(option: str) -> None:
    done = subprocess.run(["grep", "-rl", option, "--include=*.py", "bigbatch/cli"], cwd=ROOT, capture_output=True)
    assert done.stdout.decode().split() == ["bigbatch/cli/config.py"]


def test_the_comparison_names_the_framework_of_a_built_in_task() -> None:
    assert _task_of(Config("digits", framework="jax")) == ["digits", "--framework", "jax"]
    assert _task_of(Config("/home/me/task.py", framework="jax")) == ["/home/me/task.py"]
