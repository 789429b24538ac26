"""Forgets runs that are over for as long as the operator keeps them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta

from coordinator.fleet import Fleet
from coordinator.store.errors import StoreUnavailableError
from coordinator.store.writer import Writer

_log = logging.getLogger(__name__)

_A_DAY_S = 24 * 3600.0


async def forget_daily(
    fleet: Fleet, writer: Writer, keep: timedelta, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Once a day, remove runs that ended longer ago from the store and from memory, until cancelled.

    Args:
        fleet: what is known.
        writer: of its store.
        keep: how long a run is kept after its end.
        sleep: lets seconds pass.

    Raises:
        NotOwnerError: another coordinator has taken the store over.
    """
    while True:
        await sleep(_A_DAY_S)
        try:
            forgotten = await writer.forget(keep)
        except StoreUnavailableError as error:
            _log.warning("no old runs are removed today: %s", error)
            continue
        fleet.forget(forgotten)
        if forgotten:
            _log.info("%d runs are forgotten, which ended more than %d days ago", len(forgotten), keep.days)
