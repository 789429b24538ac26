"""Keeps the budget of every supply that is in force: asks what has to be asked, and looks at the clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from types import MappingProxyType

from coordinator.budgets.prometheus_budget import PrometheusBudget, fetch
from coordinator.budgets.site_file import AnyBudget
from coordinator.errors import BudgetSourceError, UnknownRecordError
from coordinator.settings import SiteSettings
from wattfleet.budgets import InForce, Override, Reading

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Standing:
    """How a supply's budget stands.

    Attributes:
        in_force: the watts, and why it is these.
        since: since when they are, or were first looked at.
        override: what the operator has set; None where the budget's own source counts.
    """

    in_force: InForce
    since: datetime
    override: Override | None


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


class BudgetWatch:
    """The watts in force of every supply, from `start` to `stop`.

    A query that fails leaves the last reading in force until it is stale, then the fallback; nothing that a source does
    ends the watch. The log says each time why watts are in force once, not at every question.
    """

    def __init__(
        self,
        budgets: Mapping[str, AnyBudget],
        on_change: Callable[[str, InForce], None],
        now: Callable[[], datetime] = _utc_now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        ask: Callable[[PrometheusBudget], Awaitable[Reading]] = fetch,
        overrides: Mapping[str, Override] | None = None,
        settings: SiteSettings = SiteSettings(),
    ) -> None:
        """Watch budgets.

        Args:
            budgets: by name of the supply.
            on_change: called with a supply and what is now in force there, in the event loop; first by `start`, for
                every supply.
            now: the date and time, with an offset.
            sleep: lets seconds pass.
            ask: asks a query once; it answers or fails within some seconds.
            overrides: what the operator has set before; what is set for no supply of these is let go.
            settings: the time between two looks at the clock.
        """
        self._budgets = dict(budgets)
        self._on_change = on_change
        self._now = now
        self._sleep = sleep
        self._check_s = settings.budget_check_s
        self._ask = ask
        self._readings: dict[str, Reading] = {}
        self._troubles: dict[str, BudgetSourceError] = {}
        self._in_force: dict[str, InForce] = {}
        self._since: dict[str, datetime] = {}
        self._overrides = {name: each for name, each in (overrides or {}).items() if name in self._budgets}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def in_force(self) -> Mapping[str, InForce]:
        """What is in force now, by name of the supply; all of them once `start` is back."""
        return MappingProxyType(self._in_force)

    @property
    def now(self) -> datetime:
        """The date and time."""
        return self._now()

    def standing(self, name: str) -> Standing:
        """How a supply's budget stands, once `start` is back.

        Raises:
            UnknownRecordError: no such supply.
        """
        self._require(name)
        return Standing(self._in_force[name], self._since[name], self._overrides.get(name))

    def override(self, name: str, override: Override | None) -> Standing:
        """Put the operator's watts in force at once, in place of a supply's source; None gives it back.

        Raises:
            UnknownRecordError: no such supply.
        """
        self._require(name)
        if override is None:
            self._overrides.pop(name, None)
        else:
            self._overrides[name] = override
        self._look(name)
        return self.standing(name)

    def _require(self, name: str) -> None:
        if name not in self._budgets:
            raise UnknownRecordError(f"no supply {name!r} is stated; known are {', '.join(self._budgets)}")

    async def start(self) -> None:
        """Ask every query once, call `on_change` for every supply, and go on in the background.

        A source that is away, or has measured nothing lately, leaves its fallback in force: after a power cut the
        coordinator may well be up before what it asks. A query that has to be changed is an error.

        Raises:
            AmbiguousQueryError: a query answers many series.
            UnsuitableQueryError: Prometheus refuses a query, or it cannot answer watts.
        """
        queries = {name: budget for name, budget in self._budgets.items() if isinstance(budget, PrometheusBudget)}
        await asyncio.gather(*(self._query(name, budget) for name, budget in queries.items()))
        for name, trouble in self._troubles.items():
            if trouble.caller_must_correct:
                raise type(trouble)(f"supply {name!r}: {trouble}")
        for name in self._budgets:
            self._look(name)
        self._tasks = [asyncio.create_task(self._look_on())]
        self._tasks += [asyncio.create_task(self._query_on(name, budget)) for name, budget in queries.items()]

    async def stop(self) -> None:
        """End the watch; what is in force stays to be read."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _look_on(self) -> None:
        """Look at the clock for ever."""
        while True:
            await self._sleep(self._check_s)
            for name in self._budgets:
                self._look_safely(name)

    async def _query_on(self, name: str, budget: PrometheusBudget) -> None:
        """Ask one query for ever; one that hangs keeps no other from being asked."""
        while True:
            await self._sleep(budget.every_s)
            try:
                await self._query(name, budget)
            except Exception:
                # The boundary of the watch: one supply's bug must not freeze the watts of all.
                _log.exception("supply %s: its query failed in an unexpected way", name)
            self._look_safely(name)

    async def _query(self, name: str, budget: PrometheusBudget) -> None:
        """Ask one query once, and note what came of it."""
        try:
            self._readings[name] = await self._ask(budget)
        except BudgetSourceError as error:
            # Texts hold figures that differ from time to time; the kind of trouble is what a log needs once.
            if type(error) is not type(self._troubles.get(name)):
                self._troubles[name] = error
                _log.warning("supply %s: %s", name, error)
        else:
            if self._troubles.pop(name, None):
                _log.info("supply %s: its query answers watts again", name)

    def _look_safely(self, name: str) -> None:
        try:
            self._look(name)
        except Exception:
            # The boundary of the watch, as above; what is in force is noted before anyone is told.
            _log.exception("supply %s: its budget could not be put in force", name)

    def _look(self, name: str) -> None:
        """Find out what is in force for a supply, and tell if that is new."""
        before, now = self._in_force.get(name), self._now()
        current = self._overridden(name, now) or self._of_source(name, now)
        if current == before:
            return
        self._in_force[name] = current
        self._since[name] = now
        if before is None or current.reason != before.reason:
            level = logging.WARNING if current.fallback else logging.INFO
            what = "W, the fallback" if current.fallback else "W"
            _log.log(level, "supply %s: %g %s, in force: %s", name, current.watts, what, current.reason)
        self._on_change(name, current)

    def _overridden(self, name: str, now: datetime) -> InForce | None:
        """What the operator has set; None where that is nothing, or is over."""
        override = self._overrides.get(name)
        if override is None:
            return None
        current = override.in_force(now)
        if current is None:
            del self._overrides[name]
        return current

    def _of_source(self, name: str, now: datetime) -> InForce:
        """What a supply's own budget says."""
        budget = self._budgets[name]
        if isinstance(budget, PrometheusBudget):
            trouble = str(self._troubles.get(name, ""))
            return budget.rule.in_force(now, self._readings.get(name), trouble)
        return budget.in_force(now)
