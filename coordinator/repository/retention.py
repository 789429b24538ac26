"""Retention: deletes old runs once a day, and drops expired invites, certificates, audit entries and events every hour.

Nothing else deletes runs by their age. The deletion runs beside the loaded fleet, also at the start, because the fleet
knows which runs are in use (`Fleet.runs_in_use`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from coordinator.repository.repository import FleetRepository
from coordinator.state.event_records import ExpiredEvents
from coordinator.state.identities import Identities
from coordinator.store.errors import StoreUnavailableError
from wattfleet_io.clock import utc_now

_log = logging.getLogger(__name__)

_AN_HOUR_S = 3600.0
_A_DAY_S = 24 * _AN_HOUR_S


async def delete_old_runs_daily(
    repository: FleetRepository, keep: timedelta, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Delete old runs from the store and from memory, now and once a day, until cancelled.

    Runs in use are kept.

    Args:
        repository: the fleet and its store.
        keep: how long a run is kept after its end, or after its last round if it never ended.
        sleep: waits for the given seconds.

    Raises:
        NotOwnerError: another coordinator has taken the store over.
    """
    while True:
        count = 0
        try:
            async for _run_id in repository.delete_old_runs(keep):
                count += 1
        except StoreUnavailableError as error:
            _log.warning("deleting old runs stopped until tomorrow: %s", error)
        if count:
            _log.info("deleted %d runs older than %d days", count, keep.days)
        await sleep(_A_DAY_S)


async def drop_expired_hourly(
    repository: FleetRepository,
    identities: Identities,
    now: Callable[[], datetime] = utc_now,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Drop expired identity records from memory and the store, and old events, now and every hour, until cancelled.

    Args:
        repository: the fleet and its store.
        identities: invites and certificates.
        now: returns the time.
        sleep: waits for the given seconds.
    """
    while True:
        repository.save_soon(identities.expire(now()), ExpiredEvents(now()))
        await sleep(_AN_HOUR_S)
