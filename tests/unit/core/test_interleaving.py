"""Training beside inference: choices compared with loops, and which measurement comes next."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.short_forms import examples
from wattfleet.core.choosing import (
    InfeasibleServiceError,
    InterleavingObjective,
    KnownModes,
    PairedModes,
    Proposal,
    ServiceLimits,
    choose_interleaved,
    next_measurement,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Measurement, PowerMode, Profile, Task, modes_to_array

# --- Interleaving -----------------------------------------------------------------------------------------------------
# Choosing a mode and an inference batch for training beside inference, compared with loops.


FAST, SLOW = PowerMode(8, 2_000_000, 1_000_000_000, 3_199_000_000), PowerMode(4, 1_000_000, 500_000_000, 2_133_000_000)
OTHER = PowerMode(6, 1_000_000, 500_000_000, 2_133_000_000)
WINDOW, SECOND = InterleavingObjective.MOST_PER_WINDOW, InterleavingObjective.MOST_PER_SECOND


def known(rows: list[Measurement], task: Task) -> KnownModes:
    return KnownModes.only_measured(Profile.of(rows, task))


def paired(training: list[Measurement], inference: list[Measurement]) -> PairedModes:
    return PairedModes.of(known(training, Task.TRAINING), known(inference, Task.INFERENCE))


TRAINING = [Measurement(SLOW, 100, 18_000), Measurement(FAST, 30, 35_000)]
INFERENCE = [
    Measurement(FAST, 20, 30_000, 4),
    Measurement(SLOW, 40, 12_000, 4),
    Measurement(FAST, 60, 40_000, 16),
    Measurement(SLOW, 130, 15_000, 16),
]


def kept_by_loop(
    training: list[Measurement], inference: list[Measurement], limits: ServiceLimits
) -> dict[int, tuple[int, Fraction]]:
    """For each inference row that keeps the published conditions: its number of minibatches and its window (s)."""
    step = {row.mode: row for row in training}
    kept = {}
    for at, row in enumerate(inference):
        window_s = Fraction(row.batch or 0) / Fraction(limits.arrival_per_s)
        inference_s = Fraction(row.minibatch_ms) / 1000
        answered = window_s + inference_s <= Fraction(limits.latency_ms) / 1000
        keeps_up = inference_s <= window_s
        power_mw = max(row.power_mw, step[row.mode].power_mw)
        if answered and keeps_up and power_mw <= limits.budget_mw:
            kept[at] = math.floor((window_s - inference_s) / (Fraction(step[row.mode].minibatch_ms) / 1000)), window_s
    return kept


@pytest.mark.parametrize(
    ("latency_ms", "arrival_per_s", "budget_w", "objective", "mode", "batch", "minibatches"),
    [
        # At 40 per second, 4 requests arrive in 100 ms and 16 in 400 ms.
        (1000, 40, 50, WINDOW, FAST, 16, 11),  # (400 - 60) / 30
        (1000, 40, 50, SECOND, FAST, 16, 11),  # 27.5 per second; with batches of 4, 2 in 100 ms are 20 per second
        (1000, 40, 39, WINDOW, SLOW, 16, 2),  # FAST draws 40 W with 16; with 4, 2 also fit, at more power
        (1000, 40, 39, SECOND, FAST, 4, 2),
        (1000, 40, 34, WINDOW, SLOW, 16, 2),  # training in the fast mode draws 35 W: (400 - 130) / 100
        (1000, 40, 18, WINDOW, SLOW, 16, 2),  # 18 W is exactly the power of training
        (459, 40, 50, WINDOW, FAST, 4, 2),  # 400 + 60 ms is too late
        (460, 40, 50, WINDOW, FAST, 16, 11),
        (140, 40, 34, WINDOW, SLOW, 4, 0),  # 60 ms are left, but a minibatch takes 100 ms
    ],
)
def test_choices_by_hand(
    latency_ms: float,
    arrival_per_s: float,
    budget_w: float,
    objective: InterleavingObjective,
    mode: PowerMode,
    batch: int,
    minibatches: int,
) -> None:
    limits = ServiceLimits(latency_ms, arrival_per_s, 1e3 * budget_w)
    found = choose_interleaved(paired(TRAINING, INFERENCE), limits, objective)
    assert (found.mode, found.batch, found.minibatches) == (mode, batch, minibatches)
    assert found.window_ms == 1e3 * batch / arrival_per_s
    row = INFERENCE[found.row]
    assert (row.mode, row.batch, row.minibatch_ms) == (mode, batch, found.inference_ms)
    assert found.minibatch_ms == (30 if mode is FAST else 100)
    assert found.power_mw == max(row.power_mw, 35_000 if mode is FAST else 18_000)


@pytest.mark.parametrize(("latency_ms", "arrival", "budget_w"), [(139, 40, 34), (1000, 250, 50), (1000, 40, 17.9)])
def test_nothing_keeps_the_limits(latency_ms: float, arrival: float, budget_w: float) -> None:
    limits = ServiceLimits(latency_ms, arrival, 1e3 * budget_w)
    inference = INFERENCE[:2]
    assert not kept_by_loop(TRAINING, inference, limits)
    with pytest.raises(
        InfeasibleServiceError, match=f"within {latency_ms:g} ms at {arrival:g} .* at most {budget_w:g} W"
    ):
        choose_interleaved(paired(TRAINING, inference), limits)


times, powers = st.integers(1, 400), st.integers(5, 60).map(lambda watts: 1000 * watts)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Measurement], list[Measurement]]:
    modes = [FAST, SLOW, OTHER]
    training = [Measurement(mode, draw(times), draw(powers)) for mode in modes]
    inference = [Measurement(mode, draw(times), draw(powers), batch) for mode in modes for batch in (1, 4, 16, 32)]
    return training, draw(st.permutations(inference))


@examples(300)
@given(
    workloads(), st.integers(50, 2000), st.integers(1, 120), st.integers(5, 60), st.sampled_from(InterleavingObjective)
)
def test_the_choice_is_the_best_of_a_loop(
    rows: tuple[list[Measurement], list[Measurement]],
    latency_ms: int,
    arrival: int,
    budget_w: int,
    objective: InterleavingObjective,
) -> None:
    limits, pair = ServiceLimits(latency_ms, arrival, 1e3 * budget_w), paired(*rows)
    kept = kept_by_loop(*rows, limits)
    if not kept:
        with pytest.raises(InfeasibleServiceError):
            choose_interleaved(pair, limits, objective)
        return
    found = choose_interleaved(pair, limits, objective)
    assert found.row in kept
    assert found.minibatches == kept[found.row][0]
    worth = {row: Fraction(count) / (1 if objective is WINDOW else window) for row, (count, window) in kept.items()}
    assert worth[found.row] == max(worth.values())
    power = {row: pair.power_mw()[row] for row in kept if worth[row] == max(worth.values())}
    if objective is WINDOW:  # rates of several windows may be equal except for rounding
        assert power[found.row] == min(power.values()), "a tie goes to the lower power"


def test_modes_that_only_one_workload_has_are_left_out() -> None:
    pair = paired([*TRAINING, Measurement(OTHER, 1, 1_000)], [Measurement(FAST, 20, 30_000, 4)])
    assert pair.mode_of.tolist() == [1]
    pair = paired(TRAINING[:1], [Measurement(OTHER, 1, 1, 4), *INFERENCE])
    assert [row.minibatch_ms for row in INFERENCE if row.mode is SLOW] == pair.inference.minibatch_ms.tolist()
    assert pair.mode_of.tolist() == [0, 0]


def test_workloads_without_a_common_mode_or_without_batches_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no power mode in common: give measurements of the same board"):
        paired(TRAINING, [Measurement(OTHER, 1, 1, 4)])
    with pytest.raises(InvalidInputError, match="state no batch sizes"):
        paired(TRAINING, [Measurement(FAST, 1, 1)])


def uncertain(pair: PairedModes, sd: float) -> PairedModes:
    """The same values as predictions with a log standard deviation."""

    def doubt(of: KnownModes) -> KnownModes:
        all_ = np.full(len(of.modes), sd)
        return replace(of, time_log_sd=all_, power_log_sd=all_, measured=np.zeros(len(all_), dtype=bool))

    return replace(pair, training=doubt(pair.training), inference=doubt(pair.inference))


def test_predictions_keep_a_limit_with_the_stated_probability() -> None:
    pair = uncertain(paired(TRAINING, INFERENCE), 0.1)
    # 1.645 standard deviations of 10 % turn 35 W into 41.3 W and 40 W into 47.2 W.
    at = 1e3 * 35 * math.exp(0.1 * 1.6448536)
    assert choose_interleaved(pair, ServiceLimits(160, 40, at + 1), WINDOW, 0.95).mode == FAST
    assert choose_interleaved(pair, ServiceLimits(160, 40, at - 1), WINDOW, 0.95).mode == SLOW
    # 20 ms become 23.6 ms, and 40 ms become 47.2 ms.
    assert choose_interleaved(pair, ServiceLimits(123.6, 40), WINDOW, 0.95).batch == 4
    with pytest.raises(InfeasibleServiceError, match=r"with a probability of 0\.95"):
        choose_interleaved(pair, ServiceLimits(123.5, 40), WINDOW, 0.95)
    with pytest.raises(InvalidInputError, match="the probability must be between 0 and 1"):
        choose_interleaved(pair, ServiceLimits(123.5, 40), WINDOW, 1.0)


def test_the_expected_worth_is_that_of_many_random_draws() -> None:
    pair, limits = uncertain(paired(TRAINING, INFERENCE), 0.2), ServiceLimits(560, 40)
    row, drawn = 2, np.random.default_rng(0).standard_normal((2, 200_000))
    inference_ms, minibatch_ms = 60 * np.exp(0.2 * drawn[0]), 30 * np.exp(0.2 * drawn[1])
    counts = np.floor((400 - inference_ms) / minibatch_ms)
    worth = pair.sampled_worth(limits, WINDOW, np.array([row]))[0]
    assert worth.mean() == pytest.approx(counts.mean(), rel=0.02)
    assert worth.std() == pytest.approx(counts.std(), rel=0.1)


def test_late_draws_are_worth_nothing_and_measured_ones_are_all_alike() -> None:
    pair = paired(TRAINING, INFERENCE)
    limits = ServiceLimits(460, 40)
    rows = np.arange(len(INFERENCE))
    exact = pair.sampled_worth(limits, SECOND, rows)
    assert np.isnan(exact[3]).all(), "400 + 130 ms is too late"
    np.testing.assert_allclose(exact[2], 11 / 0.4)
    doubtful = uncertain(pair, 0.2).sampled_worth(limits, SECOND, rows)
    assert np.isnan(doubtful[2]).mean() == pytest.approx(0.5), "its median is exactly at the limit"


# --- Interleaved search -----------------------------------------------------------------------------------------------
# The choice of the next measurement for training beside inference, in cases with an obvious answer.

MODES = modes_to_array([PowerMode(4 * k, 1_000_000 * k, 500_000_000 * k, 1_000_000_000 * k) for k in (1, 2, 3)])
BATCHES = (4, 16)
ROWS = np.repeat(np.arange(3), len(BATCHES))


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


@examples(60)
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
