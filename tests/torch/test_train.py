"""Training over a stream of micro-batches with `train_with_accumulation`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bigbatch import BatchError, OptionError
from bigbatch.torch import batch as nest
from bigbatch.torch import train_with_accumulation
from tests.problems import Problem, samples, tokens

from .training import Run, adamw, flat, make_batches, make_loss, make_model, make_weight, sgd, warm_up

DIGITS = Problem("digits", "samples", samples(64, 25), 16)
TEXT = Problem("text", "tokens", (tokens(3, 60, 17, 40), tokens(8, 1)), 1)
TERMS = Problem("terms", "terms", (tokens(3, 60, 17, 40), tokens(8, 1)), 1)


def micro_batches(problem: Problem) -> list[dict[str, Any]]:
    return [m for batch in make_batches(problem) for m in nest.cut(batch, problem.micro_batch_size)[0]]


@pytest.mark.parametrize("problem", [DIGITS, TEXT, TERMS], ids=lambda problem: problem.name)
def test_history_and_weights_are_those_of_full_batch_training(problem: Problem) -> None:
    """Each epoch has two windows, of 4 and 2 micro-batches."""
    full = Run(problem, adamw, epochs=3, clip_norm=0.5, make_scheduler=warm_up).full()
    model = make_model(problem)
    optimizer = adamw(model)
    history = train_with_accumulation(
        model,
        micro_batches(problem),
        optimizer,
        make_loss(problem),
        accumulation_steps=4,
        epochs=3,
        weight=make_weight(problem),
        scheduler=warm_up(optimizer),
        clip_norm=0.5,
    )
    error = (flat(model) - flat(full.model)).norm() / full.update.norm()
    assert error <= 1e-9
    assert [step.loss for step in history.steps] == pytest.approx(full.losses, rel=1e-9)
    assert history.losses == pytest.approx(logged_by_full_batch(problem), rel=1e-9)
    assert len(history.losses) == 3
    assert history.steps[1].num_micro_batches == 2


def logged_by_full_batch(problem: Problem) -> list[float]:
    """The losses that full-batch training logs: means over all samples or tokens of an epoch."""
    run = Run(problem, adamw, clip_norm=0.5, make_scheduler=warm_up)
    weigh = make_weight(problem) or (lambda batch: len(batch["y"]))
    epochs = []
    for _ in range(3):
        sums: Any = 0
        counts: Any = 0
        for batch in make_batches(problem):
            losses, weight = run.loss(run.model, batch), weigh(batch)
            as_tuple = (losses, weight) if isinstance(losses, tuple) else ((losses,), (weight,))
            sums = sums + torch.stack([v.detach() * w for v, w in zip(*as_tuple, strict=True)])
            counts = counts + torch.tensor([float(w) for w in as_tuple[1]], dtype=torch.float64)
            run.optimizer.zero_grad()
            sum(as_tuple[0]).backward()
            run._step_plainly()
        epochs.append(float((sums / counts).sum()))
    return epochs


def test_a_generator_is_refused_before_anything_is_trained() -> None:
    model = make_model(DIGITS)
    before = flat(model)
    with pytest.raises(BatchError, match="generator, which is exhausted after 1 of 2 epochs"):
        train_with_accumulation(
            model, (m for m in micro_batches(DIGITS)), sgd(model), make_loss(DIGITS), accumulation_steps=4, epochs=2
        )
    assert torch.equal(flat(model), before)


def test_a_generator_is_fine_for_one_epoch() -> None:
    model = make_model(DIGITS)
    history = train_with_accumulation(
        model, (m for m in micro_batches(DIGITS)), sgd(model), make_loss(DIGITS), accumulation_steps=4
    )
    assert len(history) == 2


class SpentInSecret:
    """Can be iterated again, but yields nothing the second time."""

    def __init__(self) -> None:
        self._stream = iter(micro_batches(DIGITS))

    def __iter__(self) -> Iterator[Any]:
        yield from self._stream


def test_empty_epoch_is_refused() -> None:
    model = make_model(DIGITS)
    with pytest.raises(BatchError, match="0 micro-batches in epoch 2 of 3"):
        train_with_accumulation(model, SpentInSecret(), sgd(model), make_loss(DIGITS), accumulation_steps=4, epochs=3)
    with pytest.raises(BatchError, match="0 micro-batches in epoch 1 of 1"):
        train_with_accumulation(model, [], sgd(model), make_loss(DIGITS), accumulation_steps=4)


def test_a_data_loader_and_a_ramp() -> None:
    (batch,) = make_batches(Problem("digits", "samples", samples(50), 16))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(batch["x"], batch["y"]), batch_size=8, shuffle=True
    )
    model = make_model(DIGITS)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    history = train_with_accumulation(
        model, loader, sgd(model), loss, accumulation_steps=lambda step: 1 + step, epochs=2
    )
    assert [step.num_micro_batches for step in history.steps] == [1, 2, 3, 1, 5, 2]
    assert [step.weight for step in history.steps] == [8, 16, 24, 2, 40, 10]


def test_no_epochs_are_refused() -> None:
    model = make_model(DIGITS)
    with pytest.raises(OptionError, match="epochs is 0"):
        train_with_accumulation(model, [], sgd(model), make_loss(DIGITS), accumulation_steps=4, epochs=0)


def test_batches_are_cut() -> None:
    full = Run(DIGITS, adamw, epochs=3, clip_norm=0.5, make_scheduler=warm_up).full()
    model = make_model(DIGITS)
    optimizer = adamw(model)
    history = train_with_accumulation(
        model,
        make_batches(DIGITS),
        optimizer,
        make_loss(DIGITS),
        epochs=3,
        micro_batch_size=3,
        scheduler=warm_up(optimizer),
        clip_norm=0.5,
    )
    assert (flat(model) - flat(full.model)).norm() <= 1e-9 * full.update.norm()
    assert history.losses == pytest.approx(logged_by_full_batch(DIGITS), rel=1e-9)
    assert [step.micro_batch_size for step in history.steps] == [3] * 6
    assert [step.num_micro_batches for step in history.steps] == [22, 9] * 3


def test_accumulation_steps_and_micro_batch_size_exclude_each_other() -> None:
    model = make_model(DIGITS)
    with pytest.raises(OptionError, match=r"accumulation_steps=4 and micro_batch_size=3: pass exactly one"):
        train_with_accumulation(model, [], sgd(model), make_loss(DIGITS), accumulation_steps=4, micro_batch_size=3)
    with pytest.raises(OptionError, match="accumulation_steps=None and micro_batch_size=None: pass exactly one"):
        train_with_accumulation(model, [], sgd(model), make_loss(DIGITS))
    with pytest.raises(BatchError, match="0 batches in epoch 1 of 1"):
        train_with_accumulation(model, [], sgd(model), make_loss(DIGITS), micro_batch_size=3)


def test_on_step_is_called_with_each_step() -> None:
    model, seen = make_model(DIGITS), []
    options: dict[str, Any] = {"accumulation_steps": 4, "epochs": 2, "on_step": seen.append}
    history = train_with_accumulation(model, micro_batches(DIGITS), sgd(model), make_loss(DIGITS), **options)
    assert [step.loss for step in seen] == [step.loss for step in history.steps]
    assert len(seen) == 4
