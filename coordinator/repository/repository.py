"""The fleet and its store in one place: loads what is missing in memory, and saves what has changed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL

from coordinator.clocks import BootClock
from coordinator.errors import StoreInUseError, StoreUnavailableError
from coordinator.repository.writer import Writer
from coordinator.settings import StoreSettings
from coordinator.state.fleet import Fleet
from coordinator.state.identities import Identities
from coordinator.state.records import ExpiredEvents, RoundRecord, StoredRecord, run_of
from coordinator.store.store import Store
from wattfleet.common.clock import utc_now
from wattfleet.core.planning import History

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


# --- Shared reads -----------------------------------------------------------------------------------------------------
# Reads from the store that are in progress, each shared by all tasks that need the same data.


Key = tuple[str, str]
"""The kind of thing that is read, and its id."""


class SharedReads:
    """Each read runs once for all waiting tasks, and continues to its end if they are cancelled.

    Reading a large run's history may take longer than a Flower server waits for an answer; its retry then finds the
    result.
    """

    def __init__(self) -> None:
        """Start without any read."""
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._waiting: Counter[Key] = Counter()

    def __contains__(self, key: object) -> bool:
        """Whether a key is being read, or was read for a task that has not continued yet."""
        return key in self._tasks or key in self._waiting

    async def once(self, key: Key, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a read, or wait for the same read in progress.

        Args:
            key: kind and id of what is read.
            read: reads it from the store into the fleet.
        """
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(self._run(key, read))
            task.add_done_callback(_retrieve_error)
        self._waiting[key] += 1
        try:
            await asyncio.shield(task)
        finally:
            self._waiting[key] -= 1
            self._waiting += Counter()  # drops keys that no task waits for

    async def _run(self, key: Key, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await read()
        finally:
            del self._tasks[key]


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Mark a read's error as retrieved, because no task does so if all waiting tasks were cancelled."""
    if not task.cancelled():
        task.exception()


# --- Repository -------------------------------------------------------------------------------------------------------

EVICT_S = 1.0
"""Time between two checks for rounds that no longer need to be in memory, s."""


class FleetRepository:
    """The fleet in memory and the store behind it, shared by the services.

    A change has two steps: a method of the fleet returns the changed record, and `save` returns once it is on disk.

    All methods that wait for the store raise `NotOwnerError` if another coordinator has taken it over, and
    `StoreUnavailableError` if the database does not answer.

    Attributes:
        fleet: the fleet.
    """

    def __init__(self, fleet: Fleet, writer: Writer) -> None:
        """Connect a fleet to its store.

        Args:
            fleet: the fleet.
            writer: writes to its store, and reads from it.
        """
        self.fleet = fleet
        self._writer = writer
        self._reads = SharedReads()

    # --- save ---------------------------------------------------------------------------------------------------

    async def save(self, *records: StoredRecord) -> None:
        """Save records in one transaction, and return once they are on disk.

        Raises:
            UnstorableRecordError: the database cannot store the records; this is not retried.
        """
        await self._writer.save(*self._with_grants(records))

    async def save_until_stored(self, *records: StoredRecord) -> None:
        """Save records, retrying while the store is unavailable, and return once they are on disk.

        Args:
            records: the newest records, because they replace waiting records with the same keys.

        Raises:
            UnstorableRecordError: the database cannot store the records; this is not retried.
        """
        await self._writer.save_until_stored(*self._with_grants(records))

    def save_soon(self, *records: StoredRecord) -> None:
        """Save records with the next transaction, without waiting for it."""
        self._writer.save_soon(*self._with_grants(records))

    def _with_grants(self, records: Sequence[StoredRecord]) -> list[StoredRecord]:
        """Add the records about grants that must be stored together with the given records."""
        return [*records, *self.fleet.rounds.grants.unstored.take()]

    # --- load ---------------------------------------------------------------------------------------------------

    async def read(self, what: Callable[[Store], _Result]) -> _Result:
        """Read from the store what is not in memory, such as `lambda store: store.events(wanted)`."""
        return await self._writer.read(what)

    async def load_round(self, plan_id: str) -> None:
        """Load a round into the fleet's cache if it is missing there; does nothing for an unknown round."""

        async def read() -> None:
            if (record := await self.read(lambda store: store.round_of(plan_id))) is not None:
                self.fleet.rounds.cache.restore(record)

        if self.fleet.rounds.cache.is_missing(plan_id):
            await self._reads.once(("round", plan_id), read)

    async def load_history(self, run_id: str) -> None:
        """Load a run's history, which its next plan needs, into the fleet's cache."""

        async def read() -> None:
            self.fleet.rounds.cache.restore_history(run_id, await self.read(lambda store: store.history_of(run_id)))

        if self.fleet.rounds.cache.is_history_missing(run_id):
            await self._reads.once(("history", run_id), read)
        else:
            self.fleet.rounds.cache.restore_history(run_id, History())

    async def load_newest_round(self, run_id: str) -> None:
        """Load the newest round of a run into the fleet's cache, if the run has any."""
        if self.fleet.rounds.cache.is_archived(run_id):
            for plan_id in (await self.read(lambda store: store.plan_ids_of(run_id)))[-1:]:
                await self.load_round(plan_id)

    async def rounds_of(self, run_id: str) -> AsyncIterator[RoundRecord]:
        """Yield the rounds of a run, oldest first; those only in the store are read one by one and not cached."""
        cached = {record.plan_id: record for record in self.fleet.rounds.cache.of_run(run_id)}
        if self.fleet.rounds.cache.is_archived(run_id):
            async for record in self._writer.rounds_of(run_id):
                yield cached.pop(record.plan_id, record)  # the cached round may be newer
        for record in cached.values():
            yield record

    # --- remove -------------------------------------------------------------------------------------------------

    def evict_rounds(self) -> None:
        """Remove rounds from the cache that are stored and were not used for some time."""
        unsaved = self._writer.unsaved_rounds()
        # Keep rounds that a task has just loaded and is about to use, and rounds that complete a history being loaded.
        self.fleet.rounds.cache.evict(
            [
                plan_id
                for plan_id in self.fleet.rounds.evictable()
                if plan_id not in unsaved
                and ("round", plan_id) not in self._reads
                and ("history", run_of(plan_id)) not in self._reads
            ]
        )

    async def keep_evicting(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Evict rounds periodically, until cancelled."""
        while True:
            await sleep(EVICT_S)
            self.evict_rounds()

    async def delete_run(self, run_id: str) -> None:
        """Delete a run that has ended, with its rounds, from the store and from memory."""
        await self.save(self.fleet.flower.run(run_id))  # and all records that still wait for the store
        await self._writer.delete_run(run_id)
        self.fleet.flower.remove_runs([run_id])
        self.fleet.unplanned.remove_runs([run_id])

    async def delete_old_runs(self, older_than: timedelta) -> AsyncIterator[str]:
        """Delete runs that ended, or were last changed, longer ago than the given time; yield the id of each.

        Runs in use are kept, also those that come into use meanwhile.
        """
        async for run_id in self._writer.delete_old_runs(older_than, self.fleet.runs_in_use):
            self.fleet.flower.remove_runs([run_id])
            self.fleet.unplanned.remove_runs([run_id])
            yield run_id


# --- Standby ----------------------------------------------------------------------------------------------------------
# Opens a store; a standby waits until no other coordinator uses it.

STANDBY_CHECK_S = 1.0
"""Time between two attempts of a standby to take over, s."""


async def open_store(
    location: Path | URL,
    settings: StoreSettings = StoreSettings(),
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    open_now: Callable[[Path | URL], Store] | None = None,
) -> Store:
    """Open a store.

    Args:
        location: path of an SQLite file, or a database's URL.
        settings: whether to wait while another coordinator uses it or its database does not answer.
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
        await sleep(STANDBY_CHECK_S)


# --- Retention --------------------------------------------------------------------------------------------------------
# Retention: deletes old runs once a day, and drops expired invites, certificates, audit entries and events every
# hour.
#
# Nothing else deletes runs by their age. The deletion runs beside the loaded fleet, also at the start, because the
# fleet knows which runs are in use (`Fleet.runs_in_use`).

_AN_HOUR_S = 3600.0
_A_DAY_S = 24 * _AN_HOUR_S


async def delete_old_runs_daily(
    repository: FleetRepository, keep: timedelta, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Delete old runs from the store and from memory, now and once a day, until cancelled.

    Runs in use are kept.

    Args:
        repository: the fleet and its store.
        keep: how long a run is kept after its end, or after its last round if it never ended.
        sleep: waits for the given seconds.

    Raises:
        NotOwnerError: another coordinator has taken the store over.
    """
    while True:
        count = 0
        try:
            async for _run_id in repository.delete_old_runs(keep):
                count += 1
        except StoreUnavailableError as error:
            _log.warning("deleting old runs stopped until tomorrow: %s", error)
        if count:
            _log.info("deleted %d runs older than %d days", count, keep.days)
        await sleep(_A_DAY_S)


async def drop_expired_hourly(
    repository: FleetRepository,
    identities: Identities,
    now: Callable[[], datetime] = utc_now,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Drop expired identity records from memory and the store, and old events, now and every hour, until cancelled.

    Args:
        repository: the fleet and its store.
        identities: invites and certificates.
        now: returns the time.
        sleep: waits for the given seconds.
    """
    while True:
        repository.save_soon(identities.expire(now()), ExpiredEvents(now()))
        await sleep(_AN_HOUR_S)
