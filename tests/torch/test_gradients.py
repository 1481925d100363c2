"""Parameters of every kind: frozen, unused, sparse, tied, complex, low precision, recomputed, compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.utils.checkpoint import checkpoint

from bigbatch import OptionError, Window
from bigbatch.torch import Accumulator

WAYS = ("batch", "micro_batch")
Batch = tuple[Tensor, Tensor]


def data(size: int = 11, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randn(size, 4, generator=generator, dtype=torch.float64).to(dtype)


def mse(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def train(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[Any, Any], Tensor],
    batch: Any,
    way: str,
    **options: Any,
) -> nn.Module:
    """Three steps with the plain full batch, or in micro-batches of 3, fed in one of the ways."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model)
    accumulator = Accumulator(model, optimizer, loss, 3, accumulation_steps=100, **options)
    for _ in range(3):
        if way == "full":
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        elif way == "batch":
            assert accumulator.step(batch).is_applied
        else:
            for part in zip(*(leaf.split(3) for leaf in batch), strict=True):
                with accumulator.micro_batch(weight=len(part[0])) as micro:
                    micro.backward(loss(model, part))
            assert accumulator.flush().is_applied
    return model


def assert_same(ours: nn.Module, full: nn.Module, tolerance: float = 1e-12) -> None:
    for (name, a), b in zip(ours.named_parameters(), full.parameters(), strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max(), name
        assert a.grad is None


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


class Branches(nn.Module):
    """One layer is frozen, one is never used, and one is used only by some samples."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.used = nn.Linear(6, 4, dtype=torch.float64)
        self.frozen = nn.Linear(4, 4, dtype=torch.float64).requires_grad_(False)
        self.unused = nn.Linear(6, 4, dtype=torch.float64)
        self.sometimes = nn.Linear(6, 4, dtype=torch.float64)
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        out = self.frozen(self.used(x))
        asks = x[:, 0] > self.threshold
        return out + asks[:, None] * self.sometimes(x) if asks.any() else out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make_optimizer", [adamw, momentum])
@pytest.mark.parametrize("threshold", [0.8, 100.0])
def test_parameters_without_gradient_match_the_full_batch(way: str, make_optimizer: Any, threshold: float) -> None:
    assert 0 < (data()[0][:, 0] > 0.8).sum() < 4  # so that only some micro-batches use it
    full, ours = (train(lambda: Branches(threshold), make_optimizer, mse, data(), w) for w in ("full", way))
    assert_same(ours, full)
    torch.manual_seed(0)
    start = Branches(threshold)
    assert torch.equal(ours.unused.weight, start.unused.weight)
    assert torch.equal(ours.frozen.weight, start.frozen.weight)
    assert torch.equal(ours.sometimes.weight, start.sometimes.weight) == (threshold == 100.0)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, sparse=True, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).sum(1)


def tokens() -> Batch:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 6, (11, 5), generator=generator), torch.randn(11, 4, generator=generator).double()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", ["SparseAdam", "SGD", "Adagrad"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's Adagrad creates them without checks
def test_sparse_gradients_stay_sparse(way: str, optimizer: str) -> None:
    seen = []

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
        made.register_step_pre_hook(lambda *_: seen.append(model.embed.weight.grad))
        return made

    full, ours = (train(Sparse, make_optimizer, mse, tokens(), w) for w in ("full", way))
    assert_same(ours, full)
    assert all(grad.is_sparse and grad._nnz() <= 55 for grad in seen)
    torch.manual_seed(0)
    assert torch.equal(ours.embed.weight[6:], Sparse().embed.weight[6:])  # rows that no sample has


@pytest.mark.parametrize("way", WAYS)
def test_sparse_gradients_are_clipped_by_their_summed_rows(way: str) -> None:
    """Entries of the same row are summed before the norm is taken, as in the dense gradient."""
    torch.manual_seed(0)
    dense = nn.Embedding(9, 4, dtype=torch.float64)
    ids, target = tokens()
    F.mse_loss(dense(ids).sum(1), target).backward()
    torch.manual_seed(0)
    model = Sparse()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), mse, 3, accumulation_steps=9)
    if way == "batch":
        step = accumulator.step((ids, target))
    else:
        for part in zip(ids.split(3), target.split(3), strict=True):
            with accumulator.micro_batch(weight=len(part[0])) as micro:
                micro.backward(mse(model, part))
        step = accumulator.flush()
    assert step.grad_norm == pytest.approx(dense.weight.grad.norm().item(), rel=1e-12)


def test_sparse_gradients_do_not_grow_with_the_number_of_micro_batches() -> None:
    model = Sparse()
    sizes = []

    def watching(model: Any, batch: Batch) -> Tensor:
        def look(_: Tensor) -> None:
            if model.embed.weight.grad is not None:
                sizes.append(model.embed.weight.grad._nnz())

        found = mse(model, batch)
        found.register_hook(look)  # .grad is there while the backward pass runs
        return found

    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), watching, 1)
    accumulator.step(tuple(leaf.repeat(20, *[1] * (leaf.ndim - 1)) for leaf in tokens()))
    assert len(sizes) == 219
    assert max(sizes) <= 9 + 5


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 9, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).sum(1))


@pytest.mark.parametrize("way", WAYS)
def test_tied_weights(way: str) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[0][:, 0])

    full, ours = (train(Tied, adamw, loss, tokens(), w) for w in ("full", way))
    assert_same(ours, full)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.turn).abs()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make_optimizer", [adamw, momentum])
def test_complex_parameters(way: str, make_optimizer: Any) -> None:
    full, ours = (train(Complex, make_optimizer, mse, data(), w) for w in ("full", way))
    assert_same(ours, full)
    model = Complex()
    mse(model, data()).backward()
    expected = model.turn.grad.norm().item()
    model.zero_grad()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), 0.0), mse, 3, clip_value=1e-3)
    assert accumulator.step(data()).grad_norm == pytest.approx(expected, rel=1e-12)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=torch.float64)
        self.last = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False))


@pytest.mark.parametrize("way", WAYS)
def test_recomputed_activations(way: str) -> None:
    full, ours = (train(Recomputed, adamw, mse, data(), w) for w in ("full", way))
    assert_same(ours, full)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what Python deprecates
def test_a_compiled_model(way: str) -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def compiled() -> nn.Module:
        model = plain()
        model.compile(backend="aot_eager")
        return model

    full = train(plain, adamw, mse, data(), "full")
    ours = train(compiled, adamw, mse, data(), way)
    assert_same(ours, full)


def test_parameters_of_the_loss_are_trained_too() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, model: nn.Module, batch: Batch) -> Tensor:
            return mse(model, batch) * self.log_scale.exp() - self.log_scale

    results = []
    for way in ("full", "batch"):
        torch.manual_seed(0)
        model, criterion = nn.Linear(6, 4).double(), Scaled()
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
        if way == "full":
            criterion(model, data()).backward()
            optimizer.step()
        else:
            Accumulator(model, optimizer, criterion, 3).step(data())
        results.append([*model.parameters(), *criterion.parameters()])
    for ours, full in zip(*results, strict=True):
        assert torch.allclose(ours, full, rtol=1e-12, atol=1e-15)


# --- low precision -----------------------------------------------------------------------------------------


def micro_gradients(model: nn.Module, micro_batches: list[Batch]) -> list[Tensor]:
    found = []
    for micro_batch in micro_batches:
        model.zero_grad()
        mse(model, micro_batch).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.zero_grad()
    return found


def accumulation_errors(dtype: torch.dtype, num: int = 64, by_hook: bool = False) -> dict[str, float]:
    """The error of the gradient that reaches the optimizer against float32 sums: ours, and plain .grad."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    x, y = data(4 * num, dtype)
    micro_batches = list(zip(x.split(4), y.split(4), strict=True))
    exact = torch.stack([g.float() for g in micro_gradients(model, micro_batches)]).mean(0)

    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.cat([p.grad.flatten() for p in model.parameters()])))
    Accumulator(model, optimizer, mse, 4).step((x, y))
    for micro_batch in micro_batches:
        (mse(model, micro_batch) / num).backward()
    seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    ours, plain = (float((g.float() - exact).norm() / exact.norm()) for g in seen)
    return {"ours": ours, "plain": plain}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_accumulate_in_float32(dtype: torch.dtype) -> None:
    errors = accumulation_errors(dtype)
    assert errors["ours"] * 20 <= errors["plain"], errors


@pytest.mark.parametrize("make_optimizer", [adamw, momentum])
@pytest.mark.parametrize("way", WAYS)
def test_low_precision_is_rounded_once(way: str, make_optimizer: Any) -> None:
    """An optimizer that wants gradients like its parameters gets the float32 sum, rounded once."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4).bfloat16()
    x, y = data(12, torch.bfloat16)
    parts = list(zip(x.split(3), y.split(3), strict=True))
    sums = [g.float() * 3 for g in micro_gradients(model, parts)]
    expected = (torch.stack(sums).sum(0) / 12).bfloat16()

    seen = []
    optimizer = make_optimizer(model)
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.cat([p.grad.flatten() for p in model.parameters()])))
    accumulator = Accumulator(model, optimizer, mse, 3, accumulation_steps=4)
    if way == "batch":
        accumulator.step((x, y))
    else:
        for part in parts:
            with accumulator.micro_batch(weight=3) as micro:
                micro.backward(mse(model, part))
            assert all(p.grad is None for p in model.parameters())
    assert seen[0].dtype == torch.bfloat16
    assert (seen[0].float() - expected.float()).abs().max() <= 2**-7 * expected.float().abs().max()
    assert (seen[0] == expected).float().mean() > 0.9
    state = [s for p in optimizer.state.values() for s in p.values() if s.ndim]
    assert all(s.dtype == torch.bfloat16 for s in state)


def test_at_most_one_wide_buffer_per_parameter() -> None:
    model = nn.Linear(6, 4).bfloat16()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), accumulation_steps=9)
    for _ in range(3):
        with accumulator.micro_batch(weight=3) as micro:
            micro.backward(mse(model, data(3, torch.bfloat16)))
    (sums,) = accumulator._window.sums
    assert [g.dtype for g in sums.values()] == [torch.float32] * 2
    assert [p.grad for p in model.parameters()] == [None, None]
    assert accumulator.flush().is_applied


def test_accumulate_dtype_widens_the_sums() -> None:
    model = nn.Linear(6, 4)
    accumulator = Accumulator(
        model, torch.optim.Adam(model.parameters()), accumulation_steps=9, accumulate_dtype=torch.float64
    )
    with accumulator.micro_batch(weight=3) as micro:
        micro.backward(mse(model, data(3, torch.float32)))
    assert {g.dtype for g in accumulator._window.sums[0].values()} == {torch.float64}
    assert accumulator.flush().is_applied


def test_the_users_own_grad_dtype_is_given_back() -> None:
    model: Any = nn.Linear(6, 4, bias=False).bfloat16()
    seen = []
    for wanted in (torch.bfloat16, torch.float32):
        model.weight.grad_dtype = wanted
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.dtype))
        Accumulator(model, optimizer, mse, 3).step(data(12, torch.bfloat16))
        assert model.weight.grad_dtype == wanted
    assert seen == [torch.bfloat16, torch.float32]


def two_terms(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    out = model(batch[0])
    return F.mse_loss(out.log(), batch[1]), out.square().mean()


def with_terms(model: nn.Module, loss: Any) -> tuple[Accumulator, list[tuple[Batch, tuple[int, int]]]]:
    parts = list(zip(*(t.split(4) for t in data()), strict=True))
    return Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), loss, accumulation_steps=len(parts)), [
        (part, (len(part[0]), 3)) for part in parts
    ]


def smooth() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4), nn.Softmax(-1)).double()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", ["model", "loss"])
def test_terms_of_a_compiled_model_one_micro_batch_at_a_time(what: str) -> None:
    torch.compiler.reset()
    model = smooth()
    is_model = what == "model"
    compiled: Any = torch.compile(model if is_model else two_terms, backend="aot_eager")
    forward, loss = (compiled, two_terms) if is_model else (model, compiled)
    accumulator, parts = with_terms(model, loss)
    sum(loss(forward, parts[0][0])).backward()  # torch compiles the backward pass for its first use
    model.zero_grad()
    with pytest.raises(OptionError, match=r"once for each term.*step\(\).*donated_buffer"):  # noqa: SIM117
        with accumulator.micro_batch(weight=parts[0][1]) as micro:
            micro.backward(loss(forward, parts[0][0]))
    for p, then in zip(model.parameters(), smooth().parameters(), strict=True):
        assert torch.equal(p, then)
        assert p.grad is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@functorch.patch(donated_buffer=False)
def test_the_remedies_for_terms_of_a_compiled_model() -> None:
    torch.compiler.reset()
    plain, by_step, by_feeding = smooth(), smooth(), smooth()
    accumulator, parts = with_terms(plain, two_terms)
    accumulator.weight = lambda batch: (len(batch[0]), 3)
    accumulator.step(Window([part for part, _ in parts]))
    weight = accumulator.weight
    accumulator, _ = with_terms(by_step, torch.compile(two_terms, backend="aot_eager"))
    accumulator.weight = weight
    accumulator.step(Window([part for part, _ in parts]))
    compiled = torch.compile(by_feeding, backend="aot_eager")
    sum(two_terms(compiled, parts[0][0])).backward()
    by_feeding.zero_grad()
    accumulator, parts = with_terms(by_feeding, two_terms)
    for part, weights in parts:
        with accumulator.micro_batch(weight=weights) as micro:
            micro.backward(two_terms(compiled, part))
    assert micro.step is not None
    for p, q, r in zip(plain.parameters(), by_step.parameters(), by_feeding.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(p, r, rtol=1e-10, atol=1e-12)
