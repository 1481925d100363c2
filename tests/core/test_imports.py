"""Which packages an import brings along, tested in a new process, because this one has them already."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import bigbatch

FRAMEWORKS = {"torch", "tensorflow", "keras", "jax"}
HEAVY = FRAMEWORKS | {"matplotlib", "tensorboard", "transformers", "typer", "rich"}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def brought_along(statement):
    """The heavy packages that this statement imports."""
    done = run(f"import sys\n{statement}\nprint(*sorted({HEAVY!r} & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def test_bigbatch_imports_no_framework():
    assert brought_along("import bigbatch") == set()


def test_using_the_core_imports_no_framework():
    assert brought_along("from bigbatch import *; list(windows([1, 2, 3], 2)); History().losses") == set()


def test_this_check_can_fail():
    assert brought_along("sys.modules['torch'] = sys") == {"torch"}


# --- public names ----------------------------------------------------------------------------------------


def test_public_names():
    assert bigbatch.__all__ == [
        "BatchError",
        "BigBatchError",
        "BigBatchWarning",
        "CaptureError",
        "GradientError",
        "History",
        "Interrupted",
        "LossError",
        "MissingExtraError",
        "NonFiniteError",
        "OptionError",
        "OrderError",
        "RankError",
        "StateError",
        "Step",
        "TensorBoard",
        "Verification",
        "WeightError",
        "Window",
        "__version__",
        "windows",
    ]
    assert all(hasattr(bigbatch, name) for name in bigbatch.__all__)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Accumulator", "bigbatch has no Accumulator: import it from bigbatch.torch or .tensorflow; for Keras use"),
        ("verify", "bigbatch has no verify: import it from bigbatch.torch, .tensorflow, .keras or .jax"),
        ("value_and_grad", "bigbatch has no value_and_grad: import it from bigbatch.jax"),
    ],
)
def test_a_name_of_a_framework_says_where_it_is(name, told):
    with pytest.raises(ImportError, match=re.escape(told)):
        exec(f"from bigbatch import {name}")


def test_a_name_of_another_framework_says_what_to_use_in_jax():
    names = ["Accumulator", "accumulate", "train_with_accumulation", "micro_batch", "windows", "MultiSteps", "nothing"]
    code = f"""
for name in {names}:
    try:
        exec(f"from bigbatch.jax import {{name}}")
    except ImportError as error:
        print(error)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    told = dict(zip(names, done.stdout.splitlines(), strict=True))
    assert told["Accumulator"].startswith("bigbatch.jax has no Accumulator: value_and_grad(loss, micro_batch_size)")
    assert "multi_steps" in told["Accumulator"]
    assert "bigbatch.keras.accumulate" in told["accumulate"]
    assert "multi_steps" in told["micro_batch"]
    assert told["windows"] == "bigbatch.jax has no windows: import it from bigbatch"
    assert told["nothing"].startswith("cannot import name 'nothing' from 'bigbatch.jax'")


@needs_torch
def test_names_that_bigbatch_torch_does_not_have():
    with pytest.raises(ImportError, match=r"bigbatch\.torch has no windows: import it from bigbatch"):
        from bigbatch.torch import windows  # noqa: F401
    with pytest.raises(ImportError, match=r"bigbatch\.torch has no micro_batch: it is a method"):
        from bigbatch.torch import micro_batch  # noqa: F401
    import bigbatch.torch

    assert not hasattr(bigbatch.torch, "__version__")


def test_other_names_are_missing_as_in_any_module():
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'bigbatch'"):
        from bigbatch import nothing  # noqa: F401
    with pytest.raises(AttributeError, match="module 'bigbatch' has no attribute 'nothing'"):
        bigbatch.nothing  # noqa: B018
    assert not hasattr(bigbatch, "nothing")


def test_the_extra_all_is_all_extras():
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (everything,) = extras.pop("all")
    assert re.fullmatch(r"bigbatch\[(.*)\]", everything)[1].split(",") == list(extras)


@pytest.mark.parametrize(
    ("framework", "names"),
    [
        pytest.param(
            "torch",
            ["Accumulator", "Checkpoints", "MicroBatch", "recalibrate", "train_with_accumulation", "verify", "weights"],
            marks=needs_torch,
        ),
        (
            "jax",
            [
                "Checkpoints",
                "grad",
                "micro_batch_stats",
                "multi_steps",
                "pad",
                "pooled_batch_stats",
                "value_and_grad",
                "verify",
                "weights",
            ],
        ),
    ],
)
def test_a_framework_has_these_names_and_imports_no_other_framework(framework, names):
    code = f"import bigbatch.{framework} as b\nassert all(hasattr(b, name) for name in b.__all__)\n"
    assert brought_along(f"{code}assert b.__all__ == {names}, b.__all__") == {framework}


# --- a framework that is not installed -------------------------------------------------------------------

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
"""


def test_missing_torch_names_the_extra():
    done = run(BLOCK.format(name="torch") + "import bigbatch.torch")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith('MissingExtraError: bigbatch.torch needs PyTorch: pip install "bigbatch[torch]"')


def test_missing_torch_is_an_import_error():
    code = "try:\n    import bigbatch.torch\nexcept ImportError as error:\n    print(type(error).__name__)"
    done = run(BLOCK.format(name="torch") + code)
    assert (done.returncode, done.stdout) == (0, "MissingExtraError\n"), done.stderr


@pytest.mark.parametrize("name", ["jax", "optax"])
def test_missing_jax_names_the_extra(name):
    done = run(BLOCK.format(name=name) + "import bigbatch.jax")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith('MissingExtraError: bigbatch.jax needs JAX and Optax: pip install "bigbatch[jax]"')


def test_without_torch_the_core_works():
    done = run(BLOCK.format(name="torch") + "import bigbatch\nprint(len(bigbatch.windows([1, 2, 3], 2)))")
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
