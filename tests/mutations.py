"""Plants one-line bugs in copies of bigbatch, one at a time, and records which test catches each of them.

    python -m tests.mutations --check           # only check that every bug still applies to the code
    python -m tests.mutations                   # try all of them: about an hour; writes tests/mutations.md
    python -m tests.mutations --only clip       # try those with "clip" in their name
    python -m tests.mutations --resume          # try those that are not in build/mutations.json yet
    python -m tests.mutations --baseline        # run the suites without any bug: all of them must pass

For each bug, its suites (make targets) run until one of them fails. If none fails, they run again with ALL=1, as in
`make test-all`. A suite that exceeds the time limit counts as failed: the bug made it hang. All of this happens in
copies of the tree in temporary folders; the tree itself is never changed.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "mutations.json"
TABLE = ROOT / "tests" / "mutations.md"
HEAD = """# Planted bugs

Each row is a one-line bug that `python -m tests.mutations` plants in a copy of the code. `make test-all` has all
tests of `make test`, so it runs only for bugs that `make test` misses; "same" means that it was not run.
"""
OLD = 1_000_000_000  # 2001: no file of the copy is newer than .venv, so make installs nothing into it

# name | file in bigbatch/ | suites that should catch it, the most likely first; then the change as in a diff
MUTATIONS = r"""
core: a micro-batch counts 1 instead of its weight | core/weight.py | test-core test-torch
- return where(is_empty, 0.0, weight / where(is_empty, 1.0, total))
+ return where(is_empty, 0.0, 1 / where(is_empty, 1.0, total))
core: the reference is the last weight instead of the first | core/weight.py | test-core test-torch
- return shares(self.reference, total, self.reduction, self._where)
+ return shares(self.weights[-1], total, self.reduction, self._where)
core: a fed window is divided by the number of micro-batches | core/weight.py | test-core test-torch
- return shares(self.reference, total, self.reduction, self._where)
+ return shares(self.reference, tuple(r * len(self.weights) for r in self.reference), self.reduction, self._where)
core: the 0/0 of an empty micro-batch enters the loss | core/weight.py | test-core test-torch
- zip(term, of_term, strict=True) if part)
+ zip(term, of_term, strict=True))
core: one empty term makes the loss NaN | core/step.py | test-core test-torch
- has_weight = self.reduction == "sum" or any(as_terms(self.weight))
+ has_weight = self.reduction == "sum" or all(as_terms(self.weight))
core: the loss of an epoch weights sums instead of means | core/history.py | test-core
- term * (1 if step.reduction == "sum" else weight)
+ term * (1 if step.reduction != "sum" else weight)
core: the tail of a batch is dropped | core/window.py | test-core
- stops = [*range(micro_batch_size, batch_size, micro_batch_size), batch_size]
+ stops = [*range(micro_batch_size, batch_size + 1, micro_batch_size)]
core: samples that do not divide evenly among ranks are dropped | core/window.py | test-core test-cli
- ends = [-(-batch_size * rank // num_ranks) for rank in range(num_ranks + 1)]
+ ends = [batch_size // num_ranks * rank for rank in range(num_ranks + 1)]
core: a mean of an epoch's metric counts every step the same | core/history.py | test-core
- counted = [(step.metrics[name] * weight, weight) for step, weight in having if weight]
+ counted = [(step.metrics[name], 1) for step, weight in having if weight]
torch: a skipped micro-batch opens a window | torch/accumulator.py | test-torch
- self._window = window if len(window) else None
+ self._window = window
torch: a model in eval mode is verified in eval mode | torch/verify/trial.py | test-torch
- if acting:
+ if not acting:
jax: the variance between micro-batches is not that of Flax's momentum | jax/batch_norm.py | test-jax
- between / (1 - _momentum_of(mean, momentum))
+ between * (1 - _momentum_of(mean, momentum))
torch: verify cuts where step does not | torch/verify/trial.py | test-torch
- avoid_single_sample=has_norms)  # as step() does
+ avoid_single_sample=False)
torch: a time-major micro-batch counts its time steps | torch/cutting.py | test-torch
- return nest.batch_size(batch, name, self.batch_axis)
+ return nest.batch_size(batch, name)
torch: what the user's function cuts need not add up | torch/cutting.py | test-torch
- _check_adds_up(name, item,
+ print(name, item,
torch: every micro-batch has the weight of the first | torch/accumulator.py | test-torch
- weight = passes[number][1]
+ weight = passes[0][1]
torch: the weight of a bfloat16 loss is lost | torch/backward.py | test-torch
- buffer.add(*self.terms_and_seeds((term,), (1.0,)), share, keep_graph
+ buffer.add(*self.terms_and_seeds((term,), (1.0,)), keep_graph
torch: an empty term runs backward and adds 0 * NaN | torch/backward.py | test-torch
- if term.requires_grad and (isinstance(share, Tensor) or share):
+ if term.requires_grad:
torch: a fed window is not emptied after its step | torch/accumulator.py | test-torch
- self._window = None
-             weights = [] if
+ pass
+             weights = [] if
torch: gradients add up in the dtype of the parameter | torch/gradients.py | test-torch
- return _promoted(parameter.dtype, self._dtype)
+ return parameter.dtype
torch: a parameter without a gradient gets zeros | torch/gradients.py | test-torch
- [(p, g) for p, g in zip(self.parameters, self._before, strict=True) if g is not None]
+ [(p, torch.zeros_like(p) if g is None else g) for p, g in zip(self.parameters, self._before, strict=True)]
torch: two gradients in the same memory are both added to | torch/gradients.py | test-torch
- if STORAGE_USERS(storage._cdata) > ALONE:
+ if STORAGE_USERS(storage._cdata) > ALONE + 1:
torch: clipping scales small gradients up | torch/sums.py | test-torch
- self.multiply(min(factor, 1.0))
+ self.multiply(factor)
torch: clipping comes before unscaling | torch/update.py | test-torch
- self._precision.unscale(self._optimizers.all, sums)
+ pass
torch: only the first of several optimizers steps | torch/optimizers.py | test-torch
- zip(self.all, self._captured, strict=True)
+ zip(self.all[:1], self._captured, strict=False)
torch: each of several optimizers is asked alone whether its gradient is finite | torch/update.py | test-torch
- result = self._check_and_clip(sums, terms)
+ result = self._check_and_clip(Sums({p: g for p, g in sums.items() if p.ndim == 2}), terms)
torch: a gradient that is not finite is left in .grad | torch/update.py | test-torch
- if result.is_applied:
-                     self._gradients.leave(sums)
+ if True:
+                     self._gradients.leave(sums)
torch: an infinite gradient passes the finite check | torch/update.py | test-torch
- if not math.isfinite(norm) or loss_terms is not None:
+ if math.isnan(norm) or loss_terms is not None:
torch: the schedule steps on a skipped step | torch/update.py | test-torch
- elif self.scheduler is not None and result.is_applied:
+ elif self.scheduler is not None:
torch: a saved window loses the unit of its sums | torch/state.py | test-torch
- sums.unit = unit
+ sums.unit = 1.0
torch: aux is a mean over micro-batches | torch/auxiliary.py | test-torch
- by = [share(weight[0], total[0]) for weight in weights]
+ by = [1 / len(weights) for weight in weights]
torch: rows of micro-batches without weight are missing in aux | torch/window.py | test-torch
- if reduction == "sum" or any(weight) or runs_all
+ if reduction == "sum" or any(weight)
torch: aux is in memory that a replay overwrites | torch/auxiliary.py | test-torch
- return leaf.detach().clone()
+ return leaf.detach()
torch: an interrupted step forgets its aux | torch/state.py | test-torch
- aux.load_state_dict(saved_aux, len(state["losses"]))
+ aux.load_state_dict({**saved_aux, "values": saved_aux["values"][:0]}, 0)
ranks: the world size is 1 | torch/distributed/ranks.py | test-ranks
- self.divisor = float(self.size)
+ self.divisor = 1.0
ranks: the total weight is not reduced | torch/distributed/totals.py | test-ranks
- tuple(int(t) if t.is_integer() else t for t in rest[:num]),
+ tuple(int(t) if t.is_integer() else t for t in map(float, own.total or rest[:num])),
ranks: the gradient of a fed window is not reduced | torch/accumulator.py | test-ranks
- if self._ranks.is_distributed:
-                 has_all_terms = self.reduction
+ if self._ranks.is_sharded:
+                 has_all_terms = self.reduction
ranks: each rank clips its own gradient before the reduction | torch/accumulator.py | test-ranks
- self._reduce(buffer, all_ranks, has_all_terms=has_all_terms)
+ sums.clip(1e3, self.clip_norm, None); self._reduce(buffer, all_ranks, has_all_terms=has_all_terms)
ranks: the loss is that of one rank | torch/distributed/ranks.py | test-ranks
- work = dist.all_reduce(tensor, group=self.group, async_op=True)
+ work = dist.all_reduce(tensor.clone(), group=self.group, async_op=True)
ranks: the norm is that of one shard | torch/distributed/shards.py | test-ranks
- return float(total.full_tensor())
+ return float(torch.nn.utils.get_total_norm([local(part) for part in parts]))
tensorflow: a micro-batch counts 1 instead of its weight | tensorflow/backward.py | test-tensorflow
- share(weights, totals, where)
+ share(tf.ones_like(weights), totals, where)
tensorflow: the tail of a batch is dropped | tensorflow/batch.py | test-tensorflow
- return -(-num_samples(tensors) // micro_batch_size)
+ return num_samples(tensors) // micro_batch_size
tensorflow: a fed window is divided by the number of micro-batches | tensorflow/window.py | test-tensorflow
- factor = share(1.0, weight, where)
+ factor = share(1.0, tf.cast(self.sums.count, weight.dtype), where)
tensorflow: gradients are not zeroed between windows | tensorflow/sums.py | test-tensorflow
- for v in (*self.gradients, self.weight, self.losses):
+ for v in (self.weight, self.losses):
tensorflow: gradients add up in float16 | tensorflow/gradients.py | test-tensorflow
- return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype
+ return dtype
tensorflow: the norm is that of the scaled loss | tensorflow/update.py | test-tensorflow
- norm = gradients.norm(grads) / loss_scale
+ norm = gradients.norm(grads)
tensorflow: a gradient that is not finite is applied | tensorflow/update.py | test-tensorflow
- has_weight & (is_finite | is_scaling),
+ has_weight,
tensorflow: replicas all count the same | tensorflow/loop.py | test-tensorflow
- sums, losses = gradients.scaled(sums, reference[0]), losses * reference
+ sums, losses = sums, losses * reference
tensorflow: the totals of terms are not reduced over replicas | tensorflow/loop.py | test-tensorflow
- reference = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own_total)
+ reference = tf.identity(own_total)
tensorflow: the optimizer adds the reduced gradient up again | tensorflow/internals.py | test-tensorflow
- optimizer._all_reduce_sum_gradients = list
+ optimizer._all_reduce_sum_gradients = optimizer._all_reduce_sum_gradients
tensorflow: the means of aux are those of micro-batches | tensorflow/auxiliary.py | test-tensorflow
- return tf.math.multiply_no_nan(wide, weight) if leaf.way == "mean" else wide
+ return wide * tf.cast(weight > 0, WEIGHT) if leaf.way == "mean" else wide
core: the pooled variance leaves out the one between micro-batches | core/moments.py | test-torch test-keras-torch
- one.squares + squares + apart * apart * part * one.count
+ one.squares + squares
tensorflow: moving statistics are those of one replica | tensorflow/batch_norm.py | test-tensorflow
- if replicas.is_shared() and pooled:
+ if not replicas.is_shared() and pooled:
tensorflow: statistics of a window of micro_batch() stay for the next | tensorflow/window.py | test-tensorflow
- self.moments.clear()
+ self.moments.prepare()
tensorflow: layers that cannot be pooled are not named | tensorflow/batch_norm.py | test-tensorflow
- if names and not self._has_warned:
+ if not names and not self._has_warned:
tensorflow: gradients() keeps the loss scale | tensorflow/update.py | test-tensorflow
- gradients.scaled([self._of_one_replica(g)], 1 / scale)[0]
+ gradients.scaled([self._of_one_replica(g)], scale / scale)[0]
tensorflow: only the first of several optimizers steps | tensorflow/optimizers.py | test-tensorflow
- if any(g is not None for g in own):
+ if 0 in numbers and any(g is not None for g in own):
jax: the tail counts as much as a full micro-batch | jax/window.py | test-jax
- weight = share(weights[0], self._weight_unit)
+ weight = share(weights[0], self._weight_unit) if self.spec.weight else 1
jax: gradients add up in the dtype of the parameter | jax/window.py | test-jax
- dtype = self.spec.accumulate_dtype or jnp.promote_types(parameter.dtype, jnp.float32)
+ dtype = self.spec.accumulate_dtype or parameter.dtype
jax: loss and weight are not reduced over devices | jax/window.py | test-jax
- return _Sums(gradient, *add_up(sums[1:], self.axes))
+ return _Sums(gradient, *sums[1:])
jax: the number of devices is 1 | jax/window.py | test-jax
- num_samples * (int(lax.axis_size(axes)) if axes else 1)
+ num_samples * 1
jax: every micro-batch draws the same random numbers | jax/keys.py | test-jax
- key = jax.random.fold_in(key, number)
+ key = jax.random.fold_in(key, 0)
jax: multi_steps does not zero its sums between windows | jax/multi_steps.py | test-jax
- lambda old: jnp.where(is_open, old, jnp.zeros_like(old)), (
+ lambda old: old, (
jax: multi_steps divides by the number of micro-batches | jax/multi_steps.py | test-jax
- return (sums if reduction == "sum" else share(sums, window.weight, jnp.where)).astype(gradient.dtype)
+ return (sums if reduction == "sum" else share(sums, window.micro_step + 1, jnp.where)).astype(gradient.dtype)
jax: multi_steps applies a gradient that is not finite | jax/multi_steps.py | test-jax
- is_applied &= is_finite(gradient)
+ is_applied &= True
keras: the weight of a mask is ignored | keras/loss.py | test-keras-tensorflow test-keras-jax test-keras-torch
- factor = term_shares[i] if kind.weight_from else share_of(sample_share, kind.exponent)
+ factor = share_of(sample_share, kind.exponent)
keras: a regularizer counts once for each micro-batch | keras/loss.py | test-keras-tensorflow test-keras-jax
- core_weight.counted(ops.cast(ops.sum(loss), sample_share.dtype), share_of(sample_share, exponent), ops.where)
+ ops.cast(ops.sum(loss), sample_share.dtype)
keras: a sum is taken for a mean | keras/infer_reduction.py | test-keras-tensorflow test-keras-torch
- if _distance(guess.whole, guess.cuts) <= rounding:
+ if len(tried) == 1:
keras: the loss is tried outside of a stateless scope | keras/backends/step.py | test-keras-torch
- with keras.StatelessScope(values, collect_losses=True):
+ with keras.name_scope("measured"):
keras: the tail counts as a full micro-batch on TensorFlow | keras/backends/tensorflow.py | test-keras-tensorflow
- sample_share = loss.share(tf.cast(_num_samples(micro_batch), total.dtype), total)
+ sample_share = loss.share(tf.cast(self.step.micro_batch_size, total.dtype), total)
keras: gradients are not reduced over replicas | keras/backends/tensorflow.py | test-keras-tensorflow
- sums = _sum_over_replicas(sums)
+ sums = list(sums)
keras: a gradient that is not finite is applied | keras/backends/step.py | test-keras-torch test-keras-jax
- if not checked:
+ if True:
keras: JAX divides by the number of micro-batches | keras/backends/jax.py | test-keras-jax
- sample_share = loss.share(jnp.asarray(checks.batch_size(micro_batch), dtype), size)
+ sample_share = jnp.asarray(1 / -(-size // self.step.micro_batch_size), dtype)
keras: torch does not zero gradients between steps | keras/backends/torch.py | test-keras-torch
- self.step.model.zero_grad()
-         self._wide: dict[int, Tensor] = {}
+ pass
+         self._wide: dict[int, Tensor] = {}
keras: the history on torch is a mean over steps, not samples | keras/backends/torch.py | test-keras-torch
- model._loss_tracker.update_state(value, sample_weight=size)
+ model._loss_tracker.update_state(value)
keras: a window divides by the number of micro-batches | keras/windows/step.py | test-keras-torch
- sample_share = ops.convert_to_tensor(loss.share(num, total), step.dtype)
+ sample_share = ops.convert_to_tensor(1 / len(batches), step.dtype)
keras: a window has one micro-batch too few | keras/windows/epoch.py | test-keras-torch
- while len(window) < accumulation_steps:
+ while len(window) < accumulation_steps - 1:
torch: the second call of a BatchNorm layer counts as the first once more | torch/batch_norm.py | test-torch
- zip(*(layer.rows[call] for layer
+ zip(*(layer.rows[0] for layer
torch: the variance inside of micro-batches is left out of running statistics | torch/batch_norm.py | test-torch
- found = Moments(number, mean, var * (number - lost).clamp(min=0))
+ found = Moments(number, mean, 0 * var)
checkpoint: a batch is trained on again after a resume | core/checkpoint/loop.py | test-torch test-jax test-crash
- num_done = self.place
+ num_done = max(0, self.place - 1)
checkpoint: Python's and NumPy's random numbers are not restored | core/checkpoint/loop.py | test-torch test-tensorflow
- random.restore(found)
+ random.state()
checkpoint: torch's random numbers are not restored | torch/checkpoints.py | test-torch test-crash
- torch.set_rng_state(found["torch"])
+ torch.set_rng_state(torch.get_rng_state())
checkpoint: the position of the schedule is not saved | torch/checkpoints.py | test-torch test-crash
- **schedulers}
+ }
checkpoint: only the first of several optimizers is saved | torch/checkpoints.py | test-torch
- numbered("optimizer", accumulator.optimizer),
+ {"optimizer": accumulator._optimizers.all[0]},
checkpoint: the shuffles of earlier epochs are not repeated | tensorflow/checkpoints.py | test-tensorflow test-crash
- self._num_behind = self.epoch
+ self._num_behind = 0
cli: an interrupted batch counts as done after a resume | cli/run/checkpoints.py | test-cli test-crash
- return self.num_batches
+ return object()
cli: random numbers are not restored | cli/run/checkpoints.py | test-cli test-crash
- randomness.restore(saved)
+ pass
cli: the batches draw other random numbers after a resume | cli/run/checkpoints.py | test-cli test-crash
- data.stream.state = saved["batches"]
+ pass
cli: the schedule begins anew after a resume | cli/run/checkpoints.py | test-cli test-crash
- vars(self.progress).update(progress)
+ vars(self.progress).update({**progress, "num_applied": 0})
cli: skipped steps of TensorFlow are forgotten by a resume | cli/engines/tensorflow.py | test-cli
- return [variable for variable in self.accumulator.variables if id(variable) not in others]
+ return [v for v in self.accumulator.variables if id(v) not in others and v.name != "skipped:0"]
torch: the sums are in .grad while the loss runs | torch/gradients.py | test-torch
- self.store_new()
-             clear(self.parameters)
+ self.store_new()
+             return
ranks: another model in DDP reduces in every micro-batch | torch/distributed/other_models.py | test-ranks
- model.require_backward_grad_sync = model.require_forward_param_sync = False
+ model.require_backward_grad_sync = model.require_forward_param_sync = True
tensorflow: a loss divides by the real number of replicas | tensorflow/distributed/one_replica.py | test-tensorflow
-         return 1
+         return real
tensorflow: a sum divided by hand passes for a mean | tensorflow/distributed/check_mean.py | test-tensorflow
- if last == 3 * first > 0:
+ if last == 3 * first < 0:
jax: an array that should be cut goes whole | jax/uncut.py | test-jax
-         raise error from reason
+         return
verify: a mean of some groups is taken for one of all | core/verify/diagnosis.py | test-torch
- if kind == "mean" and mix.is_unique and not mix.is_of_a_mean:
+ if kind == "mean" and mix.is_unique and not mix.is_unique:
verify: a loss that is another each time is compared | core/verify/diagnosis.py | test-torch
- self.is_repeatable = not
+ self.is_repeatable = True or not
verify: every small difference is rounding | core/verify/diagnosis.py | test-torch
- self.rounding = max(own, moved) if moved < 1e-4 else own
+ self.rounding = 1e-2
cli: skipped steps advance the schedule | cli/run/train.py | test-cli
- done.num_applied += record.is_applied
+ done.num_applied += 1
cli: the loss of a JAX run is not weighted | cli/engines/jax.py | test-cli
- counted(term, w, jnp.where)
+ counted(term, w != 0, jnp.where)
checkpoint: links are followed | core/checkpoint/files.py | test-core test-cli
- _NO_LINK = getattr(os, "O_NOFOLLOW", 0)
+ _NO_LINK = 0
checkpoint: what has no manifest of ours is removed | core/checkpoint/store.py | test-core
- own = [path for path, manifest in manifests.items() if manifest]
+ own = [path for path in manifests if manifests[path].setdefault("log", {"name": ""})]
checkpoint: the lock is one that any other handle drops | core/checkpoint/store.py | test-core
- fcntl.flock(descriptor
+ fcntl.lockf(descriptor
checkpoint: the history of a save that failed is lost | core/checkpoint/store.py | test-core
- self._new_lines += new_lines
+ self._new_lines = new_lines
cli: the run folder is not locked before it is written | cli/run/train.py | test-cli
-         self.checkpoints.claim()
+         pass
cli: the full batch outlives the run that started it | cli/child.py | test-crash
- os.killpg(0, signal.SIGKILL)
+ return
tasks: the last, smaller batch of an epoch is dropped | tasks/data.py | test-tasks test-cli
- for start in range(0, len(order), batch_size)]
+ for start in range(0, len(order) - batch_size + 1, batch_size)]
"""


@dataclass(frozen=True)
class Mutation:
    """One planted bug."""

    name: str
    path: str
    suites: tuple[str, ...]
    old: str
    new: str

    def applied(self, source: str) -> str:
        """The source with the bug in it. Raises ValueError if the bug cannot be planted."""
        if (num := source.count(self.old)) != 1:
            raise ValueError(f"the line to change occurs {num} times in {self.path}, not once")
        mutated = source.replace(self.old, self.new)
        if sum(a != b for a, b in zip(source.split("\n"), mutated.split("\n"), strict=True)) != 1:
            raise ValueError(f"it must change one line of {self.path}")
        ast.parse(mutated)
        return mutated


def misfit(mutation: Mutation) -> str | None:
    """Says why the bug cannot be planted; None if it can."""
    try:
        mutation.applied((ROOT / mutation.path).read_text())
    except (OSError, SyntaxError, ValueError) as error:
        return f"{mutation.name}: {error}"
    return None


def parsed(text: str) -> list[Mutation]:
    found = []
    for head, removed, added in re.findall(r"^([^-+\n].*)\n((?:- .*\n)+)((?:\+ .*\n)+)", text, re.MULTILINE):
        name, path, suites = (part.strip() for part in head.split("|"))
        old, new = ("\n".join(line[2:] for line in lines.splitlines()) for lines in (removed, added))
        found.append(Mutation(name, f"bigbatch/{path}", tuple(suites.split()), old, new))
    assert len({m.name for m in found}) == len(re.findall(r"^[^-+\n]", text, re.MULTILINE)), (
        "two bugs have the same name"
    )
    return found


def copy_tree(folder: Path) -> None:
    """Copies the files that git tracks or would add, and links the real .venv."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():  # else it is deleted but still in the index
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
            os.utime(folder / name, (OLD, OLD))
    (folder / ".venv").symlink_to(ROOT / ".venv")
    ask = [".venv/bin/python", "-P", "-c", "import bigbatch; print(bigbatch.__file__)"]
    where = subprocess.run(ask, cwd=folder, env=environment(folder), check=True, capture_output=True, text=True).stdout
    if not Path(where.strip()).is_relative_to(folder):
        sys.exit(f"the tests would import {where.strip()} instead of the copy in {folder}")


def environment(folder: Path) -> dict[str, str]:
    """The package is installed from the real tree; PYTHONPATH puts the copy before it, in subprocesses too."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return {**plain, "PYTHONPATH": str(folder)}


def failure(suite: str, limit: float, folder: Path, *, is_all: bool = False) -> str | None:
    """The first test of a suite that fails, or "time-out"; None if all pass."""
    shutil.rmtree(folder / ".hypothesis", ignore_errors=True)  # no examples that another bug left
    command = ["make", suite, "PYTEST_ARGS=-x -q -rfE", *(["ALL=1"] if is_all else [])]
    output = folder.parent / "output.txt"  # a file: a process that is left behind would keep a pipe open
    with output.open("w") as file:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = subprocess.Popen(command, cwd=folder, env=environment(folder), start_new_session=True, **streams)
        try:
            code = process.wait(limit * (4 if is_all else 1))
        except subprocess.TimeoutExpired:
            return "time-out"
        finally:
            end(process)
    if not code:
        return None
    text = output.read_text(errors="replace")
    named = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", text, re.MULTILINE)
    return named[1] if named else f"exit code {code}: {(text.strip().splitlines() or [''])[-1][:100]}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the processes of a suite. SIGTERM comes first, because only torchrun can end its workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(60)


def tried(mutation: Mutation, limit: float, folder: Path) -> dict[str, Any]:
    """Tries one bug and returns the result. Afterwards the copy is as before."""
    path = folder / mutation.path
    source = path.read_text()
    found: dict[str, Any] = {"old": mutation.old, "new": mutation.new, "test": None, "all": None}
    began = time.monotonic()
    path.write_text(mutation.applied(source))
    try:
        for kind, suite in [(kind, suite) for kind in ("test", "all") for suite in mutation.suites]:
            if test := failure(suite, limit, folder, is_all=kind == "all"):
                found[kind] = f"{suite}: {test}"
                break
    finally:
        path.write_text(source)
        os.utime(path, (OLD, OLD))
    return found | {"seconds": round(time.monotonic() - began)}


def table(mutations: list[Mutation], results: dict[str, Any]) -> str:
    lines = ["| planted bug | make test | make test-all | first test that fails |", "| --- | --- | --- | --- |"]
    tried = [(m.name, results[m.name]["test"], results[m.name]["all"]) for m in mutations if m.name in results]
    for name, quick, thorough in tried:
        by = (quick or thorough or "").replace("|", "\\|")
        kinds = ("caught", "same") if quick else ("**no**", "caught" if thorough else "**no**")
        lines.append(f"| {name} | {' | '.join(kinds)} | {by} |")
    nums = f"{sum(bool(q) for _, q, _ in tried)} | {sum(bool(q or t) for _, q, t in tried)}"
    return "\n".join([*lines, f"| {len(tried)} of {len(mutations)} tried | {nums} | |"])


@contextmanager
def copies(num: int) -> Iterator[SimpleQueue[Path]]:
    """A queue of copies of the tree: take one, put it back."""
    free: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        for number in range(num):
            folder = Path(temporary).resolve() / str(number) / "tree"
            folder.mkdir(parents=True)
            copy_tree(folder)
            free.put(folder)
        yield free


def check_suites(suites: list[str], folder: Path) -> None:
    """Exits unless make has commands for all suites: an unknown one would look like a suite that fails."""
    asked = subprocess.run(["make", "-n", *suites], cwd=folder, env=environment(folder), capture_output=True)
    if asked.returncode or b"Nothing to be done" in asked.stdout:
        sys.exit(f"make cannot run all suites:\n{(asked.stdout + asked.stderr).decode()}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Plants bugs and records which tests catch them.")
    parser.add_argument("--check", action="store_true", help="only check that every bug applies to the code")
    parser.add_argument("--baseline", action="store_true", help="only run the suites, without any bug")
    parser.add_argument("--resume", action="store_true", help="skip bugs that build/mutations.json has")
    parser.add_argument("--only", default="", metavar="TEXT", help="only bugs whose names contain TEXT")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a suite; four times that with ALL=1")
    parser.add_argument("--jobs", type=int, default=2, help="how many bugs are tried at a time")
    options = parser.parse_args()
    everything = parsed(MUTATIONS)
    misfits = [text for mutation in everything if (text := misfit(mutation))]
    if options.check or misfits:
        print("\n".join(misfits) or f"all {len(everything)} planted bugs apply to the code")
        return int(bool(misfits))
    mutations = [m for m in everything if options.only in m.name]
    suites = sorted({suite for mutation in mutations for suite in mutation.suites})
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with copies(options.jobs) as free, ThreadPoolExecutor(options.jobs) as pool:

        def in_a_copy(function: Callable[..., Any], *arguments: Any) -> Any:
            folder = free.get()
            try:
                return function(*arguments, folder)
            finally:
                free.put(folder)

        in_a_copy(check_suites, suites)
        if options.baseline:
            found = pool.map(lambda suite: in_a_copy(failure, suite, options.limit), suites)
            failed = dict(zip(suites, found, strict=True))
            print("\n".join(f"{suite}: {test or 'passes'}" for suite, test in failed.items()))
            return int(any(failed.values()))

        def is_known(mutation: Mutation) -> bool:
            before = results.get(mutation.name, {})
            return (before.get("old"), before.get("new")) == (mutation.old, mutation.new)

        RESULTS.parent.mkdir(exist_ok=True)
        wanted = [m for m in mutations if not (options.resume and is_known(m))]
        futures = {pool.submit(in_a_copy, tried, mutation, options.limit): mutation for mutation in wanted}
        for future in as_completed(futures):
            name, found = futures[future].name, future.result()
            caught = found["test"] or (f"{found['all']} (ALL=1)" if found["all"] else "NOT CAUGHT")
            print(f"{name}: {caught}, {found['seconds']} s", flush=True)
            results[name] = found
            RESULTS.write_text(json.dumps(results, indent=1))
    TABLE.write_text(f"{HEAD}\n{table(everything, results)}\n")
    return int(not all(results[m.name]["test"] for m in mutations))


if __name__ == "__main__":
    sys.exit(main())
