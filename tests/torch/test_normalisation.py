"""Every recipe of docs/normalisation.md against its formula on the full batch, and wrong partitions that are not.

The formulas are written again here, sequence by sequence, so that a recipe is not compared with itself.
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch import Window
from bigbatch.torch import Accumulator, verify, weights
from bigbatch.torch import batch as nest

PAGE = Path(__file__).parents[2] / "docs" / "normalisation.md"
TEXT = PAGE.read_text(encoding="utf-8")
SETUP, *RECIPES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
(
    PER_TOKEN,
    PER_SEQUENCE,
    BY_CONSTANT,
    BY_BUDGET,
    PER_GROUP,
    WHOLE_GROUPS,
    NORMALISED,
    DPO,
    KTO,
) = RECIPES
PROMPTS = (3, 3, 7, 3, 7, 1, 1, 5, 1, 1, 7)
LENGTHS = (2, 9, 1, 5, 0, 8, 3, 3, 9, 1, 6)
SIZES = (1, 2, 3, 10, 11)
WIDTH, VOCABULARY = 10, 12
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Any], Tensor]


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.mix = nn.GRU(6, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.mix(self.embed(ids))[0])
        return hidden


def make_policy() -> nn.Module:
    torch.manual_seed(1)
    return Policy().double()


def sequences(lengths: tuple[int, ...], seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (len(lengths), WIDTH), generator=generator)
    mask = (torch.arange(WIDTH - 1) < torch.tensor(lengths)[:, None]).double()
    return {"ids": ids, "mask": mask}


def names_of_page() -> dict[str, Any]:
    """What the page assumes, and the functions that its first block defines."""
    generator = torch.Generator().manual_seed(2)
    model, num = make_policy(), len(LENGTHS)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    feedback = {**sequences(LENGTHS, 3), "reference": -25 + noise(num), "desirable": noise(num) > 0}
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
        "batch": {
            **sequences(LENGTHS, 0),
            "old": -2.5 + 0.2 * noise(num, WIDTH - 1),
            "advantage": noise(num),
            "reward": noise(num),
            "prompt": torch.tensor(PROMPTS),
        },
        "preferences": {**sequences((*LENGTHS, *LENGTHS[::-1]), 1), "reference": -12 + noise(2 * num)},
        "feedback": feedback,
        "mismatched": {**sequences(LENGTHS[::-1], 4), "reference": -35 + 9 * noise(num)},
    }
    exec(compile(SETUP, PAGE.name, "exec"), names)
    return names


def update_of(code: str, size: int = 4, **changed: Any) -> tuple[Tensor, dict[str, Any]]:
    """The update of one step of SGD by a block of the page, and the names that it leaves."""
    names = {**names_of_page(), **changed}
    before = flat(names["model"])
    exec(compile(code.replace("size=4", f"size={size}"), PAGE.name, "exec"), names)
    assert names["step"].is_applied
    return flat(names["model"]) - before, names


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def error(update: Tensor, value: Tensor, model: nn.Module) -> float:
    """The relative error of an update against one step on this loss of the full batch."""
    expected = -torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])
    return float((update - expected).norm() / expected.norm())


def step(loss: Loss, batch: Any, size: int | None, **options: Any) -> Tensor:
    """The update of a recipe that is not on the page."""
    model = make_policy()
    before = flat(model)
    assert Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), loss, size, **options).step(batch).is_applied
    return flat(model) - before


# --- the formulas, sequence by sequence ------------------------------------------------------------------


def sums(model: nn.Module, names: dict[str, Any], **changed: Tensor) -> list[Tensor]:
    """The loss of each sequence, added up over its response tokens."""
    batch = {**names["batch"], **changed}
    found = []
    for k, length in enumerate(LENGTHS):
        logp = model(batch["ids"][k : k + 1])[0].log_softmax(-1)
        total = logp.sum() * 0
        for t in range(length):
            ratio = (logp[t, batch["ids"][k, t + 1]] - batch["old"][k, t]).exp()
            a = batch["advantage"][k]
            total = total - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        found.append(total)
    return found


def per_token(model: nn.Module, names: dict[str, Any]) -> Tensor:
    return sum(sums(model, names)) / sum(LENGTHS)


def per_sequence(model: nn.Module, names: dict[str, Any]) -> Tensor:
    return sum(s / max(n, 1) for s, n in zip(sums(model, names), LENGTHS, strict=True)) / len(LENGTHS)


def by_constant(model: nn.Module, names: dict[str, Any]) -> Tensor:
    return sum(sums(model, names)) / (32 * len(LENGTHS))


def by_budget(model: nn.Module, names: dict[str, Any]) -> Tensor:
    return sum(sums(model, names)) / (64 * 32)


def per_group(model: nn.Module, names: dict[str, Any]) -> Tensor:
    found = sums(model, names)
    means = []
    for prompt in set(PROMPTS):
        own = [k for k, each in enumerate(PROMPTS) if each == prompt]
        means.append(sum(found[k] for k in own) / sum(LENGTHS[k] for k in own))
    return sum(means) / len(means)


def normalised(model: nn.Module, names: dict[str, Any]) -> Tensor:
    reward = names["batch"]["reward"]
    return sum(sums(model, names, advantage=(reward - reward.mean()) / (reward.std() + 1e-6))) / sum(LENGTHS)


def ratios(model: nn.Module, rows: Batch) -> list[Tensor]:
    found = []
    for ids, mask, reference in zip(rows["ids"], rows["mask"], rows["reference"], strict=True):
        logp = model(ids[None])[0].log_softmax(-1)
        found.append(sum(logp[t, ids[t + 1]] for t in range(int(mask.sum()))) - reference)
    return found


def dpo(model: nn.Module, names: dict[str, Any]) -> Tensor:
    found = ratios(model, names["preferences"])
    num = len(found) // 2
    return -sum((0.1 * (found[k] - found[k + num])).sigmoid().log() for k in range(num)) / num


def kto(model: nn.Module, names: dict[str, Any]) -> Tensor:
    found, feedback = ratios(model, names["feedback"]), names["feedback"]
    kl = (sum(ratios(model, names["mismatched"])) / len(LENGTHS)).detach().clamp(min=0)
    assert kl > 0
    signs = [1 if each else -1 for each in feedback["desirable"]]
    return sum(1 - (0.1 * sign * (r - kl)).sigmoid() for sign, r in zip(signs, found, strict=True)) / len(found)


FORMULAS: dict[str, tuple[str, Callable[[nn.Module, dict[str, Any]], Tensor]]] = {
    "per token": (PER_TOKEN, per_token),
    "per sequence": (PER_SEQUENCE, per_sequence),
    "by a constant": (BY_CONSTANT, by_constant),
    "by a constant for the batch": (BY_BUDGET, by_budget),
    "per prompt group": (PER_GROUP, per_group),
    "advantages normalised before": (NORMALISED, normalised),
    "DPO": (DPO, dpo),
    "KTO": (KTO, kto),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FORMULAS)
def test_recipe_is_exact_for_any_cut(name: str, size: int) -> None:
    code, formula = FORMULAS[name]
    update, names = update_of(code, size)
    model = make_policy()
    assert names["step"].num_micro_batches == -(-len(LENGTHS) // size)
    assert error(update, formula(model, names), model) <= 1e-12


def test_whole_groups_are_exact() -> None:
    update, names = update_of(WHOLE_GROUPS)
    model = make_policy()
    assert names["step"].num_micro_batches == len(set(PROMPTS))
    assert error(update, per_group(model, names), model) <= 1e-12


def test_the_normalisations_are_different_objectives() -> None:
    """So that a recipe cannot pass the test of another one."""
    model, names = make_policy(), names_of_page()
    formulas = [per_token, per_sequence, by_constant, by_budget, per_group, normalised]
    for formula in formulas:
        update = -torch.cat([g.flatten() for g in torch.autograd.grad(formula(model, names), list(model.parameters()))])
        others = [error(update, other(model, names), model) for other in formulas if other is not formula]
        assert min(others) > 1e-2


# --- wrong counts and wrong partitions -------------------------------------------------------------------


def wrong(code: str, old: str, new: str, formula: Callable[..., Tensor], size: int = 3) -> float:
    """The error of a recipe with one change."""
    assert old in code
    update, names = update_of(code.replace(old, new), size)
    model = make_policy()
    return error(update, formula(model, names), model)


def test_counting_sequences_when_the_loss_is_per_token() -> None:
    assert wrong(PER_TOKEN, ', weight=weights.sample_weights("mask")', "", per_token) > 1e-2


def test_counting_tokens_when_the_loss_is_per_sequence() -> None:
    tokens = 'size=4, weight=weights.sample_weights("mask"))'
    assert wrong(PER_SEQUENCE, "size=4)", tokens, per_sequence) > 1e-2
    assert wrong(BY_CONSTANT, "size=4)", tokens, by_constant) > 1e-2


def test_adding_up_means() -> None:
    assert wrong(BY_CONSTANT, "size=4)", 'size=4, reduction="sum")', by_constant) > 1
    assert wrong(BY_BUDGET, ', reduction="sum"', "", by_budget) > 1e-1


def test_cutting_a_group_in_two() -> None:
    """The loss divides by the tokens of the part of a group that it sees; no weight repairs that."""
    names = names_of_page()
    token_losses = names["token_losses"]

    def mean_of_groups(model: nn.Module, batch: Batch) -> Tensor:
        each, means = token_losses(model, batch), []
        for prompt in batch["prompt"].unique():
            own = batch["prompt"] == prompt
            means.append(each[own].sum() / batch["mask"][own].sum().clamp(min=1))
        return torch.stack(means).mean()

    model = make_policy()
    plain = mean_of_groups(model, names["batch"])
    assert torch.isclose(plain, per_group(model, names), rtol=1e-12)
    num_prompts = lambda batch: len(batch["prompt"].unique())  # noqa: E731
    num_tokens = weights.sample_weights("mask")
    for weight in (None, num_prompts, num_tokens):
        update = step(mean_of_groups, names["batch"], 3, weight=weight)
        assert error(update, per_group(model, names), model) > 1e-2
    order = names["batch"]["prompt"].argsort(stable=True)
    by_group = {name: rows[order] for name, rows in names["batch"].items()}
    cuts = [slice(0, 4), slice(4, 8), slice(8, 11)]  # 1 1 1 1 | 3 3 3 5 | 7 7 7: micro-batches of whole groups
    window = Window([{name: rows[part] for name, rows in by_group.items()} for part in cuts])
    assert error(step(mean_of_groups, window, None, weight=num_prompts), per_group(model, names), model) <= 1e-12
    assert not verify(model, names["batch"], mean_of_groups, 3, weight=num_prompts).is_exact


def test_normalising_advantages_in_the_loss() -> None:
    in_loss = (
        'reward = batch["reward"]\n    batch = {**batch, "advantage": (reward - reward.mean()) / (reward.std() + 1e-6)}'
    )
    code = NORMALISED.replace("return token_losses", f"{in_loss}\n    return token_losses")
    update, names = update_of(code, 11)
    model = make_policy()
    assert error(update, normalised(model, names), model) <= 1e-12  # right for the full batch
    assert wrong(NORMALISED, "return token_losses", f"{in_loss}\n    return token_losses", normalised) > 1e-1


def test_cutting_stacked_pairs_as_they_are() -> None:
    """Chosen rows would be paired with other chosen rows."""
    names = names_of_page()
    exec(compile(DPO, PAGE.name, "exec"), names)

    def stacked(model: nn.Module, rows: Batch) -> Tensor:
        return names["loss"](model, names["by_pairs"](rows))

    model = make_policy()
    rows = names["preferences"]
    assert error(step(stacked, rows, len(rows["ids"])), dpo(model, names), model) <= 1e-12
    assert error(step(stacked, rows, 2), dpo(model, names), model) > 1e-1
    both = {"chosen": {}, "rejected": {}}  # type: ignore[var-annotated]
    for name, each in rows.items():
        both["chosen"][name], both["rejected"][name] = each.chunk(2)

    def of_sides(model: nn.Module, batch: Any) -> Tensor:
        joined = {name: torch.cat([batch["chosen"][name], batch["rejected"][name]]) for name in batch["chosen"]}
        return stacked(model, joined)

    assert error(step(of_sides, both, 3), dpo(model, names), model) <= 1e-12


def test_a_kl_estimate_of_the_micro_batch() -> None:
    names = names_of_page()
    exec(compile(KTO, PAGE.name, "exec"), names)

    def coupled(model: nn.Module, batch: Any) -> Tensor:
        kl = names["kl_estimate"](model, batch["mismatched"], 20)
        return names["loss"](model, {**batch["feedback"], "kl": kl})

    model = make_policy()
    batch = {"feedback": names["feedback"], "mismatched": names["mismatched"]}
    assert error(step(coupled, batch, 11), kto(model, names), model) <= 1e-12
    assert error(step(coupled, batch, 3), kto(model, names), model) > 1e-2
    found = verify(copy.deepcopy(model), batch, coupled, 3)
    assert not found.is_exact
    assert any("couples the samples" in cause for cause in found.causes)


def test_the_page_has_no_other_block() -> None:
    assert len(FORMULAS) + 1 == len(RECIPES)
    assert nest.batch_size(names_of_page()["batch"]) == len(LENGTHS) == len(PROMPTS)
