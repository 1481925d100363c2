"""Kinds of losses over groups of samples with random gradients: each is told from the others, rounded or not."""

import numpy as np
import pytest

from bigbatch.core.verify.loss_kind import loss_kind

SIZE = 40


class Groups:
    """Two groups of samples, with several losses per sample; parameters enter linearly, so gradients are exact."""

    def __init__(self, seed):
        draw = np.random.default_rng(seed)
        self.slopes = [[draw.normal(size=(n, SIZE)) for n in (5, 8)] for _ in range(3)]
        self.losses = [[draw.uniform(0.5, 4, n) for n in (5, 8)] for _ in range(3)]
        self.counts = [[draw.integers(1, 9, n).astype(float) for n in (5, 8)] for _ in range(3)]
        self.penalty = np.append(draw.normal(size=SIZE), 2.0)

    def total(self, p, q, which=0):
        """The sum over the samples, as gradient and loss."""
        parts = [
            k * np.append(c @ s, c @ v)
            for k, c, s, v in zip((p, q), self.counts[which], self.slopes[which], self.losses[which], strict=True)
        ]
        return parts[0] + parts[1]

    def count(self, p, q, which=0):
        return p * self.counts[which][0].sum() + q * self.counts[which][1].sum()

    def mean(self, p, q, which=0):
        return self.total(p, q, which) / self.count(p, q, which)

    def of_mean(self, p, q, function, slope):
        mean = self.mean(p, q)
        return np.append(slope(mean[-1]) * mean[:-1], function(mean[-1]))


LAWS = {
    "mean": lambda g, p, q: g.mean(p, q),
    "sum": lambda g, p, q: g.total(p, q),
    "means": lambda g, p, q: g.mean(p, q) + g.mean(p, q, 1),
    "sum and penalty": lambda g, p, q: g.total(p, q) + g.penalty,
    "sum and mean": lambda g, p, q: g.total(p, q) + g.mean(p, q, 1),
}
NO_LAW = {
    "root": lambda g, p, q: g.of_mean(p, q, np.sqrt, lambda m: 0.5 / np.sqrt(m)),
    "logarithm": lambda g, p, q: g.of_mean(p, q, np.log, lambda m: 1 / m),
    "square": lambda g, p, q: g.of_mean(p, q, np.square, lambda m: 2 * m),
    "by the root of the count": lambda g, p, q: g.total(p, q) / np.sqrt(g.count(p, q)),
    "by the count squared": lambda g, p, q: g.total(p, q) / g.count(p, q) ** 2,
}


def rounded(vector, noise, draw):
    return vector * (1 + noise * draw.normal(size=len(vector)))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("noise", [1e-15, 1e-7])
@pytest.mark.parametrize("law", LAWS)
def test_each_kind_is_recognised(law, noise, seed):
    groups, draw = Groups(seed), np.random.default_rng(seed)
    kind, ratio = loss_kind(lambda p, q: rounded(LAWS[law](groups, p, q), noise, draw), noise)
    assert kind == law or (noise > 1e-9 and law == "means" and kind == "unclear")
    if law == "mean":
        assert ratio == pytest.approx(groups.count(0, 1) / groups.count(1, 0), rel=1e-4)


def test_three_means():
    groups = Groups(0)
    assert loss_kind(lambda p, q: sum(groups.mean(p, q, which) for which in range(3)), 1e-15)[0] == "means"


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("noise", [1e-15, 1e-7])
@pytest.mark.parametrize("law", NO_LAW)
def test_any_other_loss_couples(law, noise, seed):
    groups, draw = Groups(seed), np.random.default_rng(seed)
    assert loss_kind(lambda p, q: rounded(NO_LAW[law](groups, p, q), noise, draw), noise)[0] == "coupled"


def test_a_product_of_means_over_the_same_counts_couples():
    groups = Groups(1)
    groups.counts[1] = groups.counts[0]

    def product(p, q):
        one, other = groups.mean(p, q), groups.mean(p, q, 1)
        return np.append(one[-1] * other[:-1] + other[-1] * one[:-1], one[-1] * other[-1])

    assert loss_kind(product, 1e-15)[0] == "coupled"


def test_a_loss_that_is_not_finite_couples():
    assert loss_kind(lambda p, q: np.full(4, np.nan if p == 2 else 1.0), 1e-15)[0] == "coupled"
