"""Choosing a mode from measured and predicted values, fronts, and the binary search within budgets."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from math import ceil, log2
from random import Random
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.fleets import columns_of, front
from tests.fakes.short_forms import examples
from wattfleet.core.choosing import (
    MAX_FRONT_POINTS,
    Front,
    InfeasibleDeadlineError,
    InfeasibleTrainingError,
    KnownModes,
    KnownTrainings,
    TrainingGoal,
    fastest_within_budget,
    least_energy_by_deadline,
    lowest_power_by_deadline,
    pareto_front,
    predicted_front,
    search_within_budgets,
)
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.modes import BOARDS, ModeArray, ModeSpace, PowerMode, Profile, array_to_modes
from wattfleet.core.prediction import Prediction

# --- Choosing ---------------------------------------------------------------------------------------------------------
# Choosing a mode from measured and predicted values.


MODES = np.array([[cores, 1_000_000, 600_000_000, 2_133_000_000] for cores in (1, 2, 3, 4)], dtype=np.float64)
ONE, TWO, THREE, FOUR = array_to_modes(MODES)
# Energies: 400, 500, 440, 600 mJ.
PREDICTED = Prediction(
    np.array([40.0, 25.0, 20.0, 15.0]), np.array([10e3, 20e3, 22e3, 40e3]), np.full(4, 0.1), np.full(4, 0.1)
)


def profile(row: int, minibatch_ms: float, power_mw: float) -> Profile:
    return Profile(MODES[[row]], np.array([minibatch_ms]), np.array([power_mw]))


def test_the_fastest_mode_whose_power_quantile_keeps_the_budget_is_chosen() -> None:
    known = KnownModes.of(MODES, PREDICTED)
    assert fastest_within_budget(known, 22e3, 0.5).mode == THREE
    # Its 95 % quantile is 22 W * exp(1.645 * 0.1) = 25.93 W.
    assert fastest_within_budget(known, 25.9e3, 0.95).mode == TWO
    assert fastest_within_budget(known, 26.0e3, 0.95).mode == THREE


def test_among_equal_times_the_mode_most_certain_to_keep_the_budget_wins() -> None:
    nearly_equal = Prediction(
        np.array([20.1, 20.0, 20.05, 20.3]), np.array([9e3, 10e3, 12e3, 5e3]), np.full(4, 0.02), np.full(4, 0.05)
    )
    # 20.1 ms is within 0.6 % of the fastest, 20.3 ms is not.
    assert fastest_within_budget(KnownModes.of(MODES, nearly_equal), 13e3, 0.9).mode == ONE
    # Modes that certainly keep the budget, such as measured ones, are compared by time alone.
    assert fastest_within_budget(KnownModes.of(MODES, nearly_equal), 40e3, 0.9).mode == TWO


def test_a_measured_power_replaces_the_predicted_one() -> None:
    cheap = KnownModes.of(MODES, PREDICTED, profile(3, 16.0, 21e3))
    chosen = fastest_within_budget(cheap, 21e3, 0.999)
    assert (chosen.mode, chosen.minibatch_ms, chosen.power_mw, chosen.measured) == (FOUR, 16.0, 21e3, True)
    hungry = KnownModes.of(MODES, PREDICTED, profile(2, 20.0, 22.001e3))
    assert fastest_within_budget(hungry, 22e3, 0.5).mode == TWO


def test_deadlines_are_kept_with_least_energy_or_lowest_power() -> None:
    known = KnownModes.of(MODES, PREDICTED)
    assert least_energy_by_deadline(known, 40.0, 0.5).mode == ONE
    assert least_energy_by_deadline(known, 39.0, 0.5).mode == THREE
    assert lowest_power_by_deadline(known, 39.0, 0.5).mode == TWO
    # 25 ms * exp(1.645 * 0.1) is 29.5 ms.
    assert lowest_power_by_deadline(known, 29.4, 0.95).mode == THREE


def test_an_infeasible_limit_is_refused_with_the_lowest_feasible_one() -> None:
    known = KnownModes.of(MODES, PREDICTED, profile(0, 40.0, 9e3))
    with pytest.raises(InfeasibleBudgetError, match=r"give a budget of at least 9\.0 W"):
        fastest_within_budget(known, 8e3)
    with pytest.raises(InfeasibleDeadlineError, match=r"allow at least 15\.0 ms"):
        least_energy_by_deadline(known, 14.0, 0.5)
    with pytest.raises(InfeasibleDeadlineError):
        lowest_power_by_deadline(known, 14.0, 0.5)


@pytest.mark.parametrize("probability", [0.0, 1.0, -1.0, float("nan")])
def test_probabilities_outside_0_to_1_are_refused(probability: float) -> None:
    with pytest.raises(InvalidInputError, match="between 0 and 1"):
        fastest_within_budget(KnownModes.of(MODES, PREDICTED), 20e3, probability)


def test_measured_modes_outside_the_space_are_ignored() -> None:
    foreign = Profile(MODES[:1] * 2, np.array([1.0]), np.array([1.0]))
    assert not KnownModes.of(MODES, PREDICTED, foreign).measured.any()


@given(seed=st.integers(0, 10_000), budget=st.floats(5e3, 5e4), probability=st.floats(0.01, 0.99))
def test_a_choice_keeps_the_budget_and_no_measured_mode_would_be_faster(
    seed: int, budget: float, probability: float
) -> None:
    rng = np.random.default_rng(seed)
    modes = np.column_stack([np.arange(1, 31), *np.full((3, 30), 1e9)])
    prediction = Prediction(*(rng.uniform(low, high, 30) for low, high in ((1, 9), (5e3, 5e4), (0, 0.1), (0, 0.1))))
    rows = rng.permutation(30)[:12]
    measured = Profile(modes[rows], rng.uniform(1, 9, 12), rng.uniform(5e3, 5e4, 12))
    known = KnownModes.of(modes, prediction, measured)
    try:
        chosen = fastest_within_budget(known, budget, probability)
    except InfeasibleBudgetError:
        assert (measured.power_mw > budget).all()
        return
    if chosen.measured:
        assert chosen.power_mw <= budget
    within = measured.power_mw <= budget
    assert not (measured.minibatch_ms[within] < chosen.minibatch_ms).any()


# --- A training within joules and a time ------------------------------------------------------------------------------


def trainings(seed: int) -> tuple[KnownTrainings, list[tuple[float, float, float]]]:
    """Measured trainings in eight modes, and for each its seconds, joules above 4 W, and mW, computed one by one."""
    rng = np.random.default_rng(seed)
    ms, mw = rng.integers(10, 40, 8).astype(float), rng.integers(5, 30, 8) * 1e3
    minibatches, warmup = rng.integers(100, 400, 8).astype(float), rng.integers(0, 20, 8).astype(float)
    modes = np.column_stack([np.arange(1, 9), *np.full((3, 8), 1e9)])
    known = KnownModes.only_measured(Profile(modes, ms, mw))
    expected = []
    for i in range(8):
        time_s = warmup[i] + minibatches[i] * ms[i] / 1e3
        expected.append((time_s, (mw[i] - 4e3) / 1e3 * time_s, mw[i]))
    return KnownTrainings(known, minibatches, warmup, 4e3), expected


@given(seed=st.integers(0, 10_000), within_s=st.floats(1, 40), within_j=st.floats(1, 900))
def test_a_training_takes_the_least_that_is_possible_within_both_limits(
    seed: int, within_s: float, within_j: float
) -> None:
    known, each = trainings(seed)
    kept = [costs for costs in each if costs[0] <= within_s and costs[1] <= within_j]
    for goal, column in ((TrainingGoal.TIME, 0), (TrainingGoal.ENERGY, 1), (TrainingGoal.POWER, 2)):
        if kept:
            chosen = each[known.best(goal, within_s, within_j)]
            assert chosen in kept
            assert chosen[column] == pytest.approx(min(costs[column] for costs in kept))
        else:
            with pytest.raises(InfeasibleTrainingError, match="allow at least"):
                known.best(goal, within_s, within_j)


@given(seed=st.integers(0, 10_000))
def test_the_front_of_trainings_has_those_that_no_other_beats(seed: int) -> None:
    known, each = trainings(seed)
    unbeaten = {
        costs[:2]
        for costs in each
        if not any(other[0] <= costs[0] and other[1] <= costs[1] and other[:2] != costs[:2] for other in each)
    }
    front = [each[place][:2] for place in known.front().tolist()]
    assert {(round(s, 6), round(j, 6)) for s, j in front} == {(round(s, 6), round(j, 6)) for s, j in unbeaten}
    assert front == sorted(front)


def test_an_infeasible_training_names_the_earliest_end_and_the_least_joules() -> None:
    modes = np.column_stack([[1, 2], *np.full((3, 2), 1e9)])
    known = KnownModes.only_measured(Profile(modes, np.array([100.0, 200.0]), np.array([30e3, 10e3])))
    both = KnownTrainings(known, np.full(2, 1000.0), np.zeros(2))  # 100 s and 3,000 J; 200 s and 2,000 J
    with pytest.raises(InfeasibleTrainingError, match="within 99 s .*: allow at least 100 s"):
        both.best(TrainingGoal.ENERGY, within_s=99)
    with pytest.raises(InfeasibleTrainingError, match="at most 1,999 J .*: allow at least 2,000 J"):
        both.best(TrainingGoal.TIME, within_j=1999)
    with pytest.raises(InfeasibleTrainingError, match="within 150 s .*: allow at least 200 s, or at least 3,000 J"):
        both.best(TrainingGoal.TIME, within_s=150, within_j=2500)


def test_a_predicted_training_keeps_its_joules_with_the_stated_probability() -> None:
    modes = np.column_stack([[1], *np.full((3, 1), 1e9)])
    prediction = Prediction(*(np.array([value]) for value in (100.0, 10e3, 0.05, 0.1)))
    known = KnownTrainings(KnownModes.of(modes, prediction), np.array([1000.0]), np.zeros(1), 6e3)
    rng = np.random.default_rng(0)
    drawn_s = 100 * np.exp(rng.normal(0, 0.05, 100_000))
    drawn_j = np.maximum(10 * np.exp(rng.normal(0, 0.1, 100_000)) - 6, 0) * drawn_s
    for probability in (0.5, 0.8, 0.9):
        assert (drawn_j <= known.safe_energy_j(probability)[0]).mean() == pytest.approx(probability, abs=0.02)
    assert (drawn_j <= known.safe_energy_j(0.95)[0]).mean() >= 0.95, "a log-normal tail is longer than the true one"


@pytest.mark.parametrize("idle_mw", [10e3, 10.5e3, 9_999.999])
def test_a_mode_near_idle_power_has_a_bound_on_its_joules(idle_mw: float) -> None:
    modes = np.column_stack([[1], *np.full((3, 1), 1e9)])
    prediction = Prediction(*(np.array([value]) for value in (100.0, 10e3, 0.05, 0.1)))
    known = KnownTrainings(KnownModes.of(modes, prediction), np.array([1000.0]), np.zeros(1), idle_mw)
    rng = np.random.default_rng(0)
    drawn_s = 100 * np.exp(rng.normal(0, 0.05, 100_000))
    drawn_j = np.maximum(10 * np.exp(rng.normal(0, 0.1, 100_000)) - idle_mw / 1e3, 0) * drawn_s
    (safe_j,) = known.safe_energy_j(0.9)
    assert (drawn_j <= safe_j).mean() >= 0.9
    assert safe_j < 250


# --- Front ------------------------------------------------------------------------------------------------------------
# Fronts compared with the definition of Pareto optimality.

QUANTILE_95 = NormalDist().inv_cdf(0.95)
FEW = st.integers(0, 6).map(float)
ANY = st.floats(0, 1e9)


def optimal(points: list[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other point dominates, found by comparing all pairs."""
    kept = [
        k
        for k, (time, power) in enumerate(points)
        if not any(
            other[0] <= time and other[1] <= power and (other != (time, power) or earlier < k)
            for earlier, other in enumerate(points)
            if earlier != k
        )
    ]
    return sorted(kept, key=lambda k: points[k])


@given(st.lists(st.tuples(FEW, FEW), max_size=20) | st.lists(st.tuples(ANY, ANY), max_size=20))
def test_a_front_equals_the_comparison_of_all_pairs(points: list[tuple[float, float]]) -> None:
    time, power = (np.array([point[axis] for point in points], dtype=np.float64) for axis in (0, 1))
    found = pareto_front(time, power)
    assert found.tolist() == optimal(points)
    assert (np.diff(time[found]) > 0).all() and (np.diff(power[found]) < 0).all()


def prediction(ms: list[float], mw: list[float], power_log_sd: float | list[float] = 0.0) -> Prediction:
    n = len(ms)
    return Prediction(np.array(ms), np.array(mw), np.full(n, 0.02), np.zeros(n) + np.array(power_log_sd))


def numbered(n: int) -> ModeArray:
    """Modes with the core counts 1 to n."""
    return np.array([[1 + k, 1e6, 1e9, 2e9] for k in range(n)], dtype=np.float64)


def test_a_predicted_front_is_in_seconds_per_epoch_and_watts() -> None:
    predicted = predicted_front(numbered(3), prediction([50, 80, 90], [30_000, 20_000, 25_000], 0.1), 3125)
    assert predicted.epoch_s.tolist() == [156.25, 250.0]
    assert predicted.power_w.tolist() == [30.0, 20.0]
    assert predicted.planned_w == pytest.approx([30 * math.exp(0.1 * QUANTILE_95), 20 * math.exp(0.1 * QUANTILE_95)])
    assert predicted.epoch_log_sd.tolist() == [0.02, 0.02]
    assert [predicted.mode(k) for k in range(len(predicted))] == [
        PowerMode(1, 1_000_000, 1_000_000_000, 2_000_000_000),
        PowerMode(2, 1_000_000, 1_000_000_000, 2_000_000_000),
    ]


def test_a_mode_with_uncertain_power_loses_to_a_more_certain_one() -> None:
    # The slower mode draws 1 W less by the median, but not by the planned watts.
    ms, mw, unsure = [50.0, 60.0], [20_000.0, 19_000.0], [0.01, 0.2]
    assert predicted_front(numbered(2), prediction(ms, mw, unsure), 100).modes[:, 0].tolist() == [1]
    assert predicted_front(numbered(2), prediction(ms, mw, 0.01), 100).modes[:, 0].tolist() == [1, 2]


@examples(10)
@given(st.randoms(use_true_random=False))
@pytest.mark.parametrize("optimal_points", [1, 2, 63, 64, 65, 66, 100, 129, 400])
def test_thinning_keeps_the_ends_and_only_optimal_points(optimal_points: int, random: Random) -> None:
    seconds = sorted(random.sample(range(1, 5_000), optimal_points))
    watts = sorted(random.sample(range(1, 5_000), optimal_points), reverse=True)
    best = [(float(time), float(power)) for time, power in zip(seconds, watts, strict=True)]
    points = [*best, *((time + 1, power + 1) for time, power in best[::3])]  # and some dominated points
    random.shuffle(points)
    predicted = predicted_front(
        numbered(len(points)), prediction([time for time, _ in points], [1e3 * power for _, power in points]), 1_000
    )
    kept = list(zip(predicted.epoch_s.tolist(), predicted.power_w.tolist(), strict=True))
    assert len(kept) <= MAX_FRONT_POINTS == 64
    assert set(kept) <= set(best)
    assert (kept[0], kept[-1]) == (best[0], best[-1])
    if len(best) <= MAX_FRONT_POINTS:
        assert kept == best


def test_thinning_spreads_points_evenly_over_the_watts() -> None:
    # Most modes have almost the lowest power, where one watt more or less hardly matters.
    watts = np.concatenate([np.linspace(50, 10.2, 200), np.linspace(10.1, 10, 2_000)])
    predicted = predicted_front(
        numbered(len(watts)), prediction(list(range(1, len(watts) + 1)), (watts * 1e3).tolist()), 1_000
    )
    step_w = (50 - 10) / (MAX_FRONT_POINTS - 1)
    assert len(predicted) >= MAX_FRONT_POINTS - 1
    assert -np.diff(predicted.power_w).min() < 1.5 * step_w
    assert predicted.power_w[[0, -1]] == pytest.approx([50, 10])


def test_a_front_may_have_one_to_max_points() -> None:
    assert len(front((10, 20))) == 1
    assert len(front(*((1.0 + k, 100.0 - k) for k in range(MAX_FRONT_POINTS)))) == MAX_FRONT_POINTS


def test_planned_watts_grow_with_the_standard_deviation() -> None:
    assert front((1, 20)).planned_w.tolist() == [20]
    # Of 100,000 draws of such a power, 5 % exceed the planned watts.
    draws = 20 * np.exp(0.15 * np.random.default_rng(3).standard_normal(100_000))
    assert (draws > front((1, 20), power_log_sd=0.15).planned_w[0]).mean() == pytest.approx(0.05, abs=0.003)


GOOD = front((10, 30), (20, 20), (30, 10))


def test_points_are_ordered_by_epoch_time_including_warmup() -> None:
    shown = front((10, 30), (8, 20), warmup_s=[1, 4])
    assert shown.one_epoch_s.tolist() == [11, 12]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epoch_s": np.array([10.0, 10.0, 30.0])}, "times must rise"),
        ({"epoch_s": np.array([10.0, 30.0, 20.0])}, "times must rise"),
        ({"power_w": np.array([30.0, 30.0, 10.0])}, "planned watts fall"),
        ({"power_w": np.array([10.0, 20.0, 30.0])}, "planned watts fall"),
        # The medians fall, but the planned watts do not.
        ({"power_log_sd": np.array([0.0, 0.4, 0.9])}, "planned watts fall"),
        ({"epoch_s": np.array([0.0, 20.0, 30.0])}, "finite and above zero"),
        ({"epoch_s": np.array([10.0, np.nan, 30.0])}, "finite and above zero"),
        ({"epoch_s": np.array([10.0, 20.0, np.inf])}, "finite and above zero"),
        ({"power_w": np.array([30.0, 20.0, -1.0])}, "finite and above zero"),
        ({"power_w": np.array([np.nan, 20.0, 10.0])}, "finite and above zero"),
        ({"modes": np.zeros((3, 4))}, "finite and above zero"),
        ({"epoch_log_sd": np.array([0.1, -0.1, 0.1])}, "not negative"),
        ({"power_log_sd": np.array([0.1, np.nan, 0.1])}, "not negative"),
        ({"warmup_s": np.array([0.0, -1.0, 0.0])}, "not negative"),
        ({"warmup_s": np.array([0.0, np.inf, 0.0])}, "not negative"),
        ({"warmup_s": np.array([0.0, 0.0])}, r"\[k, 4\] modes"),
        # The epochs get longer, but the times including warm-up do not.
        ({"warmup_s": np.array([15.0, 0.0, 0.0])}, "times must rise"),
        ({"epoch_s": np.array([10.0, 20.0])}, r"\[k, 4\] modes"),
        ({"power_log_sd": np.zeros((3, 1))}, r"\[k, 4\] modes"),
        ({"modes": np.ones((3, 5))}, r"\[k, 4\] modes"),
    ],
)
def test_invalid_columns_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        Front(**(columns_of(GOOD) | changes))


@pytest.mark.parametrize("k", [0, MAX_FRONT_POINTS + 1])
def test_a_front_of_no_or_too_many_points_is_refused(k: int) -> None:
    with pytest.raises(InvalidInputError, match=f"1 to {MAX_FRONT_POINTS} points, not {k}"):
        front(*((1.0 + step, 100.0 - step) for step in range(k)))


def test_a_front_over_several_batches_names_the_batch_of_each_point() -> None:
    # An epoch of 160 samples has 160, 40 or 10 steps. The second mode is dominated, and the last one is not plausible.
    per_epoch, batch = np.array([160.0, 40, 10, 10]), np.array([1, 4, 16, 16])
    found = predicted_front(
        numbered(4), prediction([10, 90, 100, 1e15], [20_000, 30_000, 25_000, 1_000]), per_epoch, batch=batch
    )
    assert found.epoch_s.tolist() == [1.0, 1.6]
    assert found.batch is not None
    assert found.batch.tolist() == [16, 1]


def test_fronts_of_other_batches_are_not_equal() -> None:
    def of(batch: list[int] | None) -> Front:
        values = None if batch is None else np.array(batch)
        return predicted_front(numbered(2), prediction([50, 80], [30_000, 20_000]), 100, batch=values)

    assert of([1, 4]).equals(of([1, 4])) and of(None).equals(of(None))
    assert not of([1, 4]).equals(of([1, 16]))
    assert not of([1, 4]).equals(of(None)) and not of(None).equals(of([1, 4]))


@pytest.mark.parametrize("batch", [[1], [0, 4]])
def test_impossible_batches_of_a_front_are_refused(batch: list[int]) -> None:
    two = front((1.0, 20.0), (2.0, 10.0))
    with pytest.raises(InvalidInputError, match="one for each point, at least 1 sample each"):
        Front(two.modes, two.epoch_s, two.power_w, two.epoch_log_sd, two.power_log_sd, two.warmup_s, np.array(batch))


# --- Budget search ----------------------------------------------------------------------------------------------------
# The binary search for a mode within budgets: the modes it measures, and where it ends.

ORIN = BOARDS["agx-orin"].space
ONE_KNOB = ModeSpace(cores=(1,), cpu_khz=tuple(range(100_000, 3_100_000, 100_000)), gpu_hz=(10**9,), mem_hz=(10**9,))


def power_mw(mode: PowerMode) -> float:
    """Power that rises with every knob."""
    return 8e3 + 500 * mode.cores + mode.cpu_khz / 400 + mode.gpu_hz / 8e4 + mode.mem_hz / 4e5


def searched(space: ModeSpace, budgets_mw: list[float], power: Callable[[PowerMode], float | None]) -> list[PowerMode]:
    asked: list[PowerMode] = []

    def power_of(mode: PowerMode) -> float | None:
        asked.append(mode)
        return power(mode)

    search_within_budgets(space.array(), budgets_mw, power_of)
    return asked


@pytest.mark.parametrize("budget_khz", [150_000, 1_000_000, 1_555_000, 2_999_999, 9_000_000])
def test_with_one_knob_the_search_ends_where_bisection_does(budget_khz: int) -> None:
    asked = searched(ONE_KNOB, [float(budget_khz)], lambda mode: float(mode.cpu_khz))
    best = ONE_KNOB.cpu_khz[bisect.bisect_right(ONE_KNOB.cpu_khz, budget_khz) - 1]
    assert max(mode.cpu_khz for mode in asked if mode.cpu_khz <= budget_khz) == best


def test_a_search_halves_each_knob_and_comes_near_the_budget() -> None:
    asked = searched(ORIN, [30e3], power_mw)
    halvings = sum(ceil(log2(len(values))) for values in (ORIN.cores, ORIN.cpu_khz, ORIN.gpu_hz, ORIN.mem_hz))
    assert len(set(asked)) <= halvings + 1
    assert 27e3 <= max(power for mode in asked if (power := power_mw(mode)) <= 30e3)
    assert all(mode in ORIN for mode in asked)


def test_searches_side_by_side_measure_the_modes_of_searches_in_turn() -> None:
    budgets = [15e3, 22e3, 31e3, 40e3]
    in_turn = set(searched(ORIN, budgets, power_mw))
    known: dict[PowerMode, float] = {}
    while missing := [mode for mode in searched(ORIN, budgets, known.get) if mode not in known]:
        known |= {mode: power_mw(mode) for mode in missing}
    assert set(known) == in_turn


def test_a_mode_that_is_not_sustained_counts_as_over_the_budget() -> None:
    first = searched(ONE_KNOB, [1e9], lambda mode: None)[0]
    asked = searched(ONE_KNOB, [1e9], lambda mode: float("inf") if mode == first else 1.0)
    assert max(asked[1:]).cpu_khz < first.cpu_khz


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan"), float("inf")])
def test_budgets_that_are_no_watts_are_refused(budget: float) -> None:
    with pytest.raises(InvalidInputError, match="budgets must be finite and above zero"):
        searched(ORIN, [30e3, budget], power_mw)


def test_no_modes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no modes to search"):
        search_within_budgets(ORIN.array()[:0], [30e3], power_mw)
