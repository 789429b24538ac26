"""Keeps the rounds in flight within the budgets: trims them, orders their devices, and stores the changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from coordinator.repository.repository import FleetRepository
from coordinator.services.event_log import EventLog
from coordinator.services.orders import Orders
from coordinator.settings import SiteSettings
from coordinator.state.records import RoundRecord
from wattfleet.budgets import InForce
from wattfleet.errors import first_few

_log = logging.getLogger(__name__)


class Trimmer:
    """Trims when a budget changes, and when devices may draw more than the plans in flight took into account."""

    def __init__(
        self,
        repository: FleetRepository,
        orders: Orders,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        settings: SiteSettings = SiteSettings(),
        events: EventLog | None = None,
    ) -> None:
        """Trim one fleet's rounds.

        Args:
            repository: the fleet and its store.
            orders: sends orders to devices.
            sleep: waits for the given seconds.
            settings: the time between two checks, so that a fleet that reconnects at once is trimmed only once.
            events: the log of what happens to the fleet; None for one that stores nothing.
        """
        self._events = events or EventLog(repository.fleet)
        self._repository = repository
        self._orders = orders
        self._sleep = sleep
        self._check_s = settings.trim_check_s

    def budget_changed(self, supply: str, in_force: InForce) -> None:
        """Put a supply's new budget in force."""
        self._put_in_force(self._repository.fleet.set_budget(supply, in_force))

    async def watch(self) -> None:
        """End grants that have lapsed, and trim whatever has come to exceed its budget, until cancelled."""
        is_failing = False
        while True:
            await self._sleep(self._check_s)
            fleet = self._repository.fleet
            try:
                if lapsed := fleet.check_grants():
                    _log.warning("the grants of devices without contact have lapsed: %s", first_few(lapsed))
                self._put_in_force(fleet.trim())
                is_failing = False
            except Exception:
                # The error boundary of the watch: an error in one round must not stop the coordinator.
                if not is_failing:
                    _log.exception("rounds in flight could not be trimmed; retrying")
                is_failing = True

    def _put_in_force(self, trimmed: Sequence[RoundRecord]) -> None:
        self._orders.send_due()  # before anything is stored, because the budget has changed already
        if trimmed:
            self._repository.save_soon(*trimmed)
        for record in trimmed:
            self._events.trimmed(record)
