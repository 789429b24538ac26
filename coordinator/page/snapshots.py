"""The fleet as the page shows it: one snapshot for all viewers, taken at most once a second."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
import traceback
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from coordinator.display.values import (
    RunEnergy,
    battery_values,
    budget_values,
    run_energy,
    run_totals,
    run_values,
    tagged_device_values,
)
from coordinator.display.words import Values, as_tree
from coordinator.errors import UnknownRecordError
from coordinator.page.plots import drawn
from coordinator.page.queries import Queries
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet_proto.v1 import operator_pb2, view_pb2

_log = logging.getLogger(__name__)


# --- Failures ---------------------------------------------------------------------------------------------------------
# Error answers of the page: in its own layout, or as JSON if a script sent the request.


_ASKED_BY_SCRIPTS = ("/watts.json", "/updates")


class UnexpectedErrors:
    """Answers unexpected errors: the log gets the traceback, and the viewer an id to find it."""

    def __init__(self, app: ASGIApp) -> None:
        """Guard an application.

        Args:
            app: the application.
        """
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        has_started = False

        async def noting(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            if scope["type"] != "http" or has_started:
                raise
            error_id = noted(error, scope["path"])
            await (await _unexpected(Request(scope, receive), error_id))(scope, receive, send)


def noted(error: Exception, what: str) -> str:
    """Log an unexpected error.

    Args:
        error: the error.
        what: the part of the page that cannot be shown.

    Returns:
        The id in the log line.
    """
    error_id = secrets.token_hex(4)
    _log.error("error %s: the page cannot show %r", error_id, what, exc_info=error)
    return error_id


def unexpected_text(error_id: str) -> str:
    """The text about an unexpected error for a viewer.

    Args:
        error_id: the id in its log line.
    """
    return f"Look for error {error_id} in the coordinator's log."


async def _unexpected(request: Request, error_id: str) -> Response:
    return await _answer(request, "The coordinator could not show this", unexpected_text(error_id), 500)


async def _unknown(request: Request, error: Exception) -> Response:
    return await _answer(request, "Not found", str(error), 404)


async def _invalid(request: Request, error: Exception) -> Response:
    return await _answer(request, "Invalid request", str(error), 400)


async def _failed(request: Request, error: Exception) -> Response:
    return await _answer(request, "The coordinator cannot answer now", str(error), 503)


async def _no_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return await _answer(request, "Not found", "There is no such page: choose one above.", 404)
    if error.status_code == 405:
        text = "The page only reads: change the fleet with the commands of wattfleet coordinator."
        return await _answer(request, "Invalid request", text, 405)
    return await _answer(request, "Invalid request", error.detail, error.status_code)


async def _answer(request: Request, title: str, text: str, status: int) -> Response:
    if request.url.path in _ASKED_BY_SCRIPTS:
        return JSONResponse({"error": title, "detail": text}, status_code=status)
    return await drawn(request, "error.html", {"title": title, "text": text}, status=status)


EXPECTED: dict[type[Exception], ExceptionHandler] = {
    UnknownRecordError: _unknown,
    InvalidInputError: _invalid,
    WattfleetError: _failed,
    HTTPException: _no_page,
}
"""The handlers of errors that are not faults of the page."""


# --- Run costs --------------------------------------------------------------------------------------------------------
# The totals of runs; those of ended runs are cached, so that their rounds are read only once.

_KEPT_RUNS = 1_000

_LATE_S = 10.0
"""How long the totals of an ended run are shown while observations are missing, which may still arrive."""

Totals = TypeVar("Totals")


class OfRuns(Generic[Totals]):
    """Totals of runs."""

    def __init__(
        self,
        read: Callable[[view_pb2.RunView], Awaitable[Totals]],
        is_complete: Callable[[Totals], bool],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without any run.

        Args:
            read: reads the totals of a run.
            is_complete: whether all trainings were observed.
            now_s: a clock, in seconds.
        """
        self._read, self._is_complete, self._now_s = read, is_complete, now_s
        self._ended: OrderedDict[tuple[str, float | None], tuple[float, Totals]] = OrderedDict()

    async def of(self, run: view_pb2.RunView) -> Totals:
        """The totals of a run.

        Raises:
            UnknownRecordError: the run was deleted.
        """
        key = (run.run_id, run.finished_unix_s if run.HasField("finished_unix_s") else None)
        if run.finished and (known := self._ended.get(key)) is not None:
            read_s, totals = known
            if self._is_complete(totals) or self._now_s() - read_s < _LATE_S:
                return totals
        found = await self._read(run)
        if run.finished:
            self._ended[key] = (self._now_s(), found)
            if len(self._ended) > _KEPT_RUNS:
                self._ended.popitem(last=False)
        return found


class RunCosts(OfRuns[Values]):
    """The values of runs with their totals."""

    def __init__(self, queries: Queries, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start without any run.

        Args:
            queries: read the fleet.
            now_s: a clock, in seconds.
        """

        async def read(run: view_pb2.RunView) -> Values:
            return run_totals(run, await queries.rounds(run.run_id))

        super().__init__(read, lambda found: found["observed_trainings"] >= found["trainings"], now_s)


class RunEnergies(OfRuns[RunEnergy]):
    """The energy of runs by month and device."""

    def __init__(self, queries: Queries) -> None:
        """Start without any run.

        Args:
            queries: read the fleet.
        """

        async def read(run: view_pb2.RunView) -> RunEnergy:
            return await asyncio.to_thread(run_energy, await queries.rounds(run.run_id, with_devices=True))

        super().__init__(read, lambda found: all(seen >= trainings for _, seen, trainings in found.values()))


# --- Snapshots --------------------------------------------------------------------------------------------------------

_WATCHED_S = 1.0
_UNWATCHED_S = 5.0
_STALE_S = 1.5
_OLD_S = 30.0
"""A snapshot that is older, because nobody watched, is never shown."""

_MAX_SHARE = 0.1
"""The share of time that snapshots may take: after one of a large fleet that took a second, ten seconds pass."""

_KEPT_SAMPLES = 900

WHOLE_FLEET = ""
"""Stands for all supplies, where the name of one is expected."""

_LIVE = ("sample", "profiling_left_s")
_LIVE_S = 5.0
"""Seconds between two updates of pages for values that always change."""


@dataclass(frozen=True)
class Watts:
    """The watts of a supply, or of the whole fleet, at one time.

    Attributes:
        at_unix_s: the time, seconds since 1970.
        budget_w: the budget.
        set_aside_w: the watts reserved for trainings and idle devices.
        drawn_w: the watts that the devices draw; for a board without a reading, the watts of its last training while it
            trains, or else its idle watts.
    """

    at_unix_s: float
    budget_w: float
    set_aside_w: float
    drawn_w: float


class WattsHistory:
    """The watts of every supply over the last minutes; only numbers are kept, since there may be many supplies."""

    def __init__(self) -> None:
        """Start without any sample."""
        self._samples: deque[tuple[float, tuple[str, ...], array[float]]] = deque(maxlen=_KEPT_SAMPLES)

    def add(self, at_unix_s: float, watts: Mapping[str, Watts]) -> None:
        """Add a sample of every supply."""
        numbers = array("d", [n for each in watts.values() for n in (each.budget_w, each.set_aside_w, each.drawn_w)])
        self._samples.append((at_unix_s, tuple(watts), numbers))

    def of(self, supply: str) -> list[Watts]:
        """The samples of one supply, or of `WHOLE_FLEET`, oldest first."""
        found = []
        for at_unix_s, names, numbers in self._samples:
            if supply in names:
                begin = 3 * names.index(supply)
                found.append(Watts(at_unix_s, *numbers[begin : begin + 3]))
        return found


@dataclass(frozen=True)
class Snapshot:
    """The fleet's values that the page shows.

    Attributes:
        at_unix_s: when it was taken, seconds since 1970.
        devices: the values of all devices, by id.
        runs: the values of all runs, oldest first.
        supplies: the budgets in force and the watts of all supplies, each after the one that feeds it.
        watts: the watts of each supply, and of `WHOLE_FLEET`.
        policy: name of the client-selection policy.
        batteries: the batteries of supplies, and of devices.
        version: changes with what pages show.
    """

    at_unix_s: float
    devices: Sequence[Values]
    runs: Sequence[Values]
    supplies: Sequence[Values]
    watts: Mapping[str, Watts]
    policy: str
    batteries: Sequence[Values]
    version: str

    @property
    def states(self) -> Counter[str]:
        """The number of devices in each state."""
        return Counter(each["state"] for each in self.devices)


@dataclass
class Snapshots:
    """Takes snapshots while `keep` runs and somebody watches. Otherwise it only records the watts of all supplies.

    A snapshot of thousands of devices costs the coordinator's loop tens of milliseconds, so nobody pays for one that is
    not looked at.

    Attributes:
        queries: read the fleet.
        run_costs: the totals of runs.
        run_energies: their energy by month and device.
        history: the watts of the last minutes.
        viewers: the number of open streams of updates.
        failure: why the newest snapshot is out of date; None if it is not.
    """

    queries: Queries
    history: WattsHistory = field(default_factory=WattsHistory)
    viewers: int = 0
    failure: str | None = None
    run_costs: RunCosts = field(init=False)
    run_energies: RunEnergies = field(init=False)
    _newest: Snapshot | None = None
    _failed_at: tuple[type[Exception], str, int] | None = None
    _taken: asyncio.Condition = field(default_factory=asyncio.Condition)
    _watched: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.run_costs = RunCosts(self.queries)
        self.run_energies = RunEnergies(self.queries)

    async def keep(self) -> None:
        """Take snapshots until cancelled."""
        while True:
            began_s = time.monotonic()
            is_watched = self.viewers or self._watched.is_set() or self._newest is None
            self._watched.clear()  # requests from now on need the next snapshot
            try:
                await (self._take() if is_watched else self._record_watts())
            except Exception as error:
                await self._note(error)
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(_WATCHED_S, took_s / _MAX_SHARE))
            if not self.viewers:
                try:
                    await asyncio.wait_for(self._watched.wait(), max(_UNWATCHED_S - _WATCHED_S, took_s / _MAX_SHARE))
                except (TimeoutError, asyncio.TimeoutError):
                    pass

    async def newest(self) -> Snapshot:
        """The newest snapshot; waits for the first one. Also wakes `keep`, because the caller is about to watch.

        Raises:
            WattfleetError: there is no snapshot; the message states the reason.
        """
        self._watched.set()
        async with self._taken:
            await self._taken.wait_for(lambda: self._newest is not None or self.failure is not None)
        if self._newest is None:
            raise WattfleetError(self.failure)
        age_s = time.time() - (old := self._newest).at_unix_s
        if age_s > _OLD_S:
            async with self._taken:
                await self._taken.wait_for(lambda: self._newest is not old or self.failure is not None)
        elif age_s > _STALE_S:
            with suppress(TimeoutError, asyncio.TimeoutError):  # for a large fleet, the stale one has to suffice
                return await asyncio.wait_for(self.after(self._newest), _STALE_S)
        return self._newest

    async def after(self, snapshot: Snapshot | None) -> Snapshot:
        """Wait for the next snapshot after the given one."""
        self._watched.set()
        async with self._taken:
            await self._taken.wait_for(lambda: self._newest is not None and self._newest is not snapshot)
        assert self._newest is not None
        return self._newest

    async def _take(self) -> None:
        devices, runs = await self.queries.devices(), await self.queries.runs()
        budgets, fleet = await self.queries.budgets(), await self.queries.fleet()
        batteries = await self.queries.batteries()
        taken = await asyncio.to_thread(_snapshot, devices, runs, budgets, fleet, batteries)
        self.history.add(taken.at_unix_s, taken.watts)
        async with self._taken:
            self._newest, self._failed_at, self.failure = taken, None, None
            self._taken.notify_all()

    async def _record_watts(self) -> None:
        now = time.time()
        budgets = await self.queries.budgets()
        self.history.add(now, _watts_of(as_tree(map(budget_values, budgets)), now))
        self.failure = None

    async def _note(self, error: Exception) -> None:
        """Report to viewers that snapshots fail, and log each failing place once."""
        failed_at, before = _place_of(error), self._failed_at
        async with self._taken:
            if isinstance(error, WattfleetError):
                self.failure = str(error)
                if failed_at != before:
                    _log.warning("the page cannot be brought up to date: %s", error)
            elif failed_at != before:
                self.failure = unexpected_text(noted(error, "the fleet"))
            self._failed_at = failed_at
            self._taken.notify_all()


def _place_of(error: Exception) -> tuple[type[Exception], str, int]:
    """An error's type, file and line, because its text may vary each time, for example with a count or an address."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return type(error), frame.f_code.co_filename, line


def _snapshot(
    devices: Sequence[view_pb2.DeviceView],
    runs: Sequence[view_pb2.RunView],
    budgets: Sequence[operator_pb2.SupplyBudget],
    fleet: view_pb2.GetFleetResponse,
    batteries: Sequence[operator_pb2.Battery],
) -> Snapshot:
    now = time.time()
    values, run_list = [tagged_device_values(each) for each in devices], [run_values(each) for each in runs]
    supplies = as_tree(map(budget_values, budgets))
    fixed = [{**each, "drawn_w": None, "measured_devices": None} for each in supplies]
    held = list(map(battery_values, batteries))
    moving = dict.fromkeys(("energy_j", "spare_j", "harvest_w", "measured", "measured_share"))
    fixed += [{**each, **moving, "share": round(each["share"], 2)} for each in held]
    others = {"policy": fleet.policy, "events": fleet.event_count}
    return Snapshot(
        now,
        values,
        run_list,
        supplies,
        _watts_of(supplies, now),
        fleet.policy,
        held,
        _version_of(values, run_list, fixed, [others], at_unix_s=now),
    )


def _watts_of(supplies: Sequence[Values], at_unix_s: float) -> dict[str, Watts]:
    """The watts of each supply, and of all sites together."""
    found = {each["supply"]: Watts(at_unix_s, each["watts"], each["set_aside_w"], each["drawn_w"]) for each in supplies}
    sites = [found[each["supply"]] for each in supplies if each["parent"] is None]
    budget_w, set_aside_w, drawn_w = (
        sum(getattr(each, name) for each in sites) for name in ("budget_w", "set_aside_w", "drawn_w")
    )
    return {WHOLE_FLEET: Watts(at_unix_s, budget_w, set_aside_w, drawn_w), **found}


def _version_of(devices: Sequence[Values], *others: Sequence[Values], at_unix_s: float) -> str:
    """A short text that changes with any value; values that always change count only every `_LIVE_S` seconds."""
    digest = hashlib.blake2b(digest_size=8)
    is_live = False
    for device in devices:  # one at a time, because other threads wait while JSON is written
        is_live = is_live or any(device[name] is not None for name in _LIVE)
        digest.update(json.dumps({**device, **dict.fromkeys(_LIVE)}, default=str).encode())
    for each in chain(*others):
        digest.update(json.dumps(each, default=str).encode())
    return f"{digest.hexdigest()}-{at_unix_s // _LIVE_S:.0f}" if is_live else digest.hexdigest()
