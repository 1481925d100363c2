"""The update is that of the whole batch, for all sizes and all ways of feeding it."""

import pytest

from tests.problems import Problem, problems

from .training import WAYS, Run, adamw, assert_same_update, update_error, warm_up

each_problem = pytest.mark.parametrize("problem", problems(), ids=lambda problem: problem.name)
each_way = pytest.mark.parametrize("way", WAYS)


@each_way
@each_problem
def test_one_sgd_step_equals_the_full_batch(problem: Problem, way: str) -> None:
    full = Run(problem).full()
    ours = Run(problem).accumulated(way)
    assert_same_update(ours, full, 1e-12)
    assert ours.losses == pytest.approx(full.losses, rel=1e-12)


@each_way
@each_problem
def test_three_epochs_of_adamw_with_warm_up_and_clipping(problem: Problem, way: str) -> None:
    options = {"epochs": 3, "clip_norm": 0.5, "make_scheduler": warm_up}
    full = Run(problem, adamw, **options).full()
    ours = Run(problem, adamw, **options).accumulated(way)
    assert_same_update(ours, full, 1e-9)
    assert ours.losses == pytest.approx(full.losses, rel=1e-9)
    assert ours.scheduler.last_epoch == full.scheduler.last_epoch == 3 * len(problem.batches)


@each_problem
def test_negative_control_the_naive_loop_fails_where_weights_differ(problem: Problem) -> None:
    error = update_error(Run(problem).naive(), Run(problem).full())
    if problem.is_uneven:
        assert error > 1e-2
    else:
        assert error < 1e-12


def test_the_clipped_case_is_clipped() -> None:
    clipped = next(p for p in problems() if p.clip_norm)
    step = Run(clipped).accumulated("batch").steps[0]
    assert step.grad_norm > 2 * clipped.clip_norm
