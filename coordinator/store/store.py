"""The coordinator's database: saves and loads records, for the coordinator that owns it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

from sqlalchemy import URL, Connection, delete
from sqlalchemy.engine import Engine

from coordinator.settings import StoreSettings
from coordinator.state.records import (
    DeviceOverrides,
    DeviceRecord,
    NodeRecord,
    PinnedReference,
    PublishedReference,
    RoundObservation,
    RoundRecord,
    RunRecord,
    StoredRecord,
    SupplyOverride,
    UnplannedRound,
)
from coordinator.store import rounds, rows
from coordinator.store.database import (
    READS,
    database_url,
    display_name,
    open_engine,
    typed_errors,
    typed_opening_errors,
)
from coordinator.store.errors import StoreInUseError
from coordinator.store.loading import StoredState, load
from coordinator.store.ownership import AdvisoryLock, FileLock, OwnerLock, begin_term, require_term
from coordinator.store.statements import Statements
from coordinator.store.tables import BudgetOverride, ReferencePin
from coordinator.store.times import Times, TimesOf
from coordinator.store.upgrade import upgrade
from wattfleet.choosing import Front
from wattfleet.planning import History


def utc_now() -> datetime:
    """The date and time."""
    return datetime.now(timezone.utc)


class Store:
    """The records of one coordinator, which owns the store from opening it to closing it.

    Records are on disk when `save` returns. All methods block. They may be called from any thread, one at a time; a
    method that only reads rounds may run beside another one.
    """

    def __init__(
        self, location: Path | URL, now: Callable[[], datetime] = utc_now, settings: StoreSettings = StoreSettings()
    ) -> None:
        """Open or create a database, take ownership of it, and upgrade its tables to this version.

        Args:
            location: path of an SQLite file, or a database's URL (see `database_url`).
            now: the date and time, with an offset.
            settings: the time to wait for another program's lock.

        Raises:
            InvalidInputError: it cannot be used as a store, or was written by a newer version.
            StoreInUseError: another coordinator uses it.
            StoreUnavailableError: the database does not answer, its file is locked, or the disk is full.
        """
        url = location if isinstance(location, URL) else database_url(location)
        self.name = display_name(url)
        self._now = now
        self._fronts: dict[str, Front | None] = {}
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
                    upgrade(connection, now)
                    self._term = begin_term(connection)
            undone.pop_all()

    def close(self) -> None:
        """Close the database, so that another coordinator can take over."""
        self._lock.release()
        self._engine.dispose()

    def save(self, *records: StoredRecord) -> None:
        """Save records in one transaction; each replaces what was stored for the same thing before.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the disk is full, the database is locked or does not answer.
            UnstorableRecordError: the database cannot store one of the records' values.
        """
        now = self._now()
        devices = [record for record in records if isinstance(record, DeviceRecord)]
        nodes = [rows.node_values(record) for record in records if isinstance(record, NodeRecord)]
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
        fronts = {
            record.device_id: record.front
            for record in devices
            if record.device_id not in self._fronts or self._fronts[record.device_id] is not record.front
        }
        device_rows = [{**rows.device_values(record), "first_seen_at": now, "last_seen_at": now} for record in devices]
        front_rows = [
            {"device_id": device_id, "points": rows.front_bytes(front)}
            for device_id, front in fronts.items()
            if front is not None
        ]
        references = [rows.reference_values(record) for record in records if isinstance(record, PublishedReference)]
        with self._transaction() as connection:
            for statement, values in (
                (self._statements.device, device_rows),
                (self._statements.front, front_rows),
                (
                    self._statements.no_front,
                    [{"gone": device_id} for device_id, each in fronts.items() if each is None],
                ),
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
            _save_overrides(connection, self._statements, records)
            _save_pin(connection, self._statements, records)
        self._fronts.update(fronts)

    def load(self) -> StoredState:
        """What a coordinator needs to start; the time to load it does not grow with the history.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._transaction() as connection:
            stored = load(connection)
        self._fronts = {record.device_id: record.front for record in stored.devices}
        return stored

    def round_of(self, plan_id: str) -> RoundRecord | None:
        """One round; None if it is not stored.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return rounds.round_of(connection, plan_id)

    def unplanned_of(self, run_id: str, number: int) -> UnplannedRound | None:
        """One round without a plan; None if it is not stored.

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
        """A run's finished rounds, as planning needs them.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return rounds.history_of(connection, run_id)

    def times(self, of: TimesOf) -> dict[str, Times]:
        """When things happened, by id.

        Args:
            of: a query of `coordinator.store.times`.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return {str(row[0]): Times(row[1], row[2]) for row in connection.execute(of)}

    def delete_old_runs(self, older_than: timedelta) -> list[str]:
        """Delete the runs that ended longer ago, or were not touched since, with their rounds.

        Returns:
            Ids of the deleted runs.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the disk is full, the database is locked or does not answer.
        """
        deleted: list[str] = []
        while (some := self.delete_some(older_than)) is not None:
            deleted += some
        return deleted

    def delete_some(self, older_than: timedelta, except_runs: Collection[str] = ()) -> list[str] | None:
        """Delete some rounds of the oldest such run, in a short transaction.

        Args:
            older_than: how long ago a run ended, or was last touched.
            except_runs: runs to keep.

        Returns:
            Ids of the runs that are now deleted completely; None if there was nothing to delete.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the disk is full, the database is locked or does not answer.
        """
        with self._transaction() as connection:
            return rounds.delete_some(connection, self._now() - older_than, except_runs)

    def require_owner(self) -> None:
        """Make sure that no other coordinator has taken the store over.

        Raises:
            NotOwnerError: one has.
            StoreUnavailableError: the database does not answer.
        """
        with self._transaction():
            pass

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """A transaction that fails if this coordinator is no longer the owner."""
        with typed_errors(self.name):
            # The lock may have been lost with its connection. If it cannot be taken again, the term decides.
            self._lock.take()
            with self._engine.begin() as connection:
                require_term(connection, self._term)
                yield connection

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """A transaction that only reads; it and writing transactions do not wait for each other."""
        with typed_errors(self.name), self._engine.execution_options(**READS).begin() as connection:
            require_term(connection, self._term, until_commit=False)
            yield connection


def _save_overrides(connection: Connection, statements: Statements, records: Sequence[StoredRecord]) -> None:
    for record in records:
        if not isinstance(record, SupplyOverride):
            continue
        if record.override is None:
            connection.execute(delete(BudgetOverride).where(BudgetOverride.supply == record.supply))
        else:
            connection.execute(statements.override, [rows.override_values(record.supply, record.override)])


def _save_pin(connection: Connection, statements: Statements, records: Sequence[StoredRecord]) -> None:
    for record in records:
        if not isinstance(record, PinnedReference):
            continue
        if record.digest is None:
            connection.execute(delete(ReferencePin))
        else:
            connection.execute(statements.pin, [{"only": 1, "digest": record.digest}])


def _lock(url: URL, engine: Engine) -> OwnerLock:
    if url.drivername != "sqlite":
        return AdvisoryLock(engine)
    path = Path(str(url.database))
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path)
