"""Opens a store; a standby waits until no other coordinator uses it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from sqlalchemy import URL

from coordinator.clocks import BootClock
from coordinator.settings import StoreSettings
from coordinator.store.errors import StoreInUseError, StoreUnavailableError
from coordinator.store.store import Store

_log = logging.getLogger(__name__)


async def open_store(
    location: Path | URL,
    settings: StoreSettings = StoreSettings(),
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    open_now: Callable[[Path | URL], Store] | None = None,
) -> Store:
    """Open a store.

    Args:
        location: path of an SQLite file, or a database's URL.
        settings: whether to wait while another coordinator uses it or its database does not answer, and how often to
            try.
        sleep: waits for the given seconds.
        open_now: opens the store, or fails at once; None for `Store`.

    Raises:
        InvalidInputError: the location cannot be used as a store.
        StoreInUseError: another coordinator uses the store.
        StoreUnavailableError: the database does not answer.
    """
    open_now = open_now or partial(Store, settings=settings, clock=BootClock.of_system())
    logged = ""
    while True:
        try:
            return await asyncio.to_thread(open_now, location)
        except (StoreInUseError, StoreUnavailableError) as error:
            if not settings.standby:
                raise
            # Log once per kind of error, because the messages may differ between attempts.
            if logged != type(error).__name__:
                logged = type(error).__name__
                _log.info("standby: %s", error)
        await sleep(settings.standby_check_s)
