"""Which backend of Keras these tests run on; it cannot be changed within a process."""

import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_ENABLE_X64", "1")  # else JAX has no float64
if os.environ["KERAS_BACKEND"] == "jax":
    flags = ["--xla_force_host_platform_device_count=4"]
    # These make compiling six times as fast, and the tests mostly compile.
    flags += ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if version("jax").startswith("0.10."):  # later versions do not know this one, and stop
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
# most of the time on JAX goes into compiling the same operations in every process
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[2] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

from collections.abc import Iterator

import keras
import pytest

collect_ignore = [] if keras.backend.backend() == "jax" else ["test_data_parallel.py"]
if keras.backend.backend() != "tensorflow":
    collect_ignore += ["test_imports.py", "test_replicas.py", "test_tensorflow.py"]  # the same on all, or TensorFlow's
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    tf.config.set_logical_device_configuration(  # for a MirroredStrategy; TensorFlow needs to know before it starts
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
if keras.backend.backend() == "torch":
    import torch

    torch.set_num_threads(1)  # small models: threads only wait for each other


def pytest_configure(config):
    """In the quick run graphs are not optimized: most are run a few times, and optimizing takes longer than that."""
    if keras.backend.backend() == "tensorflow" and not config.getoption("--all"):
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


FIRST = "tensorflow"
"""The backend on which the quick run has everything; on the others, what differs there."""


def on_first(item):
    return keras.backend.backend() == FIRST or not item.get_closest_marker("any_backend")


@pytest.fixture
def float64():
    """Everything in float64, so that what is left of a difference is rounding."""
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.fixture(autouse=True)
def clean():
    """Every test names its layers from the beginning and leaves no graph behind."""
    yield
    keras.config.set_dtype_policy(keras.config.floatx())
    keras.backend.clear_session(free_memory=False)


EAGER = {
    "test_accumulate",
    "test_fit",
    "test_infer_reduction",
    "test_verify",
    "test_windows",
    "test_batch_norm",
    "test_own_step",
}
"""Modules about what a step does and refuses, not about graphs; tracing a graph takes ten times as long as a step."""


@pytest.fixture
def eagerly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without `--all` every tf.function runs as the Python that it was."""
    if request.config.getoption("--all"):
        yield
        return
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.fixture(autouse=True)
def _eagerly_in_the_quick_run(request: pytest.FixtureRequest) -> None:
    """On TensorFlow. With `--all` they are compiled, as users have it; tests with the marker `compiled` always are."""
    is_eager = request.module.__name__.rpartition(".")[2] in EAGER and not request.node.get_closest_marker("compiled")
    if keras.backend.backend() == "tensorflow" and is_eager:
        request.getfixturevalue("eagerly")


THEIRS = [
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning",  # Keras 3.15, NumPy 2
    "ignore:Even though the `tf.config.experimental_run_functions_eagerly` option is set",  # of no concern here
]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/keras/" in item.path.as_posix():
            if not on_first(item):
                item.add_marker(pytest.mark.slow)
            for warning in THEIRS:
                item.add_marker(pytest.mark.filterwarnings(warning))
