"""Choosing mode and batch size for inference, compared with loops over all of them."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattfleet.choosing import InfeasibleServiceError, KnownModes, Objective, ServiceLimits, choose_serving
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, PowerMode, Profile, Task
from wattfleet.prediction import Prediction

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


@settings(max_examples=150)
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
