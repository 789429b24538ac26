"""Batteries: their energy between readings, old and impossible readings, and their harvest."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from wattfleet.core.budgets import (
    Battery,
    Charge,
    DatedHarvest,
    HourlyHarvest,
    MeasuredHarvest,
    Period,
    PeriodBudget,
)
from wattfleet.core.errors import ImplausibleError, InvalidInputError

NOON = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)
WH = 3600.0


def hours_later(hours: float) -> datetime:
    return NOON + timedelta(hours=hours)


@pytest.mark.parametrize("share", [1.4, -0.1, math.nan, math.inf])
def test_a_charge_that_no_battery_can_have_is_an_error(share: float) -> None:
    with pytest.raises(ImplausibleError, match="cannot hold"):
        Charge(share, NOON)


def test_a_battery_without_reading_counts_as_empty() -> None:
    estimate = Battery(100 * WH).estimate(None, NOON, 2.0, 0.0)
    assert (estimate.energy_j, estimate.problem) == (0.0, "its charge is unknown, so it counts as empty")


def test_idle_devices_draw_from_a_battery_between_readings() -> None:
    battery = Battery(100 * WH, self_discharge=0.0, max_age_s=7200.0)
    # Half of 100 Wh, less 2 W for 1.25 hours, less what trainings have drawn.
    estimate = battery.estimate(Charge(0.5, NOON), hours_later(1.25), 2.0, 3.0 * WH)
    assert estimate.energy_j == pytest.approx((50 - 2.5 - 3) * WH)
    assert not estimate.problem


def test_the_harvest_fills_no_battery_beyond_its_capacity() -> None:
    harvest = HourlyHarvest(ZoneInfo("UTC"), (10.0,) * 24)
    battery = Battery(100 * WH, harvest=harvest, self_discharge=0.0, max_age_s=24 * 3600)
    assert battery.estimate(Charge(0.5, NOON), hours_later(2), 2.0, 0.0).energy_j == pytest.approx(66 * WH)
    assert battery.estimate(Charge(0.5, NOON), hours_later(20), 2.0, 0.0).energy_j == pytest.approx(100 * WH)


def test_a_battery_loses_its_share_in_a_day() -> None:
    battery = Battery(100 * WH, self_discharge=0.1, max_age_s=48 * 3600)
    assert battery.estimate(Charge(1.0, NOON), hours_later(24), 0.0, 0.0).energy_j == pytest.approx(90 * WH)


def test_an_old_reading_counts_for_ever_less_and_then_for_nothing() -> None:
    harvest = HourlyHarvest(ZoneInfo("UTC"), (50.0,) * 24)
    battery = Battery(100 * WH, harvest=harvest, self_discharge=0.0, max_age_s=3600.0, decay_s=4 * 3600.0)
    full = Charge(1.0, NOON)
    assert battery.estimate(full, hours_later(1), 0.0, 0.0).energy_j == pytest.approx(100 * WH)
    # One of the four hours has passed.
    quarter = battery.estimate(full, hours_later(2), 0.0, 0.0)
    assert quarter.energy_j == pytest.approx(75 * WH)
    assert "not read in time" in quarter.problem
    over = battery.estimate(full, hours_later(5), 0.0, 0.0)
    assert over.energy_j == 0.0
    assert "too old" in over.problem


def test_a_reading_from_the_future_counts_for_nothing() -> None:
    estimate = Battery(100 * WH).estimate(Charge(1.0, hours_later(1)), NOON, 0.0, 0.0)
    assert estimate.energy_j == 0.0
    assert "was the clock set back?" in estimate.problem


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"capacity_j": -1.0}, "the capacity of a battery must be finite and above 0 J"),
        ({"capacity_j": math.inf}, "the capacity of a battery must be finite and above 0 J"),
        ({"reserve_share": 1.0}, "the reserve of a battery must be 0 to 99 %"),
        ({"self_discharge": -0.1}, "a battery loses 0 to 99 % in a day"),
        ({"parked_s": math.inf}, "devices can be parked for 0 to 168 hours"),
        ({"decay_s": 0.0}, "decay must be above 0 s"),
        ({"max_age_s": math.nan}, "max_age_s must be above 0 s"),
    ],
)
def test_an_impossible_battery_is_refused(wrong: dict[str, float], why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        Battery(**{"capacity_j": 10.0, **wrong})


def test_a_harvest_by_hour_follows_the_wall_clock() -> None:
    harvest = HourlyHarvest(ZoneInfo("Europe/Berlin"), tuple(float(hour) for hour in range(24)))
    assert harvest.watts(NOON) == 14.0


@pytest.mark.parametrize("hourly_w", [(1.0,) * 23, (1.0,) * 23 + (-1.0,), (math.nan,) * 24])
def test_an_impossible_harvest_is_refused(hourly_w: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInputError, match="a harvest by hour has 24|must be finite and 0 W or more"):
        HourlyHarvest(ZoneInfo("UTC"), hourly_w)


def test_a_dated_harvest_is_nothing_outside_of_its_table() -> None:
    harvest = DatedHarvest((NOON, hours_later(1)), (5.0, 7.0))
    watts = [harvest.watts(hours_later(hours)) for hours in (-0.1, 0.5, 1.5, 2.0)]
    assert watts == [0.0, 5.0, 7.0, 0.0]


def test_a_measured_harvest_counts_for_a_while() -> None:
    harvest = MeasuredHarvest(5.0, NOON, hours_later(1))
    assert [harvest.watts(hours_later(hours)) for hours in (-0.1, 0.5, 1.0)] == [0.0, 5.0, 0.0]


def test_the_sun_of_now_does_not_count_for_the_night_before() -> None:
    battery = Battery(1200 * WH, self_discharge=0.0, max_age_s=24 * 3600.0)
    sun = MeasuredHarvest(50.0, hours_later(12), hours_later(13))
    estimate = battery.estimate(Charge(0.3, NOON), hours_later(12), 5.0, 0.0, sun)
    assert estimate.energy_j == pytest.approx((360 - 12 * 5) * WH)


def test_a_cloud_of_minutes_counts_for_its_half_hour() -> None:
    minutes = (0, 10, 20, 60)
    harvest = DatedHarvest(tuple(NOON + timedelta(minutes=each) for each in minutes), (9.0, 1.0, 8.0, 7.0))
    # From the table's end, an hour after its last row, nothing is known.
    assert harvest.least_w(NOON, 1800.0, 5) == [1.0, 7.0, 7.0, 0.0, 0.0]
    battery = Battery(100 * WH, harvest=harvest, self_discharge=0.0, max_age_s=7200.0)
    half_hour = battery.estimate(Charge(0.5, NOON), hours_later(0.5), 0.0, 0.0)
    assert half_hour.energy_j == pytest.approx(50.5 * WH)


# --- Periods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("per", "begin", "end"),
    [
        (Period.DAY, "2026-06-03T00:00+02:00", "2026-06-04T00:00+02:00"),
        (Period.WEEK, "2026-06-01T00:00+02:00", "2026-06-08T00:00+02:00"),
        (Period.MONTH, "2026-06-01T00:00+02:00", "2026-07-01T00:00+02:00"),
    ],
)
def test_periods_begin_at_midnight_by_the_wall_clock(per: Period, begin: str, end: str) -> None:
    budget = PeriodBudget(5.0, per, "Europe/Berlin")
    at = datetime.fromisoformat("2026-06-02T23:30+00:00")  # half past one on the next day in Berlin
    assert budget.begin(at) == datetime.fromisoformat(begin)
    assert budget.end(at) == datetime.fromisoformat(end)


def test_a_day_on_which_clocks_change_is_one_period() -> None:
    budget = PeriodBudget(5.0, Period.DAY, "Europe/Berlin")
    at = datetime.fromisoformat("2026-10-25T12:00+01:00")
    assert (budget.end(at).timestamp() - budget.begin(at).timestamp()) == 25 * 3600


@pytest.mark.parametrize(("at", "hours"), [("05:30", 1.5), ("04:30", 0.5), ("23:00", 19.0)])
def test_a_midnight_that_clocks_repeat_begins_one_period(at: str, hours: float) -> None:
    # At 01:00 in Havana, clocks are put back to 00:00; its first midnight is at 04:00 UTC.
    now = datetime.fromisoformat(f"2026-11-01T{at}+00:00")
    begin = PeriodBudget(5.0, Period.DAY, "America/Havana").begin(now)
    assert now.timestamp() - begin.timestamp() == hours * 3600


@pytest.mark.parametrize("joules", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_budget_of_a_period_is_refused(joules: float) -> None:
    with pytest.raises(InvalidInputError, match="an energy budget must be finite and above 0 J"):
        PeriodBudget(joules, Period.DAY)


def test_an_unknown_time_zone_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="unknown time zone 'Mars/Olympus'"):
        PeriodBudget(1.0, Period.DAY, "Mars/Olympus")
