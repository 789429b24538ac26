"""Stores what many tasks ask for at once in few transactions: one commit for all that has come meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

from coordinator.settings import StoreSettings
from coordinator.state.records import (
    DeviceOverrides,
    DeviceRecord,
    NodeRecord,
    PinnedReference,
    PublishedReference,
    RoundObservation,
    RoundRecord,
    StoredRecord,
    SupplyOverride,
)
from coordinator.store.errors import NotOwnerError, StoreUnavailableError, UnstorableRecordError
from coordinator.store.recalls import Recalls
from coordinator.store.times import Times, TimesOf
from wattfleet.planning import History

_log = logging.getLogger(__name__)


_Key = tuple[object, ...]
_Result = TypeVar("_Result")


class RecordStore(Protocol):
    """Where records are kept; its methods block."""

    def save(self, *records: StoredRecord) -> None:
        """Keep records, all or none."""
        ...

    def round_of(self, plan_id: str) -> RoundRecord | None:
        """One round."""
        ...

    def plan_ids_of(self, run_id: str) -> list[str]:
        """The ids of a run's rounds, oldest first."""
        ...

    def history_of(self, run_id: str) -> History:
        """What a run's rounds come to that are over."""
        ...

    def forget_some(self, older_than: timedelta, but: Collection[str] = ()) -> list[str] | None:
        """Remove some of the old runs."""
        ...

    def require_owner(self) -> None:
        """Make sure that no other coordinator has taken the store over."""
        ...

    def times(self, of: TimesOf) -> dict[str, Times]:
        """When things happened."""
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
    if isinstance(record, DeviceOverrides):
        return (DeviceOverrides, record.device_id)
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
    is_patient: bool = False

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
        recalls: what is being read for the fleet's memory.
    """

    def __init__(
        self,
        store: RecordStore,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        settings: StoreSettings = StoreSettings(),
    ) -> None:
        """Write to a store, which is not to be used otherwise until `close`, and read from it.

        Args:
            store: where to.
            sleep: lets seconds pass.
            settings: when a failed write is retried, and ownership checked.
        """
        self.lost = asyncio.Event()
        self.recalls = Recalls()
        self._store = store
        self._sleep = sleep
        self._settings = settings
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        # A run's rounds may take seconds to read: what writes does not wait for it.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-reader")
        self._pending: dict[_Key, StoredRecord] = {}
        self._being_written: dict[_Key, StoredRecord] = {}
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
        await self._saved(records, is_patient=False)

    async def saved_at_last(self, *records: StoredRecord) -> None:
        """Store records, and return when they are on disk, however often that has to be tried.

        Args:
            records: the newest of each thing, as they take the place of those that wait.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            UnstorableRecordError: the database cannot hold them, which is not tried again.
        """
        await self._saved(records, is_patient=True)

    async def _saved(self, records: Sequence[StoredRecord], is_patient: bool) -> None:
        if not records:
            return
        waiter = _Waiter(frozenset(map(_key, records)), asyncio.get_running_loop().create_future(), is_patient)
        self._waiters.append(waiter)
        self.save_soon(*records)
        await waiter.done

    def save_soon(self, *records: StoredRecord) -> None:
        """Store records with the next transaction, for which nobody waits."""
        self._pending.update((_key(record), record) for record in records)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_on())

    def unsaved_rounds(self) -> set[str]:
        """Plan ids of the rounds of which something is not on disk yet."""
        waiting = (*self._pending.values(), *self._being_written.values())
        return {record.plan_id for record in waiting if isinstance(record, (RoundRecord, RoundObservation))}

    async def round_of(self, plan_id: str) -> RoundRecord | None:
        """One round as it is on disk (see `Store.round_of`).

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        return await self._as_owner(lambda: self._store.round_of(plan_id), self._reader)

    async def times(self, of: TimesOf) -> dict[str, Times]:
        """When things happened, as far as they are on disk (see `Store.times`).

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        return await self._as_owner(lambda: self._store.times(of), self._reader)

    async def rounds_of(self, run_id: str) -> AsyncIterator[RoundRecord]:
        """The rounds of a run as far as they are on disk, oldest first; one at a time is in memory.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        for plan_id in await self._as_owner(lambda: self._store.plan_ids_of(run_id), self._reader):
            record = await self.round_of(plan_id)
            if record is not None:  # it was not forgotten meanwhile
                yield record

    async def history_of(self, run_id: str) -> History:
        """What a run's rounds come to that are over on disk (see `Store.history_of`).

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        return await self._as_owner(lambda: self._store.history_of(run_id), self._reader)

    async def forget(self, older_than: timedelta, but: Collection[str] = ()) -> AsyncIterator[str]:
        """Remove old runs from the store (see `Store.forget`), and have others write in between; the id of each.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the next one could not be removed.
        """
        while (some := await self._as_owner(lambda: self._store.forget_some(older_than, but))) is not None:
            for run_id in some:
                yield run_id

    async def newest_plan_of(self, run_id: str) -> str | None:
        """The id of a run's newest round on disk.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        plan_ids = await self._as_owner(lambda: self._store.plan_ids_of(run_id), self._reader)
        return plan_ids[-1] if plan_ids else None

    async def watch_owner(self) -> None:
        """Make sure again and again that this coordinator owns the store, until another does.

        One that stores nothing would not learn of it otherwise, and go on to tell agents what to do.
        """
        while not self.lost.is_set():
            await self._sleep(self._settings.owner_check_s)
            with suppress(NotOwnerError, StoreUnavailableError):  # the one is in `lost`, the other may pass
                await self._as_owner(self._store.require_owner)

    async def close(self) -> None:
        """Store what waits still, with one attempt where that fails, and end the threads; the store stays open."""
        self._is_closing.set()
        if self._writing is not None:
            await self._writing
        self._thread.shutdown()
        self._reader.shutdown()

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
        waits = [asyncio.ensure_future(each) for each in (self._sleep(self._settings.retry_s), self._is_closing.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _write_once(self) -> None:
        """One transaction with all that waits."""
        batch, self._pending = self._pending, {}
        self._being_written = batch
        waiters, self._waiters = self._waiters, []
        failed: Exception | None = None
        unstorable: dict[_Key, Exception] = {}
        try:
            unstorable = await self._as_owner(lambda: self._save(list(batch.items())))
        except NotOwnerError as error:
            failed = error
        except StoreUnavailableError as error:
            failed = error
            # Those that have come meanwhile are newer.
            self._pending = {**batch, **self._pending}
            self._waiters = [waiter for waiter in waiters if waiter.is_patient] + self._waiters
            waiters = [waiter for waiter in waiters if not waiter.is_patient]
        self._being_written = {}
        self._say(failed)
        for waiter in waiters:
            waiter.tell(failed or next((unstorable[key] for key in waiter.keys if key in unstorable), None))
        for error_of_one in unstorable.values():
            is_bug = not isinstance(error_of_one, UnstorableRecordError)
            _log.error("a record is not stored: %s", error_of_one, exc_info=error_of_one if is_bug else None)

    def _say(self, failed: Exception | None) -> None:
        """Log when storing begins to fail, and when it does not any more."""
        if failed is not None and not self._is_failing:
            _log.error("%s", failed)
        elif failed is None and self._is_failing:
            _log.info("records can be stored again")
        self._is_failing = failed is not None

    def _save(self, records: Sequence[tuple[_Key, StoredRecord]]) -> dict[_Key, Exception]:
        """Save in one transaction; where some record cannot be saved, all others in as few as it needs.

        Returns:
            Why some could not be saved.
        """
        try:
            self._store.save(*(record for _, record in records))
            return {}
        except (NotOwnerError, StoreUnavailableError):
            raise
        except Exception as error:
            # The boundary of the writer: whatever is wrong with one record, the others are to be stored.
            if len(records) == 1:
                return {records[0][0]: error}
        half = len(records) // 2
        return self._save(records[:half]) | self._save(records[half:])

    async def _as_owner(self, work: Callable[[], _Result], thread: ThreadPoolExecutor | None = None) -> _Result:
        """Do something in a thread, by default that which writes; note if another coordinator owns the store."""
        try:
            return await asyncio.get_running_loop().run_in_executor(thread or self._thread, work)
        except NotOwnerError:
            self.lost.set()
            raise
