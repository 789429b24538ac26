"""Choosing mode and batch size for inference, and selecting those to measure, compared with loops."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.fakes.short_forms import examples
from wattfleet.core.choosing import (
    ChosenMode,
    InfeasibleServiceError,
    KnownModes,
    Objective,
    SamplingSettings,
    ServiceLimits,
    ServingGoal,
    choose_serving,
    descending_modes,
    next_modes,
)
from wattfleet.core.choosing.sampling import Prospects
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BOARDS, Measurement, PowerMode, Profile, Task
from wattfleet.core.prediction import Prediction

# --- Serving ----------------------------------------------------------------------------------------------------------
# Choosing mode and batch size for inference, compared with loops over all of them.


FAST, SLOW = PowerMode(8, 2_000_000, 1_000_000_000, 3_199_000_000), PowerMode(4, 1_000_000, 500_000_000, 2_133_000_000)
ROWS = [
    Measurement(FAST, 10, 20_000, 1),
    Measurement(FAST, 20, 30_000, 4),
    Measurement(FAST, 60, 40_000, 16),
    Measurement(SLOW, 18, 9_000, 1),
    Measurement(SLOW, 40, 12_000, 4),
    Measurement(SLOW, 130, 15_000, 16),
]
KNOWN = KnownModes.only_measured(Profile.of(ROWS, Task.INFERENCE))


def best_by_loop(
    rows: list[Measurement], latency_ms: int, arrival_per_s: int, budget_w: int, objective: Objective
) -> list[Measurement]:
    """All rows that are best by the published conditions."""
    kept = []
    for row in rows:
        collect_ms, inference_ms = Fraction(1000 * (row.batch or 0), arrival_per_s), Fraction(row.minibatch_ms)
        answered = collect_ms + inference_ms <= latency_ms
        keeps_up = inference_ms <= collect_ms
        if answered and keeps_up and row.power_mw / 1e3 <= budget_w:
            kept.append(row)
    if objective is Objective.LEAST_POWER:
        least = min((row.power_mw for row in kept), default=None)
        return [row for row in kept if row.power_mw == least]
    most = max((_rate(row) for row in kept), default=None)
    return [row for row in kept if _rate(row) == most]


def _rate(row: Measurement) -> Fraction:
    return Fraction(row.batch or 0) / Fraction(row.minibatch_ms)


@pytest.mark.parametrize(
    ("latency_ms", "arrival_per_s", "budget_w", "objective", "mode", "batch"),
    [
        # At 50 samples per second, 4 arrive in 80 ms and 16 in 320 ms.
        (500, 50, 50, Objective.LEAST_POWER, SLOW, 1),
        (500, 50, 50, Objective.MOST_SAMPLES, FAST, 16),
        (500, 50, 35, Objective.MOST_SAMPLES, FAST, 4),
        (100, 50, 50, Objective.MOST_SAMPLES, FAST, 4),
        (99, 50, 50, Objective.MOST_SAMPLES, FAST, 1),
        # At 80 per second, the slow mode takes 18 ms for a sample every 12.5 ms, but 40 ms for 4 samples every 50 ms.
        (500, 80, 50, Objective.LEAST_POWER, SLOW, 4),
        (89, 80, 50, Objective.LEAST_POWER, FAST, 1),
    ],
)
def test_hand_computed_choices(
    latency_ms: float, arrival_per_s: float, budget_w: float, objective: Objective, mode: PowerMode, batch: int
) -> None:
    found = choose_serving(KNOWN, ServiceLimits(latency_ms, arrival_per_s, budget_w * 1e3), objective)
    assert (found.mode, found.batch, found.measured) == (mode, batch, True)


@examples(150)
@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from([1, 4, 16, 32]), st.integers(1, 400), st.integers(5, 50)),
        min_size=1,
        max_size=24,
        unique_by=lambda row: row[:2],
    ),
    st.sampled_from([60, 100, 500, 1000]),
    st.sampled_from([20, 60, 120]),
    st.integers(5, 50),
    st.sampled_from(Objective),
)
def test_the_choice_is_the_best_of_a_loop_over_all_rows(
    values: list[tuple[int, int, int, int]], latency_ms: int, arrival: int, budget_w: int, objective: Objective
) -> None:
    rows = [
        Measurement(PowerMode(cores, 10**6, 10**9, 10**9), ms, 1e3 * watts, batch) for cores, batch, ms, watts in values
    ]
    known = KnownModes.only_measured(Profile.of(rows, Task.INFERENCE))
    limits = ServiceLimits(latency_ms, arrival, 1e3 * budget_w)
    best = best_by_loop(rows, latency_ms, arrival, budget_w, objective)
    if not best:
        with pytest.raises(InfeasibleServiceError):
            choose_serving(known, limits, objective)
    else:
        found = choose_serving(known, limits, objective)
        assert (found.mode, found.batch) in [(row.mode, row.batch) for row in best]


def predicted(time_sd: float, power_sd: float) -> KnownModes:
    times = np.array([row.minibatch_ms for row in ROWS])
    powers = np.array([row.power_mw for row in ROWS])
    modes = np.array([row.mode for row in ROWS], dtype=np.float64)
    batch = np.array([row.batch for row in ROWS])
    return KnownModes.of(
        modes, Prediction(times, powers, np.full(6, time_sd), np.full(6, power_sd)), Profile.of(ROWS[4:5]), batch
    )


def test_an_unmeasured_setting_keeps_its_limits_with_the_probability() -> None:
    # At 1.645 standard deviations of 10 %, a sample in the slow mode may take 21.2 ms, but one arrives every 20 ms.
    limits = ServiceLimits(500, 50, 50e3)
    assert choose_serving(predicted(0.1, 0.01), limits, Objective.LEAST_POWER, 0.95).batch == 4
    assert choose_serving(predicted(0.1, 0.01), limits, Objective.LEAST_POWER, 0.5).batch == 1
    # Batches of 4 in that mode are measured, so neither time nor power needs a margin.
    tight = ServiceLimits(120, 50, 12e3)
    assert choose_serving(predicted(0.5, 0.5), tight, Objective.MOST_SAMPLES, 0.95).measured
    # 30 W with a standard deviation of 10 % may be 35.4 W.
    assert choose_serving(predicted(0.01, 0.1), ServiceLimits(400, 50, 35e3), Objective.MOST_SAMPLES).mode == SLOW
    assert choose_serving(predicted(0.01, 0.1), ServiceLimits(400, 50, 36e3), Objective.MOST_SAMPLES).mode == FAST


def test_an_impossible_latency_and_an_impossible_budget_are_told_apart() -> None:
    with pytest.raises(InfeasibleServiceError, match="answers within 10 ms at 50 samples a second .*: allow a higher"):
        choose_serving(KNOWN, ServiceLimits(10, 50), Objective.LEAST_POWER)
    with pytest.raises(InfeasibleServiceError, match=r"draws at most 5 W .*: give a budget of at least 9\.0 W"):
        choose_serving(KNOWN, ServiceLimits(500, 50, 5e3), Objective.LEAST_POWER)


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ((0, 60, 1e3), "the latency must be finite and above 0 ms, not 0"),
        ((math.inf, 60, 1e3), "the latency must be finite"),
        ((100, -1, 1e3), "the arrival rate must be finite and above 0 samples a second, not -1"),
        ((100, math.nan, 1e3), "the arrival rate must be finite"),
        ((100, 60, 0), "the power budget must be above 0 mW, not 0"),
    ],
)
def test_impossible_limits_are_refused(limits: tuple[float, float, float], problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        ServiceLimits(*limits)


def test_modes_without_batches_are_refused() -> None:
    without = Profile.of([Measurement(FAST, 10, 20_000)])
    with pytest.raises(InvalidInputError, match="state no batch sizes: state the batch of each"):
        choose_serving(KnownModes.only_measured(without), ServiceLimits(100, 60), Objective.LEAST_POWER)
    prediction = Prediction(*np.ones((4, 1)))
    with pytest.raises(InvalidInputError, match="do not state their batch"):
        KnownModes.of(without.modes, prediction, without, np.array([4]))


def test_settings_keep_their_batch_when_some_are_selected() -> None:
    kept = KNOWN.among(np.array([False, True, False, False, False, True]))
    assert kept.batch is not None
    assert kept.batch.tolist() == [4, 16]


# --- Serving sampling -------------------------------------------------------------------------------------------------
# Selecting the modes and batch sizes to measure for inference, compared with sampling and loops.

# A small grid on which every knob trades power for time, and larger batches need less time per sample. In some modes,
# batches of 4 or 16 exceed the latency.
_MODES = descending_modes(BOARDS["orin-nano"].space.array())[::75]
BATCH = np.tile([1, 4, 16, 32], len(_MODES))
MODES = np.repeat(_MODES, 4, axis=0)
_CLOCKS = MODES / MODES.max(0)
TRUE_MS = 45 / (_CLOCKS @ np.array([1.0, 2.0, 3.0, 1.5])) * (3 + BATCH)
TRUE_MW = 1e3 * (4 + _CLOCKS**2 @ np.array([2.0, 5.0, 6.0, 2.0])) * (1 + 0.1 * np.log(BATCH))
MODE_ROWS = [tuple(row) for row in np.column_stack([MODES, BATCH]).tolist()]
EVERY = Profile(MODES, TRUE_MS, TRUE_MW, BATCH, Task.INFERENCE)
NOTHING = Profile(MODES[:0], TRUE_MS[:0], TRUE_MW[:0], BATCH[:0], Task.INFERENCE)


def goal(objective: Objective, budgets_w: tuple[float, ...] = (11, 14, 18), latency_ms: float = 500) -> ServingGoal:
    return ServingGoal(tuple(ServiceLimits(latency_ms, 60, 1e3 * watts) for watts in budgets_w), objective)


def measured(settings: np.ndarray) -> Profile:
    index = [MODE_ROWS.index(tuple(row)) for row in settings.tolist()]
    return Profile(MODES[index], TRUE_MS[index], TRUE_MW[index], BATCH[index], Task.INFERENCE)


def wrong(seed: int, sd: float = 0.1) -> Prediction:
    """Predictions whose errors have the stated standard deviation."""
    time, power = np.random.default_rng(seed).normal(0, sd, (2, len(MODES)))
    return Prediction(TRUE_MS * np.exp(time), TRUE_MW * np.exp(power), np.full(len(MODES), sd), np.full(len(MODES), sd))


def profiled(objective: Objective, prediction: Prediction, wanted: SamplingSettings, **more: float) -> Profile:
    """Measure until nothing more is proposed."""
    profile = NOTHING
    while len(
        found := next_modes(
            profile,
            MODES,
            lambda _: prediction,
            wanted,
            batch=BATCH,
            serving=goal(objective, **more),  # type: ignore[arg-type]
        )
    ):
        profile = joined(profile, measured(found))
    return profile


def unused(profile: Profile) -> Prediction:
    raise AssertionError("nothing is predicted yet")


def joined(one: Profile, other: Profile) -> Profile:
    assert one.batch is not None and other.batch is not None
    return Profile(
        np.concatenate([one.modes, other.modes]),
        np.concatenate([one.minibatch_ms, other.minibatch_ms]),
        np.concatenate([one.power_mw, other.power_mw]),
        np.concatenate([one.batch, other.batch]),
        Task.INFERENCE,
    )


DRAWS = np.random.default_rng(0).normal(size=(2, 40_000))


def sampled_gain(
    limits: ServiceLimits, objective: Objective, known: KnownModes, row: int, best_cost: float, cap: float
) -> float:
    """The mean improvement of the log cost, over random times and powers that keep all limits."""
    time, power = DRAWS
    ms = known.minibatch_ms[row] * np.exp(time * known.time_log_sd[row])
    mw = known.power_mw[row] * np.exp(power * known.power_log_sd[row])
    batch = BATCH[row]
    keeps = (batch / 60 * 1e3 + ms <= limits.latency_ms) & (ms <= batch / 60 * 1e3) & (mw <= limits.budget_mw)
    cost = mw if objective is Objective.LEAST_POWER else ms / batch
    return float(np.where(keeps, np.clip(np.log(best_cost / cost), 0, cap), 0).mean())


def gains_of(prospects: Prospects, best: NDArray[np.float64], cap: float | None = None) -> NDArray[np.float64]:
    """The gain of each mode under each limit."""
    found, promising = np.zeros(prospects.others_kept.shape), prospects.promising(best)
    found[promising.mode, promising.limit] = promising.gain(best, cap)
    return found


@pytest.mark.parametrize("cap", [None, 0.03])
@pytest.mark.parametrize("objective", Objective)
def test_the_expected_gain_is_the_mean_of_sampled_improvements(objective: Objective, cap: float | None) -> None:
    known = KnownModes.of(MODES, wrong(3), None, BATCH)
    wanted = goal(objective, (10, 14))
    # One best cost is below the limits of some rows, and the other one is above all limits.
    best = np.log([9e3, 30e3] if objective is Objective.LEAST_POWER else [22.0, 150.0])
    gain = gains_of(Prospects.of_serving(known, wanted), best, cap)
    assert (gain > 0.003).sum() > 20
    for row in range(0, len(MODES), 5):
        for k, limits in enumerate(wanted.limits):
            drawn = sampled_gain(limits, objective, known, row, math.exp(best[k]), cap or math.inf)
            assert gain[row, k] == pytest.approx(drawn, rel=0.05, abs=0.002)


@pytest.mark.parametrize("objective", Objective)
def test_a_measured_setting_counts_only_if_it_keeps_all_limits(objective: Objective) -> None:
    wanted = goal(objective)
    prospects = Prospects.of_serving(KnownModes.only_measured(EVERY), wanted)
    gain = gains_of(prospects, np.full(3, prospects.log_cost.max() + 1))
    for row in range(len(MODES)):
        collect_ms = 1e3 * BATCH[row] / 60
        in_time = TRUE_MS[row] <= collect_ms and TRUE_MS[row] + collect_ms <= 500
        keeps = [in_time and TRUE_MW[row] <= limits.budget_mw for limits in wanted.limits]
        assert prospects.kept[row].tolist() == prospects.safe[row].tolist() == (gain[row] > 0.5).tolist() == keeps


@pytest.mark.parametrize("objective", Objective)
def test_the_most_valuable_setting_is_selected(objective: Objective) -> None:
    prediction, wanted = wrong(1), SamplingSettings(limit=9, spread=3, tolerance=0)
    profile = profiled(objective, prediction, replace(wanted, limit=3))
    # The slowest mode draws the least power but is too slow, so its power is not the cost to improve on.
    slowest = np.array([[*MODES[-1], 4.0]])
    assert TRUE_MS[MODE_ROWS.index(tuple(slowest[0]))] > 1e3 * 4 / 60
    profile = joined(profile, measured(slowest))
    for _ in range(3):
        known = KnownModes.of(MODES, prediction, profile, BATCH)
        values = np.zeros(len(MODES))
        costs = objective.cost(known.minibatch_ms, known.power_mw, BATCH)
        for limits in goal(objective).limits:
            seen = [
                costs[row]
                for row in np.flatnonzero(known.measured)
                if TRUE_MS[row] <= limits.longest_ms(BATCH)[row] and TRUE_MW[row] <= limits.budget_mw
            ]
            for row in np.flatnonzero(~known.measured & (BATCH / 60 * 1e3 < limits.latency_ms)).tolist():
                values[row] += sampled_gain(limits, objective, known, row, min([*seen, costs.max()]), math.inf)
        (found,) = next_modes(profile, MODES, lambda _: prediction, wanted, batch=BATCH, serving=goal(objective))
        picked = MODE_ROWS.index(tuple(found.tolist()))
        assert values[picked] > 0.95 * values.max(), "draws leave a small error"
        profile = joined(profile, measured(found[None]))


@examples(20)
@given(st.integers(0, 999), st.sampled_from(Objective), st.integers(3, 25), st.integers(1, 4))
def test_choices_among_measured_settings_keep_all_limits(
    seed: int, objective: Objective, limit: int, batch: int
) -> None:
    wanted = SamplingSettings(limit=limit, spread=3, batch=batch, tolerance=0, seed=seed)
    profile = profiled(objective, wrong(seed, 0.3), wanted)
    assert len(profile) <= limit
    for limits in goal(objective).limits:
        try:
            found = choose_serving(KnownModes.only_measured(profile), limits, objective)
        except InfeasibleServiceError:
            continue
        row = MODE_ROWS.index((*map(float, found.mode), float(found.batch or 0)))
        collect_ms = 1e3 * BATCH[row] / 60
        assert TRUE_MS[row] <= collect_ms
        assert TRUE_MS[row] + collect_ms <= limits.latency_ms
        assert TRUE_MW[row] <= limits.budget_mw


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("objective", Objective)
def test_choices_only_improve_and_end_at_the_best_of_all_settings(objective: Objective, seed: int) -> None:
    profile = profiled(objective, wrong(seed), SamplingSettings(limit=25, spread=3, tolerance=0))
    every = KnownModes.only_measured(EVERY)
    for limits in goal(objective).limits:
        costs = []
        for count in range(1, 26):
            known = KnownModes.only_measured(profile.rows(np.arange(count)))
            try:
                costs.append(cost_of(choose_serving(known, limits, objective), objective))
            except InfeasibleServiceError:
                costs.append(math.inf)
        assert costs == sorted(costs, reverse=True)
        assert costs[-1] == cost_of(choose_serving(every, limits, objective), objective) < costs[2]


def cost_of(found: ChosenMode, objective: Objective) -> float:
    return found.power_mw if objective is Objective.LEAST_POWER else found.minibatch_ms / (found.batch or 0)


@pytest.mark.parametrize("objective", Objective)
def test_a_higher_latency_or_budget_never_lowers_a_gain(objective: Objective) -> None:
    known = KnownModes.of(MODES, wrong(2), None, BATCH)
    best = np.log([20e3 if objective is Objective.LEAST_POWER else 75.0])
    gains = [
        gains_of(Prospects.of_serving(known, goal(objective, (watts,), latency_ms)), best)
        for latency_ms, watts in ((300, 10), (500, 10), (500, 14), (900, 14))
    ]
    for tighter, wider in zip(gains, gains[1:], strict=False):
        assert (wider >= tighter - 1e-12).all()
        assert (wider > tighter + 1e-6).any()


@pytest.mark.parametrize("objective", Objective)
def test_only_batches_that_can_be_collected_are_measured_largest_first(objective: Objective) -> None:
    # At 60 per second, 16 samples arrive in 267 ms and 32 in 533 ms.
    first = next_modes(NOTHING, MODES, unused, SamplingSettings(spread=1), batch=BATCH, serving=goal(objective))
    assert first.tolist() == [[*MODES[0], 16]]
    profile = profiled(objective, wrong(4), SamplingSettings(limit=60, spread=3, tolerance=0))
    assert 32 not in profile.batches
    assert 16 in profile.batches
    nothing = next_modes(
        NOTHING, MODES, unused, SamplingSettings(), batch=BATCH, serving=goal(objective, latency_ms=10)
    )
    assert not len(nothing), "a single sample is collected in 17 ms"


@pytest.mark.parametrize("objective", Objective)
def test_measuring_for_inference_stops_when_the_choice_is_certain(objective: Objective) -> None:
    certain = Prediction(TRUE_MS, TRUE_MW, np.zeros(len(MODES)), np.zeros(len(MODES)))
    assert len(profiled(objective, certain, SamplingSettings(limit=50, spread=3))) == 3


def test_goals_for_inference_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="needs limits: state a latency"):
        ServingGoal((), Objective.LEAST_POWER)
    wanted = goal(Objective.LEAST_POWER)
    with pytest.raises(InvalidInputError, match="needs the batch of each mode"):
        next_modes(NOTHING, MODES, unused, SamplingSettings(), serving=wanted)
    with pytest.raises(InvalidInputError, match="states its budgets itself"):
        next_modes(NOTHING, MODES, unused, SamplingSettings(), np.array([9e3]), batch=BATCH, serving=wanted)
