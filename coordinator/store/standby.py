"""Waits, where that is wanted, until no other coordinator serves from a store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from sqlalchemy import URL

from coordinator.store.errors import StoreInUseError, StoreUnavailableError
from coordinator.store.store import Store

_log = logging.getLogger(__name__)

_TRIED_EVERY_S = 1.0


async def open_store(
    location: Path | URL,
    stands_by: bool = False,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    opened: Callable[[Path | URL], Store] = Store,
) -> Store:
    """Open a store.

    Args:
        location: path of an SQLite file, or a database's URL.
        stands_by: wait for as long as another coordinator serves from it, or its database does not answer.
        sleep: lets seconds pass.
        opened: opens it, or says at once that it cannot be had.

    Raises:
        InvalidInputError: it cannot be used as a store.
        StoreInUseError: another coordinator serves from it.
        StoreUnavailableError: the database does not answer.
    """
    said = ""
    while True:
        try:
            return await asyncio.to_thread(opened, location)
        except (StoreInUseError, StoreUnavailableError) as error:
            if not stands_by:
                raise
            # The kind of trouble: texts may differ from time to time.
            if said != type(error).__name__:
                said = type(error).__name__
                _log.info("standing by: %s", error)
        await sleep(_TRIED_EVERY_S)
