"""The aux of a loss on a GPU: nothing is waited for, and replays of a captured pass return that of the eager pass."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import CaptureError, Window
from bigbatch.torch import Accumulator

from .test_gpu import Batch, data, make_model, pytestmark  # noqa: F401

WORDS = {"accuracy": "auto", "correct": "auto", "logits": "concatenate", "matrix": "sum", "largest": "auto"}


def one_hot(classes: Tensor) -> Tensor:
    return (classes[:, None] == torch.arange(10, device=classes.device)).double()


def with_aux(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    logits = model(batch[0])
    hit = logits.argmax(-1) == batch[1]
    matrix = (one_hot(batch[1]).T @ one_hot(logits.argmax(-1))).long()
    aux = {"accuracy": hit.double().mean(), "correct": hit.sum(), "logits": logits, "matrix": matrix}
    return F.cross_entropy(logits, batch[1]), {**aux, "largest": [logits.amax(-1).mean(), len(hit)]}


def made(model: nn.Module, loss: Any = with_aux, **options: Any) -> Accumulator:
    options = {"has_aux": True, "aux": WORDS, "accumulation_steps": 1000, **options}
    return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 4, **options)


def fed(accumulator: Accumulator, way: str, batch: Batch) -> Any:
    parts = list(zip(batch[0].split(4), batch[1].split(4), strict=True))
    if way != "micro_batch":
        return accumulator.step(batch if way == "batch" else Window(parts))
    for part in parts:
        with accumulator.micro_batch(weight=len(part[1])) as micro:
            micro.backward(with_aux(accumulator.model, part))
    return accumulator.flush()


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found["logits"], expected["logits"].detach(), rtol=1e-10, atol=1e-12)
    assert found["logits"].is_cuda
    assert torch.equal(found["matrix"], expected["matrix"])
    assert found["accuracy"] == pytest.approx(float(expected["accuracy"]), rel=1e-12)
    assert found["correct"] == int(expected["correct"])
    assert type(found["correct"]) is int
    largest = torch.as_tensor(expected["largest"][0], dtype=torch.float64).detach()
    assert found["largest"][0] == pytest.approx(float(largest), rel=1e-10)
    assert found["largest"][1] == expected["largest"][1]


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("capture", [False, True])
def test_aux_is_that_of_the_full_batch(capture: bool, where: str) -> None:
    """The slots in which micro-batches of the host arrive, and the outputs of replays, are used again."""
    model = make_model(torch.float64)
    accumulator = made(model, capture=capture)
    steps, expected = [], []
    for step in range(5):
        batch = data(53 - step % 2, torch.float64)
        expected.append(with_aux(model, batch)[1])
        steps.append(accumulator.step(batch if where == "device" else tuple(t.cpu() for t in batch)))
    if capture:
        assert accumulator._captured is not None
        assert accumulator._captured.num_replays > 0
    for step, aux in zip(steps, expected, strict=True):  # read only now
        assert_same(step.aux, aux)
        assert step.metrics["correct"] == int(aux["correct"])
        assert step.summed == ("correct", "largest.1")


@pytest.mark.parametrize("way", ["batch", "window", "micro_batch"])
def test_nothing_is_waited_for(way: str) -> None:
    def waits(num: int, has_aux: bool) -> int:
        options = {} if has_aux else {"has_aux": False, "aux": "auto", "loss": lambda *args: with_aux(*args)[0]}
        accumulator = made(make_model(), **options)
        batch = data(4 * num)

        def run() -> Any:
            if way == "micro_batch" and not has_aux:
                for part in zip(batch[0].split(4), batch[1].split(4), strict=True):
                    with accumulator.micro_batch(weight=len(part[1])) as micro:
                        micro.backward(with_aux(accumulator.model, part)[0])
                return accumulator.flush()
            return fed(accumulator, way, batch)

        run()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                step = run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert (step.metrics != {}) == has_aux
        return sum("synchronizing" in str(warning.message) for warning in caught)

    assert waits(8, has_aux=True) == waits(32, has_aux=True) == waits(8, has_aux=False)


def test_captured_aux_of_micro_batches_without_weight() -> None:
    def weight(batch: Batch) -> Tensor:
        return (batch[1] > 4).sum() * (batch[1][0] > 4)

    auxes = []
    for capture in (False, True):
        accumulator = made(make_model(torch.float64), weight=weight, capture=capture)
        auxes.append([accumulator.step(data(53, torch.float64)).aux for _ in range(4)])
    for eager, captured in zip(*auxes, strict=True):
        assert len(captured["logits"]) == 53
        assert_same(captured, {**eager, "accuracy": eager["accuracy"]})


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (lambda model, k: {"step": k}, r"aux\['step'\] is not the same in two passes"),
        (lambda model, k: torch.tensor(1.0), "aux is a tensor on cpu"),
        (lambda model, k: model[0].bias.sum().item(), "cannot be captured|waits for the device"),
    ],
)
def test_aux_that_a_replay_would_not_compute_is_refused(aux: Any, message: str) -> None:
    numbers = iter(range(1000))
    model = make_model()
    accumulator = made(
        model, lambda m, batch: (with_aux(m, batch)[0], aux(model, next(numbers))), aux="auto", capture=True
    )
    with pytest.raises(CaptureError, match=message):
        for _ in range(3):
            accumulator.step(data(12))


def test_captured_in_mixed_precision() -> None:
    for precision in ("bf16", "fp16"):
        accumulator = made(make_model(), precision=precision, capture=True)
        for _ in range(4):
            step = accumulator.step(data(24))
            assert len(step.aux["logits"]) == 24
            assert step.aux["logits"].isfinite().all()
            assert 0 <= step.metrics["accuracy"] <= 1


def test_rows_do_not_keep_the_graph_in_memory() -> None:
    model = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 10)).cuda()
    accumulator = made(model)
    batch = data(256)
    accumulator.step(batch).aux  # noqa: B018 - what stays allocated after it is the baseline
    before = torch.cuda.memory_allocated()
    step = accumulator.step(batch)
    assert torch.cuda.memory_allocated() - before < 2**20  # the hidden layer of the batch alone is 4 MiB
    assert len(step.aux["logits"]) == 256
