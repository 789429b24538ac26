"""Keeps the rounds in flight within the watts: has them trimmed, their devices told, and what changed stored."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from coordinator.settings import SiteSettings
from coordinator.state.fleet import Fleet
from coordinator.state.orders import Orders
from coordinator.state.records import Reassignment, RoundRecord
from coordinator.store.writer import Writer
from wattfleet.budgets import InForce

_log = logging.getLogger(__name__)


class Trimmer:
    """Trims when watts fall, and when devices come to draw more than the plans in flight knew of."""

    def __init__(
        self,
        fleet: Fleet,
        writer: Writer,
        orders: Orders,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        settings: SiteSettings = SiteSettings(),
    ) -> None:
        """Trim one fleet's rounds.

        Args:
            fleet: what is known.
            writer: keeps what changed.
            orders: what devices are to be told.
            sleep: lets seconds pass.
            settings: the time between two looks; a fleet that comes back at once is looked at once.
        """
        self._fleet = fleet
        self._writer = writer
        self._orders = orders
        self._sleep = sleep
        self._check_s = settings.trim_check_s

    def budget_changed(self, supply: str, in_force: InForce) -> None:
        """A supply has other watts."""
        self._put_in_force(*self._fleet.set_budget(supply, in_force))

    async def watch(self) -> None:
        """Trim whenever more may be drawn than before, until cancelled."""
        is_failing = False
        while True:
            await self._sleep(self._check_s)
            if not self._fleet.may_exceed:
                continue
            try:
                self._put_in_force(*self._fleet.trim())
                is_failing = False
            except Exception:
                # The boundary of the watch: what goes wrong with one round must not end the coordinator.
                if not is_failing:
                    _log.exception("rounds in flight could not be trimmed; it is tried again")
                is_failing = True

    def _put_in_force(self, changed: Sequence[RoundRecord], told: Sequence[Reassignment]) -> None:
        self._orders.send(told)  # first, whether or not it can be stored: the watts have fallen
        self._writer.save_soon(*changed)
