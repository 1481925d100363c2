"""How passes are recorded and replayed, without a GPU: here a graph is the work it was made of, done again."""

import itertools
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbatch.torch.capture.capture as capture
import bigbatch.torch.capture.recording as recording
from bigbatch import BigBatchWarning, CaptureError
from bigbatch.torch import Accumulator
from bigbatch.torch.random import RandomState

from .training import flat

Batch = tuple[Tensor, Tensor]


class Graph:
    def __init__(self, work: Callable[[], None], *_: Any) -> None:
        self.replay = work


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))
    monkeypatch.setattr(RandomState, "has_drawn_on_host", lambda self: bool(self.drawn()))  # dropout draws there
    monkeypatch.setattr(capture, "_why_not", lambda *_: None)
    monkeypatch.setattr(recording, "record", Graph)
    monkeypatch.setattr(recording, "no_waiting", nullcontext)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.GELU(), nn.Linear(16, 4)).double()


def data(size: int = 13) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (size,), generator=generator)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(
    capture: Any, size: int = 4, between: Callable[[Accumulator, int], None] = lambda *_: None, loss: Any = loss
) -> Accumulator:
    model = make_model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, size, capture=capture)
    if accumulator._captured is not None:
        accumulator._optimizers._captured = [None]
    torch.manual_seed(3)
    for step in range(6):
        between(accumulator, step)
        accumulator.step(data(13 - step % 2))
    return accumulator


def assert_same(ours: Accumulator, theirs: Accumulator) -> None:
    assert float((flat(ours.model) - flat(theirs.model)).norm()) <= 1e-13


@pytest.mark.parametrize("size", [4, 20])
def test_replays_do_what_eager_passes_do(size: int) -> None:
    captured = trained(True, size)
    assert_same(captured, trained(False, size))
    assert captured._captured.num_replays > 0


def test_another_loss_is_recorded_anew() -> None:
    def tripled(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]) * 3, batch[1])

    def change(accumulator: Accumulator, step: int) -> None:
        accumulator.loss = loss if step < 3 else tripled

    assert_same(trained(True, between=change), trained(False, between=change))


def with_aux(model: nn.Module, batch: Batch) -> Any:
    logits = model(batch[0])
    hit = logits.argmax(-1) == batch[1]
    return F.cross_entropy(logits, batch[1]), {"accuracy": hit.double().mean(), "logits": logits, "size": len(hit)}


def auxes(capture: Any, loss: Any = with_aux, **options: Any) -> tuple[list[Any], int]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, loss, 4, capture=capture, has_aux=True, **options)
    if accumulator._captured is not None:
        accumulator._optimizers._captured = [None]
    torch.manual_seed(3)
    steps = [accumulator.step(data(13 - step % 2)) for step in range(6)]
    return [step.aux for step in steps], getattr(accumulator._captured, "num_replays", 0)


def test_aux_of_replays_is_that_of_eager_passes() -> None:
    (ours, num_replays), (theirs, _) = auxes(True), auxes(False)
    assert num_replays > 0
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-12, atol=1e-14)
        assert found["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-12)
        assert found["size"] == expected["size"] == len(found["logits"])


def test_aux_of_micro_batches_without_weight_is_there_too() -> None:
    """They run eagerly, without a backward pass."""

    def weight(batch: Batch) -> int:
        return 0 if float(batch[0][0, 0]) > 0.5 else len(batch[1])

    (ours, num_replays), (theirs, _) = auxes(True, weight=weight), auxes(False, weight=weight)
    assert num_replays > 0
    assert sum(weight(tuple(t[k : k + 4] for t in data())) == 0 for k in (0, 4, 8, 12)) in (1, 2)
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert len(found["logits"]) == 13 - step % 2
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-12, atol=1e-14)
        assert found["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-12)


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (lambda k: {"count": k}, r"aux\['count'\] is not the same in two passes"),
        (lambda k: {"a": torch.zeros((), device="meta")}, r"aux\['a'\] is a tensor on meta"),
        (lambda k: {f"a{k}": 1}, "the loss returned 1 values of aux and 1 before"),
        (lambda k: [1] * (k % 2), "values of aux"),
        (lambda k: object(), "aux is a object, which a captured pass does not compute again"),
    ],
)
def test_aux_that_a_replay_would_not_compute_is_refused(aux: Any, message: str) -> None:
    numbers = iter(range(100))
    with pytest.raises(CaptureError, match=message):
        auxes(True, lambda model, batch: (loss(model, batch), aux(next(numbers))), aux=lambda values, weights: None)


@pytest.mark.parametrize("size", [4, 20])
def test_a_wrong_replay_leaves_nothing_behind(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the sums, with micro-batches before it in its window or without, nor in random numbers."""
    monkeypatch.setattr(recording, "_TOLERANCE", {torch.float64: -1.0})
    with pytest.warns(BigBatchWarning, match="away from the eager pass"):
        captured = trained("auto", size)
    assert_same(captured, trained(False, size))


def test_random_numbers_of_the_host_are_refused() -> None:
    with pytest.raises(CaptureError, match="random numbers on the host"):
        trained(True, loss=lambda model, batch: loss(model, batch) * random.random())


@pytest.mark.filterwarnings("ignore::bigbatch.BigBatchWarning")
@pytest.mark.parametrize("mode", ["batch", "micro_batch", "frozen"])
def test_rehearsals_do_not_count_for_batch_norm(mode: Any) -> None:
    models = []
    for captures in (False, True):
        torch.manual_seed(0)
        norms = nn.BatchNorm1d(8), nn.BatchNorm1d(16, momentum=0.3)
        for norm in norms:
            norm.num_batches_tracked = None  # on the host, a graph would have recorded the number
        model = nn.Sequential(norms[0], nn.Linear(8, 16), norms[1], nn.Tanh(), norms[1], nn.Linear(16, 4)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = Accumulator(model, optimizer, loss, 4, capture=captures, batch_norm=mode)
        if accumulator._captured is not None:
            accumulator._optimizers._captured = [None]
        for size in (13, 13, 12, 13):
            accumulator.step(data(size))
        assert not captures or accumulator._captured.num_replays > 0
        models.append(model)
    for (name, ours), theirs in zip(models[1].state_dict().items(), models[0].state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14, msg=name)


def test_a_layer_that_begins_to_run_twice_in_a_rehearsal() -> None:
    """Its second call has no memory before that pass, and counts once."""
    models = []
    for captures in (False, True):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8)
        norm.num_batches_tracked = None
        model = nn.Sequential(norm, nn.Linear(8, 4)).double()
        numbers = itertools.count()

        def own(model: nn.Module, batch: Batch, numbers: Any = numbers) -> Tensor:
            value = loss(model, batch)
            return value + model(batch[0] * 3 - 4).square().mean() if next(numbers) else value

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = Accumulator(model, optimizer, own, 4, capture=captures)
        if accumulator._captured is not None:
            accumulator._optimizers._captured = [None]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                accumulator.step(data(12))
        assert not any("updated running statistics" in str(w.message) for w in caught)
        assert not captures or accumulator._captured.num_replays > 0
        models.append(model)
    for (name, ours), theirs in zip(models[1].state_dict().items(), models[0].state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14, msg=name)


def test_rehearsals_are_not_told_of_as_updates_of_running_statistics() -> None:
    """What restores the buffers after a rehearsal changes none of them."""
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, loss, 4, capture=True)
    assert accumulator._captured is not None
    accumulator._optimizers._captured = [None]
    with pytest.warns(BigBatchWarning) as told:
        accumulator.step(data(12))
    assert accumulator._captured.num_replays > 0
    assert ["normalises by the micro-batch" in str(w.message) for w in told] == [True]


def test_a_gradient_that_was_left_is_not_overwritten() -> None:
    """Recorded passes add to the same memory in each window."""
    left = []
    for is_captured in (False, True):
        model = make_model()
        accumulator = Accumulator(model, torch.optim.LBFGS(model.parameters()), loss, 4, capture=is_captured)
        torch.manual_seed(3)
        kept = []
        for step in range(5):
            model.zero_grad()
            accumulator.backward(data(13 - step % 2))
            kept.append([p.grad for p in model.parameters()])
        left.append(kept)
    assert accumulator._captured is not None
    assert accumulator._captured.num_replays > 0
    for eager, captured in zip(*left, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(eager, captured, strict=True))
