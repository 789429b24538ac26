"""Duties: valid values, the number of requests to expect, and their storage."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from wattfleet.duties import (
    ConstantArrivals,
    DailyArrivals,
    Duty,
    MeasuredArrivals,
    arrivals_from_content,
    largest_slowdown,
)
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode

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
