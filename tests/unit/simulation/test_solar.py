"""Simulated boards with batteries and panels: their reserve is never touched, however cloudy it is."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import reference_models
from tests.fakes.short_forms import first
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.planning.policies import policy_named
from wattfleet.simulation.solar import SolarReport, SolarSettings, Sun, simulate_solar, suns, typical_year


def clear(at: datetime) -> float:
    """A sun from 11 to 1 o'clock UTC, as in North Carolina in June."""
    hours = (at.hour + at.minute / 60 - 11) % 24
    return 950 * math.sin(math.pi * hours / 14) if hours < 14 else 0.0


def cloudy(at: datetime) -> float:
    """A sun that is hidden more on each day than on the one before."""
    return clear(at) * max(0.2, 1 - 0.25 * (at.day - 1))


def month(settings: SolarSettings, sun: Sun, sky: Sun) -> SolarReport:
    reference = reference_models.load("agx_orin_resnet18")
    return simulate_solar(settings, sun, sky, policy_named("all"), reference)


def three_days(**others: Any) -> SolarSettings:
    return SolarSettings(
        {"orin-nano": 3}, days=3, battery_j=100 * 3600.0, every_s=2 * 3600.0, minibatches=3000, **others
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", first(1, range(3)))
def test_the_reserve_is_never_touched_on_days_that_become_darker(seed: int) -> None:
    settings = three_days(seed=seed)
    kept = month(settings, cloudy, clear)
    assert kept.touched_h == 0.0
    assert kept.lowest_share >= settings.reserve_share
    assert kept.trainings >= 10, "the boards train meanwhile"
    assert kept.reasons["too little energy"] + kept.waited > 0, "some could not, so it was a test"


@pytest.mark.timeout(600)
def test_without_knowing_of_batteries_the_coordinator_would_touch_the_reserve() -> None:
    blind = month(three_days(knows_batteries=False), cloudy, clear)
    assert blind.touched_h > 0.0
    assert not blind.reasons


@pytest.mark.timeout(600)
def test_boards_with_panels_of_their_own_have_no_budget_in_watts() -> None:
    noon = SolarSettings({"agx-orin": 3}, days=1, every_s=24 * 3600.0, minibatches=3000, battery_j=3.6e6)
    assert month(noon, clear, clear).trainings == 3, "together they draw more than 70 W"
    with pytest.raises(InfeasibleBudgetError, match="20 W is not enough .*: allow at least"):
        month(replace(noon, site_budget_w=20.0), clear, clear)


def test_the_typical_year_is_darker_than_a_clear_sky() -> None:
    pytest.importorskip("pvlib")
    true, sky = suns("typical", 30)
    june = [datetime(2026, 6, day, hour, tzinfo=timezone.utc) for day in range(2, 30) for hour in range(24)]
    measured_wh, clear_wh = sum(map(true, june)) / 28, sum(map(sky, june)) / 28
    # Flat ground in Greensboro gets 5 to 7 kWh/m2 on a day in June; a clear sky brings 7.5 to 9.
    assert 5_000 < measured_wh < 7_000
    assert 7_500 < clear_wh < 9_000
    assert typical_year().latitude == pytest.approx(36.1)


def test_the_typical_year_begins_again_in_january(monkeypatch: pytest.MonkeyPatch) -> None:
    year = {"ghi": np.arange(24.0 * 365)}, {"latitude": 36.1, "longitude": -80.0, "TZ": -5}
    fake = SimpleNamespace(__file__="pvlib/__init__.py", iotools=SimpleNamespace(read_tmy3=lambda *_, **__: year))
    monkeypatch.setattr("wattfleet.simulation.solar._pvlib", lambda: fake)
    sun = typical_year().sun
    assert [sun(datetime(each, 2, 3, 17, tzinfo=timezone.utc)) for each in (2026, 2027)] == [24.0 * 33 + 12] * 2


def test_a_board_that_runs_dry_each_night_counts_once() -> None:
    # An idle board draws more in a night than the small battery holds, and the panel fills it every day.
    settings = SolarSettings({"orin-nano": 2}, days=3, battery_j=10 * 3600.0, every_s=12 * 3600.0)
    report = month(settings, clear, clear)
    assert report.ran_dry == 2


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_reserve_of_fifty_boards_is_never_touched_in_a_month() -> None:
    pytest.importorskip("pvlib")
    settings = SolarSettings({"orin-nano": 50}, every_s=3600.0)
    kept = month(settings, *suns("typical", settings.days))
    assert kept.touched_h == 0.0
    assert kept.trainings > 50 * 30


@pytest.mark.parametrize("text", ["", "52.5", "91,0", "nan,3", "here", "1,2,3"])
def test_a_sun_that_shines_nowhere_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="is no place: write latitude,longitude in degrees"):
        suns(text, 3)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"days": 0}, "--days must be 1 to 365"), ({"panel_w": -1.0}, "--panel-w must be finite and 0 or more")],
)
def test_impossible_panels_are_refused(wrong: dict[str, float], why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        SolarSettings({"orin-nano": 1}, **wrong)  # type: ignore[arg-type]  # one of several fields
