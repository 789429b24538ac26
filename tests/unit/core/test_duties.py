"""Duties: valid values, the requests to expect, and the latencies of requests on a shared board."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.short_forms import examples
from wattfleet.core.duties import (
    ArrivalPattern,
    ConstantArrivals,
    DailyArrivals,
    Demand,
    Duty,
    MeasuredArrivals,
    arrivals_from_content,
    largest_slowdown,
    latency_at_quantile_ms,
    share_in_time,
    utilization,
)
from wattfleet.core.duties.queueing import LeftoverQueue, points_needed
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode

# --- Duties -----------------------------------------------------------------------------------------------------------
# Duties: valid values, the number of requests to expect, and their storage.


NOON = datetime(2026, 6, 1, 12, 0, tzinfo=timezone.utc)
BY_DAY = DailyArrivals.of(ZoneInfo("Europe/Berlin"), {"06:00-18:00": 30, "18:00-06:00": 0})
EVERY_KIND = [ConstantArrivals(30), BY_DAY, MeasuredArrivals(12.5)]


@pytest.mark.parametrize("arrivals", EVERY_KIND, ids=["constant", "daily", "measured"])
def test_a_duty_is_stored_and_read_again(arrivals):
    duty = Duty("mobilenet-camera", arrivals, 500, 0.99)
    assert Duty.from_json(duty.to_json()) == duty
    assert "\n" not in duty.to_json()


def test_the_rate_follows_the_wall_clock_of_the_schedule():
    duty = Duty("camera", BY_DAY, 500)
    assert duty.arrivals_per_s(NOON) == 30
    assert duty.arrivals_per_s(NOON + timedelta(hours=3, minutes=59)) == 30
    assert duty.arrivals_per_s(NOON + timedelta(hours=4)) == 0, "18:00 in Berlin's summer"


def test_a_measured_rate_is_assumed_until_it_is_measured():
    duty = Duty("camera", MeasuredArrivals(12.5), 500)
    assert duty.arrivals_per_s(NOON) == 12.5
    assert duty.arrivals_per_s(NOON, 0.0) == 0
    assert Duty("camera", ConstantArrivals(30), 500).arrivals_per_s(NOON, 99.0) == 30


@pytest.mark.parametrize("per_s", [0, -1, float("nan"), float("inf"), 1e6])
def test_an_impossible_rate_is_refused(per_s):
    with pytest.raises(InvalidInputError, match="requests per second must be"):
        ConstantArrivals(per_s)
    with pytest.raises(InvalidInputError, match="requests per second must be"):
        MeasuredArrivals(per_s)


@pytest.mark.parametrize(
    ("latency_ms", "quantile", "text"),
    [(0, 0.95, "latency_ms"), (float("nan"), 0.95, "latency_ms"), (1e9, 0.95, "latency_ms"), (500, 1.0, "quantile")],
)
def test_an_impossible_duty_is_refused(latency_ms, quantile, text):
    with pytest.raises(InvalidInputError, match=text):
        Duty("camera", ConstantArrivals(30), latency_ms, quantile)


def test_a_schedule_covers_the_whole_day():
    with pytest.raises(InvalidInputError, match="no arrivals for 18:00-20:00"):
        DailyArrivals.of(ZoneInfo("UTC"), {"06:00-18:00": 30, "20:00-06:00": 1})
    with pytest.raises(InvalidInputError, match="several rates of arrivals for 17:00-18:00"):
        DailyArrivals.of(ZoneInfo("UTC"), {"06:00-18:00": 30, "17:00-06:00": 1})
    with pytest.raises(InvalidInputError, match="no arrivals at all"):
        DailyArrivals.of(ZoneInfo("UTC"), {"00:00-24:00": 0})


GOOD = '{"workload": "camera", "arrivals": {"per_s": 30}, "latency_ms": 500}'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[", "JSON object"),
        ("[1]", "JSON object"),
        ("[" * 100_000, "JSON object"),
        (GOOD.replace("latency_ms", "latency"), "unknown key 'latency'"),
        (GOOD.replace(', "latency_ms": 500', ""), "needs the key 'latency_ms'"),
        (GOOD.replace("500", '"500"'), "latency_ms must be a number"),
        (GOOD.replace("500", "true"), "latency_ms must be a number"),
        (GOOD.replace("500", "NaN"), "latency_ms must be above 0"),
        (GOOD.replace('"camera"', "7"), "workload must be a text"),
        (GOOD.replace('"camera"', '" "'), "name"),
        (GOOD.replace("per_s", "rate"), "arrivals must have the keys"),
        (GOOD.replace('{"per_s": 30}', "30"), "arrivals must have the keys"),
        (GOOD.replace('{"per_s": 30}', '{"zone": "No/Where", "schedule": {"00:00-24:00": 1}}'), "not a time zone"),
        (GOOD.replace('{"per_s": 30}', '{"zone": "UTC", "schedule": {"all day": 1}}'), "not a time span"),
    ],
)
def test_a_damaged_duty_is_refused_with_a_reason(text, problem):
    assert Duty.from_json(GOOD) == Duty("camera", ConstantArrivals(30), 500)
    with pytest.raises(InvalidInputError, match=problem):
        Duty.from_json(text)


def test_work_slows_down_at_most_as_much_as_its_slowest_part():
    measured = PowerMode(12, 2_000_000, 1_000_000_000, 3_000_000_000)
    assert largest_slowdown(measured, measured) == 1
    assert largest_slowdown(measured, measured._replace(gpu_hz=500_000_000)) == 2
    assert largest_slowdown(measured, measured._replace(cores=6, cpu_khz=1_000_000)) == 4
    assert largest_slowdown(measured, measured._replace(mem_hz=1_000_000_000, gpu_hz=800_000_000)) == 3
    assert largest_slowdown(measured._replace(cores=6), measured) == 1, "more cores may be of no use"


def test_a_number_of_hundreds_of_digits_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="per_s is too large a number"):
        arrivals_from_content({"per_s": 10**400})


# --- Duty queueing ----------------------------------------------------------------------------------------------------
# Request latencies on a shared board, compared with closed forms, a Markov chain and an event simulation.


def one_share(batch: int, inference_ms: float, cycle_ms: float, arrival_per_s: float, latency_ms: float) -> float:
    (share,) = share_in_time(
        np.array([batch]), np.array([inference_ms]), np.array([cycle_ms]), arrival_per_s, latency_ms
    )
    return float(share)


def one_latency(batch: int, inference_ms: float, cycle_ms: float, arrival_per_s: float, quantile: float) -> float:
    (latency,) = latency_at_quantile_ms(
        np.array([batch]), np.array([inference_ms]), np.array([cycle_ms]), arrival_per_s, quantile
    )
    return float(latency)


def simulated_latencies(
    batch: int, inference_ms: float, cycle_ms: float, arrival_per_s: float, requests: int, seed: int
) -> list[float]:
    """Latencies of single requests; the first tenth is dropped, while the queue settles."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1e3 / arrival_per_s, requests)).tolist()
    latencies, first, begin_ms = [], 0, 0.0
    while first < requests:
        if cycle_ms == inference_ms:
            begin_ms = max(begin_ms, arrivals[first])  # without training, the board waits for the next request
        last = first
        while last < requests and last - first < batch and arrivals[last] <= begin_ms:
            latencies.append(begin_ms + inference_ms - arrivals[last])
            last += 1
        first, begin_ms = last, begin_ms + cycle_ms
    return latencies[requests // 10 :]


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("wait", [0.0, 0.5, 1.3, 4.7])
def test_single_requests_without_training_wait_as_in_an_m_d_1_queue(load: float, wait: float) -> None:
    # Erlang's formula, with the inference time as the unit.
    erlang = (1 - load) * sum(
        (-load * (wait - i)) ** i / math.factorial(i) * math.exp(load * (wait - i)) for i in range(int(wait) + 1)
    )
    assert one_share(1, 20.0, 20.0, 1e3 * load / 20, 20 * (1 + wait)) == pytest.approx(erlang, abs=1e-9)


@pytest.mark.parametrize(
    ("batch", "load"), [(1, 0.05), (1, 0.95), (4, 0.7), (16, 0.2), (16, 0.95), (64, 0.05), (64, 0.9)]
)
def test_leftover_requests_are_distributed_as_the_markov_chain_says(batch: int, load: float) -> None:
    offered, states = load * batch, 600
    log_factorial = np.cumsum(np.log(np.maximum(np.arange(states + batch), 1)))
    arrivals = np.exp(np.arange(states + batch) * math.log(offered) - offered - log_factorial)
    chain = np.zeros((states, states))
    for left in range(states):
        for new, probability in enumerate(arrivals):
            if (after := max(left + new - batch, 0)) < states:
                chain[left, after] += probability
    equations = chain.T - np.eye(states)
    equations[-1] = 1.0
    expected = np.linalg.solve(equations, np.eye(states)[-1])
    (points,) = points_needed(np.array([batch]), np.array([load]))
    found = LeftoverQueue.of(batch, np.array([offered]), int(points)).probability[0]
    common = min(states, len(found))
    assert np.abs(found[:common] - expected[:common]).max() < 1e-10
    assert expected[common:].sum() < 1e-12


@pytest.mark.parametrize(
    ("batch", "inference_ms", "cycle_ms", "arrival_per_s"),
    [(1, 10.0, 15.0, 50), (4, 40.0, 40.0, 80), (4, 30.0, 120.0, 30), (16, 60.0, 250.0, 60), (32, 90.0, 300.0, 30)],
)
def test_latencies_are_those_of_a_simulation(
    batch: int, inference_ms: float, cycle_ms: float, arrival_per_s: float
) -> None:
    runs = [simulated_latencies(batch, inference_ms, cycle_ms, arrival_per_s, 20_000, seed) for seed in range(10)]
    for quantile in (0.5, 0.9, 0.99):
        latency_ms = one_latency(batch, inference_ms, cycle_ms, arrival_per_s, quantile)
        shares = [float(np.mean(np.array(run) <= latency_ms)) for run in runs]
        # Within four standard errors of the mean of ten independent runs, plus 0.001 for rounding.
        error = 4 * np.std(shares, ddof=1) / math.sqrt(len(shares)) + 0.001
        assert np.mean(shares) == pytest.approx(quantile, abs=error) or (
            latency_ms == inference_ms and np.mean(shares) >= quantile  # most requests begin at once
        )


def test_an_overloaded_board_answers_nobody_in_time() -> None:
    # 4 requests every 100 ms are 40 per second.
    assert utilization(np.array([4]), np.array([100.0]), 30) == pytest.approx(0.75)
    assert one_share(4, 50.0, 100.0, 30, 10_000) > 0.999
    for arrival_per_s in (40, 41, 400):
        assert one_share(4, 50.0, 100.0, arrival_per_s, 10_000) == 0
        assert one_latency(4, 50.0, 100.0, arrival_per_s, 0.5) == math.inf


def test_nobody_is_answered_before_the_inference_ends() -> None:
    assert one_share(16, 50.0, 200.0, 10, 49.9) == 0
    # Without leftover requests, a request waits for the end of its cycle and arrives at a uniformly distributed time.
    assert one_share(16, 50.0, 200.0, 10, 150.0) == pytest.approx(0.5, abs=1e-6)
    assert one_share(16, 50.0, 200.0, 10, 250.0) == pytest.approx(1.0, abs=1e-6)


@examples(60)
@given(
    st.sampled_from([1, 4, 16, 64]),
    st.floats(1, 300),
    st.floats(0, 2),
    st.floats(1, 200),
    st.floats(1, 2000),
    st.floats(1.01, 2),
)
def test_fewer_are_in_time_with_longer_cycles_more_arrivals_or_a_lower_latency(
    batch: int, inference_ms: float, training: float, arrival_per_s: float, latency_ms: float, factor: float
) -> None:
    cycle_ms = inference_ms * (1 + training)
    share = one_share(batch, inference_ms, cycle_ms, arrival_per_s, latency_ms)
    assert 0 <= share <= 1
    assert one_share(batch, inference_ms, cycle_ms * factor, arrival_per_s, latency_ms) <= share + 1e-9
    assert one_share(batch, inference_ms, cycle_ms, arrival_per_s, latency_ms / factor) <= share + 1e-9
    if training > 0:
        assert one_share(batch, inference_ms, cycle_ms, arrival_per_s * factor, latency_ms) <= share + 1e-9


@examples(40)
@given(st.sampled_from([1, 4, 32]), st.floats(0, 2), st.floats(0.05, 0.98), st.floats(0.5, 0.99))
def test_the_latency_at_a_quantile_is_the_least_that_keeps_it(
    batch: int, training: float, load: float, quantile: float
) -> None:
    cycle_ms = 50 * (1 + training)
    arrival_per_s = 1e3 * load * batch / cycle_ms
    latency_ms = one_latency(batch, 50.0, cycle_ms, arrival_per_s, quantile)
    assert one_share(batch, 50.0, cycle_ms, arrival_per_s, latency_ms) >= quantile
    assert latency_ms == 50 or one_share(batch, 50.0, cycle_ms, arrival_per_s, latency_ms - 0.002 * cycle_ms) < quantile


def test_many_boards_are_computed_as_each_alone() -> None:
    rng = np.random.default_rng(0)
    batch = rng.choice([1, 4, 16, 32, 64], 300)
    inference_ms = rng.uniform(5, 200, 300)
    cycle_ms = inference_ms * rng.choice([1.0, 1.5, 4.0], 300)
    together = share_in_time(batch, inference_ms, cycle_ms, 60, 500.0)
    alone = [one_share(int(b), s, c, 60, 500.0) for b, s, c in zip(batch, inference_ms, cycle_ms, strict=True)]
    assert np.abs(together - np.array(alone)).max() < 1e-12
    assert 0 < (together > 0).mean() < 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 100), "arrival rate must be finite and above 0 requests a second, not 0"),
        ((60, math.inf), "latency must be finite and above 0 ms, not inf"),
        ((60, 100, 1.0), "quantile must be between 0 and 1, not 1"),
    ],
)
def test_a_demand_out_of_range_is_refused(values: tuple[float, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Demand(*values)


def test_a_demand_is_described_by_its_numbers() -> None:
    assert str(Demand(60, 500, 0.99)) == "99 % of 60 requests a second within 500 ms"
    assert str(Demand(30, 200, pattern=ArrivalPattern.REGULAR)) == "all of 30 requests a second within 200 ms"
