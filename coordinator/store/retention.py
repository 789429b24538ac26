"""Forgets runs that are over, or were left alone, for as long as the operator keeps them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta

from coordinator.state.fleet import Fleet
from coordinator.store.errors import StoreUnavailableError
from coordinator.store.writer import Writer

_log = logging.getLogger(__name__)

_A_DAY_S = 24 * 3600.0


async def forget_daily(
    fleet: Fleet, writer: Writer, keep: timedelta, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Once a day, remove runs that ended longer ago, or were left alone, from store and memory, until cancelled.

    Args:
        fleet: what is known.
        writer: of its store.
        keep: how long a run is kept after its end, or after its last round where it never ended.
        sleep: lets seconds pass.

    Raises:
        NotOwnerError: another coordinator has taken the store over.
    """
    while True:
        await sleep(_A_DAY_S)
        awaited = {record.run_id for record in fleet.awaited_rounds()}
        count = 0
        try:
            async for run_id in writer.forget(keep, awaited):
                fleet.forget([run_id])
                count += 1
        except StoreUnavailableError as error:
            _log.warning("no more old runs are removed today: %s", error)
        if count:
            _log.info("%d runs are forgotten, which ended or were left more than %d days ago", count, keep.days)
