"""Which packages an import brings along; asked in a process of its own, since this one has them already."""

import importlib.util
import subprocess
import sys

import pytest

import bigbatch

FRAMEWORKS = {"torch", "tensorflow", "keras", "jax"}
HEAVY = FRAMEWORKS | {"matplotlib", "transformers", "typer", "rich"}


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


@needs_torch
def test_this_check_can_fail():
    assert "torch" in brought_along("import torch")


@needs_torch
def test_bigbatch_torch_imports_torch_alone():
    assert brought_along("import bigbatch.torch") == {"torch"}


def test_bigbatch_jax_imports_jax_alone():
    assert brought_along("import bigbatch.jax") == {"jax"}


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
        "Verification",
        "WeightError",
        "Window",
        "__version__",
        "windows",
    ]
    assert all(hasattr(bigbatch, name) for name in bigbatch.__all__)


@needs_torch
def test_public_names_of_torch():
    import bigbatch.torch

    assert bigbatch.torch.__all__ == ["Accumulator", "Checkpoints", "MicroBatch", "train_with_accumulation", "verify"]
    assert all(hasattr(bigbatch.torch, name) for name in bigbatch.torch.__all__)


def test_public_names_of_jax():
    names = ["Checkpoints", "grad", "multi_steps", "pad", "value_and_grad", "verify"]
    done = run("import bigbatch.jax as b\nprint(b.__all__, all(hasattr(b, name) for name in b.__all__))")
    assert done.stdout.strip() == f"{names} True", done.stderr


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
