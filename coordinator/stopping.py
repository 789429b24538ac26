"""Stops the coordinator's process on a signal, at the latest after a time limit."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from types import FrameType

from wattfleet_io.stop_signals import handled_signals

_log = logging.getLogger(__name__)

_EXIT_FAILED = 1
_LOGS_FOR_S = 0.5
"""The most seconds to wait for the log, whose reader may have stopped reading."""


def stop_on_signals(stop: asyncio.Event, limit_s: float) -> None:
    """Set `stop` on a signal, and terminate the process if it has not ended `limit_s` later.

    Threads cannot be cancelled: without the limit, a thread that hangs in a query of the store or in a plan would keep
    the process alive. As with a power cut, terminating it loses nothing that was acknowledged.

    Args:
        stop: stops the coordinator when set; an event of the running loop.
        limit_s: seconds from the first signal to the end of the process.
    """
    loop = asyncio.get_running_loop()
    limit = threading.Timer(limit_s, _end, (limit_s,))
    limit.daemon = True

    # Not `loop.add_signal_handler`, because the limit must hold even if the loop is blocked.
    def handle(number: int, frame: FrameType | None) -> None:
        if limit.ident is None:
            limit.start()
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    for number in handled_signals():
        signal.signal(number, handle)


def _end(limit_s: float) -> None:
    logging_it = threading.Thread(target=_log_end, args=(limit_s,), name="end", daemon=True)
    logging_it.start()
    logging_it.join(_LOGS_FOR_S)
    os._exit(_EXIT_FAILED)


def _log_end(limit_s: float) -> None:
    busy = sorted({thread.name for thread in threading.enumerate() if not thread.daemon})
    _log.error(
        "the coordinator did not stop within %g s and is terminated now (threads: %s); acknowledged data is on disk",
        limit_s,
        ", ".join(busy),
    )
    sys.stdout.flush()
    sys.stderr.flush()
