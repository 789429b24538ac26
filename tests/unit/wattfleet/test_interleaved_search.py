"""The choice of the next measurement for training beside inference, in cases with an obvious answer."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattfleet.choosing import InterleavingObjective, KnownModes, PairedModes, Proposal, ServiceLimits, next_measurement
from wattfleet.modes import PowerMode, Task, modes_to_array

MODES = modes_to_array([PowerMode(4 * k, 1_000_000 * k, 500_000_000 * k, 1_000_000_000 * k) for k in (1, 2, 3)])
BATCHES = (4, 16)
ROWS = np.repeat(np.arange(3), len(BATCHES))
WINDOW = InterleavingObjective.MOST_PER_WINDOW


def pair(sd: float = 0.1, training: tuple[int, ...] = (), inference: tuple[int, ...] = ()) -> PairedModes:
    """Modes whose power rises with speed. The given rows are measured, and the others are uncertain."""
    step_ms, step_mw = np.array([120.0, 60.0, 30.0]), np.array([12e3, 24e3, 36e3])
    ms = np.array([40.0, 120.0, 20.0, 60.0, 10.0, 30.0])
    mw = np.array([10e3, 11e3, 20e3, 22e3, 30e3, 33e3])
    known_step, known_row = np.isin(np.arange(3), training), np.isin(np.arange(6), inference)
    doubt_step, doubt_row = np.where(known_step, 0.0, sd), np.where(known_row, 0.0, sd)
    return PairedModes(
        KnownModes(MODES, step_ms, step_mw, doubt_step, doubt_step, known_step),
        KnownModes(MODES[ROWS], ms, mw, doubt_row, doubt_row, known_row, np.tile(BATCHES, 3)),
        ROWS.astype(np.intp),
    )


def test_nothing_is_proposed_once_everything_is_measured() -> None:
    known = pair(training=(0, 1, 2), inference=(0, 1, 2, 3, 4, 5))
    assert next_measurement(known, [ServiceLimits(1000, 40)], WINDOW) is None


def test_nothing_is_proposed_if_no_window_can_be_answered() -> None:
    # At 4 per second, 4 requests arrive in one second.
    assert next_measurement(pair(), [ServiceLimits(500, 4)], WINDOW) is None


@pytest.mark.parametrize("frugal", [None, *Task])
def test_nothing_is_proposed_that_surely_breaks_the_budget(frugal: Task | None) -> None:
    known = pair(sd=0.01)
    if frugal is Task.TRAINING:
        known = replace(known, training=replace(known.training, power_mw=np.full(3, 3e3)))
    if frugal is Task.INFERENCE:
        known = replace(known, inference=replace(known.inference, power_mw=np.full(6, 3e3)))
    assert next_measurement(known, [ServiceLimits(1000, 40, 5e3)], WINDOW) is None


def test_nothing_is_proposed_that_is_surely_worse_than_the_best() -> None:
    # The fastest mode with the larger batch size: (400 - 30) / 30 = 12 minibatches.
    known = pair(sd=0.01, training=(2,), inference=(5,))
    assert next_measurement(known, [ServiceLimits(1000, 40)], WINDOW) is None


def test_the_missing_half_of_the_best_pair_is_proposed() -> None:
    limits = [ServiceLimits(1000, 40)]
    assert next_measurement(pair(sd=0.01, training=(2,)), limits, WINDOW) == Proposal(Task.INFERENCE, 5)
    assert next_measurement(pair(sd=0.01, inference=(5,)), limits, WINDOW) == Proposal(Task.TRAINING, 2)


def test_a_lower_budget_proposes_a_slower_mode() -> None:
    def mode_of(budget_w: float) -> int:
        known = pair(sd=0.01)
        found = next_measurement(known, [ServiceLimits(1000, 40, 1e3 * budget_w)], WINDOW)
        assert found is not None
        return found.row if found.task is Task.TRAINING else int(known.mode_of[found.row])

    assert [mode_of(watts) for watts in (14, 28, 60)] == [0, 1, 2]


@pytest.mark.parametrize("doubtful", Task)
def test_the_more_doubtful_workload_of_a_pair_is_measured_first(doubtful: Task) -> None:
    known = pair(sd=0.001)
    if doubtful is Task.TRAINING:
        known = replace(known, training=replace(known.training, power_log_sd=np.full(3, 0.2)))
    else:
        known = replace(known, inference=replace(known.inference, power_log_sd=np.full(6, 0.2)))
    found = next_measurement(known, [ServiceLimits(1000, 40, 37e3)], WINDOW)
    assert found is not None and found.task is doubtful


def test_a_problem_without_a_known_solution_counts_beside_solved_ones() -> None:
    known = pair(sd=0.01, training=(2,), inference=(5,))
    solved, open_ = ServiceLimits(1000, 40), ServiceLimits(1000, 40, 14e3)
    found = next_measurement(known, [solved, open_], WINDOW)
    assert found is not None
    assert (found.row if found.task is Task.TRAINING else known.mode_of[found.row]) == 0


def test_a_choice_without_training_is_worth_finding() -> None:
    # 4 requests arrive in 100 ms and take 40 ms. A minibatch of 120 ms does not fit into the rest. 16 requests are
    # late.
    known = pair(sd=0.01)
    found = next_measurement(known, [ServiceLimits(150, 40, 14e3)], WINDOW)
    assert found in (Proposal(Task.TRAINING, 0), Proposal(Task.INFERENCE, 0))


@settings(max_examples=60)
@given(
    st.integers(0, 10_000),
    st.integers(50, 1500),
    st.integers(10, 120),
    st.one_of(st.just(math.inf), st.integers(8, 60).map(lambda watts: 1e3 * watts)),
    st.sampled_from(InterleavingObjective),
    st.booleans(),
)
def test_a_search_measures_each_row_once_and_finds_the_best(
    seed: int, latency_ms: int, arrival: int, budget_mw: float, objective: InterleavingObjective, several: bool
) -> None:
    """The medians are the true values with large uncertainty. The search continues until no better choice is likely."""
    drawn = np.random.default_rng(seed)
    truth = pair(0.0)
    truth = PairedModes(
        replace(truth.training, minibatch_ms=drawn.uniform(10, 200, 3), power_mw=drawn.uniform(8e3, 50e3, 3)),
        replace(truth.inference, minibatch_ms=drawn.uniform(5, 200, 6), power_mw=drawn.uniform(8e3, 50e3, 6)),
        truth.mode_of,
    )
    limits = ServiceLimits(latency_ms, arrival, budget_mw)
    problems = [limits, ServiceLimits(2 * latency_ms, arrival, budget_mw)] if several else [limits]
    seen: dict[Task, list[int]] = {Task.TRAINING: [], Task.INFERENCE: []}

    def known() -> PairedModes:
        step, row = np.isin(np.arange(3), seen[Task.TRAINING]), np.isin(np.arange(6), seen[Task.INFERENCE])
        no_step, no_row = np.where(step, 0.0, 0.5), np.where(row, 0.0, 0.5)
        return PairedModes(
            replace(truth.training, time_log_sd=no_step, power_log_sd=no_step, measured=step),
            replace(truth.inference, time_log_sd=no_row, power_log_sd=no_row, measured=row),
            truth.mode_of,
        )

    while (found := next_measurement(known(), problems, objective)) is not None:
        assert found.row not in seen[found.task], "nothing is measured twice"
        seen[found.task].append(found.row)
    kept = truth.keeps(limits)
    worth = objective.worth(truth.minibatches(limits), limits.collect_ms(truth.inference.stated_batch()))
    both = known().measured & kept
    assert both.any() == kept.any(), "a problem that can be solved is solved"
    if kept.any():
        assert worth[both].max() == pytest.approx(worth[kept].max())
