"""Several optimizers and schedules in one accumulator: all of them step, or none does."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from bigbatch import BigBatchWarning, NonFiniteError, OptionError, OrderError
from bigbatch.torch import Accumulator, train_with_accumulation
from bigbatch.torch.optimizers import Optimizers
from bigbatch.torch.sums import Sums
from tests.problems import Problem, problems

from .test_accumulator import assert_untouched, loss, make_batch, make_model, snapshot
from .training import WAYS, Run, adamw, assert_same_update, flat, muon_and_adamw, update_error, warm_up

BY_NAME = {problem.name: problem for problem in problems()}
CLIPPED = BY_NAME["clipped to norm 0.1"]


def warm_ups(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    return [warm_up(optimizers[0]), ExponentialLR(optimizers[1], 0.7)]


def weights_and_biases(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    parameters = list(model.parameters())
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]


def make(*kinds: Callable[..., torch.optim.Optimizer], **options: Any) -> Accumulator:
    """An accumulator with one optimizer for the weights and one for the biases."""
    model = options.pop("model", None) or make_model()
    kinds = kinds or (torch.optim.SGD, torch.optim.SGD)
    optimizers = [kind(held, lr=0.1) for kind, held in zip(kinds, weights_and_biases(model), strict=True)]
    return Accumulator(model, optimizers, options.pop("loss", loss), 4, **options)


# --- as with the full batch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("problem", problems(), ids=lambda problem: problem.name)
def test_muon_and_adamw_equal_the_full_batch(problem: Problem, way: str) -> None:
    full = Run(problem, muon_and_adamw, epochs=3, make_scheduler=warm_ups).full()
    ours = Run(problem, muon_and_adamw, epochs=3, make_scheduler=warm_ups).accumulated(way)
    assert_same_update(ours, full, 1e-9)
    assert ours.losses == pytest.approx(full.losses, rel=1e-9)


@pytest.mark.parametrize("skipped", [0, 1])
def test_negative_control_one_of_two_is_skipped(skipped: int) -> None:
    full = Run(CLIPPED, muon_and_adamw).full()
    ours = Run(CLIPPED, muon_and_adamw)
    ours.optimizer = [ours.optimizer[1 - skipped]]
    assert update_error(ours.accumulated("batch"), full) > 1e-2


def test_negative_control_a_mean_of_means() -> None:
    uneven = BY_NAME["sizes 16, 16, 16, 5"]
    assert update_error(Run(uneven, muon_and_adamw).naive(), Run(uneven, muon_and_adamw).full()) > 1e-3


def test_negative_control_each_is_clipped_by_itself() -> None:
    class Apart(Run):
        def _step_plainly(self) -> None:
            for parameters in weights_and_biases(self.model):
                nn.utils.clip_grad_norm_(parameters, self.options["clip_norm"])
            for optimizer in self.optimizer:
                optimizer.step()

    def two_sgds(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(held, lr=0.1) for held in weights_and_biases(model)]

    full, apart = Run(CLIPPED, two_sgds).full(), Apart(CLIPPED, two_sgds).full()
    assert_same_update(Run(CLIPPED, two_sgds).accumulated("batch"), full, 1e-12)
    assert update_error(apart, full) > 1e-3


def test_a_list_of_one_is_as_the_optimizer_alone() -> None:
    one, alone = (Run(CLIPPED, make, epochs=3).accumulated("batch") for make in (lambda m: [adamw(m)], adamw))
    assert torch.equal(flat(one.model), flat(alone.model))


def test_sparse_and_dense_parameters() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.EmbeddingBag(9, 4, sparse=True, mode="sum").double()
            self.head = nn.Linear(4, 3).double()

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

    def optimizers(model: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SparseAdam(model.embed.parameters()), torch.optim.AdamW(model.head.parameters())]

    batch = torch.arange(44).reshape(11, 4) % 7, make_batch()[1]
    plain = Words()
    made = optimizers(plain)
    for _ in range(3):
        plain.zero_grad()
        loss(plain, batch).backward()
        for optimizer in made:
            optimizer.step()
    ours = Words()
    accumulator = Accumulator(ours, optimizers(ours), loss, 3)
    for _ in range(3):
        accumulator.step(batch)
    assert torch.allclose(flat(ours), flat(plain), rtol=1e-12)


def test_each_gets_gradients_in_the_dtype_that_it_takes() -> None:
    """SGD without momentum takes the float32 sum of bfloat16 parameters; AdamW gets it rounded."""
    accumulator = make(torch.optim.SGD, torch.optim.AdamW, model=make_model().bfloat16())
    seen: dict[int, set[torch.dtype]] = {0: set(), 1: set()}
    for number, optimizer in enumerate(accumulator.optimizer):

        def note(optimizer: Any, *_: Any, number: int = number) -> None:
            seen[number] |= {p.grad.dtype for group in optimizer.param_groups for p in group["params"]}

        optimizer.register_step_pre_hook(note)
    x, y = make_batch()
    accumulator.step((x.bfloat16(), y))
    assert seen == {0: {torch.float32}, 1: {torch.bfloat16}}


def test_hooks_of_all_parameters_run_once_on_the_whole_gradient() -> None:
    accumulator, plain = make(), make_model()
    for model in (accumulator.model, plain):
        for p in model.parameters():
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))
    loss(plain, make_batch()).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    accumulator.step(make_batch())
    assert torch.allclose(flat(accumulator.model), flat(plain), rtol=1e-12)


def test_train_with_accumulation_takes_several() -> None:
    batches = [make_batch()] * 2
    models = [make_model(), make_model()]
    for model, epochs in zip(models, (1, 2), strict=True):
        optimizers = [torch.optim.Adam(held, lr=0.1) for held in weights_and_biases(model)]
        schedules = [ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
        history = train_with_accumulation(
            model, batches[: 3 - epochs], optimizers, loss, micro_batch_size=4, epochs=epochs, scheduler=schedules
        )
        assert len(history.steps) == 2
    assert torch.equal(flat(models[0]), flat(models[1]))


def test_a_copy_steps_its_own() -> None:
    accumulator = make(torch.optim.AdamW, torch.optim.SGD)
    other = copy.deepcopy(accumulator)
    before = snapshot(accumulator)
    other.step(make_batch())
    assert_untouched(accumulator, before)
    assert not accumulator.optimizer[0].state
    accumulator.step(make_batch())
    assert torch.equal(flat(accumulator.model), flat(other.model))


# --- all or none -------------------------------------------------------------------------------------------------


def with_a_bad_bias(model: nn.Module, batch: Any) -> Tensor:
    """The gradient of a bias alone is not finite."""
    return loss(model, batch) + model[0].bias.sum() * batch[0].new_tensor(torch.inf)


def test_a_gradient_that_is_not_finite_for_one_holds_all_back() -> None:
    accumulator = make(torch.optim.Adam, torch.optim.Adam)
    accumulator.scheduler = [ExponentialLR(optimizer, 0.5) for optimizer in accumulator.optimizer]
    accumulator.step(make_batch())
    before, states = snapshot(accumulator), [copy.deepcopy(o.state_dict()) for o in accumulator.optimizer]
    accumulator.loss = with_a_bad_bias
    with pytest.warns(BigBatchWarning, match=r"0\.bias is not finite"):
        assert not accumulator.step(make_batch()).is_applied
    accumulator.on_nonfinite = "raise"
    with pytest.raises(NonFiniteError, match=r"0\.bias is not finite"):
        accumulator.step(make_batch())
    assert_untouched(accumulator, before)
    for optimizer, state in zip(accumulator.optimizer, states, strict=True):
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert all(optimizer.state_dict()["state"][k]["step"] == s["step"] for k, s in state["state"].items())


def with_a_steep_bias(model: nn.Module, batch: Any) -> Tensor:
    """The gradient of a bias alone overflows float32 at a scale of 2**100."""
    return loss(model, batch) + model[0].bias.sum() * 1e12


def test_an_overflow_for_one_holds_all_back_and_lowers_the_scale_once() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**100)
    model = make_model().float()
    accumulator = make(torch.optim.Adam, torch.optim.SGD, model=model, scaler=scaler, loss=with_a_steep_bias)
    accumulator.scheduler = [ExponentialLR(optimizer, 0.5) for optimizer in accumulator.optimizer]
    x, y = make_batch()
    before = snapshot(accumulator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not accumulator.step((x.float(), y)).is_applied
        assert_untouched(accumulator, before)
        assert scaler.get_scale() == 2.0**99
        assert not accumulator.optimizer[0].state
        assert accumulator.optimizer[1].param_groups[0]["lr"] == 0.1
        scaler.update(2.0**10)
        accumulator.loss = loss
        assert accumulator.step((x.float(), y)).is_applied
    plain = make_model().float()
    loss(plain, (x.float(), y)).backward()
    for kind, held in zip((torch.optim.Adam, torch.optim.SGD), weights_and_biases(plain), strict=True):
        kind(held, lr=0.1).step()
    assert torch.allclose(flat(accumulator.model), flat(plain), atol=1e-6)


def test_a_scaler_steps_past_an_optimizer_without_gradients() -> None:
    """GradScaler.step raises for an optimizer whose parameters have none."""

    def of_weights(model: nn.Module, batch: Any) -> Tensor:
        return (batch[0] @ model[0].weight.T).square().mean()

    accumulator = make(
        torch.optim.Adam, torch.optim.Adam, model=make_model().float(), scaler=GradScaler("cpu"), loss=of_weights
    )
    x, y = make_batch()
    before = accumulator.model[0].bias.clone()
    assert accumulator.step((x.float(), y)).is_applied
    assert accumulator.step((x.float(), y)).is_applied
    assert len(accumulator.optimizer[0].state) == 1
    assert torch.equal(accumulator.model[0].bias, before)


def test_the_device_can_skip_them_if_it_can_skip_each() -> None:
    """Fused SGD cannot skip the step that creates its momentum; parameters of the other optimizer do not count."""
    model = make_model()
    weights, biases = weights_and_biases(model)
    momentum = torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True)
    adam = torch.optim.Adam(biases, fused=True)
    both = Optimizers(model, [momentum, adam])
    loss(model, make_batch()).backward()
    sums = Sums((p, p.grad) for p in model.parameters())
    assert not both.can_be_skipped_on_device(sums)
    both.step()
    assert both.can_be_skipped_on_device(sums)
    assert not Optimizers(model, [momentum, torch.optim.Adam(biases)]).can_be_skipped_on_device(sums)
    before = flat(model)
    with both.skipping(torch.tensor(True)):
        both.step()
    assert torch.equal(flat(model), before)
    with both.skipping(torch.tensor(False)):
        both.step()
    assert not any(torch.equal(now, then) for now, then in zip(flat(model), before, strict=True))
    assert not hasattr(adam, "found_inf")


def test_a_step_of_any_of_them_in_an_open_window_is_detected() -> None:
    for number in (0, 1):
        accumulator = make(accumulation_steps=3)
        with accumulator.micro_batch(weight=11) as micro:
            micro.backward(loss(accumulator.model, make_batch()))
        for p in accumulator.model.parameters():
            p.grad = torch.ones_like(p)
        accumulator.optimizer[number].step()
        accumulator.model.zero_grad()
        with pytest.raises(OrderError, match="the parameters were changed in the middle of a window"):
            accumulator.flush()


# --- schedules ---------------------------------------------------------------------------------------------------


def test_each_schedule_is_stepped_once_for_each_applied_step() -> None:
    accumulator = make()
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    accumulator.scheduler = [LambdaLR(other, lambda step: 1 + step), ExponentialLR(accumulator.optimizer[1], 0.5)]
    other.step()
    for _ in range(2):
        accumulator.step(make_batch())
    with pytest.warns(BigBatchWarning):
        accumulator.step((make_batch()[0] * torch.nan, make_batch()[1]))
    assert [optimizer.param_groups[0]["lr"] for optimizer in (other, *accumulator.optimizer)] == [3.0, 0.1, 0.025]


def test_they_are_what_was_passed() -> None:
    accumulator = make()
    assert [type(one) for one in accumulator.optimizer] == [torch.optim.SGD] * 2
    assert isinstance(accumulator.optimizer, tuple)
    schedule = ExponentialLR(accumulator.optimizer[0], 0.5)
    for given, kept in (([schedule], (schedule,)), (schedule, schedule), ([], ()), (None, None)):
        accumulator.scheduler = given
        assert accumulator.scheduler == kept
        accumulator.step(make_batch())
    assert accumulator.optimizer[0].param_groups[0]["lr"] == 0.025
    with pytest.raises(OptionError, match="optimizer cannot be changed"):
        accumulator.optimizer = accumulator.optimizer[0]


# --- bad input ---------------------------------------------------------------------------------------------------

MODEL = make_model()


def sgd(*parameters: Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        ([], "optimizer is an empty list: pass an optimizer"),
        (
            [sgd(MODEL[0].weight, MODEL[2].bias), sgd(MODEL[0].bias, MODEL[2].bias)],
            r"optimizers 1 and 2 of 2 both hold 1 parameter \(2\.bias first\)",
        ),
        ([sgd(*MODEL.parameters())] * 2, r"both hold 4 parameters \(0\.weight first\)"),
        ([sgd(MODEL[0].weight), sgd(nn.Parameter(torch.zeros(2)))], "holds 1 parameters but none of the model's 4"),
        ([sgd(MODEL[0].weight), None], "optimizer is a NoneType: pass a torch.optim.Optimizer, or a list of several"),
        ({"weights": sgd(MODEL[0].weight)}, "optimizer is a dict: pass a torch.optim.Optimizer, or a list of several"),
    ],
)
def test_bad_optimizers(optimizers: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Accumulator(MODEL, optimizers, loss, 4)


def test_bad_schedules() -> None:
    accumulator = make()
    schedule = ExponentialLR(accumulator.optimizer[0], 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(accumulator.optimizer[1])
    for given, message in (
        ([schedule, schedule], r"scheduler\[1\] is in the list twice"),
        ([None, schedule], r"scheduler\[0\] is None: leave it out"),
        ([schedule, ExponentialLR], r"scheduler\[1\] is the class ExponentialLR"),
        ((schedule, plateau), "ReduceLROnPlateau wants a metric"),
    ):
        with pytest.raises(OptionError, match=message):
            accumulator.scheduler = given
    assert accumulator.scheduler is None


def test_one_that_accelerate_holds_back_is_named() -> None:
    accumulator = make()
    accumulator.optimizer[1].gradient_state = type("State", (), {"sync_gradients": False, "num_steps": 4})
    with pytest.raises(OrderError, match="holds back the SGD for windows of 4"):
        accumulator.step(make_batch())
