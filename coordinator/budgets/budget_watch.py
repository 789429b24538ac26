"""Keeps track of the budget in force at every supply: queries its source, and checks schedules against the clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType

from coordinator.budgets.prometheus_budget import NameLookups, PrometheusBudget, fetch
from coordinator.budgets.site_file import AnyBudget
from coordinator.clocks import Moment, jump_s, jump_text
from coordinator.errors import BudgetSourceError, UnknownRecordError
from coordinator.settings import SiteSettings
from wattfleet.common.clock import utc_now
from wattfleet.common.tasks import background_task, stop_tasks
from wattfleet.core.budgets import InForce, Override, Reading

_log = logging.getLogger(__name__)

_THIS_BOOT = "this one"

CHECK_S = 1.0
"""Time between two checks for a changed schedule or a stale reading, s."""


@dataclass(frozen=True)
class BudgetStatus:
    """The status of a supply's budget.

    Attributes:
        in_force: the watts, and where they come from.
        since: since when they are in force.
        override: what the operator has set; None if the budget's own source is in force.
    """

    in_force: InForce
    since: datetime
    override: Override | None


@dataclass(frozen=True)
class BudgetChange:
    """A change of the budget in force at a supply.

    Attributes:
        supply: the supply.
        before: what was in force; None at the start.
        after: what is in force now.
        until: when the operator's override ends; None without an end, and without an override.
        caller: the operator who has caused the change; empty if nobody did.
    """

    supply: str
    before: InForce | None
    after: InForce
    until: datetime | None = None
    caller: str = ""


class BudgetWatch:
    """The watts in force at every supply, from `start` to `stop`.

    If a query fails, the last reading stays in force until it is stale, then the fallback. No error of a source ends
    the watch. The log has one line per change of the reason, not one per query.
    """

    def __init__(
        self,
        budgets: Mapping[str, AnyBudget],
        on_change: Callable[[str, InForce], None],
        now: Callable[[], datetime] = utc_now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        query: Callable[[PrometheusBudget], Awaitable[Reading]] | None = None,
        overrides: Mapping[str, Override] | None = None,
        settings: SiteSettings = SiteSettings(),
        since_boot_s: Callable[[], float] | None = None,
        is_clock_doubtful: bool = False,
        on_event: Callable[[BudgetChange], None] = lambda change: None,
    ) -> None:
        """Watch budgets.

        Args:
            budgets: by name of the supply.
            on_change: called in the event loop with a supply and what is now in force there; `start` calls it for every
                supply.
            now: the date and time, with an offset.
            sleep: waits for some seconds.
            query: runs a query once; returns or fails within some seconds. None for `fetch`.
            overrides: what the operator has set before; overrides of unknown supplies are dropped.
            settings: the timeout of a query.
            since_boot_s: seconds since the machine started; None if `now` cannot jump.
            is_clock_doubtful: `overrides` may have ended long ago: they may lower watts, but not raise them.
            on_event: called after `on_change` with the same change.
        """
        self._budgets = dict(budgets)
        self._on_change = on_change
        self._on_event = on_event
        self._now = now
        self._sleep = sleep
        self._query_once = query or partial(fetch, timeout_s=settings.query_timeout_s, names=NameLookups())
        self._readings: dict[str, Reading] = {}
        self._errors: dict[str, BudgetSourceError] = {}
        self._in_force: dict[str, InForce] = {}
        self._since: dict[str, datetime] = {}
        self._overrides = {name: each for name, each in (overrides or {}).items() if name in self._budgets}
        self._doubtful = set(self._overrides) if is_clock_doubtful else set()
        self._since_boot_s = since_boot_s
        self._newest = self._moment()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def in_force(self) -> Mapping[str, InForce]:
        """What is in force now, by name of the supply; complete once `start` has returned."""
        return MappingProxyType(self._in_force)

    @property
    def now(self) -> datetime:
        """The date and time."""
        return self._now()

    def status(self, name: str) -> BudgetStatus:
        """The status of a supply's budget, once `start` has returned.

        Raises:
            UnknownRecordError: no such supply.
        """
        self._require(name)
        return BudgetStatus(self._in_force[name], self._since[name], self._overrides.get(name))

    def override(self, name: str, override: Override | None, caller: str = "") -> BudgetStatus:
        """Put the operator's watts in force at once, in place of a supply's source; None clears the override.

        Args:
            name: the supply.
            override: the watts.
            caller: the operator.

        Raises:
            UnknownRecordError: no such supply.
        """
        self._require(name)
        self._follow_clock()
        self._doubtful.discard(name)
        if override is None:
            self._overrides.pop(name, None)
        else:
            self._overrides[name] = override
        self._update(name, caller)
        return self.status(name)

    def _require(self, name: str) -> None:
        if name not in self._budgets:
            raise UnknownRecordError(f"unknown supply {name!r}; known: {', '.join(self._budgets)}")

    async def start(self) -> None:
        """Run every query once, call `on_change` for every supply, and continue in the background.

        If a source is unavailable or has no recent samples, its fallback is in force: after a power cut the coordinator
        may start before its sources. A query that must be changed is an error.

        Raises:
            AmbiguousQueryError: a query returns several series.
            UnsuitableQueryError: Prometheus rejects a query, or it cannot return watts.
        """
        queries = {name: budget for name, budget in self._budgets.items() if isinstance(budget, PrometheusBudget)}
        await asyncio.gather(*(self._query_safely(name, budget) for name, budget in queries.items()))
        for name, error in self._errors.items():
            if error.caller_must_correct:
                raise type(error)(f"supply {name!r}: {error}")
        for name in self._budgets:
            self._update(name)
        self._tasks = [background_task("check budgets", self._check_clock())]
        self._tasks += [
            background_task(f"query the budget of {name}", self._query_forever(name, budget))
            for name, budget in queries.items()
        ]

    async def stop(self) -> None:
        """End the watch; what is in force can still be read."""
        await stop_tasks(*self._tasks)
        self._tasks = []

    async def _check_clock(self) -> None:
        """Check all supplies periodically."""
        while True:
            await self._sleep(CHECK_S)
            for name in self._budgets:
                self._update_safely(name)

    async def _query_forever(self, name: str, budget: PrometheusBudget) -> None:
        """Run one query periodically; a query that hangs does not delay the others."""
        while True:
            await self._sleep(budget.every_s)
            await self._query_safely(name, budget)
            self._update_safely(name)

    async def _query_safely(self, name: str, budget: PrometheusBudget) -> None:
        try:
            await self._query(name, budget)
        except Exception:
            # The boundary of the watch: a bug in one supply must not freeze the budgets of all, nor end the start.
            _log.exception("supply %s: unexpected error in its query", name)

    async def _query(self, name: str, budget: PrometheusBudget) -> None:
        """Run one query once, and keep its reading or its error."""
        try:
            self._readings[name] = await self._query_once(budget)
        except BudgetSourceError as error:
            # Log once per kind of error: the texts contain figures that differ from query to query.
            if type(error) is not type(self._errors.get(name)):
                self._errors[name] = error
                _log.warning("supply %s: %s", name, error)
        else:
            if self._errors.pop(name, None):
                _log.info("supply %s: its query returns watts again", name)

    def _update_safely(self, name: str) -> None:
        try:
            self._update(name)
        except Exception:
            # The boundary of the watch, as above; the budget is updated before `on_change` is called.
            _log.exception("supply %s: its budget could not be put in force", name)

    def _update(self, name: str, caller: str = "") -> None:
        """Update what is in force at a supply, and call `on_change` if that has changed."""
        self._follow_clock()
        before, now = self._in_force.get(name), self._now()
        current = self._from_override(name, now)
        if current is None:
            current = self._from_source(name, now)
        elif name in self._doubtful:
            current = min(current, self._from_source(name, now), key=lambda each: each.watts)
        if current == before:
            return
        self._in_force[name] = current
        self._since[name] = now
        if before is None or current.reason != before.reason:
            level = logging.WARNING if current.fallback else logging.INFO
            unit = "W (fallback)" if current.fallback else "W"
            _log.log(level, "supply %s: %g %s in force: %s", name, current.watts, unit, current.reason)
        self._on_change(name, current)
        override = self._overrides.get(name)
        until = None if override is None else override.until
        self._on_event(BudgetChange(name, before, current, until, caller))

    def _from_override(self, name: str, now: datetime) -> InForce | None:
        """The operator's override; None if there is none, or it has expired."""
        override = self._overrides.get(name)
        if override is None:
            return None
        current = override.in_force(now)
        if current is None:
            del self._overrides[name]
            ended = "" if override.until is None else override.until.isoformat(timespec="seconds")
            _log.info("supply %s: the override of %g W ended at %s", name, override.watts, ended)
        return current

    def _moment(self) -> Moment | None:
        if self._since_boot_s is None:
            return None
        return Moment(self._now(), _THIS_BOOT, self._since_boot_s())

    def _follow_clock(self) -> None:
        """If the date has jumped, move the ends of overrides with it; the store does the same with its records."""
        before, self._newest = self._newest, self._moment()
        if before is None or self._newest is None:
            return
        jumped_s = jump_s(before, self._newest, 0.0)
        if not jumped_s:
            return
        _log.warning("the clock was %s: overrides keep their remaining time", jump_text(jumped_s))
        for name, override in self._overrides.items():
            if override.until is not None:
                self._overrides[name] = replace(override, until=override.until + timedelta(seconds=jumped_s))

    def _from_source(self, name: str, now: datetime) -> InForce:
        """The budget of a supply's own source."""
        budget = self._budgets[name]
        if isinstance(budget, PrometheusBudget):
            error = str(self._errors.get(name, ""))
            return budget.rule.in_force(now, self._readings.get(name), error)
        return budget.in_force(now)
