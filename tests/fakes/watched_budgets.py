"""A budget watch in virtual time, with a source that returns what a test sets."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta, timezone
from typing import Any

from coordinator.budgets.budget_watch import BudgetWatch
from coordinator.budgets.prometheus_budget import PrometheusBudget
from coordinator.budgets.site_file import AnyBudget
from wattfleet.core.budgets import InForce, Override, Reading, ReadingRule

NOON = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)
METER = PrometheusBudget("http://127.0.0.1:9090", "meter_watts", 15, ReadingRule(max_age_s=60, fallback_w=40))
Answer = float | Exception | None
"""Watts, an error, or None for an answer that never comes."""


class VirtualTime:
    """Time that advances only in `advance`, for any number of sleepers."""

    def __init__(self, start: datetime = NOON) -> None:
        self._now = start
        self._sleepers: list[tuple[datetime, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._jumped = timedelta()

    def now(self) -> datetime:
        return self._now + self._jumped

    def since_boot_s(self) -> float:
        return self._now.timestamp()

    def jump(self, **by: float) -> None:
        """Change the wall clock; sleepers do not notice."""
        self._jumped += timedelta(**by)

    async def sleep(self, seconds: float) -> None:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + timedelta(seconds=seconds), next(self._order), wake))
        await wake

    async def advance(self, seconds: float) -> None:
        end = self._now + timedelta(seconds=seconds)
        await settled()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():
                wake.set_result(None)
            await settled()
        self._now = end


async def settled() -> None:
    """Let everything run that can without time passing."""
    for _ in range(20):
        await asyncio.sleep(0)


class Meter:
    """A source that returns what a test sets, from that moment on."""

    def __init__(self, clock: VirtualTime, answer: Answer) -> None:
        self._clock = clock
        self.answer = answer
        self.asked = 0

    async def __call__(self, budget: PrometheusBudget) -> Reading:
        self.asked += 1
        if self.answer is None:
            await asyncio.get_running_loop().create_future()
        if isinstance(self.answer, Exception):
            raise self.answer
        assert self.answer is not None
        return Reading(self.answer, self._clock.now())


class Watched:
    """A watch in virtual time, and everything that it reported."""

    def __init__(self, budgets: dict[str, AnyBudget], answer: Answer = 120.0, start: datetime = NOON) -> None:
        self.clock = VirtualTime(start)
        self.meter = Meter(self.clock, answer)
        self.told: list[tuple[str, float]] = []
        self.watch = self.new_watch(budgets)

    def new_watch(
        self, budgets: dict[str, AnyBudget], overrides: dict[str, Override] | None = None, is_doubtful: bool = False
    ) -> BudgetWatch:
        return BudgetWatch(
            budgets,
            self.tell,
            self.clock.now,
            self.clock.sleep,
            self.meter,
            overrides,
            since_boot_s=self.clock.since_boot_s,
            is_clock_doubtful=is_doubtful,
        )

    def tell(self, supply: str, state: InForce) -> None:
        assert self.watch.in_force[supply] == state, "the announced value is in force"
        self.told.append((supply, state.watts))

    def watts(self, supply: str = "rack") -> float:
        return self.watch.in_force[supply].watts


def run(scenario: Callable[[Watched], Coroutine[Any, Any, None]], watched: Watched) -> None:
    """Run a scenario from start to stop; afterwards nothing is still running."""

    async def whole() -> None:
        await watched.watch.start()
        try:
            await scenario(watched)
            running = [task for task in watched.watch._tasks if task.done()]  # noqa: SLF001 - no task may end by itself
            assert not running
        finally:
            await watched.watch.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(whole())
