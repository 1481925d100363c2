"""The options of a run are declared once, and passed on by the name that each framework has for them."""

import re
import subprocess
from pathlib import Path

import pytest

from bigbatch.cli.config import FLAGS, Config, option
from bigbatch.cli.config import _checked as checked
from bigbatch.cli.run.compare import _task_of
from bigbatch.cli.task import FRAMEWORKS
from bigbatch.core.errors import OptionError

from .command import run_here

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("framework", "passed_on"),
    [
        ("torch", {"clip_norm": 2.0, "precision": "bf16", "on_nonfinite": "stop"}),
        ("tensorflow", {"clip_norm": 2.0, "on_nonfinite": "stop"}),
        ("keras", {"global_clipnorm": 2.0}),
        ("jax", {}),
    ],
)
def test_options_are_passed_on(framework: str, passed_on: dict[str, object]) -> None:
    assert Config("task", framework=framework).for_framework() == {}
    config = Config("task", framework=framework, clip_norm=2.0, precision="bf16", on_nonfinite="stop")
    assert config.for_framework() == passed_on


OTHERS = {
    "batch_size": 65,
    "micro_batch_size": 9,
    "epochs": 3,
    "steps": 3,
    "lr": 0.5,
    "lr_scaling": "sqrt",
    "base_batch_size": 32,
    "warmup_steps": 2,
    "schedule": "linear",
    "clip_norm": 2.0,
    "precision": "bf16",
    "on_nonfinite": "stop",
    "batch_norm": "frozen",
    "checkpoint_every": 100,
    "seed": 1,
    "device": "cpu",
    "compare": False,
    "tensorboard": True,
}
"""Values that are not the default."""


def test_every_option_has_another_value() -> None:
    assert OTHERS.keys() == FLAGS.keys() - {"framework"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", OTHERS)
def test_no_option_is_ignored(name: str, framework: str) -> None:
    """Each is passed on, used in the code of that framework, or refused."""
    config = Config("task.py", framework=framework, **{"base_batch_size": 32, name: OTHERS[name]})
    passed_on, takers = FLAGS[name].metadata["passed_on"], FLAGS[name].metadata["takers"]
    if framework not in takers:
        with pytest.raises(OptionError, match=f"^{option(name)} .* is a task for {framework}.*: leave it out$"):
            checked(config)
        return
    checked(config)
    if framework in passed_on:
        assert config.for_framework() == {passed_on[framework]: OTHERS[name]}
        return
    assert config.for_framework() == {}
    folder = ROOT / "bigbatch" / "cli"
    files = [folder / "engines" / f"{framework}.py"]
    if not passed_on:
        files += [folder / "config.py", folder / "app.py", folder / "engines" / "engine.py", *folder.glob("run/*.py")]
    assert any(re.search(rf"\b(config|chosen|self)\.{name}\b", file.read_text()) for file in files)


@pytest.mark.parametrize("name", ["clip_norm", "on_nonfinite"])
def test_an_option_is_declared_once(name: str) -> None:
    """Some engines read it, the other frameworks take it as it is passed on."""
    done = subprocess.run(["grep", "-rl", name, "--include=*.py", "bigbatch/cli"], cwd=ROOT, capture_output=True)
    readers = {"clip_norm": ["jax"], "on_nonfinite": ["jax", "keras"]}[name]
    engines = [f"bigbatch/cli/engines/{framework}.py" for framework in readers]
    assert sorted(done.stdout.decode().split()) == ["bigbatch/cli/config.py", *engines]


def test_a_flag_is_checked_for_the_framework_of_the_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A flag that torch does not take is accepted for a task of another framework."""
    about = dict(FLAGS["clip_norm"].metadata, takers=("jax",))
    monkeypatch.setattr(FLAGS["clip_norm"], "metadata", about)
    (tmp_path / "task.py").write_text("import jax\n")
    done = run_here("train", tmp_path / "task.py", "--clip-norm", 2)
    assert "defines no model()" in done.stderr  # the next error
    assert "--clip-norm" not in done.stderr


def test_the_comparison_names_the_framework_of_a_built_in_task() -> None:
    assert _task_of(Config("digits", framework="jax")) == ["digits", "--framework", "jax"]
    assert _task_of(Config("/home/me/task.py", framework="jax")) == ["/home/me/task.py"]
