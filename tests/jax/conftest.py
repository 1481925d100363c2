"""JAX on four host devices, in float64; what must be set before JAX is imported."""

import os
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_X64"] = "1"
FLAGS = ["--xla_force_host_platform_device_count=4"]
# These make compiling six times as fast, and the tests mostly compile.
FLAGS += ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jax").startswith("0.10."):  # later versions do not know this one, and stop
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(FLAGS)

import jax
import pytest


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
