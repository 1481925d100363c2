"""Silent errors: each of these once gave a wrong gradient or lost something."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from bigbatch import BigBatchWarning, OptionError, OrderError, Window
from bigbatch.torch import Accumulator

from .test_accumulator import feed_once, loss, make, make_batch, make_model, snapshot
from .test_gradients import data, micro_gradients, mse
from .training import alone


def low_error(sizes: tuple[int, ...], way: str, dtype: torch.dtype) -> tuple[float, float]:
    """The error of a low-precision gradient against float32 sums of the same micro-gradients: ours, and plain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    x, y = data(sum(sizes), dtype)
    parts = list(zip(x.split(sizes), y.split(sizes), strict=True))
    exact = sum(g.float() * n for g, n in zip(micro_gradients(model, parts), sizes, strict=True)) / sum(sizes)
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.cat([p.grad.flatten() for p in model.parameters()])))
    accumulator = Accumulator(model, optimizer, mse, sizes[0], accumulation_steps=len(sizes))
    if way == "batch":
        accumulator.step((x, y))
    elif way == "window":
        accumulator.step(Window(parts))
    else:
        for part in parts:
            with accumulator.micro_batch(weight=len(part[0])) as micro:
                micro.backward(mse(model, part))
    for part in parts:
        (mse(model, part) * len(part[0]) / sum(sizes)).backward()
    seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    ours, plain = (float((g.float() - exact).norm() / exact.norm()) for g in seen)
    return ours, plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["window", "micro_batch"])
@pytest.mark.parametrize("sizes", [(4,) * 60, (3, 60, 17, 40), (4,) * 7])
def test_scales_are_not_rounded_to_the_loss_dtype(sizes: tuple[int, ...], way: str, dtype: torch.dtype) -> None:
    """bfloat16 cannot represent 1/60."""
    ours, plain = low_error(sizes, way, dtype)
    assert ours < 1e-6
    assert 20 * ours <= plain


def test_two_terms_in_low_precision() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4).bfloat16()
    x, y = data(21, torch.bfloat16)
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))

    def terms(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        out = model(batch[0])
        return F.mse_loss(out, batch[1]), out.square().mean()

    exact = torch.zeros(4, 6)
    for part in zip(x.split(6), y.split(6), strict=True):
        for t, weight in enumerate((len(part[0]), 3)):
            model.zero_grad()
            terms(model, part)[t].backward()
            exact += model.weight.grad.float() * weight / (21, 12)[t]
    model.zero_grad()
    Accumulator(model, optimizer, terms, 6, weight=lambda batch: (len(batch[0]), 3)).step((x, y))
    assert (seen[0].float() - exact).norm() <= 1e-6 * exact.norm()


def test_calls_inside_a_block_are_refused() -> None:
    for call in ("flush", "step", "micro_batch"):
        accumulator = make(accumulation_steps=3)
        before = snapshot(accumulator)
        feed_once(accumulator)
        with pytest.raises(OrderError, match=rf"{call}\(\) was called inside"), accumulator.micro_batch(weight=11):
            if call == "flush":
                accumulator.flush()
            elif call == "step":
                accumulator.step(make_batch())
            else:
                feed_once(accumulator)
        assert all(torch.equal(a, b) for a, b in zip(accumulator.model.parameters(), before, strict=True))
        assert accumulator.flush().weight == 11


def float_accumulator(**options: Any) -> Accumulator:
    model = make_model().float()
    return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 4, **options)


def float_batch() -> tuple[Tensor, Tensor]:
    x, y = make_batch()
    return x.float(), y


def test_changed_scale_in_the_middle_of_a_window_is_detected() -> None:
    scaler = GradScaler("cpu", growth_interval=1)
    first = float_accumulator(scaler=scaler)
    second = float_accumulator(scaler=scaler, accumulation_steps=5)
    with second.micro_batch(weight=11) as micro:
        micro.backward(loss(second.model, float_batch()))
    first.step(float_batch())
    with second.micro_batch(weight=11) as micro:
        micro.backward(loss(second.model, float_batch()))
    before = snapshot(second)
    with pytest.raises(OrderError, match="went from 65536 to 131072"):
        second.flush()
    assert all(torch.equal(a, b) for a, b in zip(second.model.parameters(), before, strict=True))


def test_a_scaler_is_usable_after_an_error_in_the_optimizer() -> None:
    accumulator = float_accumulator(precision="fp16")
    handle = accumulator.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        accumulator.step(float_batch())
    handle.remove()
    assert accumulator.step(float_batch()).is_applied


def test_disabled_scaler_counts_as_none() -> None:
    accumulator = float_accumulator(scaler=GradScaler("cpu", enabled=False))
    x, y = float_batch()
    x[3] = torch.nan
    with pytest.warns(BigBatchWarning, match="not finite"):
        accumulator.step((x, y))


def test_small_first_weight_does_not_overflow() -> None:
    accumulator = float_accumulator(precision="fp16", accumulation_steps=2)
    for weight in (1, 20000):
        with accumulator.micro_batch(weight=weight) as micro:
            micro.backward(loss(accumulator.model, float_batch()))
    assert micro.step.is_applied
    assert accumulator.scaler.get_scale() == 65536


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.float16, np.float32])
def test_numpy_weights_are_summed_as_plain_numbers(kind: Any) -> None:
    step = make(weight=lambda batch: kind(30 * len(batch[1]))).step(make_batch())
    assert step.weight == 330
    assert type(step.weight) in (int, float)
    assert step.grad_norm == pytest.approx(make().step(make_batch()).grad_norm, rel=1e-12)


def test_backward_runs_outside_of_the_users_autocast() -> None:
    def in_float32(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return loss(model, batch)

    plain, wrapped = float_accumulator(), float_accumulator()
    wrapped.loss = in_float32
    plain.step(float_batch())
    with torch.autocast("cpu", torch.bfloat16):
        wrapped.step(float_batch())
    for a, b in zip(wrapped.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_hook_that_changes_the_gradient_of_the_loss_in_place() -> None:
    """It acts on its own backward pass and on no other, in this window or the next."""

    def doubled(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model, batch)
        value.register_hook(lambda gradient: gradient.mul_(2))
        return value

    twice, once = make(2, loss=doubled), make(2)
    for _ in range(2):
        norm = once.step(make_batch()).grad_norm
        twice.optimizer.param_groups[0]["lr"] = once.optimizer.param_groups[0]["lr"] / 2
        assert twice.step(make_batch()).grad_norm == pytest.approx(2 * norm, rel=1e-12)


class OfItsOwn(Tensor):
    """A tensor class that may have its own backward, by __torch_function__."""


def test_loss_of_a_tensor_subclass_uses_the_full_backward_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = make().step(make_batch()).grad_norm
    monkeypatch.setattr("bigbatch.torch.gradients.RUN_ENGINE", lambda *_, **__: pytest.fail("took the shortcut"))
    own = make(loss=lambda model, batch: loss(model, batch).as_subclass(OfItsOwn))
    assert own.step(make_batch()).grad_norm == norm
    with pytest.raises(pytest.fail.Exception, match="shortcut"):
        make().step(make_batch())


def test_torch_without_the_shortcut_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = make()
    norm = with_it.step(make_batch()).grad_norm
    monkeypatch.setattr("bigbatch.torch.gradients.RUN_ENGINE", None)
    without = make()
    assert without.step(make_batch()).grad_norm == norm
    for a, b in zip(snapshot(without), snapshot(with_it), strict=True):
        assert torch.equal(a, b)


def test_ever_new_weights_do_not_grow_the_cache() -> None:
    weights = iter(range(1, 1000))
    accumulator = make(1, weight=lambda _: next(weights))
    for _ in range(50):
        accumulator.step(make_batch())
    assert len(accumulator._eager._seeds) < 100


def test_batch_norm_warns_once_it_trains() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 4)
    model.eval()
    accumulator.step(make_batch())
    model.train()
    with pytest.warns(BigBatchWarning, match="1 BatchNorm layer"):
        accumulator.step(make_batch())


def test_sparse_and_dense_gradients_of_one_parameter_in_two_terms() -> None:
    def terms(model: nn.Embedding, ids: Tensor) -> tuple[Tensor, Tensor]:
        return model(ids).square().mean(), model.weight.square().mean()

    results = []
    for way in ("batch", "micro_batch"):
        torch.manual_seed(0)
        model = nn.Embedding(9, 4, sparse=True, dtype=torch.float64)
        ids = torch.tensor([1, 2, 1, 5, 7])
        accumulator = Accumulator(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            terms,
            2,
            accumulation_steps=9,
            weight=lambda b: (len(b), 1),
        )
        if way == "batch":
            accumulator.step(ids)
        else:
            for part in ids.split(2):
                with accumulator.micro_batch(weight=(len(part), 1)) as micro:
                    micro.backward(terms(model, part))
            accumulator.flush()
        results.append(model.weight.detach())
    assert torch.allclose(*results, rtol=1e-12, atol=1e-15)


def test_finished_window_is_freed() -> None:
    accumulator = make(accumulation_steps=1)
    with accumulator.micro_batch(weight=11) as micro:
        micro.backward(loss(accumulator.model, make_batch()))
    held = [value for value in micro._feed.args if hasattr(value, "sums")]
    assert held
    assert not any(sums for open_window in held for sums in open_window.sums)


def test_norm_is_clipped_before_values() -> None:
    model = make_model()
    loss(model, make_batch()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    accumulator = make(clip_norm=0.1, clip_value=0.01)
    accumulator.step(make_batch())
    for a, b in zip(accumulator.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-15)


def test_ddp_inside_another_module_is_refused(tmp_path: Path) -> None:
    with alone(tmp_path):
        model = nn.Sequential(nn.parallel.DistributedDataParallel(make_model()))
        with pytest.raises(OptionError, match="is a part of the model: wrap the whole model"):
            Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"weight": 3}, "weight is 3"), ({"loss": "x"}, "loss is 'x'"), ({"scheduler": [1]}, r"scheduler\[0\] is a int")],
)
def test_more_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(**options)
