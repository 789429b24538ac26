"""Group commit: stores the records of many concurrent tasks in few transactions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

from coordinator.errors import NotOwnerError, StoreUnavailableError, UnstorableRecordError
from coordinator.service_figures import ServiceFigures, timed
from coordinator.state.identity_records import AuditEntry, CertificateRecord, ExpiredIdentities, InviteRecord
from coordinator.state.records import (
    BatteryCharge,
    ContainedEnergy,
    CountedEnergy,
    DeviceOverrides,
    DeviceRecord,
    EventRecord,
    ExpiredEvents,
    ForgottenDevice,
    GivenUpTraining,
    GrantLifetime,
    NodeRecord,
    PinnedReferences,
    PublishedReference,
    RemovedReference,
    RoundObservation,
    RoundRecord,
    StoredRecord,
    SupplyEnergyBudget,
    SupplyOverride,
    TrainingEnergy,
    UnplannedRound,
)
from coordinator.store.store import Store

_log = logging.getLogger(__name__)

_Key = tuple[object, ...]
_Result = TypeVar("_Result")


def _key(record: StoredRecord) -> _Key:
    """A record's key: a newer record with the same key replaces it."""
    if isinstance(record, DeviceRecord | DeviceOverrides | ForgottenDevice | GivenUpTraining):
        return (type(record), record.device_id)
    if isinstance(record, NodeRecord):
        return (NodeRecord, record.node_id)
    if isinstance(record, RoundRecord):
        return (RoundRecord, record.plan_id)
    if isinstance(record, RoundObservation):
        return (RoundObservation, record.plan_id, record.observed.device_id)
    if isinstance(record, TrainingEnergy):
        return (TrainingEnergy, record.plan_id, record.device_id)
    if isinstance(record, UnplannedRound):
        return (UnplannedRound, record.run_id, record.number)
    if isinstance(record, CountedEnergy | ContainedEnergy):
        return (CountedEnergy, record.plan_id, record.holder)
    if isinstance(record, BatteryCharge):
        return (BatteryCharge, record.holder)
    if isinstance(record, SupplyOverride | SupplyEnergyBudget):
        return (type(record), record.supply)
    if isinstance(record, PublishedReference | RemovedReference):
        return (PublishedReference, record.digest)
    if isinstance(record, InviteRecord):
        return (InviteRecord, record.token_hash)
    if isinstance(record, CertificateRecord):
        return (CertificateRecord, record.serial)
    if isinstance(record, AuditEntry):
        return (AuditEntry, record.entry_id)
    if isinstance(record, EventRecord):
        return (EventRecord, record.event_id)
    if isinstance(record, PinnedReferences | GrantLifetime | ExpiredIdentities | ExpiredEvents):
        return (type(record),)
    return (type(record), record.run_id)


def _without_forgotten(waiting: dict[_Key, StoredRecord], newer: Iterable[StoredRecord]) -> dict[_Key, StoredRecord]:
    """Drop waiting records about devices that newer records remove."""
    forgotten = {record.device_id for record in newer if isinstance(record, ForgottenDevice)}
    if not forgotten:
        return waiting
    of_devices = (DeviceRecord, DeviceOverrides, NodeRecord)
    return {
        key: record
        for key, record in waiting.items()
        if not (isinstance(record, of_devices) and record.device_id in forgotten)
    }


@dataclass(frozen=True)
class _Waiter:
    """A task that waits for records to be committed."""

    keys: frozenset[_Key]
    done: asyncio.Future[None]
    retries: bool = False

    def resolve(self, error: Exception | None) -> None:
        if self.done.done():  # its task was cancelled
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


RETRY_S = 1.0
"""Time between two attempts to write after one failed, s."""

OWNER_CHECK_S = 2.0
"""Time between two checks that no other coordinator has taken the store over, s."""


class Writer:
    """Group commit for the tasks of one event loop.

    Records that could not be stored wait for the next attempt: memory has changed already, and nothing was
    acknowledged. At most one record per key waits.

    All methods that wait for the store raise its errors (see `Store`).

    Attributes:
        ownership_lost: set once another coordinator has taken the store over; nothing is stored after that.
    """

    def __init__(
        self,
        store: Store,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        figures: ServiceFigures | None = None,
    ) -> None:
        """Write to a store and read from it; nothing else may use the store until `close`.

        Args:
            store: the store.
            sleep: waits for the given seconds.
            figures: records how long transactions last, and whether they fail.
        """
        self.ownership_lost = asyncio.Event()
        self._store = store
        self._sleep = sleep
        self._figures = figures or ServiceFigures()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        # Reading a run's rounds may take seconds, which must not delay writes.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-reader")
        self._pending: dict[_Key, StoredRecord] = {}
        self._in_transaction: dict[_Key, StoredRecord] = {}
        self._waiters: list[_Waiter] = []
        self._is_failing = False
        self._is_closing = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    async def save(self, *records: StoredRecord) -> None:
        """Store records in one transaction, and return once they are on disk.

        Raises:
            StoreUnavailableError: this attempt failed; the records wait for the next one.
            UnstorableRecordError: the database cannot store the records; this is not retried.
        """
        await self._enqueue(records, retries=False)

    async def save_until_stored(self, *records: StoredRecord) -> None:
        """Store records, retrying while the store is unavailable, and return once they are on disk.

        Args:
            records: the newest records, because they replace waiting records with the same keys.

        Raises:
            UnstorableRecordError: the database cannot store the records; this is not retried.
        """
        await self._enqueue(records, retries=True)

    async def _enqueue(self, records: Sequence[StoredRecord], retries: bool) -> None:
        if not records:
            return
        waiter = _Waiter(frozenset(map(_key, records)), asyncio.get_running_loop().create_future(), retries)
        self._waiters.append(waiter)
        self.save_soon(*records)
        await waiter.done

    def save_soon(self, *records: StoredRecord) -> None:
        """Store records with the next transaction, without waiting for it."""
        self._pending = _without_forgotten(self._pending, records)
        self._pending.update((_key(record), record) for record in records)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())

    def unsaved_rounds(self) -> set[str]:
        """The plan ids of rounds that are not completely on disk yet."""
        waiting = (*self._pending.values(), *self._in_transaction.values())
        return {
            record.plan_id for record in waiting if isinstance(record, (RoundRecord, RoundObservation, TrainingEnergy))
        }

    async def read(self, what: Callable[[Store], _Result]) -> _Result:
        """Read from the store, beside writes, which a long read must not delay; such as `what` of it returns."""
        return await self._as_owner(lambda: what(self._store), self._reader)

    async def rounds_of(self, run_id: str) -> AsyncIterator[RoundRecord]:
        """Yield the rounds of a run that are on disk, oldest first, read one at a time."""
        for plan_id in await self.read(lambda store: store.plan_ids_of(run_id)):
            record = await self.read(lambda store: store.round_of(plan_id))  # noqa: B023 - awaited within the loop
            if record is not None:  # not deleted meanwhile
                yield record

    async def delete_old_runs(
        self, older_than: timedelta, except_runs: Callable[[], Collection[str]]
    ) -> AsyncIterator[str]:
        """Delete old runs from the store in short transactions (see `Store.delete_some`); yield the id of each.

        Args:
            older_than: how long ago a run must have ended or last changed.
            except_runs: returns the runs to keep; asked before each transaction.
        """
        while True:
            some = await self._as_owner(partial(self._store.delete_some, older_than, except_runs()))
            if some is None:
                return
            for run_id in some:
                yield run_id

    async def delete_run(self, run_id: str) -> None:
        """Delete a run from the store in short transactions."""
        while not await self._as_owner(lambda: self._store.delete_some_of(run_id)):
            pass

    async def watch_owner(self) -> None:
        """Check periodically that this coordinator owns the store, until another one does.

        Otherwise, a coordinator that stores nothing would not notice, and would continue to send orders to agents.
        """
        while not self.ownership_lost.is_set():
            await self._sleep(OWNER_CHECK_S)
            with suppress(
                NotOwnerError, StoreUnavailableError
            ):  # the former sets `ownership_lost`, the latter may be temporary
                await self._as_owner(self._store.require_owner)

    async def close(self) -> None:
        """Store the records that still wait, in one attempt, and end the threads; the store stays open."""
        self._is_closing.set()
        if self._writing is not None:
            await self._writing
        self._thread.shutdown()
        self._reader.shutdown()

    async def _write_all(self) -> None:
        """Write until no record waits."""
        while self._pending:
            await self._write_once()
            if self._pending and self._is_failing:
                if self._is_closing.is_set():
                    _log.error("%d records could not be stored before the coordinator stopped", len(self._pending))
                    break
                await self._pause()
        self._writing = None

    async def _pause(self) -> None:
        """Wait before the next attempt, or until `close`."""
        waits = [asyncio.ensure_future(each) for each in (self._sleep(RETRY_S), self._is_closing.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _write_once(self) -> None:
        """Store all waiting records in one transaction."""
        batch, self._pending = self._pending, {}
        self._in_transaction = batch
        waiters, self._waiters = self._waiters, []
        failed: Exception | None = None
        unstorable: dict[_Key, Exception] = {}
        try:
            with timed(self._figures.store_s):
                unstorable = await self._as_owner(lambda: self._save(list(batch.items())))
        except NotOwnerError as error:
            failed = error
        except StoreUnavailableError as error:
            failed = error
            # Records that arrived meanwhile are newer.
            self._pending = {**_without_forgotten(batch, self._pending.values()), **self._pending}
            self._waiters = [waiter for waiter in waiters if waiter.retries] + self._waiters
            waiters = [waiter for waiter in waiters if not waiter.retries]
        self._in_transaction = {}
        self._log_change(failed)
        for waiter in waiters:
            waiter.resolve(failed or next((unstorable[key] for key in waiter.keys if key in unstorable), None))
        for why in unstorable.values():
            is_bug = not isinstance(why, UnstorableRecordError)
            _log.error("a record was not stored: %s", why, exc_info=why if is_bug else None)

    def _log_change(self, failed: Exception | None) -> None:
        """Log when storing starts to fail, and when it works again."""
        if failed is not None and not self._is_failing:
            _log.error("%s", failed)
        elif failed is None and self._is_failing:
            _log.info("records can be stored again")
        self._is_failing = failed is not None
        self._figures.stored(self._is_failing)

    def _save(self, records: Sequence[tuple[_Key, StoredRecord]]) -> dict[_Key, Exception]:
        """Save in one transaction; if a record cannot be stored, save the others in as few transactions as needed.

        Returns:
            The errors of the records that could not be stored.
        """
        try:
            self._store.save(*(record for _, record in records))
            return {}
        except (NotOwnerError, StoreUnavailableError):
            raise
        except Exception as error:
            # The error boundary of the writer: an error in one record must not prevent storing the others.
            if len(records) == 1:
                return {records[0][0]: error}
        half = len(records) // 2
        return self._save(records[:half]) | self._save(records[half:])

    async def _as_owner(self, work: Callable[[], _Result], thread: ThreadPoolExecutor | None = None) -> _Result:
        """Run work in a thread, by default the writing thread; record if another coordinator owns the store."""
        try:
            return await asyncio.get_running_loop().run_in_executor(thread or self._thread, work)
        except NotOwnerError:
            self.ownership_lost.set()
            raise
