"""What importing bigbatch.keras brings along, and what happens without Keras; each in a process of its own."""

import subprocess
import sys

import pytest

from ..core.test_imports import BLOCK, run

FRAMEWORKS = {"torch", "tensorflow", "jax"}


def brought_along(statement: str) -> set[str]:
    done = run(f"import sys\n{statement}\nprint(*sorted({FRAMEWORKS!r} & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_no_framework_beyond_what_keras_imports() -> None:
    assert brought_along("import bigbatch.keras") == brought_along("import keras")


def test_public_names() -> None:
    import bigbatch.keras

    assert bigbatch.keras.__all__ == ["accumulate", "verify"]


def test_missing_keras_names_the_extra() -> None:
    done = run(BLOCK.format(name="keras") + "import bigbatch.keras")
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith('MissingExtraError: bigbatch.keras needs Keras: pip install "bigbatch[keras]"')


@pytest.mark.parametrize("version", ["2.15.0", "3.7.0"])
def test_old_keras_is_told(version: str) -> None:
    code = f"""
import sys, types
keras = types.ModuleType("keras")
keras.__version__ = {version!r}
sys.modules["keras"] = keras
import bigbatch.keras
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    last = done.stderr.strip().splitlines()[-1]
    assert f"needs Keras 3.8 or later, but Keras {version} is installed" in last
