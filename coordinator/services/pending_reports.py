"""Reports of one session that could not be stored in time: acknowledged once they are on disk."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

import grpc

from coordinator.repository.repository import FleetRepository
from coordinator.services.error_statuses import STATUS
from coordinator.state.records import DeviceRecord, StoredRecord
from coordinator.store.errors import StoreUnavailableError
from wattfleet.errors import WattfleetError
from wattfleet_io.tasks import background_task
from wattfleet_proto.error_boundary import status_of

_log = logging.getLogger(__name__)


class PendingReports:
    """The reports that one session has yet to acknowledge."""

    def __init__(
        self,
        device_id: str,
        repository: FleetRepository,
        acknowledge: Callable[[int], Awaitable[None]],
        end: Callable[[grpc.StatusCode, str], None],
        limit: int,
    ) -> None:
        """Start without any report.

        Args:
            device_id: the session's device.
            repository: the fleet and its store.
            acknowledge: acknowledges the report with this number to the agent.
            end: ends the session if its reports can never be stored.
            limit: the most reports that may wait. It exceeds the size of an agent's outbox, because a new session
                begins by sending it.
        """
        self._device_id = device_id
        self._repository = repository
        self._acknowledge = acknowledge
        self._end = end
        self._limit = limit
        self._waiting: deque[tuple[int, StoredRecord | None]] = deque()
        self._storing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: int, record: StoredRecord | None) -> None:
        """Add a report; a repeated report has no record, and waits until all earlier ones are stored.

        Raises:
            StoreUnavailableError: too many reports wait.
        """
        if len(self._waiting) >= self._limit:
            raise StoreUnavailableError(
                f"{self._device_id}: {self._limit} reports wait while the store is unavailable: reconnect and send the"
                " current state"
            )
        # The fleet has the device's newest record, which replaces the older ones.
        self._waiting.append((sequence, None if isinstance(record, DeviceRecord) else record))
        if record is not None:
            self._repository.save_soon(record)
        if self._storing is None or self._storing.done():
            self._storing = background_task("store waiting reports", self._store())

    def close(self) -> None:
        """Stop with the session; the agent repeats what was not acknowledged."""
        if self._storing is not None:
            self._storing.cancel()

    async def _store(self) -> None:
        try:
            while self._waiting:
                waiting = list(self._waiting)
                records = [record for _, record in waiting if record is not None]
                device = self._repository.fleet.agents.get(self._device_id)
                await self._repository.save_until_stored(device, *records)
                for sequence, _ in waiting:
                    await self._acknowledge(sequence)
                    self._waiting.popleft()
        except grpc.aio.BaseError:
            return  # the device disconnected, which ends the session
        except WattfleetError as error:
            self._end(status_of(error, STATUS), str(error))
        except Exception:
            _log.exception("%s: its reports could not be stored", self._device_id)
            self._end(grpc.StatusCode.INTERNAL, "internal error; see the service's log")
