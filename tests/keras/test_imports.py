"""The imports of bigbatch.keras, and the error without Keras; each in a separate process."""

import subprocess
import sys

import pytest

from ..core.test_imports import BLOCK, run

FRAMEWORKS = {"torch", "tensorflow", "jax"}


def test_no_framework_beyond_what_keras_imports() -> None:
    report = f"print(*sorted({FRAMEWORKS!r} & set(sys.modules)))"
    done = run(f"import sys, keras\n{report}\nimport bigbatch.keras\n{report}")
    assert done.returncode == 0, done.stderr
    of_keras, of_both = done.stdout.splitlines()
    assert of_both == of_keras != ""


def test_public_names() -> None:
    import bigbatch.keras

    assert bigbatch.keras.__all__ == ["accumulate", "recalibrate", "verify"]


def test_missing_keras_names_the_extra() -> None:
    done = run(BLOCK.format(name="keras") + "import bigbatch.keras")
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith('MissingExtraError: bigbatch.keras needs Keras: pip install "bigbatch[keras]"')


@pytest.mark.parametrize("version", ["2.15.0", "3.7.0"])
def test_old_keras_is_refused(version: str) -> None:
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
