"""The share of losses and loops for which `verify` names the right cause, and a check that it names no wrong one."""

import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from bigbatch import BigBatchWarning, Verification
from bigbatch.torch import Accumulator, verify

from .truth_table import CASES, EXACT, SIZE, WORDS, Case, mlp

SMALL, LARGE = 6, 1500  # widths: fewer and more parameters than a sketch has numbers
DTYPES = [None, torch.float32]
FEWEST_RIGHT = 0.95
SEEN: dict[str, bool] = {}
VAGUE: list[Case] = []
"""Cases in float32 for which `verify` only says that it cannot tell more."""


def asked(case: Case, width: int, dtype: torch.dtype | None) -> Verification:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    options = {"micro_batch_size": SIZE, **case.options}
    return verify(case.model(width), case.batch(), case.loss, dtype=dtype, **options)


def wrong_in(case: Case, found: Verification, dtype: torch.dtype | None) -> list[str]:
    """The causes that `verify` names wrongly or misses."""
    said = {word for word, phrase in WORDS.items() if any(phrase in cause for cause in found.causes)}
    if found.is_exact:
        said.add(EXACT)
    truth = set(case.says)
    if dtype is torch.float32:
        truth -= {"float32"}  # asked for
        if case.vague and said == {*case.vague, *(truth & {EXACT, "eval"})}:
            VAGUE.append(case)
            return []
    return [
        *(f"says {word!r}" for word in sorted(said - truth)),
        *(f"leaves out {word!r}" for word in sorted(truth - said)),
    ]


@pytest.mark.parametrize("width", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["small", "large"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_names_the_cause_and_nothing_else(case: Case, dtype: torch.dtype | None, width: int) -> None:
    found = asked(case, width, dtype)
    wrong = wrong_in(case, found, dtype)
    SEEN[f"{case}, {dtype}, {width}"] = not wrong
    assert not wrong, str(found)


def real_error(case: Case) -> float:
    """How far a real step of the accumulator is from the full batch, in float64."""
    wide = torch.float32 if "float32" in case.says else torch.float64
    model = case.model(SMALL).to(wide)

    def batch() -> Any:
        def cast(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: cast(item) for key, item in value.items()}
            if isinstance(value, list):
                return [cast(item) for item in value]
            return value.to(wide) if value.is_floating_point() else value

        return cast(case.batch())

    # a copy loses its hooks, so both models are created again
    other = case.model(SMALL).to(wide)
    before = [p.detach().clone() for p in model.parameters()]
    terms = case.loss(other, batch())
    sum(terms if isinstance(terms, tuple) else (terms,)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"micro_batch_size": SIZE, **case.options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BigBatchWarning)
        Accumulator(model, optimizer, case.loss, **options).step(batch())
    moved = [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
    full = [torch.zeros_like(p) if p.grad is None else p.grad for p in other.parameters()]
    off = torch.stack([(m - f).norm() for m, f in zip(moved, full, strict=True)]).norm()
    return float(off / torch.stack([f.norm() for f in full]).norm())


COMPARABLE = [c for c in CASES if "step" not in c.options and not c.is_random and EXACT in c.says]


@pytest.mark.parametrize("case", COMPARABLE, ids=str)
def test_exact_verdicts_are_exact_in_a_real_step(case: Case) -> None:
    """Checks the table itself: if it says exact, the accumulator's step is that of the full batch."""
    assert real_error(case) < (1e-4 if {"float32", "rounding"} & set(case.says) else 1e-12)


WRONG = [c for c in CASES if "step" not in c.options and not c.is_random and EXACT not in c.says]
REFUSED = ("list", "nothing", "time-major LSTM", "time-major GRU")


@pytest.mark.parametrize("case", [c for c in WRONG if not {*REFUSED, "masks", "eval"} & {*c.says, c.name}], ids=str)
def test_other_verdicts_are_off_in_a_real_step(case: Case) -> None:
    assert real_error(case) > 1e-9


def test_the_table_is_large_enough() -> None:
    assert len(CASES) >= 80
    assert len({c.name for c in CASES}) == len(CASES)
    assert {word for c in CASES for word in c.says} <= {EXACT, *WORDS}


@pytest.fixture(scope="module", autouse=True)
def share(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints the share of right causes, and fails below 95%."""
    yield
    if SEEN:
        right = sum(SEEN.values())
        line = (
            f"verify names the right cause in {right} of {len(SEEN)} cases ({right / len(SEEN):.1%}); in {len(VAGUE)} "
            "of these, in float32, it says that more cannot be told"
        )
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\n{line}")
        assert right >= FEWEST_RIGHT * len(SEEN), line


def test_cases_leave_nothing_behind() -> None:
    """The cases do not depend on each other."""
    model = mlp(SMALL)
    before = copy.deepcopy(model.state_dict())
    assert all(torch.equal(before[name], value) for name, value in mlp(SMALL).state_dict().items())
