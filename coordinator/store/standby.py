"""Opens a store, and waits for it in standby."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from sqlalchemy import URL

from coordinator.store.errors import StoreInUseError, StoreUnavailableError
from coordinator.store.store import Store

_log = logging.getLogger(__name__)

_RETRY_EVERY_S = 1.0


async def open_store(
    location: Path | URL,
    stands_by: bool = False,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    open_now: Callable[[Path | URL], Store] = Store,
) -> Store:
    """Open a store.

    Args:
        location: path of an SQLite file, or a database's URL.
        stands_by: wait while another coordinator uses it, or its database does not answer.
        sleep: waits for some seconds.
        open_now: opens it, or fails at once.

    Raises:
        InvalidInputError: it cannot be used as a store.
        StoreInUseError: another coordinator uses it.
        StoreUnavailableError: the database does not answer.
    """
    logged = ""
    while True:
        try:
            return await asyncio.to_thread(open_now, location)
        except (StoreInUseError, StoreUnavailableError) as error:
            if not stands_by:
                raise
            # Once per kind of error: texts may differ from attempt to attempt.
            if logged != type(error).__name__:
                logged = type(error).__name__
                _log.info("standby: %s", error)
        await sleep(_RETRY_EVERY_S)
