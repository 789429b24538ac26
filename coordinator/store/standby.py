"""Opens the store; a standby waits until no other coordinator serves from it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from sqlalchemy import URL

from coordinator.settings import StoreSettings
from coordinator.store.errors import StoreInUseError, StoreUnavailableError
from coordinator.store.store import Store

_log = logging.getLogger(__name__)


async def open_store(
    location: Path | URL,
    settings: StoreSettings = StoreSettings(),
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    opened: Callable[[Path | URL], Store] | None = None,
) -> Store:
    """Open a store; a standby waits while another coordinator serves from it, or its database does not answer.

    Args:
        location: path of an SQLite file, or a database's URL.
        settings: whether to stand by, and how often to try.
        sleep: lets seconds pass.
        opened: opens the store, or raises at once; None for `Store`.

    Raises:
        InvalidInputError: it cannot be used as a store.
        StoreInUseError: another coordinator serves from it.
        StoreUnavailableError: the database does not answer.
    """
    opened = opened or partial(Store, settings=settings)
    logged = ""
    while True:
        try:
            return await asyncio.to_thread(opened, location)
        except (StoreInUseError, StoreUnavailableError) as error:
            if not settings.standby:
                raise
            # One line for each kind of error, since its text may differ from time to time.
            if logged != type(error).__name__:
                logged = type(error).__name__
                _log.info("standing by: %s", error)
        await sleep(settings.standby_check_s)
