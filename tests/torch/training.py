"""Trains the shared problems in torch, with the plain full batch and in all ways to feed bigbatch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Step, Window
from bigbatch.torch import Accumulator
from bigbatch.torch import batch as nest
from tests.problems import IGNORED, VOCABULARY, Problem

WAYS = ("batch", "window", "micro_batch")
Batch = dict[str, Tensor]
MakeOptimizer = Callable[[nn.Module], Any]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices and AdamW for the rest, as its users do."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.1), torch.optim.AdamW(others, lr=1e-2)]


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


class Classifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.mix = nn.GRU(12, 16, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)
        self.length = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.mix(self.embed(ids))[0]
        return self.head(hidden), self.length(hidden.mean(1)).squeeze(1)


def make_model(problem: Problem, dtype: torch.dtype = torch.float64, device: str = "cpu") -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = Classifier() if problem.kind == "samples" else Language()
    return model.to(device, dtype)


def make_batches(problem: Problem, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Batch]:
    def tensor(array: Any) -> Tensor:
        made = torch.as_tensor(array, device=device)
        return made.to(dtype) if made.is_floating_point() else made

    return [{name: tensor(array) for name, array in batch.items()} for batch in problem.batches]


def make_loss(problem: Problem) -> Callable[[nn.Module, Batch], Any]:
    def of_samples(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    def of_tokens(model: nn.Module, batch: Batch) -> Tensor:
        logits, _ = model(batch["x"])
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), ignore_index=IGNORED)

    def of_terms(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits, length = model(batch["x"])
        tokens = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), ignore_index=IGNORED)
        return tokens, F.mse_loss(length, batch["z"])

    return {"samples": of_samples, "tokens": of_tokens, "terms": of_terms}[problem.kind]


def make_weight(problem: Problem) -> Callable[[Batch], Any] | None:
    if problem.kind == "samples":
        return None
    if problem.kind == "tokens":
        return lambda batch: (batch["y"] != IGNORED).sum()
    return lambda batch: ((batch["y"] != IGNORED).sum(), len(batch["y"]))


class Run:
    """One training run: the parameters before and after, and the loss of each step."""

    def __init__(self, problem: Problem, make_optimizer: MakeOptimizer = sgd, epochs: int = 1, **options: Any) -> None:
        self.problem = problem
        self.device = options.pop("device", "cpu")
        self.model = make_model(problem, device=self.device)
        self.before = flat(self.model)
        self.optimizer = make_optimizer(self.model)
        self.scheduler = options.pop("make_scheduler", lambda _: None)(self.optimizer)
        self.epochs = epochs
        self.options = {"clip_norm": problem.clip_norm, **options}
        self.loss = make_loss(problem)
        self.losses: list[float] = []
        self.steps: list[Step] = []

    def full(self) -> "Run":
        """Trains on the plain full batch, without bigbatch."""
        for batch in make_batches(self.problem, device=self.device) * self.epochs:
            self.model.zero_grad()
            loss = self.loss(self.model, batch)
            loss = sum(loss) if isinstance(loss, tuple) else loss
            loss.backward()
            self._step_plainly()
            self.losses.append(loss.item())
        return self

    def naive(self) -> "Run":
        """Trains with the usual loop, which divides by the number of micro-batches."""
        for batch in make_batches(self.problem, device=self.device) * self.epochs:
            self.model.zero_grad()
            micro_batches, _ = nest.cut(batch, self.problem.micro_batch_size)
            for micro_batch in micro_batches:
                loss = self.loss(self.model, micro_batch)
                loss = sum(loss) if isinstance(loss, tuple) else loss
                if torch.isfinite(loss):
                    (loss / self.problem.accumulation_steps).backward()
            self._step_plainly()
        return self

    def accumulated(self, way: str) -> "Run":
        for batch in make_batches(self.problem, device=self.device) * self.epochs:
            step = getattr(self, f"_by_{way}")(batch)
            assert step.is_applied
            self.steps.append(step)
            self.losses.append(step.loss)
        return self

    def _by_batch(self, batch: Batch) -> Step:
        return self._accumulator(micro_batch_size=self.problem.micro_batch_size).step(batch)

    def _by_window(self, batch: Batch) -> Step:
        return self._accumulator().step(Window(nest.cut(batch, self.problem.micro_batch_size)[0]))

    def _by_micro_batch(self, batch: Batch) -> Step:
        accumulator = self._accumulator(accumulation_steps=self.problem.accumulation_steps)
        weigh = make_weight(self.problem) or (lambda micro_batch: len(micro_batch["y"]))
        for micro_batch in nest.cut(batch, self.problem.micro_batch_size)[0]:
            self.model.zero_grad()  # harmless and common
            with accumulator.micro_batch(weight=weigh(micro_batch)) as micro:
                micro.backward(self.loss(self.model, micro_batch))
        step = micro.step or accumulator.flush()
        assert step is not None
        return step

    def _accumulator(self, **how: Any) -> Accumulator:
        if not hasattr(self, "_made"):
            self._made = Accumulator(
                self.model,
                self.optimizer,
                self.loss,
                weight=make_weight(self.problem),
                scheduler=self.scheduler,
                **self.options,
                **how,
            )
        return self._made

    def _step_plainly(self) -> None:
        if self.options["clip_norm"] is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options["clip_norm"])
        for one in (*several(self.optimizer), *several(self.scheduler)):
            one.step()

    @property
    def update(self) -> Tensor:
        return flat(self.model) - self.before


def several(given: Any) -> list[Any]:
    """An optimizer or a scheduler, a list of them, or None, as a list."""
    return [] if given is None else given if isinstance(given, list) else [given]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def update_error(run: Run, reference: Run) -> float:
    """The relative error of the update against that of the reference."""
    return float((run.update - reference.update).norm() / reference.update.norm())


def assert_same_update(run: Run, reference: Run, tolerance: float) -> None:
    error = update_error(run, reference)
    assert error <= tolerance, f"{run.problem.name}: the update is {error:.1e} off, allowed is {tolerance:.0e}"


KEPT: list[Any] = []


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside this block, there is a process group of one rank.

    The group is kept: if it ended together with a model, it would wait for its threads, and they for Python.
    """
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    KEPT.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
