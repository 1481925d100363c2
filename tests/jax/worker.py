"""One of several processes that train on one batch: `python -m tests.jax.worker ADDRESS NUM ID`."""

import os
import sys

os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=2")

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_enable_x64", True)
address, num_processes, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, num_processes, number)

import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bigbatch.jax import pad, value_and_grad
from tests.collectives import collectives
from tests.jax.training import WEIGHTS, gap, language, tokens_loss
from tests.problems import tokens

LENGTHS = ((3, 60, 17, 40, 0, 5, 21, 8, 33), (2, 60, 1))
"""Of the texts that each process has: three times as many here as there."""

kind = AxisType.Explicit if sys.argv[4] == "explicit" else AxisType.Auto
mesh = jax.make_mesh((2 * num_processes,), ("data",), axis_types=(kind,))
sharding = NamedSharding(mesh, PartitionSpec("data"))
everything = tokens(*LENGTHS[0], *LENGTHS[1])
first = len(LENGTHS[0]) * number
mine = {name: array[first : first + len(LENGTHS[number])] for name, array in everything.items()}
padded, is_real = pad(mine, 10)
padded["y"] = np.where(is_real[:, None] == 1, padded["y"], -100)
batch = {name: jax.make_array_from_process_local_data(sharding, array) for name, array in padded.items()}
params = jax.device_put(language(), NamedSharding(mesh, PartitionSpec()))

ours = value_and_grad(tokens_loss, 8, weight=WEIGHTS["tokens"], sharding=sharding)
value, grads = jax.jit(ours)(params, batch)
found = jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), (value, grads))
right = jax.jit(jax.value_and_grad(tokens_loss))(language(), everything)
print("process", number, "devices", len(jax.devices()), "gap", gap(found, jax.tree.map(np.asarray, right)))
print("collectives", collectives(ours, params, batch))
