"""Stores what many tasks ask for at once in few transactions: one commit for all that has come meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

from coordinator.records import (
    DeviceRecord,
    NodeRecord,
    OperatorSay,
    PinnedReference,
    PublishedReference,
    RoundObservation,
    RoundRecord,
    StoredRecord,
    SupplyOverride,
)
from coordinator.store.errors import NotOwnerError, StoreUnavailableError, UnstorableRecordError
from coordinator.store.times import Times, TimesOf

_log = logging.getLogger(__name__)

_RETRIED_AFTER_S = 1.0
"""Seconds between attempts while nothing can be stored, however many records come meanwhile."""

_Key = tuple[object, ...]
_Result = TypeVar("_Result")


class RecordStore(Protocol):
    """Where records are kept; its methods block."""

    def save(self, *records: StoredRecord) -> None:
        """Keep records, all or none."""
        ...

    def rounds_of(self, run_id: str) -> list[RoundRecord]:
        """The rounds of a run, oldest first."""
        ...

    def times(self, of: TimesOf) -> dict[str, Times]:
        """When things happened."""
        ...

    def forget(self, older_than: timedelta) -> list[str]:
        """Remove old runs."""
        ...


def _key(record: StoredRecord) -> _Key:
    """What a record is of: a newer one of the same thing takes its place."""
    if isinstance(record, DeviceRecord):
        return (DeviceRecord, record.device_id)
    if isinstance(record, NodeRecord):
        return (NodeRecord, record.node_id)
    if isinstance(record, RoundRecord):
        return (RoundRecord, record.plan_id)
    if isinstance(record, RoundObservation):
        return (RoundObservation, record.plan_id, record.observed.device_id)
    if isinstance(record, OperatorSay):
        return (OperatorSay, record.device_id)
    if isinstance(record, SupplyOverride):
        return (SupplyOverride, record.supply)
    if isinstance(record, PublishedReference):
        return (PublishedReference, record.digest)
    if isinstance(record, PinnedReference):
        return (PinnedReference,)
    return (type(record), record.run_id)


@dataclass(frozen=True)
class _Waiter:
    """Who waits for records to be committed."""

    keys: frozenset[_Key]
    done: asyncio.Future[None]

    def tell(self, error: Exception | None) -> None:
        if self.done.done():  # it was cancelled, and does not wait any more
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Writer:
    """Group commit for the tasks of one event loop.

    Records that could not be stored stay to be stored with the next ones, since what they say is in memory already and
    nobody was told that it is safe. At most one of each device, node, run, round, observation and say waits.

    Attributes:
        lost: set once another coordinator has taken the store over; nothing is stored from then on.
    """

    def __init__(self, store: RecordStore, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Write to a store, which is not to be used otherwise until `close`.

        Args:
            store: where to.
            sleep: lets seconds pass.
        """
        self.lost = asyncio.Event()
        self._store = store
        self._sleep = sleep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._pending: dict[_Key, StoredRecord] = {}
        self._waiters: list[_Waiter] = []
        self._is_failing = False
        self._is_closing = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    async def saved(self, *records: StoredRecord) -> None:
        """Store records in one transaction, and return when they are on disk.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: they could not be stored yet, which is tried again.
            UnstorableRecordError: the database cannot hold them, which is not tried again.
        """
        if not records:
            return
        waiter = _Waiter(frozenset(map(_key, records)), asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self.save_soon(*records)
        await waiter.done

    def save_soon(self, *records: StoredRecord) -> None:
        """Store records with the next transaction, for which nobody waits."""
        self._pending.update((_key(record), record) for record in records)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_on())

    async def rounds_of(self, run_id: str) -> list[RoundRecord]:
        """The rounds of a run as far as they are on disk (see `Store.rounds_of`).

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        return await self._as_owner(lambda: self._store.rounds_of(run_id))

    async def times(self, of: TimesOf) -> dict[str, Times]:
        """When things happened, as far as they are on disk (see `Store.times`).

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        return await self._as_owner(lambda: self._store.times(of))

    async def forget(self, older_than: timedelta) -> list[str]:
        """Remove old runs from the store (see `Store.forget`).

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: they could not be removed.
        """
        return await self._as_owner(lambda: self._store.forget(older_than))

    async def close(self) -> None:
        """Store what waits still, with one attempt where that fails, and end the thread; the store stays open."""
        self._is_closing.set()
        if self._writing is not None:
            await self._writing
        self._thread.shutdown()

    async def _write_on(self) -> None:
        """Write until nothing waits any more."""
        while self._pending:
            await self._write_once()
            if self._pending and self._is_failing:
                if self._is_closing.is_set():
                    _log.error("%d records could not be stored and are lost", len(self._pending))
                    break
                await self._pause()
        self._writing = None

    async def _pause(self) -> None:
        """Let some time pass, unless it is the end."""
        waits = [asyncio.ensure_future(each) for each in (self._sleep(_RETRIED_AFTER_S), self._is_closing.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _write_once(self) -> None:
        """One transaction with all that waits."""
        batch, self._pending = self._pending, {}
        waiters, self._waiters = self._waiters, []
        failed: Exception | None = None
        unstorable: dict[_Key, UnstorableRecordError] = {}
        try:
            unstorable = await self._as_owner(lambda: self._save(list(batch.items())))
        except NotOwnerError as error:
            failed = error
        except StoreUnavailableError as error:
            failed = error
            # Those that have come meanwhile are newer.
            self._pending = {**batch, **self._pending}
        except Exception as error:
            # The boundary of the writer: whatever it is, those who wait have to be told, and those to come be served.
            _log.exception("%d records could not be stored", len(batch))
            failed = error
        self._say(failed)
        for waiter in waiters:
            waiter.tell(failed or next((unstorable[key] for key in waiter.keys if key in unstorable), None))
        for error_of_one in unstorable.values():
            _log.error("a record is not stored: %s", error_of_one)

    def _say(self, failed: Exception | None) -> None:
        """Log when storing begins to fail, and when it does not any more."""
        if failed is not None and not self._is_failing:
            _log.error("%s", failed)
        elif failed is None and self._is_failing:
            _log.info("records can be stored again")
        self._is_failing = failed is not None

    def _save(self, records: Sequence[tuple[_Key, StoredRecord]]) -> dict[_Key, UnstorableRecordError]:
        """Save in one transaction; where the database does not take some record, all others in as few as it needs.

        Returns:
            Why some could not be saved.
        """
        try:
            self._store.save(*(record for _, record in records))
            return {}
        except UnstorableRecordError as error:
            if len(records) == 1:
                return {records[0][0]: error}
        half = len(records) // 2
        return self._save(records[:half]) | self._save(records[half:])

    async def _as_owner(self, work: Callable[[], _Result]) -> _Result:
        """Do something in the thread, and note if another coordinator owns the store."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except NotOwnerError:
            self.lost.set()
            raise
