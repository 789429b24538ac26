"""A month of simulated boards with batteries and solar panels, in virtual time.

The coordinator's state and plans are the real ones, as are its estimates of the batteries. Simulated are the boards,
their batteries with gauges that fail now and then, and the sun: a clear sky or a typical year of measurements. Both are
from pvlib. The forecast that plans count on is a share of the clear sky, so that it knows nothing of the weather.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.errors import NoDevicesError
from coordinator.state.stores import PlacedBattery
from edge_agent.devices.virtual.virtual_board import WorkSpan
from wattfleet.common.console import count_of, energy_text
from wattfleet.core.budgets import Battery, DatedHarvest, require_watts
from wattfleet.core.choosing import MAX_POWER_W
from wattfleet.core.errors import EnergySpentError, InvalidInputError, NoCandidatesError
from wattfleet.core.modes import Workload
from wattfleet.core.planning.policies import Policy
from wattfleet.core.prediction import Artefact
from wattfleet.simulation.client_process import ClientReport
from wattfleet.simulation.large_fleet import CoordinatorPlanner, LargeFleetDevice, PlannedTraining, open_devices
from wattfleet_proto.convert import workload_to_message
from wattfleet_proto.device_state import BoardSample
from wattfleet_proto.v1 import planning_pb2

_RUN, _BATCH = "solar", 16
_STEP_S, _HOUR_S = 600.0, 3600.0
_WATTS_PER_SUN = 1000.0
"""W/m2 at which a panel has its rated power."""
_GAUGE_STEP = 0.01
"""A battery's gauge shows whole percents, rounded down."""
_GAUGE_FAILS_S = 6 * _HOUR_S
"""Seconds for which a gauge that fails shows nothing."""
_GAUGE_FAILURES_PER_DAY = 0.03

Sun = Callable[[datetime], float]
"""The irradiance of a flat panel at a time, W/m2."""


# --- Sun --------------------------------------------------------------------------------------------------------------


def _pvlib() -> Any:
    try:
        import pvlib
    except ImportError:
        raise InvalidInputError("--sun needs pvlib, which is not installed: pip install 'wattfleet[solar]'") from None
    return pvlib


def _hourly(values: Sequence[float], begins: datetime) -> Sun:
    """A sun of hourly values from a moment on, which repeat before and after them."""

    def sun(at: datetime) -> float:
        place = int((at - begins).total_seconds() // _HOUR_S)
        return values[place % len(values)]

    return sun


def clear_sky(latitude: float, longitude: float, begins: datetime, days: int) -> Sun:
    """A clear sky, by the model of Haurwitz (1945).

    Raises:
        InvalidInputError: pvlib is not installed.
    """
    import pandas as pd

    location = _pvlib().location.Location(latitude, longitude)
    # The middle of each hour.
    times = pd.date_range(begins, periods=24 * days, freq="h") + pd.Timedelta(minutes=30)
    return _hourly(location.get_clearsky(times, model="haurwitz")["ghi"].tolist(), begins)


@dataclass(frozen=True)
class TypicalYear:
    """A typical year of hourly measurements (TMY3) of one place.

    Attributes:
        latitude: of the place, degrees.
        longitude: of the place, degrees.
        sun: its irradiance by the calendar; it repeats after 365 days.
    """

    latitude: float
    longitude: float
    sun: Sun


def typical_year() -> TypicalYear:
    """The typical year of Greensboro, North Carolina, which pvlib ships.

    Raises:
        InvalidInputError: pvlib is not installed.
    """
    pvlib = _pvlib()
    path = Path(pvlib.__file__).parent / "data" / "723170TYA.CSV"
    year = _BEGINS.year
    table, place = pvlib.iotools.read_tmy3(str(path), map_variables=True, coerce_year=year)
    # Each row states the hour that ends at its time, by the place's standard time.
    begins = datetime(year, 1, 1, tzinfo=timezone(timedelta(hours=place["TZ"])))
    return TypicalYear(place["latitude"], place["longitude"], _hourly(table["ghi"].tolist(), begins))


# --- Settings ---------------------------------------------------------------------------------------------------------

_BEGINS = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)


@dataclass(frozen=True)
class SolarSettings:
    """Settings of a simulation with batteries and sun.

    Attributes:
        kinds: number of boards of each kind.
        days: days to simulate.
        panel_w: rated watts of each board's panel.
        battery_j: capacity of each board's battery.
        reserve_share: share of it that no training may touch.
        harvest_share: share of the clear sky that plans count on.
        every_s: seconds from one round to the next.
        site_budget_w: watts for the whole fleet; None for no limit, since each board has a panel of its own.
        minibatches: in an epoch; each board trains one epoch in a round.
        seed: seed of boards, their batteries' first charges and the gauges' failures.
        knows_batteries: whether the coordinator knows of the batteries; otherwise it plans as without any.

    Raises:
        InvalidInputError: a value is out of range.
    """

    kinds: Mapping[str, int]
    days: int = 30
    panel_w: float = 35.0
    battery_j: float = 200 * _HOUR_S
    reserve_share: float = 0.2
    harvest_share: float = 0.3
    every_s: float = 1800.0
    site_budget_w: float | None = None
    minibatches: int = 2000
    seed: int = 0
    knows_batteries: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.days <= 365:
            raise InvalidInputError(f"--days must be 1 to 365, not {self.days}")
        if not (math.isfinite(self.panel_w) and self.panel_w >= 0):
            raise InvalidInputError(f"--panel-w must be finite and 0 or more, not {self.panel_w:g}")
        if self.site_budget_w is not None:
            require_watts("--site-budget-w", self.site_budget_w)


@dataclass
class SolarReport:
    """What a simulation with batteries and sun has found. All figures are simulated.

    Attributes:
        rounds: number of rounds.
        waited: number of times that no round could be planned.
        trainings: number of trainings.
        training_j: joules above idle of all trainings.
        lowest_share: the lowest charge of any battery.
        touched_h: hours in which a battery held less than its reserve, added up over all boards.
        ran_dry: number of boards whose battery was empty at some time.
        harvested_j: joules that the panels have charged into batteries.
        reasons: why devices were not selected, and how often.
    """

    rounds: int = 0
    waited: int = 0
    trainings: int = 0
    training_j: float = 0.0
    lowest_share: float = 1.0
    touched_h: float = 0.0
    ran_dry: int = 0
    harvested_j: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)


# --- Batteries --------------------------------------------------------------------------------------------------------


class _TrueBatteries:
    """What the boards' batteries really hold, and what their gauges show."""

    def __init__(self, settings: SolarSettings, idle_w: np.ndarray, sun: Sun) -> None:
        count = len(idle_w)
        self._settings, self._idle_w, self._sun = settings, idle_w, sun
        self._rng = np.random.default_rng([settings.seed, 5])
        self.energy_j = settings.battery_j * self._rng.uniform(0.5, 1.0, count)
        self._silent_until_s = np.zeros(count)
        self._ran_dry = np.zeros(count, dtype=np.bool_)
        self._now_s = 0.0
        self.draws: list[tuple[int, float, float, float]] = []

    def advance(self, until_s: float, report: SolarReport) -> None:
        """Let time pass, with the draws that were noted."""
        capacity_j, reserve_j = self._settings.battery_j, self._settings.reserve_share * self._settings.battery_j
        while self._now_s < until_s:
            seconds = min(_STEP_S, until_s - self._now_s)
            end_s = self._now_s + seconds
            watts = self._settings.panel_w * self._sun(_BEGINS + timedelta(seconds=self._now_s)) / _WATTS_PER_SUN
            drawn_j = self._idle_w * seconds
            for k, begin_s, ends_s, extra_w in self.draws:
                drawn_j[k] += extra_w * max(0.0, min(end_s, ends_s) - max(self._now_s, begin_s))
            self.draws = [draw for draw in self.draws if draw[2] > end_s]
            charged_j = np.minimum(watts * seconds, np.maximum(0.0, capacity_j - self.energy_j + drawn_j))
            report.harvested_j += float(charged_j.sum())
            self.energy_j = np.clip(self.energy_j + charged_j - drawn_j, 0.0, capacity_j)
            self._ran_dry |= self.energy_j <= 0
            report.ran_dry = int(self._ran_dry.sum())
            report.lowest_share = min(report.lowest_share, float(self.energy_j.min()) / capacity_j)
            report.touched_h += float((self.energy_j < reserve_j).sum()) * seconds / _HOUR_S
            self._now_s = end_s

    def readings(self) -> list[float | None]:
        """What the gauges show, shares of the capacity; None of a gauge that has failed."""
        fails = self._rng.random(len(self.energy_j)) < _GAUGE_FAILURES_PER_DAY * self._settings.every_s / 86_400
        self._silent_until_s[fails] = self._now_s + _GAUGE_FAILS_S
        shares = np.floor(self.energy_j / self._settings.battery_j / _GAUGE_STEP) * _GAUGE_STEP
        is_silent = self._silent_until_s > self._now_s
        return [None if silent else float(share) for silent, share in zip(is_silent, shares, strict=True)]


# --- Month ------------------------------------------------------------------------------------------------------------


class _SolarPlanner(CoordinatorPlanner):
    """Plans for boards that draw from batteries."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.drawn: list[tuple[LargeFleetDevice, tuple[float, float, float]]] = []
        self._energy: dict[str, tuple[float, float]] = {}

    def _note_draw(
        self, device: LargeFleetDevice, spans: Sequence[WorkSpan], kind: str, begin_s: float, until_s: float
    ) -> float:
        end_s = super()._note_draw(device, spans, kind, begin_s, until_s)
        energy_j, lasted_s = sum(span.energy_j for span in spans), end_s - begin_s
        if lasted_s > 0:
            self._energy[device.device_id] = energy_j, lasted_s
            self.drawn.append((device, (begin_s, end_s, energy_j / lasted_s - device.idle_w)))
        return end_s

    def _ended(self, training: PlannedTraining, observed: tuple[float, float] | None) -> None:
        super()._ended(training, observed)
        device_id = training.device.device_id
        self._fleet.report_energy(device_id, training.plan_id, *self._energy[device_id])

    def read_batteries(self, shares: Sequence[float | None]) -> None:
        """Report what the gauges of all boards show."""
        for device_id, share in zip(self.devices, shares, strict=True):
            self._fleet.report_sample(device_id, BoardSample(battery_share=share))

    def reasons(self, plan_id: str) -> Counter[str]:
        """Why devices were not selected, without their figures, and how often."""
        decisions = self._fleet.rounds.get(plan_id).plan.decisions
        return Counter(each.reason.partition(":")[0] for each in decisions if not each.selected)


def simulate_solar(
    settings: SolarSettings,
    sun: Sun,
    clear: Sun,
    policy: Policy,
    reference: Artefact,
    on_day: Callable[[int, SolarReport], None] = lambda day, report: None,
) -> SolarReport:
    """Simulate boards with batteries and panels.

    Args:
        settings: the boards, their batteries and panels.
        sun: the true irradiance.
        clear: the irradiance of a clear sky, of which the forecast is a share.
        policy: the client-selection policy.
        reference: the predictor to transfer from.
        on_day: called after each day.
    """
    devices = open_devices(settings.kinds, settings.seed)
    rated_w = settings.panel_w * settings.harvest_share / _WATTS_PER_SUN
    hours = [_BEGINS.replace(minute=0) + timedelta(hours=k) for k in range(24 * (settings.days + 4))]
    forecast = DatedHarvest(tuple(hours), tuple(rated_w * max(0.0, clear(each)) for each in hours))
    battery = Battery(settings.battery_j, settings.reserve_share, forecast, parked_s=24 * _HOUR_S)
    placed = PlacedBattery("boards", battery, "agent", devices=("*",))
    batteries = [placed] if settings.knows_batteries else []
    budget_w = MAX_POWER_W * len(devices) if settings.site_budget_w is None else settings.site_budget_w
    planner = _SolarPlanner(
        devices, settings.seed, policy, budget_w, reference, 20, batteries=batteries, begins=_BEGINS
    )
    report = SolarReport()
    true = _TrueBatteries(settings, np.array([each.idle_w for each in devices.values()]), sun)
    place = {device_id: k for k, device_id in enumerate(devices)}
    loader = ClientReport(settings.minibatches, _BATCH, 0, settings.minibatches)
    planner.StartRun(
        planning_pb2.StartRunRequest(run_id=_RUN, strategy="FedAvg", workload=workload_to_message(Workload("images")))
    )
    for device in devices.values():
        device.report = loader
    nodes, number, day, end_s = [each.node_id for each in devices.values()], 1, 0, settings.days * 86_400.0
    while (now_s := planner.clock.now_s()) < end_s:
        true.draws += [(place[each.device_id], *draw) for each, draw in planner.drawn]
        planner.drawn.clear()
        true.advance(now_s, report)
        planner.read_batteries(true.readings())
        if now_s // 86_400 > day:
            day = int(now_s // 86_400)
            on_day(day, report)
        next_s = now_s + settings.every_s
        try:
            plan = planner._planround(  # noqa: SLF001 - its errors say why no round can be planned
                planning_pb2.PlanRoundRequest(run_id=_RUN, round=number, node_ids=nodes, epochs=1.0)
            )
        except (NoDevicesError, NoCandidatesError, EnergySpentError):
            report.waited += 1
        else:
            ends_s = [
                planner.train(training, loader, None, failed=False)
                for (plan_id, _), training in list(planner.planned.items())
                if plan_id == plan.plan_id
            ]
            report.rounds += 1
            report.trainings += len(ends_s)
            report.reasons += planner.reasons(plan.plan_id)
            report.training_j += sum(extra_w * (ended_s - begun_s) for _, (begun_s, ended_s, extra_w) in planner.drawn)
            planner.clock.sleep_s(max(ends_s) - now_s)
            planner.FinishRound(planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=max(ends_s) - now_s))
            number += 1
        planner.clock.sleep_s(max(0.0, next_s - planner.clock.now_s()))
    true.draws += [(place[each.device_id], *draw) for each, draw in planner.drawn]
    true.advance(end_s, report)
    return report


# --- Command ----------------------------------------------------------------------------------------------------------

TYPICAL = "typical"
"""The value of `--sun` for the typical year that pvlib ships."""


def suns(text: str, days: int) -> tuple[Sun, Sun]:
    """The true sun of `--sun`, and the clear sky of the same place.

    Raises:
        InvalidInputError: the text is neither a place nor `typical`, or pvlib is not installed.
    """
    begins = _BEGINS.replace(hour=0)
    if text == TYPICAL:
        year = typical_year()
        return year.sun, clear_sky(year.latitude, year.longitude, begins, days + 6)
    try:
        latitude, longitude = map(float, text.split(","))
        if not (abs(latitude) <= 90 and abs(longitude) <= 180):
            raise ValueError
    except ValueError:
        raise InvalidInputError(
            f"--sun {text!r} is no place: write latitude,longitude in degrees, such as 52.5,13.4, or {TYPICAL}"
        ) from None
    clear = clear_sky(latitude, longitude, begins, days + 6)
    return clear, clear


def simulate_sun(settings: SolarSettings, sun: str, policy: Policy, reference: Artefact, as_json: bool) -> None:
    """Simulate boards with batteries and panels, and print what was found.

    Raises:
        InvalidInputError: an option is not valid, or pvlib is not installed.
    """
    true, clear = suns(sun, settings.days)

    def on_day(day: int, report: SolarReport) -> None:
        if not as_json:
            print(
                f"day {day}: {report.rounds:,} rounds, {report.trainings:,} trainings, lowest charge"
                f" {report.lowest_share:.0%}",
                flush=True,
            )

    report = simulate_solar(settings, true, clear, policy, reference, on_day)
    if as_json:
        print(json.dumps({"provenance": "simulated", **asdict(settings), "sun": sun, **asdict(report)}, indent=2))
        return
    boards = sum(settings.kinds.values())
    print(
        f"{count_of(boards, 'board')} for {count_of(settings.days, 'day')} (simulated): {report.rounds:,} rounds and"
        f" {report.trainings:,} trainings with {energy_text(report.training_j)} above idle;"
        f" {energy_text(report.harvested_j)} harvested"
    )
    print(f"no round could be planned {report.waited:,} times; devices were left out as follows:")
    for reason, times in report.reasons.most_common():
        print(f"  {times:,} x {reason}")
    touched = f"{report.touched_h:,.0f} board-hours below it" if report.touched_h else "never touched"
    print(f"reserve of {settings.reserve_share:.0%}: {touched}; lowest charge {report.lowest_share:.1%}")
