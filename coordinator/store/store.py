"""The coordinator's records on disk."""

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
from coordinator.store.loading import KeptRecords, load
from coordinator.store.ownership import AdvisoryLock, FileLock, OwnerLock, begin_term, require_term
from coordinator.store.schema import upgrade
from coordinator.store.statements import Statements
from coordinator.store.tables import (
    BudgetOverride,
    ReferencePin,
)
from coordinator.store.times import Times, TimesOf
from wattfleet.choosing import Front
from wattfleet.planning import History


def utc_now() -> datetime:
    """The date and time."""
    return datetime.now(timezone.utc)


class Store:
    """The records of one coordinator, which owns the store from when it opens it until it closes it.

    What is saved is on disk when `save` returns. All methods block, and may be called from any thread: one at a time,
    and beside it one of those that only read rounds.
    """

    def __init__(
        self, location: Path | URL, now: Callable[[], datetime] = utc_now, settings: StoreSettings = StoreSettings()
    ) -> None:
        """Open, or create, a database; take it over, and bring its tables to this version.

        Args:
            location: path of an SQLite file, or a database's URL (see `database_url`).
            now: the date and time, with an offset.
            settings: the time to wait for another program's lock.

        Raises:
            InvalidInputError: it cannot be used as a store, or is of a newer version.
            StoreInUseError: another coordinator serves from it.
            StoreUnavailableError: the database does not answer, its file is locked, or there is no room for it.
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
                        f"another coordinator serves from {self.name}: stop it, or have this one wait for its end"
                        " (--standby)"
                    )
                undone.callback(self._lock.release)
                with self._engine.begin() as connection:
                    upgrade(connection, now)
                    self._term = begin_term(connection)
            undone.pop_all()

    def close(self) -> None:
        """Let go of the database, for another coordinator to take over."""
        self._lock.release()
        self._engine.dispose()

    def save(self, *records: StoredRecord) -> None:
        """Keep records, each in place of what was kept of the same thing before: all of them, or none.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the disk is full, the database is locked or does not answer.
            UnstorableRecordError: the database cannot hold one of the records' values.
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
                    self._statements.say,
                    [rows.say_values(each) for each in records if isinstance(each, DeviceOverrides)],
                ),
                (self._statements.reference, references),
            ):
                if values:
                    connection.execute(statement, values)
            _save_overrides(connection, self._statements, records)
            _save_pin(connection, self._statements, records)
        self._fronts.update(fronts)

    def load(self) -> KeptRecords:
        """What was saved, as far as it is needed to go on: in a time that does not grow with the history.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._transaction() as connection:
            kept = load(connection)
        self._fronts = {record.device_id: record.front for record in kept.devices}
        return kept

    def round_of(self, plan_id: str) -> RoundRecord | None:
        """One round; None where it is not stored.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return rounds.round_of(connection, plan_id)

    def plan_ids_of(self, run_id: str) -> list[str]:
        """The ids of a run's rounds, oldest first.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return rounds.plan_ids_of(connection, run_id)

    def history_of(self, run_id: str) -> History:
        """What a run's rounds come to that are over.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return rounds.history_of(connection, run_id)

    def times(self, of: TimesOf) -> dict[str, Times]:
        """When things happened, by the id of each.

        Args:
            of: what is asked for, of `coordinator.store.times`.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._reading() as connection:
            return {str(row[0]): Times(row[1], row[2]) for row in connection.execute(of)}

    def forget(self, older_than: timedelta) -> list[str]:
        """Remove the runs that ended longer ago, or were left alone since, with all that belongs to them.

        Returns:
            Ids of the runs that were removed.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the disk is full, the database is locked or does not answer.
        """
        forgotten: list[str] = []
        while (some := self.forget_some(older_than)) is not None:
            forgotten += some
        return forgotten

    def forget_some(self, older_than: timedelta, but: Collection[str] = ()) -> list[str] | None:
        """The same in a transaction that is short.

        Args:
            older_than: how long ago a run ended, or was last touched.
            but: runs to leave alone.

        Returns:
            Ids of the runs that are gone by now; None if nothing was left to remove.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the disk is full, the database is locked or does not answer.
        """
        with self._transaction() as connection:
            return rounds.forget_some(connection, self._now() - older_than, but)

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
        """A transaction of the owner's."""
        with typed_errors(self.name):
            # It may have been lost with its connection. Where it cannot be had again, the term decides.
            self._lock.take()
            with self._engine.begin() as connection:
                require_term(connection, self._term)
                yield connection

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """A transaction that only reads: none that writes waits for it, nor it for any."""
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
