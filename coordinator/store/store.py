"""The coordinator's records on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from sqlalchemy import URL, ColumnElement, Connection, delete, or_, select
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError

from coordinator.records import (
    DeviceRecord,
    NodeRecord,
    ObservedTraining,
    OperatorSay,
    PinnedReference,
    PublishedReference,
    RoundObservation,
    RoundRecord,
    RunRecord,
    StoredRecord,
    SupplyOverride,
)
from coordinator.store import rows
from coordinator.store.database import database_url, display_name, open_engine, reason, typed_errors
from coordinator.store.errors import StoreInUseError, StoreUnavailableError
from coordinator.store.ownership import AdvisoryLock, FileLock, OwnerLock, begin_term, require_term
from coordinator.store.schema import upgrade
from coordinator.store.statements import Statements
from coordinator.store.tables import (
    BudgetOverride,
    Device,
    DeviceFront,
    DeviceSay,
    Node,
    Observation,
    Reference,
    ReferencePin,
    Round,
    Run,
)
from coordinator.store.times import Times, TimesOf
from wattfleet.budgets import Override
from wattfleet.errors import InvalidInputError
from wattfleet.front import Front


def utc_now() -> datetime:
    """The date and time."""
    return datetime.now(timezone.utc)


@dataclass(frozen=True)
class KeptRecords:
    """What a store holds, but for the rounds of most of the runs that are over.

    Attributes:
        devices: in no particular order.
        nodes: Flower node id -> device id.
        runs: oldest first.
        rounds: of the newest run and of those that are not over; oldest first.
        archived: ids of the runs whose rounds are left out; `Store.rounds_of` has them.
        says: what the operator said of devices.
        overrides: watts that the operator has set, by supply; some may be over.
        references: published reference predictors.
        pinned: digest of the one that is pinned; None for none.
    """

    devices: Sequence[DeviceRecord]
    nodes: dict[int, str]
    runs: Sequence[RunRecord]
    rounds: Sequence[RoundRecord]
    archived: frozenset[str]
    says: Sequence[OperatorSay] = ()
    overrides: Mapping[str, Override] = field(default_factory=dict)
    references: Sequence[PublishedReference] = ()
    pinned: str | None = None


class Store:
    """The records of one coordinator, which owns the store from when it opens it until it closes it.

    What is saved is on disk when `save` returns. All methods block, and may be called from any thread, one at a time.
    """

    def __init__(self, location: Path | URL, now: Callable[[], datetime] = utc_now) -> None:
        """Open, or create, a database; take it over, and bring its tables to this version.

        Args:
            location: path of an SQLite file, or a database's URL (see `database_url`).
            now: the date and time, with an offset.

        Raises:
            InvalidInputError: it cannot be used as a store, or is of a newer version.
            StoreInUseError: another coordinator serves from it.
            StoreUnavailableError: the database does not answer.
        """
        url = location if isinstance(location, URL) else database_url(location)
        self.name = display_name(url)
        self._now = now
        self._fronts: dict[str, Front | None] = {}
        with ExitStack() as undone:
            self._engine = open_engine(url)
            undone.callback(self._engine.dispose)
            self._statements = Statements(self._engine.dialect.name)
            try:
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
            except (OSError, DBAPIError, InvalidInputError) as error:
                why = reason(error) if isinstance(error, DBAPIError) else error
                is_away = url.drivername != "sqlite" and isinstance(error, DBAPIError)
                kind = StoreUnavailableError if is_away else InvalidInputError
                raise kind(f"{self.name}: cannot be used as the coordinator's store: {why}") from None
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
        rounds = [record for record in records if isinstance(record, RoundRecord)]
        round_rows = [
            {**rows.round_values(record), "planned_at": now, "finished_at": None if record.wall_s is None else now}
            for record in rounds
        ]
        observations = [
            rows.observation_values(RoundObservation(record.plan_id, observed))
            for record in rounds
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
                (self._statements.say, [rows.say_values(each) for each in records if isinstance(each, OperatorSay)]),
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
            points = {row.device_id: row.points for row in connection.execute(select(DeviceFront.__table__))}
            fronts = {device_id: rows.front_from_bytes(each) for device_id, each in points.items()}
            devices = connection.execute(select(Device.__table__)).all()
            runs = [rows.run_record(row) for row in connection.execute(select(Run.__table__).order_by(Run.order))]
            current = {record.run_id for record in runs if not record.finished} | {each.run_id for each in runs[-1:]}
            newest = select(Run.run_id).order_by(Run.order.desc()).limit(1).scalar_subquery()
            is_current = or_(Run.finished.is_(False), Run.run_id == newest)
            kept = KeptRecords(
                devices=[rows.device_record(row, fronts.get(row.device_id)) for row in devices],
                nodes={int(row.node_id): row.device_id for row in connection.execute(select(Node.__table__))},
                runs=runs,
                rounds=_rounds(connection, Round.run_id.in_(select(Run.run_id).where(is_current))),
                archived=frozenset(record.run_id for record in runs) - current,
                says=[rows.say_record(row) for row in connection.execute(select(DeviceSay.__table__))],
                overrides={
                    row.supply: Override(row.watts, row.until)
                    for row in connection.execute(select(BudgetOverride.__table__))
                },
                references=[
                    PublishedReference(row.digest, row.manifest, row.weights)
                    for row in connection.execute(select(Reference.__table__))
                ],
                pinned=connection.scalar(select(ReferencePin.digest)),
            )
        self._fronts = {record.device_id: record.front for record in kept.devices}
        return kept

    def rounds_of(self, run_id: str) -> list[RoundRecord]:
        """The rounds of a run, oldest first.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._transaction() as connection:
            return _rounds(connection, Round.run_id == run_id)

    def times(self, of: TimesOf) -> dict[str, Times]:
        """When things happened, by the id of each.

        Args:
            of: what is asked for, of `coordinator.store.times`.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the database does not answer.
        """
        with self._transaction() as connection:
            return {str(row[0]): Times(row[1], row[2]) for row in connection.execute(of)}

    def forget(self, older_than: timedelta) -> list[str]:
        """Remove the runs that ended longer ago, with their rounds and what was observed in them.

        Returns:
            Ids of the runs that were removed.

        Raises:
            NotOwnerError: another coordinator has taken the store over.
            StoreUnavailableError: the disk is full, the database is locked or does not answer.
        """
        with self._transaction() as connection:
            is_old = Run.finished_at < self._now() - older_than
            forgotten = list(connection.scalars(select(Run.run_id).where(is_old).order_by(Run.order)))
            rounds = select(Round.plan_id).where(Round.run_id.in_(select(Run.run_id).where(is_old)))
            connection.execute(delete(Observation).where(Observation.plan_id.in_(rounds)))
            connection.execute(delete(Round).where(Round.run_id.in_(select(Run.run_id).where(is_old))))
            connection.execute(delete(Run).where(is_old))
        return forgotten

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """A transaction of the owner's."""
        with typed_errors(self.name):
            # It may have been lost with its connection. Where it cannot be had again, the term decides.
            self._lock.take()
            with self._engine.begin() as connection:
                require_term(connection, self._term)
                yield connection


def _rounds(connection: Connection, are_wanted: ColumnElement[bool]) -> list[RoundRecord]:
    """Rounds with what was observed in them, oldest first."""
    observations: dict[str, list[ObservedTraining]] = {}
    observed_in = select(Round.plan_id).where(are_wanted)
    for row in connection.execute(select(Observation.__table__).where(Observation.plan_id.in_(observed_in))):
        observed = ObservedTraining(row.device_id, row.epoch_s, row.power_w)
        observations.setdefault(row.plan_id, []).append(observed)
    wanted = select(Round.__table__).where(are_wanted).order_by(Round.order)
    return [rows.round_record(row, observations.get(row.plan_id, [])) for row in connection.execute(wanted)]


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
