"""The coordinator's database: saves and loads records, for the coordinator that owns it."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import URL, Connection
from sqlalchemy.engine import Engine

from coordinator.clocks import BootClock
from coordinator.settings import StoreSettings
from coordinator.state.event_records import EventFilter, EventRecord, ExpiredEvents
from coordinator.state.identity_records import AuditEntry, ExpiredIdentities
from coordinator.state.records import (
    DeviceOverrides,
    DeviceRecord,
    ForgottenDevice,
    NodeRecord,
    PublishedReference,
    RoundObservation,
    RoundRecord,
    RunRecord,
    StoredRecord,
    UnplannedRound,
)
from coordinator.state.workload_fronts import WorkloadFront
from coordinator.store import checksums, event_rows, identity_rows, rounds, rows
from coordinator.store.backups import copy_file, has_tables
from coordinator.store.clock_record import ClockRecord
from coordinator.store.database import (
    READS,
    database_url,
    display_name,
    open_engine,
    typed_errors,
    typed_opening_errors,
)
from coordinator.store.errors import StoreInUseError
from coordinator.store.integrity import driver_connection, readable, require_undamaged
from coordinator.store.loading import StoredState, load
from coordinator.store.ownership import AdvisoryLock, FileLock, OwnerLock, begin_term, require_term
from coordinator.store.single_rows import save_single_rows
from coordinator.store.statements import Statements
from coordinator.store.times import Times, TimesOf
from coordinator.store.upgrade import newest_version, upgrade, version_of
from wattfleet.planning import History
from wattfleet_io.atomic_files import make_state_folder
from wattfleet_io.clock import utc_now

_log = logging.getLogger(__name__)

_FILE_MODE = 0o640
"""The permissions of a new SQLite file; SQLite gives the files beside it the same."""


class Store:
    """The records of one coordinator, which owns the store while it is open.

    Records are on disk when `save` returns. All methods block. They may be called from any thread, one at a time; a
    method that only reads rounds may run at the same time as another one.
    """

    def __init__(
        self,
        location: Path | URL,
        now: Callable[[], datetime] = utc_now,
        settings: StoreSettings = StoreSettings(),
        clock: BootClock | None = None,
    ) -> None:
        """Open or create a database, take ownership of it, and upgrade its tables to this version.

        Args:
            location: path of an SQLite file, or a database's URL (see `database_url`).
            now: returns the date and time, with a UTC offset.
            settings: the time to wait for another program's lock, whether to check rows, and which dates are plausible.
            clock: the time since the machine started; None if `now` cannot jump.

        Raises:
            DamagedStoreError: an SQLite file does not contain what was written to it.
            InvalidInputError: the location cannot be used as a store, or was written by a newer version.
            StoreInUseError: another coordinator uses the store.
            StoreUnavailableError: the database does not answer, its file is locked, or the disk is full.
        """
        url = location if isinstance(location, URL) else database_url(location)
        self.name = display_name(url)
        self._now = now
        self._fronts: dict[str, tuple[WorkloadFront, ...]] = {}
        self._clocks = None if clock is None else ClockRecord(clock, now, 86_400 * settings.max_absence_days)
        with ExitStack() as undone:
            self._engine = open_engine(url, settings.lock_timeout_s)
            undone.callback(self._engine.dispose)
            self._statements = Statements(self._engine.dialect.name)
            with typed_opening_errors(self.name):
                self._lock = _lock(url, self._engine)
                if not self._lock.take():
                    raise StoreInUseError(
                        f"another coordinator uses {self.name}: stop it, or start this one with --standby to take over"
                        " when it ends"
                    )
                undone.callback(self._lock.release)
                with self._engine.begin() as connection:
                    if url.drivername == "sqlite":
                        _open_file(connection, Path(self.name), now, settings.check_rows)
                        _close_to_others(Path(self.name))
                    else:
                        upgrade(connection, now)
                    self._term = begin_term(connection)
                    if self._clocks is not None:
                        self._clocks.open(connection)
            undone.pop_all()

    def close(self) -> None:
        """Close the database, so that another coordinator can take over."""
        self._lock.release()
        self._engine.dispose()

    def save(self, *records: StoredRecord) -> None:
        """Save records in one transaction; each replaces the stored record with the same key.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the disk is full, the database is locked or does not answer.
            UnstorableRecordError: the database cannot store one of the records' values.
        """
        now = self._now()
        forgotten = {record.device_id for record in records if isinstance(record, ForgottenDevice)}
        devices = [record for record in records if isinstance(record, DeviceRecord)]
        nodes = [{**rows.node_values(record), "bound_at": now} for record in records if isinstance(record, NodeRecord)]
        runs = [
            {**rows.run_values(record), "started_at": now, "finished_at": now if record.finished else None}
            for record in records
            if isinstance(record, RunRecord)
        ]
        planned = [record for record in records if isinstance(record, RoundRecord)]
        round_rows = [
            {**rows.round_values(record), "planned_at": now, "finished_at": None if record.wall_s is None else now}
            for record in planned
        ]
        observations = [
            rows.observation_values(RoundObservation(record.plan_id, observed))
            for record in planned
            for observed in record.observations.values()
        ] + [rows.observation_values(record) for record in records if isinstance(record, RoundObservation)]
        fronts = {record.device_id: record.fronts for record in devices}
        stored = {each: () if each in forgotten else self._fronts.get(each, ()) for each in fronts}
        device_rows = [{**rows.device_values(record), "first_seen_at": now, "last_seen_at": now} for record in devices]
        front_rows = [
            {**rows.workload_front_values(device_id, known), "reported_at": now}
            for device_id, now_known in fronts.items()
            for known in now_known
            if not any(known is each for each in stored[device_id])
        ]
        gone_fronts = [
            {"of_device": device_id, "gone": name}
            for device_id, before in stored.items()
            for name in {each.name for each in before} - {each.name for each in fronts[device_id]}
        ]
        references = [rows.reference_values(record) for record in records if isinstance(record, PublishedReference)]
        with self._transaction() as connection:
            # First, because a forgotten device may have enrolled again since.
            for deletion in self._statements.forgotten if forgotten else ():
                connection.execute(deletion, [{"gone": device_id} for device_id in forgotten])
            for statement, values in (
                (self._statements.device, device_rows),
                (self._statements.front, front_rows),
                (self._statements.no_front, gone_fronts),
                (self._statements.node, nodes),
                (self._statements.run, runs),
                (self._statements.round, round_rows),
                (self._statements.observation, observations),
                (
                    self._statements.unplanned,
                    [rows.unplanned_values(each) for each in records if isinstance(each, UnplannedRound)],
                ),
                (
                    self._statements.device_overrides,
                    [rows.device_overrides_values(each) for each in records if isinstance(each, DeviceOverrides)],
                ),
                (self._statements.reference, references),
            ):
                if values:
                    connection.execute(statement, values)
            save_single_rows(connection, self._statements, records)
            identity_rows.save_identities(connection, self._statements, records)
            event_rows.save_events(connection, self._statements, records)
            for each in records:
                # After a jump of the date, this would also delete unexpired revocations and entries.
                if isinstance(each, ExpiredIdentities) and not self._keeps(each.keep):
                    identity_rows.drop(connection, each)
                elif isinstance(each, ExpiredEvents) and not self._keeps(each.keep):
                    event_rows.drop_events(connection, each)
        for device_id in forgotten:
            self._fronts.pop(device_id, None)
        self._fronts.update(fronts)

    def load(self) -> StoredState:
        """Load what a coordinator needs to start; the time this takes does not grow with the history.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._transaction() as connection, readable(self.name):
            stored = load(connection, self._clocks is not None and self._clocks.is_doubtful)
        self._fronts = {record.device_id: record.fronts for record in stored.devices}
        return stored

    def round_of(self, plan_id: str) -> RoundRecord | None:
        """Load one round; None if it is not stored.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return rounds.round_of(connection, plan_id)

    def unplanned_of(self, run_id: str, number: int) -> UnplannedRound | None:
        """Load one round without a plan; None if it is not stored.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return rounds.unplanned_of(connection, run_id, number)

    def plan_ids_of(self, run_id: str) -> list[str]:
        """The ids of a run's rounds, oldest first.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return rounds.plan_ids_of(connection, run_id)

    def history_of(self, run_id: str) -> History:
        """Load a run's finished rounds, as planning needs them.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return rounds.history_of(connection, run_id)

    def audit_entries(self, since: datetime | None, limit: int) -> list[AuditEntry]:
        """Load the newest entries of the audit log, oldest first; none from before `since`.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return identity_rows.audit_entries(connection, since, limit)

    def events(self, wanted: EventFilter) -> list[EventRecord]:
        """Load the newest events that a filter keeps, newest first.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return event_rows.events(connection, wanted)

    def times(self, of: TimesOf) -> dict[str, Times]:
        """Load the times of events, by id.

        Args:
            of: a query of `coordinator.store.times`.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return {str(row[0]): Times(row[1], row[2]) for row in connection.execute(of)}

    def delete_some(self, older_than: timedelta, except_runs: Collection[str] = ()) -> list[str] | None:
        """Delete some rounds of the oldest run that is old enough, in a short transaction.

        After a jump of the date, nothing is deleted until that time has passed again.

        Args:
            older_than: how long ago a run must have ended or last changed.
            except_runs: runs to keep.

        Returns:
            Ids of the runs that are now deleted completely; None if there was nothing to delete.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the disk is full, the database is locked or does not answer.
        """
        with self._transaction() as connection:
            if (until := self._keeps(older_than)) is not None:
                _log.info(
                    "no runs are deleted before %s, because the clock has jumped", until.isoformat("T", "seconds")
                )
                return None
            return rounds.delete_some(connection, self._now() - older_than, except_runs)

    def delete_some_of(self, run_id: str) -> bool:
        """Delete some rounds of a run in a short transaction; with its last round, delete the run.

        Returns: Whether the run is now deleted completely.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the disk is full, the database is locked or does not answer.
        """
        with self._transaction() as connection:
            return rounds.delete_some_of(connection, run_id)

    def _keeps(self, keep: timedelta) -> datetime | None:
        """The time until which nothing may be deleted because the date has jumped; None if old data may be deleted."""
        return None if self._clocks is None else self._clocks.keeps_until(keep)

    def require_owner(self) -> None:
        """Check that no other coordinator has taken the store over.

        Raises:
            NotOwnerError: another coordinator has taken it over.
            StoreUnavailableError: the database does not answer.
        """
        with self._transaction():
            pass

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """Begin a transaction that fails if this coordinator is no longer the owner."""
        with typed_errors(self.name):
            # The lock may have been lost with its connection. If it cannot be taken again, the term decides.
            self._lock.take()
            with self._engine.begin() as connection:
                require_term(connection, self._term)
                if self._clocks is not None:
                    self._clocks.note(connection)
                yield connection

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """Begin a read-only transaction; it and writing transactions do not wait for each other."""
        with typed_errors(self.name), self._engine.execution_options(**READS).begin() as connection:
            require_term(connection, self._term, until_commit=False)
            with readable(self.name):
                yield connection


def _open_file(connection: Connection, path: Path, now: Callable[[], datetime], check_rows: bool) -> None:
    """Check an SQLite file, and upgrade its tables after copying the file.

    Raises:
        DamagedStoreError: the file does not contain what was written to it.
        InvalidInputError: the file was written by a newer version.
    """
    file = driver_connection(connection)
    require_undamaged(file, str(path), check_rows)
    version = version_of(connection)
    if version == newest_version() and checksums.is_sealed(file):
        return
    if has_tables(file):
        backup = path.with_name(f"{path.name}.tables-{version or 'none'}.backup")
        copy_file(path, backup)
        _log.info("%s was copied to %s before its tables are upgraded", path, backup)
    checksums.forget(file)
    upgrade(connection, now)
    checksums.prepare(file)
    checksums.seal(file)


def _lock(url: URL, engine: Engine) -> OwnerLock:
    if url.drivername != "sqlite":
        return AdvisoryLock(engine)
    path = Path(str(url.database))
    make_state_folder(path.parent)
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _FILE_MODE))
    return FileLock(path)


def _close_to_others(path: Path) -> None:
    """Let no other users read a store that an earlier version has created, since it contains the audit log."""
    for each in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        with suppress(OSError):  # absent, or the file of a user in whose group this one is
            if (mode := stat.S_IMODE(each.stat().st_mode)) & stat.S_IRWXO:
                each.chmod(mode & ~stat.S_IRWXO)
