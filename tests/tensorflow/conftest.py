"""Three logical CPUs, for a MirroredStrategy of two or three replicas; TensorFlow wants to know before it starts."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from collections.abc import Iterator

import keras
import pytest
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
)


def pytest_configure(config: pytest.Config) -> None:
    """In the quick run graphs are not optimized: most are run once or twice, and optimizing takes longer than that."""
    if not config.getoption("--all"):
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@pytest.fixture
def float64() -> Iterator[None]:
    """Everything in float64, so that what is left of a difference is rounding."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def eagerly() -> Iterator[None]:
    """Every tf.function is run as the Python that it was."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


EAGER = {"test_accumulator", "test_nonfinite", "test_one_replica", "test_optimizers", "test_precision", "test_refusals"}
EAGER |= {"test_train", "test_users"}
"""Modules about what a step does and refuses, not about graphs; tracing a graph takes ten times as long as a step."""


@pytest.fixture(autouse=True)
def _eagerly_in_the_quick_run(request: pytest.FixtureRequest) -> None:
    """With `--all` they are compiled, as users have it; tests with the marker `compiled` always are."""
    is_quick = not request.config.getoption("--all") and request.module.__name__.rpartition(".")[2] in EAGER
    if is_quick and not request.node.get_closest_marker("compiled"):
        request.getfixturevalue("eagerly")
