"""The verdict of `verify` on a user's model: exact, or why not."""

import copy
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BatchError, LossError, OptionError, Window
from bigbatch.torch import Accumulator, verify
from tests.problems import IGNORED, Problem, problems, tokens

from .training import Language, make_batches, make_loss, make_model, make_weight

Batch = tuple[Tensor, Tensor]


def data(size: int = 53) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 6, generator=generator)
    return x * torch.linspace(0.3, 3, size)[:, None], torch.randint(0, 4, (size,), generator=generator)


def classifier(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), *middle, nn.Linear(12, 4))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def only(causes: tuple[str, ...]) -> str:
    assert len(causes) == 1, causes
    return causes[0]


@pytest.mark.parametrize("problem", problems(), ids=lambda problem: problem.name)
def test_the_shared_problems_are_exact(problem: Problem) -> None:
    model = make_model(problem, torch.float32)
    found = verify(
        model,
        make_batches(problem)[0],
        make_loss(problem),
        problem.micro_batch_size,
        weight=make_weight(problem),
    )
    assert found.is_exact, str(found)
    assert found.max_error <= 1e-12
    if problem.name == "micro-batch size n":
        assert "one micro-batch holds the whole batch, so nothing was cut" in only(found.causes)
    else:
        assert found.causes == ()
    used = {name for name, _ in model.named_parameters() if problem.kind != "tokens" or "length" not in name}
    assert set(found.errors) == used


def test_verify_changes_nothing() -> None:
    model = classifier(nn.BatchNorm1d(12), nn.Dropout(0.5))
    model[0].bias.requires_grad_(False)
    model[-1].weight.grad = torch.ones_like(model[-1].weight)
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    verify(model, data(), loss, 16)
    verify(model, data(), loss, 16, step=divided_by(lambda n: n))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training
    assert torch.equal(model[-1].weight.grad, torch.ones_like(model[-1].weight))
    assert model[0].weight.grad is None
    assert model[0].weight.dtype == torch.float32
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_result_prints_as_a_table() -> None:
    text = str(verify(classifier(), data(), loss, 16))
    assert "parameter" in text
    assert "3.weight" in text or "2.weight" in text
    assert "\nexact: largest error of a parameter" in text


# --- causes ------------------------------------------------------------------------------------------------


def test_batch_norm_is_named() -> None:
    found = verify(classifier(nn.BatchNorm1d(12)), data(), loss, 16)
    assert not found.is_exact
    assert found.max_error > 1e-3
    assert "BatchNorm in training mode (2)" in only(found.causes)
    model = classifier(nn.BatchNorm1d(12))
    model[2].eval()
    assert verify(model, data(), loss, 16).is_exact


@pytest.mark.parametrize(
    "middle",
    [nn.Dropout(0.4), nn.AlphaDropout(0.4), nn.RReLU()],
    ids=lambda module: type(module).__name__,
)
def test_dropout_is_compared_with_the_same_masks(middle: nn.Module) -> None:
    found = verify(classifier(middle), data(), loss, 16)
    if isinstance(middle, nn.RReLU):  # its noise is mixed into its output, so there is no mask to cut
        assert not found.is_exact
        assert any("could not be cut like the batch" in cause for cause in found.causes)
    else:
        assert found.is_exact, str(found)
        assert "compared with the same masks" in only(found.causes)


class Attention(nn.Module):
    """Dropout on attention weights (leading axis batch x heads), on sequence-first activations, and on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=False)
        self.drop = nn.Dropout1d(0.3)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(1, (2, 3)).repeat(1, 1, 2).transpose(0, 1)  # sequence, batch, features
        mixed, _ = self.attention(rows, rows, rows, need_weights=True)
        mixed = F.dropout(mixed, 0.2, self.training)
        return self.head(self.drop(mixed.transpose(0, 1)).mean(1))


def test_masks_are_cut_along_the_batch_axis() -> None:
    torch.manual_seed(0)
    found = verify(Attention(), data(13), loss, 4)
    assert found.is_exact, str(found)
    assert "compared with the same masks" in only(found.causes)


class Rated(nn.Module):
    """Attention over four tokens of width 16; its kernel takes the dropout rate."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.mix(x.unflatten(1, (1, 4, 16)))
        return F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=self.rate).flatten(1)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_dropout_of_zero_is_not_mentioned(rate: float) -> None:
    model = nn.Sequential(Rated(rate), nn.Dropout(rate), nn.Linear(64, 10))
    found = verify(model, (torch.randn(7, 64), torch.arange(7)), lambda m, b: F.cross_entropy(m(b[0]), b[1]), 3)
    assert found.is_exact or rate
    assert bool(found.causes) == bool(rate)


def test_negative_control_without_the_same_masks_dropout_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    from bigbatch.torch.verify import draws

    monkeypatch.setattr(draws, "_part_of", lambda *_: None)
    found = verify(classifier(nn.Dropout(0.4)), data(), loss, 16)
    assert found.max_error > 1e-2
    assert "could not be cut like the batch" in found.causes[0]


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)))


def root_mean_square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0]).square().mean().sqrt()


def batch_variance(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0]).var(0).mean()


@pytest.mark.parametrize("coupling", [contrastive, root_mean_square, batch_variance])
def test_a_loss_that_couples_samples_is_found_by_testing(coupling: Any) -> None:
    found = verify(classifier(), data(), coupling, 16)
    assert not found.is_exact
    assert "the loss couples the samples" in only(found.causes)
    found = verify(classifier(nn.BatchNorm1d(12)), data(), coupling, 16)
    assert [cause.split()[0] for cause in found.causes] == ["BatchNorm", "the"]


def test_weight_that_disagrees_with_the_loss_is_named_with_both_values() -> None:
    problem = next(p for p in problems() if p.kind == "tokens")
    (batch,) = make_batches(problem)
    found = verify(Language(), batch, make_loss(problem), 1)  # counts samples, but the loss is a mean over tokens
    assert not found.is_exact
    cause = only(found.causes)
    assert "2.5% : 50% : 14.2% : 33.3%" in cause
    assert "25% : 25% : 25% : 25%" in cause


def test_a_term_that_nothing_counts_is_named() -> None:
    def two(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), logits.square().mean()

    found = verify(classifier(), data(), two, 16, weight=lambda batch: (0, len(batch[1])))
    assert only(found.causes).startswith("term 1 of 2: `weight` returns 0 for every micro-batch, so this loss is not")


def test_labels_counted_without_the_shift_are_named() -> None:
    """A language model predicts token t+1, so the first label of each text is not a target."""
    batch = {name: torch.as_tensor(array) for name, array in tokens(3, 60, 17, 40, 9).items()}

    def shifted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, _ = model(batch["x"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["y"][:, 1:].flatten(), ignore_index=IGNORED)

    def unshifted(batch: dict[str, Tensor]) -> Tensor:
        return (batch["y"] != IGNORED).sum()

    def right(batch: dict[str, Tensor]) -> Tensor:
        return (batch["y"][:, 1:] != IGNORED).sum()

    found = verify(Language(), batch, shifted, 2, weight=unshifted)
    assert "return from `weight` the number of samples or tokens the loss averages over" in only(found.causes)
    assert verify(Language(), batch, shifted, 2, weight=right).is_exact


def test_sum_and_mean_mixed_up() -> None:
    def summed(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    assert "adds up over samples" in only(verify(classifier(), data(), summed, 16).causes)
    assert verify(classifier(), data(), summed, 16, reduction="sum").is_exact
    assert 'reduction="sum" adds it up' in only(verify(classifier(), data(), loss, 16, reduction="sum").causes)


def test_model_that_computes_in_float32_is_reported() -> None:
    class Narrow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.float(), self.weight.float(), self.bias.float()).to(x.dtype)

    model = classifier(Narrow(12, 12))
    found = verify(model, data(), loss, 16)
    assert found.is_exact
    assert 1e-9 < found.max_error < found.tolerance < 1e-4
    assert found.precision == "float64 with parts in float32"
    assert "the size of rounding" in only(found.causes)
    assert "something in the model or the loss computes in float32" in only(found.causes)
    assert not verify(model, data(), loss, 16, tolerance=1e-9).is_exact
    slightly_off = verify(model, data(), loss, 16, weight=lambda batch: len(batch[0]) + 1e-3)
    assert not slightly_off.is_exact
    assert "but `weight` says" in only(slightly_off.causes)


def test_loss_that_needs_float32_is_compared_in_float32() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def weighted(model: nn.Module, batch: Batch) -> Tensor:
        return criterion(model(batch[0]), batch[1])

    def weight(batch: Batch) -> Tensor:
        return criterion.weight[batch[1]].sum()

    with pytest.raises(RuntimeError) as caught:
        verify(classifier(), data(), weighted, 16, weight=weight, dtype=torch.float64)
    assert "dtype=torch.float32" in caught.value.__notes__[0]
    found = verify(classifier(), data(), weighted, 16, weight=weight)
    assert found.is_exact, str(found)
    assert found.precision == "float32"
    assert "compared in float32, because in float64 the model or the loss raises: expected scalar" in only(found.causes)
    found = verify(classifier(), data(), weighted, 16, weight=weight, dtype=torch.float32, tolerance=1e-5)
    assert found.is_exact, str(found)


# --- foreign loops ----------------------------------------------------------------------------------

Loop = Callable[[nn.Module, list[Batch]], None]


def divided_by(divisor: Callable[[int], float]) -> Loop:
    def loop(model: nn.Module, micro_batches: list[Batch]) -> None:
        model.zero_grad()
        for micro_batch in micro_batches:
            (loss(model, micro_batch) / divisor(len(micro_batches))).backward()

    return loop


def right(model: nn.Module, micro_batches: list[Batch]) -> None:
    model.zero_grad()
    total = sum(len(y) for _, y in micro_batches)
    for micro_batch in micro_batches:
        (loss(model, micro_batch) * len(micro_batch[1]) / total).backward()


def by_the_full_size(model: nn.Module, micro_batches: list[Batch]) -> None:
    model.zero_grad()
    for micro_batch in micro_batches:
        (loss(model, micro_batch) * len(micro_batch[1]) / 64).backward()


def twice(model: nn.Module, micro_batches: list[Batch]) -> None:
    right(model, micro_batches)
    stale = [p.grad.clone() for p in model.parameters()]
    right(model, micro_batches)
    for p, grad in zip(model.parameters(), stale, strict=True):
        p.grad += grad


def never_zeroed(model: nn.Module, micro_batches: list[Batch]) -> None:
    total = sum(len(y) for _, y in micro_batches)
    for micro_batch in micro_batches:
        (loss(model, micro_batch) * len(micro_batch[1]) / total).backward()


def zeroed_each_time(model: nn.Module, micro_batches: list[Batch]) -> None:
    for micro_batch in micro_batches:
        model.zero_grad()
        loss(model, micro_batch).backward()


def clipped_each_time(model: nn.Module, micro_batches: list[Batch]) -> None:
    model.zero_grad()
    for micro_batch in micro_batches:
        (loss(model, micro_batch) / len(micro_batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def without_the_last(model: nn.Module, micro_batches: list[Batch]) -> None:
    right(model, micro_batches[:-1])


@pytest.mark.parametrize(
    ("loop", "cause"),
    [
        (divided_by(lambda n: n), r"divided by the number of micro-batches \(4\) although their weights differ"),
        (divided_by(lambda n: 1), "not divided"),
        (
            divided_by(lambda n: 8),
            "the loop divides by 8, but this window has only 4 micro-batches, so its gradient is too small",
        ),
        (by_the_full_size, "the loop divides by the size of a full window, but this window is smaller"),
        (twice, "2 times too large: gradients of an earlier window were not zeroed"),
        (zeroed_each_time, "gradients are zeroed between micro-batches"),
        (clipped_each_time, "clipped after each micro-batch"),
        (without_the_last, "micro-batch 4 is left out"),
    ],
    ids=["mean of means", "not divided", "short", "short by size", "twice", "zeroed", "clipped", "dropped"],
)
def test_common_mistakes_are_named(loop: Loop, cause: str) -> None:
    found = verify(classifier(), data(), loss, 16, step=loop)
    assert not found.is_exact
    assert found.max_error > 1e-3
    assert re.search(cause, only(found.causes))


def test_a_right_loop_is_exact() -> None:
    found = verify(classifier(), data(), loss, 16, step=right)
    assert found.is_exact
    assert found.causes == ()


def test_loop_that_never_zeroes_is_found_although_its_first_window_is_right() -> None:
    found = verify(classifier(), data(), loss, 16, step=never_zeroed)
    assert found.is_exact
    assert "gradients are not zeroed: a second window adds to the first" in only(found.causes)


def test_a_loop_over_dropout_and_batch_norm() -> None:
    found = verify(classifier(nn.Dropout(0.3)), data(), loss, 16, step=right)
    assert found.is_exact, str(found)
    assert "dropout was switched off" in only(found.causes)
    found = verify(classifier(nn.BatchNorm1d(12)), data(), loss, 16, step=divided_by(lambda n: n))
    assert ["BatchNorm" in found.causes[0], "divided by the number" in found.causes[1]] == [True, True]


def test_empty_micro_batch_can_be_compared() -> None:
    problem = next(p for p in problems() if p.name == "a micro-batch without a token")
    (batch,) = make_batches(problem)

    def of_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Gives 0/0 for the micro-batch without a token, and a NaN gradient."""
        kept = batch["y"] != IGNORED
        losses = F.cross_entropy(model(batch["x"])[0].transpose(1, 2), batch["y"].clamp(min=0), reduction="none")
        return (losses * kept).sum() / kept.sum()

    def twice_as_much(model: nn.Module, micro_batches: list[Any]) -> None:
        model.zero_grad()
        weights = [int((m["y"] != IGNORED).sum()) for m in micro_batches]
        for micro_batch, weight in zip(micro_batches, weights, strict=True):
            if weight:
                (of_tokens(model, micro_batch) * 2 * weight / sum(weights)).backward()

    weigh = make_weight(problem)
    assert verify(Language(), batch, of_tokens, 1, weight=weigh).is_exact
    assert "2 times too large" in only(verify(Language(), batch, of_tokens, 1, weight=weigh, step=twice_as_much).causes)
    found = verify(Language(), batch, of_tokens, 1, weight=lambda m: 1 + (m["y"] != IGNORED).sum())
    assert not found.is_exact
    assert "not finite" in only(found.causes)


def test_a_loop_that_leaves_nan_is_not_exact() -> None:
    def loop(model: nn.Module, micro_batches: list[Batch]) -> None:
        right(model, micro_batches)
        model[0].bias.grad[0] = torch.nan

    found = verify(classifier(), data(), loss, 16, step=loop)
    assert not found.is_exact
    assert "not finite" in only(found.causes)


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_dropout_hidden_in_layers_is_switched_off_for_a_loop(kind: str) -> None:
    torch.manual_seed(0)

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix: Any = nn.LSTM(6, 6, 2, dropout=0.5, batch_first=True)
            if kind == "attention":
                self.mix = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)
            self.head = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = self.mix(x[:, None].repeat(1, 3, 1))
            return self.head((out if kind == "attention" else out[0]).mean(1))

    found = verify(Hidden(), data(13), loss, 4, step=right)
    assert found.is_exact, str(found)


def test_draws_that_cannot_be_cut_do_not_stop_verify() -> None:
    def mixed_up(model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, (0.7 * batch[0] + 0.3 * batch[0][torch.randperm(len(batch[0]))], batch[1]))

    found = verify(classifier(), data(), mixed_up, 16)
    assert not found.is_exact
    assert "could not be cut like the batch" in found.causes[0]


def test_objects_of_the_loss_do_not_change() -> None:
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    other = classifier().double()

    def with_temperature(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]) * temperature + other(batch[0]), batch[1])

    assert verify(classifier(), data(), with_temperature, 16).is_exact
    assert temperature.grad is None
    assert all(p.grad is None for p in other.parameters())


def test_buffers_that_are_not_saved_are_restored_too() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    assert verify(classifier(Counting()), data(), loss, 53).is_exact


# --- bad input ---------------------------------------------------------------------------------------------


def test_bad_input() -> None:
    with pytest.raises(OptionError, match="micro_batch_size is 0"):
        verify(classifier(), data(), loss, 0)
    with pytest.raises(BatchError, match="has 53 samples but"):
        verify(classifier(), (data()[0], data(9)[1]), loss, 16)
    model = classifier()
    with pytest.raises(LossError, match="none of the model's parameters"):
        verify(model, data(), lambda _, b: F.cross_entropy(classifier().double()(b[0]), b[1]), 16)


def test_a_compiled_model_is_verified_uncompiled() -> None:
    assert verify(torch.compile(classifier(), backend="eager"), data(), loss, 16).is_exact


def test_a_loss_that_changes_its_batch_in_place() -> None:
    def halving(model: nn.Module, batch: Batch) -> Tensor:
        batch[0].mul_(0.5)
        return loss(model, batch)

    x, y = data()
    x = x.double()
    before = x.clone()
    assert verify(classifier(), (x, y), halving, 8).is_exact
    assert torch.equal(x, before)


# --- losses and models that change their batch, or the copy ---------------------------------------------


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (lambda loss, out: {"logits": out}, 'returned a dict without "loss"'),
        (lambda loss, out: None, "the loss is a NoneType"),
        (lambda loss, out: out.square().mean(1), r"the loss has the shape \(53,\), so 53 numbers instead of 1"),
        (lambda loss, out: loss.detach(), "the loss has no graph"),
        (lambda loss, out: loss.item(), "the loss is a float"),
        (lambda loss, out: (loss, loss), "the loss has 2 terms but the weight has 1"),
    ],
    ids=["dict", "None", "unreduced", "detached", "float", "terms"],
)
def test_invalid_loss_gets_the_error_of_the_accumulator(bad: Any, sentence: str) -> None:
    def returning(model: nn.Module, batch: Batch) -> Any:
        return bad(loss(model, batch), model(batch[0]))

    with pytest.raises(LossError, match=sentence):
        verify(classifier(), data(), returning, 16)


def test_hook_that_acts_on_each_micro_batch_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an accumulator that ran hooks in every pass would not be certified."""
    from bigbatch.torch import gradients

    model = classifier()
    model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    assert verify(model, data(), loss, 16).is_exact
    monkeypatch.setattr(gradients, "_has_hooks", lambda _: False)
    assert not verify(model, data(), loss, 16).is_exact


def test_hooks_of_the_user_stay() -> None:
    model = classifier()
    seen: list[Tensor] = []
    handle = model[0].weight.register_hook(seen.append)
    verify(model, data(), loss, 16, weight=lambda b: 1)
    seen.clear()
    loss(model, data()).backward()
    assert len(seen) == 1
    handle.remove()


def test_result_says_precision_and_tolerance() -> None:
    assert "up to 1e-09 is allowed in float64" in str(verify(classifier(), data(), loss, 16))
    found = verify(classifier(), data(), loss, 16, dtype=torch.float32)
    assert found.is_exact
    assert 1e-5 < found.tolerance < 1e-4
    assert "in float32" in str(found)
    assert verify(classifier(), data(), loss, 16, dtype=torch.float32, tolerance=1e-5).tolerance == 1e-5


def test_error_of_the_loss_is_raised_unchanged() -> None:
    def failing(model: nn.Module, batch: Batch) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        verify(classifier(), data(), failing, 16)


@pytest.mark.parametrize("num", [8, 31])
def test_memory_does_not_grow_with_the_number_of_micro_batches(num: int) -> None:
    """8 MiB of parameters: all gradients in float64 would be 500 MB for 31 micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 1448), nn.Tanh(), nn.Linear(1448, 1448), nn.Tanh(), nn.Linear(1448, 4))
    size = 4 * sum(p.numel() for p in model.parameters())
    assert size > 2**23
    tracemalloc.start()  # tracemalloc sees the memory of NumPy, in which gradients are compared
    try:
        found = verify(model, data(num), loss, 1, weight=lambda b: 1 + b[1].sum())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "but `weight` says" in only(found.causes)
    assert peak < 12 * size, f"{peak / size:.1f} times the model"


# --- a model in eval mode --------------------------------------------------------------------------------


def test_a_model_in_eval_mode_is_compared_in_training_mode() -> None:
    model = classifier(nn.BatchNorm1d(12), nn.Dropout(0.2)).eval()
    found = verify(model, data(), loss, 8)
    assert not found
    assert any("BatchNorm in training mode (2)" in cause for cause in found.causes)
    assert "the model is in eval mode, so a copy in training mode was compared" in found.causes[-1]
    assert "act: 2, 3; if you" in found.causes[-1]
    assert not any(module.training for module in model.modules())


def test_layers_that_are_in_eval_mode_alone_stay_there() -> None:
    model = classifier(nn.BatchNorm1d(12))
    model[2].eval()
    found = verify(model, data(), loss, 8)
    assert found.is_exact, str(found)
    assert found.causes == ()


def test_a_model_in_eval_mode_without_such_layers_is_compared_as_it_is() -> None:
    found = verify(classifier().eval(), data(), loss, 8)
    assert found.is_exact
    assert found.causes == ()


# --- a window --------------------------------------------------------------------------------------------


def windowed(sizes: list[int]) -> Window[Batch]:
    x, y = data(sum(sizes))
    return Window(zip(x.split(sizes), y.split(sizes), strict=True))


@pytest.mark.parametrize("sizes", [[1, 2, 3, 11], [5, 1], [7, 7, 2]], ids=str)
def test_a_window_of_any_sizes_is_compared_with_its_micro_batches_together(sizes: list[int]) -> None:
    found = verify(classifier(), windowed(sizes), loss)
    assert found.is_exact, str(found)
    assert found.causes == ()


def test_a_window_shows_a_wrong_weight() -> None:
    found = verify(classifier(), windowed([1, 2, 3, 11]), loss, weight=lambda batch: 1)
    assert not found
    assert found.max_error > 0.01


def test_a_window_of_dicts_with_parts_that_are_not_per_sample() -> None:
    x, y = data(9)
    scale = torch.tensor(2.0)
    window = Window({"y": y[i:j], "extra": (x[i:j], scale, "name")} for i, j in ((0, 2), (2, 9)))
    found = verify(classifier(), window, lambda m, b: b["extra"][1] * loss(m, (b["extra"][0], b["y"])))
    assert found.is_exact, str(found)


def test_a_loop_of_your_own_is_given_the_windows_micro_batches() -> None:
    seen = []

    def step(model: nn.Module, micro_batches: list[Batch]) -> None:
        seen.append([len(y) for _, y in micro_batches])
        for part in micro_batches:
            (loss(model, part) * len(part[1]) / 17).backward()

    assert verify(classifier(), windowed([1, 2, 3, 11]), loss, step=step)
    assert seen[0] == [1, 2, 3, 11]


@pytest.mark.parametrize(
    ("window", "told"),
    [
        (Window([]), "the window has 0 micro-batches"),
        (
            Window([torch.zeros(2, 3), torch.zeros(2, 4)]),
            r"samples of micro_batch differ \(\(3,\) of",
        ),
        (
            Window([(torch.zeros(2), 1), (torch.zeros(2), 2)]),
            r"micro_batch\[1\]\[1\] has no samples but is not",
        ),
        (Window([(torch.zeros(2), 1), torch.zeros(2)]), r"micro_batch\[1\] has other parts than micro_batch\[0\]"),
        (Window([torch.zeros(2), torch.zeros(0)]), r"micro_batch\[1\] has 0 samples"),
    ],
)
def test_a_window_that_cannot_be_concatenated_says_why(window: Window[Any], told: str) -> None:
    with pytest.raises(BatchError, match=told):
        verify(classifier(), window, loss)


# --- accumulator.verify ----------------------------------------------------------------------------------


def accumulator_of(model: nn.Module, **options: Any) -> Accumulator:
    return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **options)


def test_an_accumulator_verifies_itself_and_is_left_as_it_was() -> None:
    accumulator = accumulator_of(classifier(), micro_batch_size=8, accumulation_steps=2)
    batch = data(16)
    with accumulator.micro_batch(weight=16) as micro:  # in an open window too
        micro.backward(loss(accumulator.model, batch))
    random = torch.random.get_rng_state()
    found = accumulator.verify(data())
    assert found.is_exact, str(found)
    assert accumulator.verify(windowed([1, 5])).is_exact
    assert torch.equal(torch.random.get_rng_state(), random)
    assert accumulator.num_fed == 1
    assert accumulator.num_steps == 0
    with accumulator.micro_batch(weight=16) as micro:
        micro.backward(loss(accumulator.model, batch))
    assert micro.step.num_micro_batches == 2


@pytest.mark.parametrize("problem", problems(), ids=lambda problem: problem.name)
def test_an_accumulator_verifies_with_its_own_weight_and_size(problem: Problem) -> None:
    model = make_model(problem)
    weight = make_weight(problem)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, make_loss(problem), problem.micro_batch_size, weight=weight)
    found = accumulator.verify(make_batches(problem)[0])
    assert found.is_exact, str(found)
    if problem.kind == "tokens":
        accumulator.weight = None  # a mean of means
        assert not accumulator.verify(make_batches(problem)[0])


def test_an_accumulator_of_sums_verifies_sums() -> None:
    def summed(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert Accumulator(model, optimizer, summed, 8, reduction="sum").verify(data())
    assert not Accumulator(model, optimizer, summed, 8).verify(data())


def test_an_accumulator_verifies_with_its_other_options() -> None:
    def time_major(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return loss(model, (batch[0].T, batch[1])), {"first": batch[1][0]}

    model = classifier(nn.BatchNorm1d(12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"batch_axis": (1, 0), "has_aux": True, "batch_norm": "frozen"}
    accumulator = Accumulator(model, optimizer, time_major, 8, **options)
    x, y = data()
    assert accumulator.verify((x.T.contiguous(), y)).is_exact
    cut = Accumulator(model, optimizer, loss, 8, cut=lambda batch, sizes: cut_by(batch, sizes), batch_norm="frozen")
    assert cut.verify((x, y)).is_exact


def cut_by(batch: Batch, sizes: list[int]) -> list[Batch]:
    return list(zip(*(part.split(sizes) for part in batch), strict=True))


def test_an_accumulator_that_cannot_verify_says_why() -> None:
    with pytest.raises(OptionError, match=r"verify\(\) does not know where to cut the batch: set micro_batch_size, or"):
        accumulator_of(classifier()).verify(data())
    accumulator = accumulator_of(classifier())
    accumulator.loss = None
    with pytest.raises(OptionError, match=r"verify\(\) needs a loss"):
        accumulator.verify(data())
