"""Reports of one session that were taken while nothing could be stored: acknowledged when they are on disk."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

import grpc

from coordinator.errors import STATUS
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceRecord, StoredRecord
from coordinator.store.errors import StoreUnavailableError
from coordinator.store.writer import Writer
from wattfleet.errors import WattfleetError
from wattfleet_proto.error_boundary import status_of

_log = logging.getLogger(__name__)


class LateReports:
    """What one session has yet to acknowledge."""

    def __init__(
        self,
        device_id: str,
        fleet: Fleet,
        writer: Writer,
        acknowledge: Callable[[int], Awaitable[None]],
        end: Callable[[grpc.StatusCode, str], None],
        limit: int,
    ) -> None:
        """Begin with none.

        Args:
            device_id: whose session it is.
            fleet: what is known.
            writer: keeps what changed.
            acknowledge: tells the agent that the report of a number is stored.
            end: ends the session, where they cannot ever be stored.
            limit: number of reports that may wait. It exceeds an agent's outbox, with which a new session begins.
        """
        self._device_id = device_id
        self._fleet = fleet
        self._writer = writer
        self._acknowledge = acknowledge
        self._end = end
        self._limit = limit
        self._waiting: deque[tuple[int, StoredRecord | None]] = deque()
        self._storing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: int, record: StoredRecord | None) -> None:
        """A report waits; one that came again, without a record, as long as those before it.

        Raises:
            StoreUnavailableError: too many wait already.
        """
        if len(self._waiting) >= self._limit:
            raise StoreUnavailableError(
                f"{self._device_id}: {self._limit} reports wait to be stored, and nothing can be: come back with what"
                " stands"
            )
        # A device's newest record says all of it, and is in the fleet.
        self._waiting.append((sequence, None if isinstance(record, DeviceRecord) else record))
        if record is not None:
            self._writer.save_soon(record)
        if self._storing is None or self._storing.done():
            self._storing = asyncio.create_task(self._store())

    def close(self) -> None:
        """The session is over; its agent repeats what was not acknowledged."""
        if self._storing is not None:
            self._storing.cancel()

    async def _store(self) -> None:
        try:
            while self._waiting:
                waiting = list(self._waiting)
                records = [record for _, record in waiting if record is not None]
                await self._writer.saved_at_last(self._fleet.device(self._device_id), *records)
                for sequence, _ in waiting:
                    await self._acknowledge(sequence)
                    self._waiting.popleft()
        except grpc.aio.BaseError:
            return  # the peer is gone, which ends the session
        except WattfleetError as error:
            self._end(status_of(error, STATUS), str(error))
        except Exception:
            _log.exception("%s: its reports could not be stored", self._device_id)
            self._end(grpc.StatusCode.INTERNAL, "internal error; see the service's log")
