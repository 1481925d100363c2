"""Losses and loops, right and wrong, each with the cause that `verify` must name."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

N, SIZE, IGNORED = 13, 4, -100
DTYPE = torch.float64

# A few words of each cause. `verify` must not state a cause that a case does not list.
WORDS = {
    "weight": "return from `weight` the number of samples or tokens the loss averages over",
    "adds up": "the loss adds up over samples",
    "mean added up": 'reduction="sum" adds it up',
    "couples": "the loss couples the samples",
    "backward": "but their gradients do not: something in the backward pass",
    "means": "adds up several means over different counts",
    "sum and mean": "adds a sum over samples and a mean",
    "penalty": "something that does not depend on them",
    "nothing": "a mean over nothing is 0/0",
    "not finite": "a gradient is not finite",
    "batch norm": "BatchNorm in training mode",
    "eval": "the model is in eval mode",
    "masks": "compared with the same masks",
    "uncut": "could not be cut like the batch",
    "other random": "cannot be cut like the batch",
    "changes": "gives another gradient each time",
    "carried": "a pass changes what the next one sees",
    "rounding": "is the size of rounding",
    "columns": "this looks time-major: pass batch_axis=1",
    "list": "is a list of",
    "one": "one micro-batch holds the whole batch",
    "float32": "compared in float32, because",
    "hooks": "hooks of parameters act on",
    "missing": "parameters have no gradient when the loop ends",
    "sign": "the sign is flipped",
    "divided": "divided by the number of micro-batches",
    "undivided": "not divided: ",
    "short": "so its gradient is too small",
    "over": "so its gradient is too large",
    "zeroed": "only the last micro-batch counts",
    "left out": "is left out",
    "times": "times too large",
    "whole": "the whole gradient is",
    "odd": "is not divided like the others",
    "clipped": "clipped after each micro-batch",
    "stale": "has something in it that is in none",
    "refuses": "the cause is unknown because the loss fails",
    "never zeroed": "gradients are not zeroed",
    "steps": "steps of the optimizer for a window",
    "elsewhere": "steps an optimizer that holds none",
    "nothing left": "the loop leaves no gradient, takes no step",
    "direction": "shows the direction but",
    "dropout off": "dropout was switched off",
    "drawn in eval": "random numbers are drawn in eval mode",
    "no loop": "no loop over these micro-batches can be exact",
    "unexplained": "the cause could not be determined",
    "unclear": "which of the two cannot be told in this precision",
}
EXACT = "exact"


@dataclass(frozen=True)
class Case:
    name: str
    loss: Callable[..., Any]
    says: tuple[str, ...]
    """EXACT if the case is exact, then the causes, as in WORDS."""
    model: Callable[[int], nn.Module]
    batch: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    vague: tuple[str, ...] = ()
    """What `verify` may say instead in float32."""
    is_random: bool = False
    """Whether the real step draws different random numbers, so that it cannot be compared."""

    def __str__(self) -> str:
        return self.name


def data() -> dict[str, Tensor]:
    """Samples of different sizes, each with up to 7 tokens; the number of tokens differs from sample to sample."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(N, 6, generator=draw) * torch.linspace(0.3, 2, N)[:, None]
    tokens = torch.randn(N, 7, 6, generator=draw)
    labels = torch.randint(0, 4, (N, 7), generator=draw)
    for row, length in enumerate([1, 7, 2, 5, 7, 1, 1, 6, 3, 7, 2, 4, 5]):
        labels[row, length:] = IGNORED
    y = torch.randint(0, 4, (N,), generator=draw)
    return {"x": x, "y": y, "tokens": tokens, "labels": labels}


def without_label() -> dict[str, Tensor]:
    batch = data()
    batch["labels"][4:8] = IGNORED
    return batch


def mlp(width: int, *middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), *middle, nn.Linear(width, 4))


def ce(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def token_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def num_tokens(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != IGNORED).sum()


CASES: list[Case] = []


def case(
    *says: str,
    model: Callable[[int], nn.Module] = mlp,
    batch: Callable[[], Any] = data,
    vague: tuple[str, ...] = (),
    is_random: bool = False,
    name: str = "",
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(loss: Callable[..., Any]) -> Callable[..., Any]:
        label = name or loss.__name__.replace("_", " ")
        CASES.append(Case(label, loss, says, model, batch, options, vague, is_random))
        return loss

    return add


# --- losses that are means, and weights that fit or do not --------------------------------------------------

case(EXACT, name="cross entropy")(ce)
case("weight", name="weight of one each", weight=lambda b: 1)(ce)
case("weight", name="weight squared", weight=lambda b: len(b["x"]) ** 2)(ce)
case("weight", name="tokens without a weight")(token_mean)
case(EXACT, name="tokens with their weight", weight=num_tokens)(token_mean)
case("weight", name="tokens counted with padding", weight=lambda b: b["labels"].numel())(token_mean)
case("weight", name="tokens, micro-batches of 1", micro_batch_size=1)(token_mean)
case(EXACT, "one", name="one micro-batch", micro_batch_size=N)(ce)
case(EXACT, "one", name="one micro-batch, wrong weight", micro_batch_size=20, weight=lambda b: 7)(token_mean)
case("nothing", name="a micro-batch without a label", batch=without_label)(token_mean)
case(EXACT, name="a micro-batch without a label, weighted", batch=without_label, weight=num_tokens)(token_mean)
case("weight", name="without a label, off by one", batch=without_label, weight=lambda b: 3 * (num_tokens(b) > 0))(
    token_mean
)


@case("weight")
def mean_over_positive_samples(model, batch):
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    kept = (batch["x"][:, 0] > -0.5).double()
    return (losses * kept).sum() / kept.sum()


@case("weight")
def class_weights(model, batch):
    weights = torch.tensor([1.0, 5.0, 0.5, 3.0], dtype=batch["x"].dtype)
    return F.cross_entropy(model(batch["x"]), batch["y"], weights)


@case(EXACT, weight=lambda b: torch.tensor([1.0, 5.0, 0.5, 3.0])[b["y"]].sum(), name="class weights, counted")
def class_weights_counted(model, batch):
    return class_weights(model, batch)


@case(EXACT)
def mean_and_penalty(model, batch):
    return ce(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


@case("weight")
def tokens_and_penalty(model, batch):
    return token_mean(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


@case(EXACT)
def mean_squared_error(model, batch):
    return F.mse_loss(model(batch["x"]), batch["x"][:, :4])


@case(EXACT)
def divided_by_a_constant(model, batch):
    return ce(model, batch) / 4


# --- sums ---------------------------------------------------------------------------------------------------


def summed(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


case("adds up", name="a sum")(summed)
case(EXACT, name="a sum, added up", reduction="sum")(summed)
case("mean added up", name="a mean, added up", reduction="sum")(ce)
case("mean added up", name="tokens, added up", reduction="sum")(token_mean)


@case("adds up")
def sum_over_a_fixed_size(model, batch):
    return summed(model, batch) / 32


@case("adds up")
def sum_of_token_losses(model, batch):
    return F.cross_entropy(
        model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def sum_and_l2(model, batch):
    return summed(model, batch) + 0.3 * sum(p.square().sum() for p in model.parameters())


case("penalty", name="sum and L2, added up", reduction="sum")(sum_and_l2)
case("penalty", name="sum and L2")(sum_and_l2)


@case("penalty", reduction="sum")
def sum_and_l1(model, batch):
    return summed(model, batch) + 0.5 * model[0].weight.abs().sum()


@case("sum and mean", reduction="sum")
def sum_and_token_mean(model, batch):
    return summed(model, batch) + token_mean(model, batch)


@case("sum and mean")
def mean_and_token_sum(model, batch):
    return ce(model, batch) + 0.1 * sum_of_token_losses(model, batch)


@case("adds up")
def of_a_fixed_length(model, batch):
    """Cannot be called with more samples than the batch has."""
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (losses * torch.linspace(1, 1, N, dtype=losses.dtype)[: len(losses)]).sum() / N


@case("refuses")
def of_certain_sizes(model, batch):
    if len(batch["x"]) not in (1, SIZE, N):
        raise ValueError("another size")
    return ce(model, batch).sqrt()


# --- several means ------------------------------------------------------------------------------------------


@case("means", vague=("unclear",))
def two_means_in_one_number(model, batch):
    return token_mean(model, batch) + ce(model, batch)


@case("means", weight=num_tokens, vague=("unclear",))
def two_means_weighted_by_tokens(model, batch):
    return token_mean(model, batch) + 0.5 * ce(model, batch)


@case("means", vague=("unclear",))
def three_means(model, batch):
    return token_mean(model, batch) + ce(model, batch) + mean_over_positive_samples(model, batch)


@case(EXACT, weight=lambda b: (num_tokens(b), len(b["x"])))
def two_terms(model, batch):
    return token_mean(model, batch), ce(model, batch)


@case("weight", weight=lambda b: (len(b["x"]), len(b["x"])))
def two_terms_one_weight_wrong(model, batch):
    return token_mean(model, batch), ce(model, batch)


@case("couples", weight=lambda b: (num_tokens(b), len(b["x"])))
def two_terms_one_couples(model, batch):
    return token_mean(model, batch), ce(model, batch).sqrt()


# --- losses that couple samples -----------------------------------------------------------------------------


@case("couples", vague=("unclear",))
def root_mean_square(model, batch):
    return model(batch["x"]).square().mean().sqrt()


@case("couples", vague=("unclear",))
def log_of_a_mean(model, batch):
    return ce(model, batch).log()


@case("couples", vague=("unclear",))
def contrastive(model, batch):
    z = F.normalize(model(batch["x"]), dim=1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)))


@case("couples", vague=("unclear",))
def variance(model, batch):
    return model(batch["x"]).var(0, unbiased=False).mean()


@case("couples", vague=("unclear",))
def hardest_samples(model, batch):
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return losses.topk(min(2, len(losses))).values.mean()


@case("couples", vague=("unclear",))
def largest(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none").max()


@case("couples", vague=("unclear",))
def centred_by_the_batch(model, batch):
    out = model(batch["x"])
    return F.cross_entropy(out - out.mean(0), batch["y"])


@case("couples", vague=("unclear",))
def dice(model, batch):
    p = model(batch["x"]).softmax(1)
    t = F.one_hot(batch["y"], 4).to(p)
    return 1 - 2 * (p * t).sum() / (p.square().sum() + t.square().sum())


@case("couples", vague=("unclear",))
def load_balance(model, batch):
    p = model(batch["x"]).softmax(1)
    return 4 * (p.mean(0) * F.one_hot(p.argmax(1), 4).to(p).mean(0)).sum()


@case("couples", vague=("unclear",))
def pairwise_ranking(model, batch):
    score = model(batch["x"])[:, 0]
    return F.softplus(score[:, None] - score[None]).mean() + 0.1 * (score[:, None] * score[None]).tanh().mean()


@case("couples", vague=("unclear",))
def divided_by_the_root_of_the_count(model, batch):
    return summed(model, batch) / len(batch["x"]) ** 0.5


@case("couples", vague=("unclear",))
def covariance(model, batch):
    z = model(batch["x"])
    c = (z - z.mean(0)).T @ (z - z.mean(0)) / len(z)
    return (c - torch.eye(4, dtype=z.dtype)).square().sum()


# --- layers -------------------------------------------------------------------------------------------------

case("batch norm", name="BatchNorm", micro_batch_size=5, model=lambda w: mlp(w, nn.BatchNorm1d(w)))(ce)
case(
    "batch norm",
    "weight",
    name="BatchNorm, wrong weight",
    micro_batch_size=5,
    weight=lambda b: 1,
    model=lambda w: mlp(w, nn.BatchNorm1d(w)),
)(ce)
case(
    "batch norm",
    "eval",
    name="BatchNorm in a model in eval mode",
    micro_batch_size=5,
    model=lambda w: mlp(w, nn.BatchNorm1d(w)).eval(),
)(ce)
case(EXACT, name="BatchNorm alone in eval mode", model=lambda w: mlp(w, nn.BatchNorm1d(w).eval()))(ce)
case(EXACT, "eval", "masks", name="dropout in eval", model=lambda w: mlp(w, nn.Dropout(0.5)).eval(), is_random=True)(ce)
case(EXACT, name="LayerNorm", model=lambda w: mlp(w, nn.LayerNorm(w)))(ce)
case(EXACT, "masks", name="dropout", model=lambda w: mlp(w, nn.Dropout(0.5)), is_random=True)(ce)
case("masks", "weight", name="dropout, wrong weight", weight=lambda b: 1, model=lambda w: mlp(w, nn.Dropout(0.5)))(ce)


def spectral(width: int) -> nn.Module:
    torch.manual_seed(0)
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, width))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(width, 4))


case("carried", name="spectral_norm", model=spectral, vague=(EXACT,))(ce)


class Narrow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float(), self.bias.float()).to(x.dtype)


case(EXACT, "rounding", name="float32 inside", model=lambda w: mlp(w, Narrow(w, w)), vague=(EXACT,))(ce)
case("weight", name="float32 inside, wrong weight", weight=lambda b: 1, model=lambda w: mlp(w, Narrow(w, w)))(ce)


class ByItsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class Normalised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ByItsNorm.apply(x)


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * 1.0
        if weight.requires_grad:
            weight.register_hook(lambda g: g.clamp(-0.005, 0.005))
        return F.linear(x, weight, self.bias)


case("backward", name="a backward function that normalises", model=lambda w: mlp(w, Normalised()))(ce)
case("backward", name="a hook in forward that clamps", model=lambda w: mlp(w, Clamped(w, w)))(ce)


def half_masked() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    keep = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0]).bool()  # the last micro-batches keep nothing
    return {"x": torch.randn(11, 6, generator=draw), "keep": keep}


@case("means", batch=half_masked, micro_batch_size=3, vague=("unclear",))
def two_means_of_few_samples(model, batch):
    out, keep = model(batch["x"]), batch["keep"]
    return out.square().mean() + out[keep].abs().sum() / keep.sum().clamp(min=1)


def with_hooks(width: int) -> nn.Module:
    model = mlp(width)
    model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))

    def by_its_norm(p: Tensor) -> None:
        p.grad *= p.grad.norm()

    model[2].bias.register_post_accumulate_grad_hook(by_its_norm)
    return model


case(EXACT, name="hooks of parameters", model=with_hooks)(ce)
case("weight", name="hooks of parameters, wrong weight", model=with_hooks, weight=lambda b: 1)(ce)


class Drifting(nn.Linear):
    """Keeps a state in Python, which nothing restores."""

    drift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.drift = 0.9 * self.drift + 0.1 * float(x.detach().mean()) + 0.1
        return super().forward(x) * (1 + self.drift)


case("changes", name="a state in Python", model=lambda w: mlp(w, Drifting(w, w)), is_random=True)(ce)


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1)


case("couples", name="own BatchNorm", model=lambda w: mlp(w, Centre()), vague=("unclear",))(ce)


class Words(nn.Module):
    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(4, width, **options), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed((x[:, 0] > 0).long()))


case("backward", name="by frequency", model=lambda w: Words(w, scale_grad_by_freq=True))(ce)
case(EXACT, name="sparse", model=lambda w: Words(w, sparse=True))(ce)
case("weight", name="sparse, wrong weight", weight=lambda b: 1, model=lambda w: Words(w, sparse=True))(ce)


class Router(nn.Module):
    """Mixes float32 with the dtype of its parameters, as mixtures of experts do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.route, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        share, out = F.softmax(self.route(x), 1, dtype=torch.float32), torch.zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = (share.argmax(1) == number).nonzero()[:, 0]
            out.index_add_(0, rows, expert(x[rows]) * share[rows, number : number + 1])
        return out


case(EXACT, "float32", name="experts", model=Router)(ce)
case("weight", "float32", name="experts, wrong weight", model=Router, weight=lambda b: 1)(ce)


# --- random numbers -----------------------------------------------------------------------------------------


@case("other random", is_random=True)
def numpy_noise(model, batch):
    noise = torch.as_tensor(np.random.randn(*batch["x"].shape), dtype=batch["x"].dtype)
    return ce(model, {**batch, "x": batch["x"] + noise})


@case("other random", is_random=True)
def python_noise(model, batch):
    scale = torch.tensor([random.random() for _ in batch["x"]], dtype=batch["x"].dtype)
    return ce(model, {**batch, "x": batch["x"] * scale[:, None]})


@case(EXACT, "other random", is_random=True)
def spec_augment(model, batch):
    tokens = batch["tokens"].clone()
    start = random.randrange(5)
    tokens[..., start : start + 2] = 0
    return F.cross_entropy(model(tokens[:, 0]), batch["y"])


@case("other random", "weight", is_random=True)
def spec_augment_without_weight(model, batch):
    tokens = batch["tokens"].clone()
    tokens[..., random.randrange(5)] = 0
    return token_mean(model, {**batch, "tokens": tokens})


@case(EXACT, "masks", is_random=True)
def categorical_sample(model, batch):
    policy = torch.distributions.Categorical(logits=model(batch["x"]))
    action = policy.sample()
    return -(policy.log_prob(action) * batch["x"][:, 0]).mean()


@case("uncut", is_random=True)
def mixup(model, batch):
    return ce(model, {**batch, "x": 0.7 * batch["x"] + 0.3 * batch["x"][torch.randperm(len(batch["x"]))]})


OWN = np.random.default_rng(0)


@case("changes", is_random=True)
def own_generator(model, batch):
    noise = torch.as_tensor(OWN.normal(size=tuple(batch["x"].shape)), dtype=batch["x"].dtype)
    return ce(model, {**batch, "x": batch["x"] + noise})


TORCH_OWN = torch.Generator().manual_seed(0)


@case("changes", is_random=True)
def own_torch_generator_and_count(model, batch):
    noise = torch.as_tensor(OWN.uniform(0.5, 2), dtype=batch["x"].dtype)
    return ce(model, batch) * noise


@case(EXACT, "masks", is_random=True)
def torch_noise(model, batch):
    return ce(model, {**batch, "x": batch["x"] + torch.randn_like(batch["x"])})


# --- losses that treat their batch badly --------------------------------------------------------------------


@case(EXACT)
def pops_from_the_batch(model, batch):
    y = batch.pop("y")
    return F.cross_entropy(model(batch["x"]), y)


@case(EXACT)
def gradient_penalty(model, batch):
    x = batch["x"].requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, batch["y"]) + slope.square().sum(1).mean()


@case(EXACT)
def reentrant_checkpoint(model, batch):
    x = batch["x"].requires_grad_()
    return F.cross_entropy(checkpoint(model, x, use_reentrant=True), batch["y"])


@case(EXACT)
def changes_the_batch_in_place(model, batch):
    batch["x"].mul_(0.5)
    return ce(model, batch)


TEACHER = mlp(8).float()


@case(EXACT, "float32")
def float32_teacher(model, batch):
    with torch.no_grad():
        target = TEACHER(batch["x"]).softmax(1)
    return F.cross_entropy(model(batch["x"]), target)


@case("weight", "float32", weight=lambda b: 1)
def float32_teacher_wrong_weight(model, batch):
    return float32_teacher(model, batch)


# --- batches whose samples are not the leading axis ---------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.head = kind(6, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(x)[0])


def by_time(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def times() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {"x": torch.randn(9, 8, 6), "y": torch.randint(0, 4, (9, 8))}


case("columns", name="time-major LSTM", model=lambda w: Recurrent(nn.LSTM, w), batch=times)(by_time)
case("columns", name="time-major GRU", model=lambda w: Recurrent(nn.GRU, w), batch=times)(by_time)


class Cumulative(nn.Module):
    """Takes a cumulative sum over the leading axis, so no layer reveals that this axis is time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).cumsum(0).tanh())


case("columns", name="time-major without layers", model=Cumulative, batch=times)(by_time)


def listed() -> list[Tensor]:
    torch.manual_seed(4)
    return [torch.randn(8, 6) for _ in range(2)]  # three or more of one shape are refused


@case("list", batch=listed, model=Cumulative)
def list_of_samples(model, batch):
    return torch.stack([model(x)[-1].square().mean() for x in batch]).mean()


# --- foreign loops ----------------------------------------------------------------------------------

Loop = Callable[[nn.Module, list[Any]], Any]


def loop(*says: str, loss: Callable[..., Any] = ce, name: str = "", **options: Any) -> Callable[[Loop], Loop]:
    def add(step: Loop) -> Loop:
        case(*says, name=f"loop: {name or step.__name__.replace('_', ' ')}", step=step, **options)(loss)
        return step

    return add


def each(scale: Callable[[int, int, int, int], float], loss: Callable[..., Any] = ce) -> Loop:
    """A loop that zeroes the gradients, then adds up losses times `scale(place, window, size, total)`."""

    def step(model, micro_batches):
        model.zero_grad()
        total = sum(len(b["x"]) for b in micro_batches)
        for place, b in enumerate(micro_batches):
            (loss(model, b) * scale(place, len(micro_batches), len(b["x"]), total)).backward()

    return step


right = each(lambda k, num, size, total: size / total)
by_number = each(lambda k, num, size, total: 1 / num)
loop(EXACT, name="right")(right)
loop("divided", name="mean of means")(by_number)
loop(EXACT, "eval", "dropout off", name="right, dropout in eval mode", model=lambda w: mlp(w, nn.Dropout(0.5)).eval())(
    right
)
loop("undivided", name="not divided")(each(lambda k, num, size, total: 1))
loop("short", name="divided by 8")(each(lambda k, num, size, total: 1 / 8))
loop("over", name="divided by 2")(each(lambda k, num, size, total: 1 / 2))
loop("short", name="divided by 16 samples")(each(lambda k, num, size, total: size / 16))
loop("times", name="twice as large")(each(lambda k, num, size, total: 2 * size / total))
loop("whole", name="0.3 times as large")(each(lambda k, num, size, total: 0.3 * size / total))
loop("whole", name="1.7 times as large")(each(lambda k, num, size, total: 1.7 * size / total))
loop("odd", name="last not divided")(each(lambda k, num, size, total: 1 if k == num - 1 else 1 / num))
loop("odd", name="first not divided")(each(lambda k, num, size, total: 1 if k == 0 else 1 / num))
loop("odd", name="last not divided, by size", micro_batch_size=5)(
    each(lambda k, num, size, total: (num if k == num - 1 else 1) * size / total)
)
loop("odd", name="last not divided, of three", micro_batch_size=5)(
    each(lambda k, num, size, total: 1 if k == num - 1 else 1 / num)
)
loop("left out", name="first left out")(each(lambda k, num, size, total: 0 if k == 0 else size / total))
loop("left out", name="last left out")(each(lambda k, num, size, total: 0 if k == num - 1 else size / total))
loop(name="odd weights")(each(lambda k, num, size, total: (0.3, 0.2, 0.4, 0.6)[k]))

# the loss is a mean over tokens, so dividing by the number of micro-batches is wrong with or without a weight
by_number_of_tokens = each(lambda k, num, size, total: 1 / num, token_mean)
loop("divided", name="tokens by number", loss=token_mean, micro_batch_size=1)(by_number_of_tokens)
loop("divided", name="tokens by number, weighed", loss=token_mean, weight=num_tokens)(by_number_of_tokens)
loop("divided", name="tokens by number, sizes 4 4 4 1", loss=token_mean)(by_number_of_tokens)
loop("undivided", name="tokens not divided", loss=token_mean)(each(lambda k, num, size, total: 1, token_mean))


@loop("stale")
def with_a_penalty(model, micro_batches):
    right(model, micro_batches)
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=0.1)


@loop("stale")
def with_noise(model, micro_batches):
    right(model, micro_batches)
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p), alpha=0.1)


@loop("stale")
def clipped_by_value(model, micro_batches):
    right(model, micro_batches)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


@loop("missing")
def some_gradients_dropped(model, micro_batches):
    right(model, micro_batches)
    for p in model[0].parameters():
        p.grad = None


loop("sign", "whole", name="sign turned")(each(lambda k, num, size, total: -size / total))


@loop("stale")
def with_a_hinge(model, micro_batches):
    each(lambda k, num, size, total: size / total, lambda m, b: F.multi_margin_loss(m(b["x"]), b["y"]))(
        model, micro_batches
    )


@loop(EXACT, loss=token_mean)
def right_over_tokens(model, micro_batches):
    model.zero_grad()
    total = sum(int(num_tokens(b)) for b in micro_batches)
    for b in micro_batches:
        (token_mean(model, b) * num_tokens(b) / total).backward()


@loop(EXACT, loss=token_mean)
def sums_of_tokens_over_their_total(model, micro_batches):
    model.zero_grad()
    total = sum(int(num_tokens(b)) for b in micro_batches)
    for b in micro_batches:
        (sum_of_token_losses(model, b) / total).backward()


@loop(EXACT, "never zeroed")
def never_zeroed(model, micro_batches):
    for b in micro_batches:
        (ce(model, b) * len(b["x"]) / N).backward()


@loop("zeroed")
def zeroed_each_time(model, micro_batches):
    for b in micro_batches:
        model.zero_grad()
        ce(model, b).backward()


def with_step(kind: type[torch.optim.Optimizer], set_to_none: bool, inner: Loop = right) -> Loop:
    def step(model, micro_batches):
        optimizer = kind(model.parameters(), lr=0.1)
        inner(model, micro_batches)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    return step


loop(EXACT, name="right, with step and zero_grad")(with_step(torch.optim.SGD, True))
loop(EXACT, name="right, with AdamW, zeroed in place")(with_step(torch.optim.AdamW, False))
loop("divided", name="mean of means, with step and zero_grad")(with_step(torch.optim.SGD, True, by_number))
loop("odd", name="last not divided, with step")(
    with_step(torch.optim.SGD, True, each(lambda k, num, size, total: 1 if k == num - 1 else 1 / num))
)


@loop("steps")
def a_step_each_time(model, micro_batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for b in micro_batches:
        optimizer.zero_grad()
        (ce(model, b) * len(b["x"]) / N).backward()
        optimizer.step()


@loop(EXACT, "direction")
def updates_by_hand(model, micro_batches):
    right(model, micro_batches)
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.grad = None


@loop("steps")
def two_steps(model, micro_batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for place, b in enumerate(micro_batches):
        (ce(model, b) / 2).backward()
        if place % 2:
            optimizer.step()
            optimizer.zero_grad()


@loop(EXACT)
def two_optimizers(model, micro_batches):
    optimizers = [torch.optim.SGD(model[k].parameters(), lr=0.1) for k in (0, 2)]
    right(model, micro_batches)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@loop(EXACT)
def with_a_scaler(model, micro_batches):
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.Adam(model.parameters())
    for b in micro_batches:
        scaler.scale(ce(model, b) * len(b["x"]) / N).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@loop("nothing left")
def does_nothing(model, micro_batches):
    model.zero_grad()


ELSEWHERE = mlp(6)


@loop("elsewhere", "nothing left")
def of_another_model(model, micro_batches):
    optimizer = torch.optim.SGD(ELSEWHERE.parameters(), lr=0.0)
    model.zero_grad()
    optimizer.step()


def clipping(part: float, scale: Callable[[int, int], float], *, each_alone: bool) -> Loop:
    """A loop that clips to a fraction of the norm of the first gradient."""

    def step(model, micro_batches):
        model.zero_grad()
        total = [torch.zeros_like(p) for p in model.parameters()]
        ce(model, micro_batches[0]).backward()
        norm = part * float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)) / len(micro_batches)
        model.zero_grad()
        for b in micro_batches:
            (ce(model, b) * scale(len(b["x"]), len(micro_batches))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), norm)
            if each_alone:
                for t, p in zip(total, model.parameters(), strict=True):
                    t += p.grad
                model.zero_grad()
        if each_alone:
            for t, p in zip(total, model.parameters(), strict=True):
                p.grad = t

    return step


def by_size(size: int, num: int) -> float:
    return size / N


loop("clipped", name="running sum clipped")(clipping(0.6, lambda size, num: 1 / num, each_alone=False))
loop("clipped", name="each clipped alone")(clipping(0.4, by_size, each_alone=True))
loop("clipped", name="running sum clipped, by size")(clipping(0.6, by_size, each_alone=False))


@loop("whole")
def clipped_once(model, micro_batches):
    right(model, micro_batches)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@loop("stale")
def rest_of_another_batch(model, micro_batches):
    right(model, micro_batches)
    for p in model.parameters():
        p.grad += 0.1 * torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view_as(p)


@loop("not finite")
def leaves_nan(model, micro_batches):
    right(model, micro_batches)
    model[0].bias.grad[0] = torch.nan


loop("hooks", name="hooks in every pass", model=with_hooks)(right)
loop(
    "batch norm",
    "divided",
    name="BatchNorm, mean of means",
    micro_batch_size=5,
    model=lambda w: mlp(w, nn.BatchNorm1d(w)),
)(by_number)
loop("batch norm", name="BatchNorm, right", micro_batch_size=5, model=lambda w: mlp(w, nn.BatchNorm1d(w)))(right)
loop(EXACT, "dropout off", name="dropout, right", model=lambda w: mlp(w, nn.Dropout(0.3)))(right)
loop("dropout off", "divided", name="dropout, mean of means", model=lambda w: mlp(w, nn.Dropout(0.3)))(by_number)
loop("no loop", "couples", name="a loss that couples", loss=contrastive)(
    each(lambda k, num, size, total: size / total, contrastive)
)
loop("no loop", "means", name="two means", vague=("no loop", "unclear"), loss=two_means_in_one_number)(
    each(lambda k, num, size, total: size / total, two_means_in_one_number)
)
loop(EXACT, name="a sum", loss=summed, reduction="sum")(each(lambda k, num, size, total: 1, summed))
loop("divided", name="a sum divided", loss=summed, reduction="sum")(each(lambda k, num, size, total: 1 / num, summed))
