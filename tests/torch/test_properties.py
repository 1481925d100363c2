"""A step by accumulation is the step of the plain full batch, for random data and all three ways of feeding.

Every example draws the data (ragged, masked, weighted, with zeros), the nest it is packed into, the loss, and how
the batch is cut. The reference is one backward pass over the whole batch and one step of SGD, in float64.
"""

import copy
import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, assume, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from torch import nn

from bigbatch import Step, Window, windows
from bigbatch.torch import Accumulator
from tests.examples import examples

stable = settings(
    max_examples=examples(150),
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

LIMIT = 1e-12  # of the update, and of the loss
NUM_TOKENS = 3


# --- data, packed into a random nest ---------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    first: Any
    rest: Any


class Named(NamedTuple):
    first: Any
    rest: Any


CONTAINERS = {
    "tuple": tuple,
    "list": list,
    "dict": lambda items: {f"key {k}": item for k, item in enumerate(items)},
    "OrderedDict": lambda items: OrderedDict(enumerate(items)),
    "Box": lambda items: Box(items[0], items[1:]),
    "Named": lambda items: Named(items[0], tuple(items[1:])),
}
CONTENTS = {
    "tuple": list,
    "list": list,
    "dict": lambda found: list(found.values()),
    "OrderedDict": lambda found: list(found.values()),
    "Box": lambda found: [found.first, *found.rest],
    "Named": lambda found: [found.first, *found.rest],
}


@st.composite
def plans(draw, leaves=("x", "y", "weights", "mask")):
    """Draws how to pack the tensors: (container, [plans]), with names of tensors or other values at the leaves."""
    items = list(draw(st.permutations(leaves)))
    for rest in draw(st.lists(st.sampled_from([None, 3, "word", 2.5]), max_size=2)):
        items.insert(draw(st.integers(0, len(items))), ("rest", rest))
    while len(items) > 1 and draw(st.booleans()):
        start = draw(st.integers(0, len(items) - 1))
        stop = draw(st.integers(start + 1, len(items)))
        items[start:stop] = [(draw(st.sampled_from(sorted(CONTAINERS))), items[start:stop])]
    return draw(st.sampled_from(sorted(CONTAINERS))), items


def packed(plan, data):
    if isinstance(plan, str):
        return data[plan]
    kind, inner = plan
    return inner if kind == "rest" else CONTAINERS[kind]([packed(item, data) for item in inner])


def unpacked(plan, nest):
    if isinstance(plan, str):
        return {plan: nest}
    kind, inner = plan
    if kind == "rest":
        assert nest == inner
        return {}
    found = {}
    for item, part in zip(inner, CONTENTS[kind](nest), strict=True):
        found |= unpacked(item, part)
    return found


# --- losses ----------------------------------------------------------------------------------------------


def over_samples(predicted, data):
    return (predicted - data["y"]).square().mean(), len(data["y"])


def over_weights(predicted, data):
    errors = (predicted - data["y"]).abs().sum(1).sqrt()
    return (data["weights"] * errors).sum() / data["weights"].sum(), data["weights"]  # one weight for each sample


def over_tokens(predicted, data):
    errors = torch.nn.functional.softplus(predicted * data["y"])
    return errors[data["mask"]].mean(), data["mask"].sum()  # nan where there are no tokens


def added_up(predicted, data):
    return (predicted - data["y"]).square().sum(), len(data["y"])


@dataclass(frozen=True)
class Problem:
    plan: Any
    data: dict[str, torch.Tensor]
    terms: tuple[Any, ...]
    seed: int
    sizes: tuple[int, ...]
    """The sizes of the micro-batches, if these are fed one at a time."""
    accumulation_steps: int
    micro_batch_size: int

    @property
    def reduction(self):
        return "sum" if self.terms == (added_up,) else "mean"

    def model(self):
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, NUM_TOKENS)).double()

    def loss(self, model, nest):
        data = unpacked(self.plan, nest)
        predicted = model(data["x"])  # once, so that the terms share their graph
        losses = tuple(term(predicted, data)[0] for term in self.terms)
        return losses if len(losses) > 1 else losses[0]

    def weight(self, nest):
        data = unpacked(self.plan, nest)
        weights = tuple(term(data["y"], data)[1] for term in self.terms)
        return weights if len(weights) > 1 else weights[0]

    def micro_batches(self):
        """The data in uneven parts, cut by slicing."""
        starts = [sum(self.sizes[:k]) for k in range(len(self.sizes))]
        return [
            {name: tensor[start : start + size] for name, tensor in self.data.items()}
            for start, size in zip(starts, self.sizes, strict=True)
        ]


TERMS = [
    (over_samples,),
    (over_weights,),
    (over_tokens,),
    (added_up,),
    (over_tokens, over_samples),
    (over_tokens, over_weights),
    (over_weights, over_samples, over_tokens),
]


@st.composite
def problems(draw, terms=TERMS, zero_shares=(0.0, 0.3, 0.8)):
    num = draw(st.integers(1, 40))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(num, size, generator=generator, dtype=torch.float64) for size in (2, NUM_TOKENS))
    share = draw(st.sampled_from(zero_shares))  # how many samples have weight zero
    counts = torch.rand(num, generator=generator) >= share
    weights = counts * (0.1 + 5 * torch.rand(num, generator=generator, dtype=torch.float64))
    mask = counts[:, None] & (torch.rand(num, NUM_TOKENS, generator=generator) < draw(st.sampled_from([0.3, 0.9])))
    cuts = draw(st.sets(st.integers(1, num - 1), max_size=9)) if num > 1 else set()
    edges = [0, *sorted(cuts), num]
    sizes = tuple(stop - start for start, stop in pairwise(edges))
    return Problem(
        draw(plans()),
        {"x": 1 + x, "y": 1 + 2 * y, "weights": weights, "mask": mask},
        draw(st.sampled_from(terms)),
        seed,
        sizes,
        draw(st.integers(1, len(sizes) + 1)),
        draw(st.integers(1, num + 3)),
    )


# --- three ways of feeding, and two wrong ones -----------------------------------------------------------
# Each yields the data of each window and the function that makes its step.


def joined(window):
    return {name: torch.cat([part[name] for part in window]) for name in window[0]}


def by_batch(problem, model, optimizer):
    weight = None if problem.terms in ((over_samples,), (added_up,)) else problem.weight
    accumulator = Accumulator(
        model, optimizer, problem.loss, problem.micro_batch_size, weight=weight, reduction=problem.reduction
    )
    yield problem.data, lambda: accumulator.step(packed(problem.plan, problem.data))


def by_window(problem, model, optimizer):
    accumulator = Accumulator(model, optimizer, problem.loss, weight=problem.weight, reduction=problem.reduction)
    for window in windows(problem.micro_batches(), problem.accumulation_steps):
        nests = Window(packed(problem.plan, part) for part in window)
        yield joined(window), lambda nests=nests: accumulator.step(nests)


def by_micro_batch(problem, model, optimizer):
    accumulator = Accumulator(
        model, optimizer, accumulation_steps=problem.accumulation_steps, reduction=problem.reduction
    )

    def feed(window):
        step = None
        for part in window:
            assert step is None, "the window was over before its last micro-batch"
            nest = packed(problem.plan, part)
            with accumulator.micro_batch(weight=problem.weight(nest)) as micro:
                micro.backward(problem.loss(model, nest))
            step = micro.step
        assert (step is not None) == (len(window) == problem.accumulation_steps)
        step = step or accumulator.flush()
        assert accumulator.flush() is None
        return step

    for window in windows(problem.micro_batches(), problem.accumulation_steps):
        yield joined(window), lambda window=window: feed(window)


def by_hand(divide_by):
    """The usual loop of tutorials."""

    def way(problem, model, optimizer):
        def naive(window):
            optimizer.zero_grad()
            total = 0.0
            for part in window:
                loss = problem.loss(model, packed(problem.plan, part)) / divide_by(problem, window)
                loss.backward()
                total += loss.item()
            optimizer.step()
            return Step(
                terms=(total,),
                weight=float(torch.as_tensor(problem.weight(packed(problem.plan, joined(window)))).sum()),
                grad_norm=1.0,
                num_micro_batches=len(window),
                micro_batch_size=None,
                is_applied=True,
            )

        for window in windows(problem.micro_batches(), problem.accumulation_steps):
            yield joined(window), lambda window=window: naive(window)

    return way


mean_of_means = by_hand(lambda problem, window: len(window))
divided_by_steps = by_hand(lambda problem, window: problem.accumulation_steps)

WAYS = [by_batch, by_window, by_micro_batch]


# --- the property ----------------------------------------------------------------------------------------


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def full_batch(problem, model, data, learning_rate):
    """The update, the loss and the weight of a plain step on all the data, from the current parameters."""
    twin = copy.deepcopy(model)
    nest = packed(problem.plan, data)
    losses = problem.loss(twin, nest)
    weights = problem.weight(nest)
    losses, weights = (value if isinstance(value, tuple) else (value,) for value in (losses, weights))
    weights = [float(torch.as_tensor(weight).sum()) for weight in weights]
    loss = sum(
        term for term, weight in zip(losses, weights, strict=True) if weight
    )  # a mean over nothing does not exist
    if isinstance(loss, int):
        return torch.zeros_like(vector(model)), math.nan, weights
    optimizer = torch.optim.SGD(twin.parameters(), lr=learning_rate)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return vector(twin) - vector(model), loss.item(), weights


def assert_full_batch(way, problem):
    learning_rate = 0.1
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    num_samples = 0
    for data, make_step in way(problem, model, optimizer):
        update, loss, weights = full_batch(problem, model, data, learning_rate)
        before = vector(model)
        step = make_step()
        found = vector(model) - before
        error = torch.linalg.vector_norm(found - update)
        assert error <= LIMIT * torch.linalg.vector_norm(update), f"{error / torch.linalg.vector_norm(update):.1e} off"
        assert step.is_applied is any(weights)
        assert step.loss == pytest.approx(loss, rel=LIMIT, abs=0, nan_ok=True)
        found_weights = step.weight if isinstance(step.weight, tuple) else (step.weight,)
        assert found_weights == pytest.approx(tuple(weights), rel=LIMIT, abs=0)
        assert all(p.grad is None for p in model.parameters()) or way not in WAYS
        num_samples += len(data["x"])
    assert num_samples == len(problem.data["x"])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@stable
@given(problem=problems())
def test_step_is_that_of_the_full_batch(way, problem):
    assert_full_batch(way, problem)


@pytest.mark.each_value
@pytest.mark.parametrize("way", [mean_of_means, divided_by_steps], ids=["mean of means", "divided by steps"])
@pytest.mark.parametrize("term", [over_samples, over_weights, over_tokens], ids=lambda term: term.__name__)
def test_the_property_catches_a_naive_loop(way, term):
    @stable
    @given(problem=problems(terms=[(term,)], zero_shares=[0.0]))
    def run(problem):
        assume(
            all(part["mask"].any() for part in problem.micro_batches())
        )  # no mean over nothing, so everything is finite
        assert_full_batch(way, problem)

    with pytest.raises(AssertionError, match="off"):
        run()


def test_naive_loop_is_right_on_equal_micro_batches():
    """The control of the control: the test passes where the naive loop is right."""

    def is_wrong(problem):
        if len(problem.sizes) < 2 or problem.accumulation_steps < 2:
            return False
        try:
            assert_full_batch(mean_of_means, problem)
        except AssertionError:
            return True
        return False

    every = problems(terms=[(over_samples,)], zero_shares=[0.0])
    equal = every.filter(lambda problem: len(set(problem.sizes)) == 1)
    with pytest.raises(NoSuchExample):
        find(equal, is_wrong, settings=stable)
    found = find(every, is_wrong, settings=stable)
    assert len(set(found.sizes)) > 1


# --- weight zero -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@stable
@given(problem=problems(terms=[(over_weights,), (over_tokens,), (over_tokens, over_weights)], zero_shares=[1.0]))
def test_a_weight_of_zero_changes_nothing(way, problem):
    """This holds even with momentum and weight decay, which move parameters without a gradient."""
    assert not problem.data["weights"].any()
    assert not problem.data["mask"].any()
    model = problem.model()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1
    )  # both change parameters without a gradient
    before = vector(model)
    for _, make_step in way(problem, model, optimizer):
        step = make_step()
        assert not step.is_applied
        assert math.isnan(step.loss)
        assert step.weight == ((0, 0) if len(problem.terms) > 1 else 0)
        assert step.grad_norm == 0.0
    assert torch.equal(vector(model), before)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@stable
@given(problem=problems(terms=[(over_tokens,)]), noise=st.integers(0, 2**16))
def test_masked_values_have_no_effect(way, problem, noise):
    """Other values behind the mask give the same step."""
    assume(problem.data["mask"].any())
    hidden = ~problem.data["mask"].any(1)
    other = torch.randn(problem.data["x"].shape, generator=torch.Generator().manual_seed(noise), dtype=torch.float64)
    changed = {**problem.data, "x": torch.where(hidden[:, None], other, problem.data["x"])}
    after = []
    for data in (problem.data, changed):
        twin = Problem(**{**problem.__dict__, "data": data})
        model = twin.model()
        for _, make_step in way(twin, model, torch.optim.SGD(model.parameters(), lr=0.1)):
            make_step()
        after.append(vector(model))
    torch.testing.assert_close(after[0], after[1], rtol=LIMIT, atol=1e-15)
