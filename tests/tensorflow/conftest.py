"""Sets up three logical CPUs for strategies of two or three replicas, which must happen before TensorFlow starts."""

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
    """In the quick run graphs are not optimized: most run once or twice, and optimizing takes longer than that."""
    if not config.getoption("--all"):
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@pytest.fixture
def float64() -> Iterator[None]:
    """Runs everything in float64, so that any difference is rounding."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def eagerly() -> Iterator[None]:
    """Runs every tf.function eagerly."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


EAGER = {"test_accumulator", "test_nonfinite", "test_one_replica", "test_optimizers", "test_precision", "test_refusals"}
EAGER |= {"test_train", "test_users"}
"""Modules whose tests do not depend on graphs; tracing a graph takes ten times as long as a step."""


@pytest.fixture(autouse=True)
def _eagerly_in_the_quick_run(request: pytest.FixtureRequest) -> None:
    """With `--all` they are compiled, as for users; tests with the marker `compiled` always are."""
    is_quick = not request.config.getoption("--all") and request.module.__name__.rpartition(".")[2] in EAGER
    if is_quick and not request.node.get_closest_marker("compiled"):
        request.getfixturevalue("eagerly")
