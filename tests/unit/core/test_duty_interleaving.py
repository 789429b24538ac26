"""How much a board can train beside a duty, compared with loops over all modes, batch sizes and minibatch counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.fakes.short_forms import examples, first
from wattfleet.core.choosing import Front, KnownModes, predicted_front
from wattfleet.core.duties import (
    ArrivalPattern,
    Demand,
    LatencyTooLowError,
    ModesWithDuty,
    NoTrainingTimeError,
    TooManyRequestsError,
    keep_duty,
    most_minibatches,
    share_in_time,
)
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.modes import Measurement, PowerMode, Profile, Task
from wattfleet.core.prediction import Prediction

SLOW, FAST = PowerMode(4, 1_000_000, 500_000_000, 2_133_000_000), PowerMode(8, 2_000_000, 10**9, 3_199_000_000)
TRAINING = [Measurement(SLOW, 120, 15_000), Measurement(FAST, 60, 30_000)]
INFERENCE = [
    Measurement(SLOW, 20, 12_000, 1),
    Measurement(SLOW, 40, 14_000, 4),
    Measurement(SLOW, 120, 16_000, 16),
    Measurement(FAST, 8, 22_000, 1),
    Measurement(FAST, 15, 28_000, 4),
    Measurement(FAST, 45, 40_000, 16),
]
SWITCH_MS = 5.0
REGULAR = ArrivalPattern.REGULAR


def known(rows: list[Measurement], task: Task = Task.INFERENCE) -> KnownModes:
    return KnownModes.only_measured(Profile.of(rows, task))


def kept(demand: Demand, switch_ms: float = SWITCH_MS) -> ModesWithDuty:
    return keep_duty(known(TRAINING, Task.TRAINING), known(INFERENCE), demand, switch_ms)


def front_of(duty: ModesWithDuty) -> Front:
    """The front that an agent builds from the modes beside a duty."""
    known = duty.trainable()
    prediction = Prediction(known.minibatch_ms, known.power_mw, known.time_log_sd, known.power_log_sd)
    return predicted_front(known.modes, prediction, 100)


def keeps(demand: Demand, batch: int, inference_ms: float, minibatches: int, minibatch_ms: float) -> bool:
    """The conditions for one mode, batch size and number of minibatches, checked one at a time."""
    cycle_ms = inference_ms + (minibatches * minibatch_ms + 2 * SWITCH_MS if minibatches else 0)
    if demand.pattern is REGULAR:
        collect_ms = 1e3 * batch / demand.arrival_per_s
        return collect_ms + inference_ms <= demand.latency_ms and cycle_ms <= collect_ms
    (share,) = share_in_time(
        np.array([batch]), np.array([inference_ms]), np.array([cycle_ms]), demand.arrival_per_s, demand.latency_ms
    )
    return bool(share >= demand.quantile)


def fastest_by_loop(demand: Demand, budget_w: float) -> float | None:
    """The least mean milliseconds per minibatch within a budget."""
    found = []
    minibatch_of = {row.mode: row for row in TRAINING}
    for row in INFERENCE:
        training, batch = minibatch_of[row.mode], row.batch or 0
        for count in range(1, 60):
            cycle_ms = row.minibatch_ms + count * training.minibatch_ms + 2 * SWITCH_MS
            if demand.pattern is REGULAR:
                cycle_ms = 1e3 * batch / demand.arrival_per_s
            in_budget = max(row.power_mw, training.power_mw) <= 1e3 * budget_w
            if in_budget and keeps(demand, batch, row.minibatch_ms, count, training.minibatch_ms):
                found.append(cycle_ms / count)
    return min(found, default=None)


@examples(30)
@given(
    st.sampled_from([5, 20, 60, 100]),
    st.sampled_from([40, 100, 200, 500, 1500]),
    st.sampled_from([0.5, 0.9, 0.99]),
    st.sampled_from(ArrivalPattern),
    st.sampled_from([14, 16, 30, 50]),
)
def test_the_fastest_is_that_of_a_loop_over_everything(
    arrival_per_s: float, latency_ms: float, quantile: float, pattern: ArrivalPattern, budget_w: float
) -> None:
    demand = Demand(arrival_per_s, latency_ms, quantile, pattern)
    expected_ms = fastest_by_loop(demand, budget_w)
    if expected_ms is None:
        with pytest.raises((InfeasibleBudgetError, NoTrainingTimeError, LatencyTooLowError)):
            kept(demand).fastest(1e3 * budget_w)
        return
    found = kept(demand).fastest(1e3 * budget_w)
    # Times within 0.6 % count as equal.
    assert expected_ms <= found.minibatch_ms * (1 + 1e-12) and found.minibatch_ms <= 1.006 * expected_ms
    assert found.power_mw <= 1e3 * budget_w
    assert found.measured
    inference_ms = next(row.minibatch_ms for row in INFERENCE if (row.mode, row.batch) == (found.mode, found.batch))
    minibatch_ms = next(row.minibatch_ms for row in TRAINING if row.mode == found.mode)
    assert keeps(demand, found.batch, inference_ms, found.minibatches, minibatch_ms)
    assert not keeps(demand, found.batch, inference_ms, found.minibatches + 1, minibatch_ms)
    assert found.training_share == pytest.approx(minibatch_ms / found.minibatch_ms)
    assert found.latency_ms <= latency_ms * 1.001


@examples(30)
@given(
    st.sampled_from([1, 4, 16, 64]),
    st.floats(1, 200),
    st.floats(5, 300),
    st.floats(5, 150),
    st.floats(20, 2000),
    st.sampled_from(ArrivalPattern),
)
def test_one_more_minibatch_would_break_the_duty(
    batch: int, inference_ms: float, minibatch_ms: float, arrival: float, latency_ms: float, pattern: ArrivalPattern
) -> None:
    demand = Demand(arrival, latency_ms, 0.9, pattern)
    (count,) = most_minibatches(
        demand, np.array([batch]), np.array([inference_ms]), np.array([minibatch_ms]), SWITCH_MS
    )
    assert count < 0 or keeps(demand, batch, inference_ms, count, minibatch_ms)
    assert not keeps(demand, batch, inference_ms, count + 1, minibatch_ms)


@pytest.mark.parametrize("seed", first(3, range(8)))
def test_of_many_boards_none_could_train_one_minibatch_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    demand = Demand(rng.uniform(2, 200), 10 ** rng.uniform(2, 3.5), rng.choice([0.5, 0.9, 0.99]))
    batch = rng.choice([1, 4, 16, 64], 300)
    inference_ms, minibatch_ms = 10 ** rng.uniform(0.3, 2.5, 300), 10 ** rng.uniform(0.5, 2, 300)
    count = most_minibatches(demand, batch, inference_ms, minibatch_ms, SWITCH_MS)

    def in_time(minibatches: NDArray[np.int64]) -> NDArray[np.bool_]:
        cycle_ms = inference_ms + np.where(minibatches > 0, minibatches * minibatch_ms + 2 * SWITCH_MS, 0.0)
        share = share_in_time(batch, inference_ms, cycle_ms, demand.arrival_per_s, demand.latency_ms)
        return np.asarray(share >= demand.quantile)

    assert in_time(count)[count >= 0].all()
    assert not in_time(count + 1).any()
    assert (count > 0).any()


def test_hand_computed_share_of_regular_requests() -> None:
    # At 20 per second, 16 requests arrive in 800 ms: 45 ms of inference, 10 ms of switches and 12 * 60 ms of training.
    found = kept(Demand(20, 1000, pattern=REGULAR)).fastest(math.inf)
    assert (found.mode, found.batch, found.minibatches) == (FAST, 16, 12)
    assert found.minibatch_ms == pytest.approx(800 / 12)
    assert found.training_share == pytest.approx(0.9)
    assert found.latency_ms == pytest.approx(845)
    assert found.power_mw == 40_000
    # Inference in batches of 16 draws 40 W. Below that, batches of 4 are left: 15 + 10 + 2 * 60 ms within 200 ms.
    found = kept(Demand(20, 1000, pattern=REGULAR)).fastest(30_000)
    assert (found.batch, found.minibatches, found.minibatch_ms) == (4, 2, 100)
    # With longer switches, only one minibatch fits.
    assert kept(Demand(20, 1000, pattern=REGULAR), switch_ms=33).in_mode(FAST, 30_000).minibatches == 1


def test_a_front_has_only_modes_that_keep_the_duty_and_the_seconds_with_it() -> None:
    demand = Demand(60, 200)
    duty = kept(demand)
    front = front_of(duty)
    assert set(map(tuple, front.modes.tolist())) <= set(map(tuple, duty.beside.modes.tolist()))
    for index in range(len(front)):
        shared = duty.in_mode(front.mode(index), 1e3 * front.planned_w[index])
        assert front.epoch_s[index] == pytest.approx(shared.minibatch_ms * 100 / 1e3)
        assert front.power_w[index] == pytest.approx(shared.power_mw / 1e3)
    # Without the duty, 100 minibatches would take 6 s.
    assert front.epoch_s[0] > 6


def test_requests_gather_as_long_as_the_planned_cycle_leaves_them() -> None:
    """If the last minibatch and the switches have begun when a batch asks, it begins after a whole cycle."""
    shared = kept(Demand(20, 1000)).in_mode(FAST, math.inf)
    inference_ms = next(row.minibatch_ms for row in INFERENCE if (row.mode, row.batch) == (FAST, shared.batch))
    assert shared.minibatches > 1
    assert shared.gather_ms == pytest.approx(inference_ms + 60 * (shared.minibatches - 1))
    assert keeps(Demand(20, 1000), shared.batch, inference_ms, shared.minibatches, 60)


def test_the_batch_of_a_mode_without_training_draws_the_least_in_it() -> None:
    duty = kept(Demand(60, 300))
    found = duty.least_power_in(FAST)
    rows = [row for row in INFERENCE if row.mode == FAST and keeps(duty.demand, row.batch or 0, row.minibatch_ms, 0, 0)]
    assert found is not None and found.power_mw == min(row.power_mw for row in rows)
    assert duty.least_power_in(FAST._replace(cores=2)) is None


def test_a_higher_load_moves_the_front_and_then_drops_the_slow_mode() -> None:
    light, heavy = kept(Demand(10, 300)), kept(Demand(60, 300))
    assert {tuple(mode) for mode in light.beside.modes} == {SLOW, FAST}
    assert {tuple(mode) for mode in heavy.beside.modes} == {FAST}
    assert light.fastest(math.inf).minibatch_ms < heavy.fastest(math.inf).minibatch_ms
    with pytest.raises(NoTrainingTimeError, match="not kept in the mode .* beside training"):
        heavy.in_mode(SLOW, math.inf)
    with pytest.raises(InfeasibleBudgetError, match="at least 40.0 W"):
        heavy.fastest(20_000)


def test_a_duty_that_takes_everything_leaves_a_mode_to_serve_in() -> None:
    duty = kept(Demand(60, 60))
    with pytest.raises(
        NoTrainingTimeError, match=r"95 % of 60 requests a second within 60 ms.*allow (\d+) ms"
    ) as raised:
        front_of(duty)
    least_ms = float(str(raised.value).split("allow ")[1].split(" ms")[0])
    assert len(front_of(kept(Demand(60, least_ms)))) >= 1
    with pytest.raises(NoTrainingTimeError):
        front_of(kept(Demand(60, least_ms - 2)))
    rest = duty.least_power()
    assert keeps(duty.demand, rest.batch or 0, rest.minibatch_ms, 0, 0)
    assert (rest.mode, rest.batch) == (FAST, 1)


@pytest.mark.parametrize("pattern", ArrivalPattern)
def test_a_board_that_has_no_time_for_any_minibatch_is_told_to_take_fewer_requests(pattern: ArrivalPattern) -> None:
    # 16 requests arrive in 58 ms, and their inference takes 45 ms.
    with pytest.raises(NoTrainingTimeError, match="only while nothing is trained; send fewer requests"):
        kept(Demand(275, 10_000, pattern=pattern)).fastest(math.inf)


def test_more_requests_than_the_board_answers_are_named_with_the_most() -> None:
    # 16 requests in 45 ms are 355.5 per second; 99 % of that rate can be answered in the long run.
    with pytest.raises(TooManyRequestsError, match="400 requests a second .* at most 352 a second"):
        kept(Demand(400, 1000))
    with pytest.raises(TooManyRequestsError, match="at most 355.5 a second"):
        kept(Demand(400, 1000, pattern=REGULAR))
    assert len(kept(Demand(352, 5000)).alone.modes) == 1


@pytest.mark.parametrize("pattern", ArrivalPattern)
def test_a_latency_that_no_mode_keeps_is_named_with_the_least(pattern: ArrivalPattern) -> None:
    with pytest.raises(LatencyTooLowError, match=r"within 9 ms.*: allow at least (\d+) ms") as raised:
        kept(Demand(60, 9, pattern=pattern))
    least_ms = float(str(raised.value).split("at least ")[1].split(" ms")[0])
    assert len(kept(Demand(60, least_ms, pattern=pattern)).alone.modes) >= 1
    with pytest.raises(LatencyTooLowError):
        kept(Demand(60, least_ms - 1, pattern=pattern))


def predicted(rows: list[Measurement], sd: float, measured: Profile | None = None) -> KnownModes:
    columns = [np.array([getattr(row, name) for row in rows]) for name in ("minibatch_ms", "power_mw")]
    batch = None if rows[0].batch is None else np.array([row.batch for row in rows])
    prediction = Prediction(*columns, np.full(len(rows), sd), np.full(len(rows), sd))
    return KnownModes.of(np.array([row.mode for row in rows], dtype=np.float64), prediction, measured, batch)


def test_predicted_times_keep_the_duty_with_the_probability() -> None:
    demand = Demand(20, 1000, pattern=REGULAR)
    training, inference = predicted(TRAINING, 0.1), predicted(INFERENCE, 0.1)
    certain = keep_duty(known(TRAINING, Task.TRAINING), known(INFERENCE), demand, SWITCH_MS).fastest(math.inf)
    # A minibatch may take up to 60 ms * exp(1.645 * 0.1) = 70.7 ms, so 10 instead of 12 fit within 745 ms.
    careful = keep_duty(training, inference, demand, SWITCH_MS, 0.95).fastest(math.inf)
    even = keep_duty(training, inference, demand, SWITCH_MS, 0.5).fastest(math.inf)
    assert (careful.minibatches, even.minibatches, certain.minibatches) == (10, 12, 12)
    assert (careful.measured, certain.measured) == (False, True)
    # Measured modes need no margin.
    both = keep_duty(
        predicted(TRAINING, 0.1, Profile.of(TRAINING)),
        predicted(INFERENCE, 0.1, Profile.of(INFERENCE, Task.INFERENCE)),
        demand,
        SWITCH_MS,
    )
    assert both.fastest(math.inf) == certain


def test_a_duty_holds_as_often_as_its_probability_if_the_predictions_are_off() -> None:
    rng = np.random.default_rng(0)
    demand, probability, sd = Demand(60, 300), 0.8, 0.1
    duty = keep_duty(predicted(TRAINING, sd), predicted(INFERENCE, sd), demand, SWITCH_MS, probability)
    found = duty.in_mode(FAST, math.inf)
    inference_ms = next(row.minibatch_ms for row in INFERENCE if (row.mode, row.batch) == (FAST, found.batch))
    held = [
        keeps(demand, found.batch, inference_ms * of_inference, found.minibatches, 60 * of_training)
        for of_inference, of_training in np.exp(rng.normal(0, sd, (1000, 2))).tolist()
    ]
    assert np.mean(held) >= probability - 0.03


def test_planned_watts_cover_the_larger_of_two_uncertain_powers() -> None:
    training, inference = predicted(TRAINING, 0.2), predicted(INFERENCE, 0.05)
    front = front_of(keep_duty(training, inference, Demand(20, 1000), SWITCH_MS))
    of_training = dict(zip(map(tuple, training.modes.tolist()), training.safe_power_mw(0.95), strict=True))
    for index, mode in enumerate(front.modes.tolist()):
        assert front.planned_w[index] >= of_training[tuple(mode)] / 1e3 * (1 - 1e-9)


@pytest.mark.parametrize("switch_ms", [-1.0, math.nan, math.inf])
def test_a_switch_that_takes_no_time_that_can_be_is_refused(switch_ms: float) -> None:
    with pytest.raises(InvalidInputError, match="switch must take at least 0 ms"):
        kept(Demand(20, 1000), switch_ms)


def test_tables_of_different_boards_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no power mode in common"):
        keep_duty(known(TRAINING[:1], Task.TRAINING), known(INFERENCE[3:]), Demand(20, 1000), SWITCH_MS)
    with pytest.raises(InvalidInputError, match="occurs more than once"):
        keep_duty(known(INFERENCE), known(INFERENCE), Demand(20, 1000), SWITCH_MS)
    with pytest.raises(InvalidInputError, match="no batch sizes"):
        keep_duty(known(TRAINING), known(TRAINING), Demand(20, 1000), SWITCH_MS)
