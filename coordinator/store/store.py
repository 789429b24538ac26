"""The coordinator's database: saves and loads records, for the coordinator that owns it."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, ColumnElement, Connection, Row, and_, delete, exists, func, or_, select
from sqlalchemy.engine import Engine

from coordinator.clocks import BootClock
from coordinator.errors import StoreFullError, StoreInUseError
from coordinator.settings import StoreSettings
from coordinator.state.identity_records import AuditEntry, CertificateRecord, ExpiredIdentities, InviteRecord
from coordinator.state.records import (
    ContainedEnergy,
    CountedEnergy,
    DeviceOverrides,
    DeviceRecord,
    DeviceResult,
    EventFilter,
    EventRecord,
    ExpiredEvents,
    ForgottenDevice,
    GivenUpTraining,
    NodeRecord,
    ObservedTraining,
    PublishedReference,
    RoundObservation,
    RoundRecord,
    RunRecord,
    StoredGrants,
    StoredRecord,
    TrainingEnergy,
    UnplannedRound,
    parts_of,
)
from coordinator.state.stores import KEPT
from coordinator.state.workload_fronts import WorkloadFront
from coordinator.store import checksums, tables
from coordinator.store.checksums import damaged_store, driver_connection, readable, require_undamaged
from coordinator.store.database import (
    READS,
    WITHOUT_VERSION,
    database_url,
    display_name,
    has_no_version,
    newest_version,
    open_engine,
    typed_errors,
    typed_opening_errors,
    upgrade,
    version_of,
)
from coordinator.store.ownership import AdvisoryLock, FileLock, OwnerLock, begin_term, require_term
from coordinator.store.tables import (
    BatteryChargeRow,
    BudgetOverride,
    ClockRecord,
    CountedEnergyRow,
    DeviceFront,
    DeviceOverridesRow,
    DeviceRow,
    GivenUpTrainingRow,
    GrantLifetimeRow,
    Node,
    Observation,
    ReferencePin,
    ReferenceRow,
    Round,
    Run,
    Statements,
    SupplyEnergyBudgetRow,
    Times,
    TimesOf,
    TrainingEnergyRow,
    UnplannedRoundRow,
    save_single_rows,
)
from wattfleet.common.atomic_files import make_state_folder, sync_folder
from wattfleet.common.clock import utc_now
from wattfleet.core.budgets import Charge, EnergyAccount, Override, Period, PeriodBudget
from wattfleet.core.errors import ImplausibleError, InvalidInputError
from wattfleet.core.planning import History

_log = logging.getLogger(__name__)


# --- Rounds -----------------------------------------------------------------------------------------------------------
# Reads and deletes rounds, a few at a time: one round may have ten thousand devices.


_NEWEST = 3
"""The number of newest rounds that are always loaded, for example for metrics."""

_DELETED_AT_ONCE = 8
"""The number of rounds per transaction: with ten thousand devices each, deleting them takes some tenths of a second."""


def plan_ids_of(connection: Connection, run_id: str) -> list[str]:
    """The ids of a run's rounds, oldest first."""
    return list(connection.scalars(select(Round.plan_id).where(Round.run_id == run_id).order_by(Round.order)))


def round_of(connection: Connection, plan_id: str) -> RoundRecord | None:
    """Load one round with its observations; None if it is not stored."""
    row = connection.execute(select(Round.__table__).where(Round.plan_id == plan_id)).one_or_none()
    if row is None:
        return None
    observed = connection.execute(select(Observation.__table__).where(Observation.plan_id == plan_id))
    energies = connection.execute(select(TrainingEnergyRow.__table__).where(TrainingEnergyRow.plan_id == plan_id))
    return tables.round_record(
        row,
        [tables.record_of(ObservedTraining, each) for each in observed],
        [tables.record_of(TrainingEnergy, each) for each in energies],
    )


def energy_of(connection: Connection, runs: Sequence[RunRecord]) -> dict[str, EnergyAccount]:
    """Load the accounts of those runs that have an energy budget, by run id."""
    with_budget = [each for each in runs if each.energy_budget_j is not None]
    run_ids = [each.run_id for each in with_budget]
    planned = select(Round.run_id, func.sum(Round.set_aside_j)).where(Round.run_id.in_(run_ids))
    planned_j = {run_id: float(joules or 0.0) for run_id, joules in connection.execute(planned.group_by(Round.run_id))}
    reported = (
        select(Round.run_id, func.sum(TrainingEnergyRow.energy_j), func.sum(TrainingEnergyRow.set_aside_j))
        .join(TrainingEnergyRow, TrainingEnergyRow.plan_id == Round.plan_id)
        .where(Round.run_id.in_(run_ids))
        .group_by(Round.run_id)
    )
    reported_j = {
        run_id: (float(spent or 0.0), float(aside or 0.0)) for run_id, spent, aside in connection.execute(reported)
    }
    found = {}
    for run in with_budget:
        assert run.energy_budget_j is not None, "it has a budget"
        spent_j, settled_j = reported_j.get(run.run_id, (0.0, 0.0))
        set_aside_j = max(0.0, planned_j.get(run.run_id, 0.0) - settled_j)
        found[run.run_id] = EnergyAccount(run.energy_budget_j, spent_j + run.surveys_j, set_aside_j)
    return found


def unplanned(connection: Connection) -> list[tuple[str, int]]:
    """The run id and number of each round without a plan."""
    columns = select(UnplannedRoundRow.run_id, UnplannedRoundRow.number)
    return [(row.run_id, row.number) for row in connection.execute(columns)]


def unplanned_of(connection: Connection, run_id: str, number: int) -> UnplannedRound | None:
    """Load one round without a plan; None if it is not stored."""
    is_it = and_(UnplannedRoundRow.run_id == run_id, UnplannedRoundRow.number == number)
    row = connection.execute(select(UnplannedRoundRow.__table__).where(is_it)).one_or_none()
    return None if row is None else tables.unplanned_record(row)


def history_of(connection: Connection, run_id: str) -> History:
    """Load a run's finished rounds, without their plans."""
    history = History()
    is_over = and_(Round.run_id == run_id, Round.wall_s.is_not(None))
    over = select(Round.number, Round.results).where(is_over).order_by(Round.order)
    for row in connection.execute(over.execution_options(yield_per=1)):
        history = history.after(row.number, parts_of(DeviceResult(**each) for each in row.results))
    return history


def current(connection: Connection) -> list[RoundRecord]:
    """Load the rounds that a coordinator continues with, oldest first.

    They are the newest few, those that may be in flight or were given up, and the newer rounds of their devices.
    """
    may_be_in_flight = and_(Round.wall_s.is_(None), Round.run_id.in_(select(Run.run_id).where(Run.finished.is_(False))))
    is_of_round = GivenUpTrainingRow.plan_id == Round.plan_id
    in_flight: set[str] = set().union(*connection.scalars(select(Round.nodes).where(may_be_in_flight)))
    in_flight.update(connection.scalars(select(GivenUpTrainingRow.device_id).join(Round, is_of_round)))
    newest_first = select(Round.plan_id, Round.nodes).order_by(Round.order.desc())
    wanted: list[str] = []
    with connection.execute(newest_first.execution_options(yield_per=_NEWEST)) as found:
        for row in found:
            if len(wanted) >= _NEWEST and not in_flight:
                break
            if len(wanted) < _NEWEST or not in_flight.isdisjoint(row.nodes):
                wanted.append(row.plan_id)
            in_flight -= row.nodes.keys()
    loaded = (round_of(connection, plan_id) for plan_id in reversed(wanted))
    return [record for record in loaded if record is not None]


def delete_some(connection: Connection, untouched_since: datetime, except_runs: Collection[str]) -> list[str] | None:
    """Delete some rounds of the oldest run that is old enough; with its last round, delete the run.

    Args:
        connection: in a transaction.
        untouched_since: a date and time.
        except_runs: runs to keep.

    Returns:
        The id of the run if it is now deleted completely; None if there was nothing to delete.
    """
    old = (
        select(Run.run_id)
        .where(_is_untouched(untouched_since), Run.run_id.not_in(except_runs))
        .order_by(Run.order)
        .limit(1)
    )
    run_id = connection.scalar(old)
    if run_id is None:
        return None
    return [run_id] if delete_some_of(connection, run_id) else []


def delete_some_of(connection: Connection, run_id: str) -> bool:
    """Delete some rounds of a run; with its last round, delete the run.

    Returns:
        Whether the run is now deleted completely.
    """
    plan_ids = plan_ids_of(connection, run_id)
    deleted = plan_ids[:_DELETED_AT_ONCE]
    connection.execute(delete(Observation).where(Observation.plan_id.in_(deleted)))
    connection.execute(delete(TrainingEnergyRow).where(TrainingEnergyRow.plan_id.in_(deleted)))
    connection.execute(delete(Round).where(Round.plan_id.in_(deleted)))
    if len(deleted) < len(plan_ids):
        return False
    of_run = UnplannedRoundRow.run_id == run_id
    numbers = list(connection.scalars(select(UnplannedRoundRow.number).where(of_run).limit(_DELETED_AT_ONCE)))
    connection.execute(delete(UnplannedRoundRow).where(of_run, UnplannedRoundRow.number.in_(numbers)))
    if len(numbers) == _DELETED_AT_ONCE:  # there may be more
        return False
    connection.execute(delete(Run).where(Run.run_id == run_id))
    return True


def _is_untouched(since: datetime) -> ColumnElement[bool]:
    """A condition for runs that ended before a time, and for unfinished runs whose last round is older than it."""
    of_rounds = select(func.max(func.coalesce(Round.finished_at, Round.planned_at))).where(Round.run_id == Run.run_id)
    touched_at = func.coalesce(of_rounds.correlate(Run).scalar_subquery(), Run.started_at)
    is_unplanned_since = and_(UnplannedRoundRow.run_id == Run.run_id, UnplannedRoundRow.ended_at >= since)
    is_trained_since = exists().where(is_unplanned_since).correlate(Run)
    return or_(Run.finished_at < since, and_(Run.finished.is_(False), touched_at < since, ~is_trained_since))


# --- Loading ----------------------------------------------------------------------------------------------------------
# Loads what a coordinator needs when it starts.


@dataclass(frozen=True)
class StoredState:
    """What a store holds, except the rounds that are not needed to continue.

    Attributes:
        devices: in no particular order.
        nodes: Flower node id -> device id, in the order in which the nodes were bound.
        pairing_problems: Flower node id -> why it cannot train on its device, or an empty text; only checked nodes.
        runs: oldest first.
        rounds: those that a coordinator continues with (see `coordinator.store.store.current`), oldest first.
        overrides: what the operator set for individual devices.
        budget_overrides: budgets that the operator set, by supply; some may have expired.
        references: published reference predictors.
        pinned: digests of the pinned ones.
        unplanned: run id and number of each round without a plan.
        grants: what is known about the grants of an earlier coordinator.
        invites: permissions to enrol; some may have expired.
        certificates: certificates that the fleet's authority has issued; some may have expired.
        is_clock_doubtful: the date is implausible, so overrides may have ended long ago.
        energy: the accounts of runs with an energy budget, by run id.
        energy_budgets: the energy budgets of supplies, by supply.
        counted: what rounds of the last weeks count for these budgets and for batteries.
        charges: the charges that the operator has stated for batteries, by holder.
    """

    devices: Sequence[DeviceRecord]
    nodes: dict[int, str]
    pairing_problems: dict[int, str]
    runs: Sequence[RunRecord]
    rounds: Sequence[RoundRecord]
    overrides: Sequence[DeviceOverrides]
    budget_overrides: Mapping[str, Override]
    references: Sequence[PublishedReference]
    pinned: Sequence[str]
    unplanned: Sequence[tuple[str, int]]
    grants: StoredGrants
    invites: Sequence[InviteRecord]
    certificates: Sequence[CertificateRecord]
    is_clock_doubtful: bool
    energy: Mapping[str, EnergyAccount] = field(default_factory=dict)
    energy_budgets: Mapping[str, PeriodBudget] = field(default_factory=dict)
    counted: Sequence[CountedEnergy] = ()
    charges: Mapping[str, Charge] = field(default_factory=dict)

    @property
    def archived(self) -> frozenset[str]:
        """The ids of runs with rounds that may not be loaded."""
        return frozenset(record.run_id for record in self.runs)


def load(connection: Connection, is_clock_doubtful: bool) -> StoredState:
    """Load the state from a database.

    Args:
        connection: in a transaction.
        is_clock_doubtful: the date is implausible.
    """
    fronts: dict[str, list[WorkloadFront]] = {}
    by_time = select(DeviceFront.__table__).order_by(DeviceFront.reported_at, DeviceFront.workload)
    for row in connection.execute(by_time):
        if (known := _front(row)) is not None:
            fronts.setdefault(row.device_id, []).append(known)
    devices = connection.execute(select(DeviceRow.__table__)).all()
    nodes = connection.execute(select(Node.__table__).order_by(Node.bound_at)).all()
    runs = [tables.run_record(row) for row in connection.execute(select(Run.__table__).order_by(Run.order))]
    return StoredState(
        devices=[tables.device_record(row, fronts.get(row.device_id, ())) for row in devices],
        nodes={int(row.node_id): row.device_id for row in nodes},
        pairing_problems={int(row.node_id): row.pairing_problem for row in nodes if row.pairing_problem is not None},
        runs=runs,
        rounds=current(connection),
        overrides=[
            tables.device_overrides_record(row) for row in connection.execute(select(DeviceOverridesRow.__table__))
        ],
        budget_overrides={
            row.supply: tables.record_of(Override, row) for row in connection.execute(select(BudgetOverride.__table__))
        },
        references=[
            tables.record_of(PublishedReference, row) for row in connection.execute(select(ReferenceRow.__table__))
        ],
        pinned=connection.scalars(select(ReferencePin.digest).order_by(ReferencePin.rank)).all(),
        unplanned=unplanned(connection),
        grants=StoredGrants(
            connection.scalar(select(GrantLifetimeRow.lifetime_s)) or 0.0,
            {
                row.device_id: tables.record_of(GivenUpTraining, row)
                for row in connection.execute(select(GivenUpTrainingRow.__table__))
            },
        ),
        invites=tables.invites(connection),
        certificates=tables.certificates(connection),
        is_clock_doubtful=is_clock_doubtful,
        energy=energy_of(connection, runs),
        energy_budgets={
            row.supply: PeriodBudget(row.budget_j, Period(row.per), row.timezone)
            for row in connection.execute(select(SupplyEnergyBudgetRow.__table__))
        },
        counted=[
            tables.record_of(CountedEnergy, row) for row in connection.execute(select(CountedEnergyRow.__table__))
        ],
        charges={
            row.holder: Charge(row.share, row.measured_at)
            for row in connection.execute(select(BatteryChargeRow.__table__))
        },
    )


def _front(row: Row[Any]) -> WorkloadFront | None:
    """Convert a stored front; None if it is implausible."""
    try:
        return tables.workload_front(row)
    except ImplausibleError as error:
        _log.warning("a stored front of %s is not used until the device reports another: %s", row.device_id, error)
        return None


# --- Backups ----------------------------------------------------------------------------------------------------------
# Copies and checks a store's SQLite file; PostgreSQL has its own tools for this.

SIDECARS = ("-wal", "-shm")
"""The ends of the names of the files that SQLite keeps beside a database."""


def _has_tables(connection: sqlite3.Connection) -> bool:
    """Whether a file has any table."""
    (count,) = connection.execute("SELECT count(*) FROM main.sqlite_master").fetchone()
    return bool(count)


def check_file(path: Path, name: Path | None = None) -> dict[str, int]:
    """Check a file without changing it; a coordinator may be using it.

    Args:
        path: the file.
        name: the file's name for messages; None for its path.

    Returns:
        The number of rows by table.

    Raises:
        InvalidInputError: the file has no tables, or they have no version.
        DamagedStoreError: the file does not contain what was written to it.
    """
    with _reading(path) as connection:
        connection.create_function(checksums.FUNCTION, -1, checksums.row_checksum, deterministic=True)
        # One transaction, so that the check does not see rows that a coordinator writes meanwhile.
        connection.execute("BEGIN")
        try:
            if has_no_version(connection):
                raise InvalidInputError(f"{name or path} {WITHOUT_VERSION}: name the file of a store")
            require_undamaged(connection, str(name or path))
            if not _has_tables(connection):
                raise InvalidInputError(f"{name or path} has no tables: name the file of a store")
            return checksums.row_counts(connection)
        except sqlite3.Error as error:
            raise damaged_store(str(name or path), str(error)) from None


def back_up(path: Path, target: Path) -> None:
    """Copy a store's file and check the copy; a coordinator may be using the file.

    Raises:
        DamagedStoreError: the store is damaged, and no copy was made.
        StoreFullError: there is no space for the copy.
        OSError: the copy cannot be written.
        sqlite3.Error: the store cannot be read.
    """
    draft = target.with_name(f".{target.name}.unchecked")
    try:
        copy_file(path, draft)
        check_file(draft, path)
        os.replace(draft, target)
        sync_folder(target.parent)
    finally:
        draft.unlink(missing_ok=True)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file that a coordinator may be using; an existing copy is replaced only by a complete one.

    Raises:
        StoreFullError: there is no space for the copy.
        OSError: the copy cannot be written.
        sqlite3.Error: the source cannot be read.
    """
    draft = target.with_name(f".{target.name}.draft")
    try:
        draft.unlink(missing_ok=True)
        # Only readable by those who can read the source.
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, os.stat(source).st_mode & 0o777))
        with _reading(source) as connection, closing(sqlite3.connect(draft)) as copy:
            # In one step, because a write between two steps would restart the copy. A coordinator can write meanwhile
            # (WAL).
            connection.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # the copy is one file
        _sync(draft)
        os.replace(draft, target)
        sync_folder(target.parent)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        if is_full or (isinstance(error, sqlite3.Error) and "is full" in str(error)):
            raise StoreFullError(f"no space for {target}: free some space on its disk") from None
        raise


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection."""
    with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as connection:
        yield connection


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Store ------------------------------------------------------------------------------------------------------------

_FILE_MODE = 0o640
"""The permissions of a new SQLite file, which contains the audit log; SQLite gives the files beside it the same."""


class Store:
    """The records of one coordinator, which owns the store while it is open.

    Records are on disk when `save` returns. All methods block. They may be called from any thread, one at a time; a
    method that only reads rounds may run at the same time as another one.

    All methods raise `NotOwnerError` if another coordinator has taken the store over, and `StoreUnavailableError` if
    the database does not answer or is locked, or the disk is full.
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
            settings: whether to check rows, and which dates are plausible.
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
            self._engine = open_engine(url)
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
                        _open_file(connection, Path(self.name), settings.check_rows)
                    else:
                        upgrade(connection)
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
            UnstorableRecordError: the database cannot store one of the records' values.
        """
        now = self._now()
        forgotten = {record.device_id for record in records if isinstance(record, ForgottenDevice)}
        devices = [record for record in records if isinstance(record, DeviceRecord)]
        nodes = [
            {**tables.node_values(record), "bound_at": now} for record in records if isinstance(record, NodeRecord)
        ]
        runs = [
            {**tables.run_values(record), "started_at": now, "finished_at": now if record.finished else None}
            for record in records
            if isinstance(record, RunRecord)
        ]
        planned = [record for record in records if isinstance(record, RoundRecord)]
        round_rows = [
            {**tables.round_values(record), "planned_at": now, "finished_at": None if record.wall_s is None else now}
            for record in planned
        ]
        observations = [
            tables.observation_values(RoundObservation(record.plan_id, observed))
            for record in planned
            for observed in record.observations.values()
        ] + [tables.observation_values(record) for record in records if isinstance(record, RoundObservation)]
        fronts = {record.device_id: record.fronts for record in devices}
        stored = {each: () if each in forgotten else self._fronts.get(each, ()) for each in fronts}
        device_rows = [
            {**tables.device_values(record), "first_seen_at": now, "last_seen_at": now} for record in devices
        ]
        front_rows = [
            {**tables.workload_front_values(device_id, known), "reported_at": now}
            for device_id, now_known in fronts.items()
            for known in now_known
            if not any(known is each for each in stored[device_id])
        ]
        gone_fronts = [
            {"of_device": device_id, "gone": name}
            for device_id, before in stored.items()
            for name in {each.name for each in before} - {each.name for each in fronts[device_id]}
        ]
        energies = [each for record in planned for each in record.energies.values()]
        energies += [record for record in records if isinstance(record, TrainingEnergy)]
        references = [tables.row_of(ReferenceRow, each) for each in records if isinstance(each, PublishedReference)]
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
                (self._statements.training_energy, [tables.row_of(TrainingEnergyRow, each) for each in energies]),
                (
                    self._statements.counted_energy,
                    [tables.row_of(CountedEnergyRow, each) for each in records if isinstance(each, CountedEnergy)],
                ),
                (
                    self._statements.contained_energy,
                    [
                        {"of_plan": each.plan_id, "of_holder": each.holder}
                        for each in records
                        if isinstance(each, ContainedEnergy)
                    ],
                ),
                (
                    self._statements.unplanned,
                    [tables.unplanned_values(each) for each in records if isinstance(each, UnplannedRound)],
                ),
                (
                    self._statements.device_overrides,
                    [tables.device_overrides_values(each) for each in records if isinstance(each, DeviceOverrides)],
                ),
                (self._statements.reference, references),
            ):
                if values:
                    connection.execute(statement, values)
            save_single_rows(connection, self._statements, records)
            tables.save_identities(connection, self._statements, records)
            tables.save_events(connection, self._statements, records)
            for each in records:
                # After a jump of the date, this would also delete unexpired revocations and entries.
                if isinstance(each, ExpiredIdentities) and not self._keeps(each.keep):
                    tables.drop(connection, each)
                elif isinstance(each, ExpiredEvents) and not self._keeps(each.keep):
                    tables.drop_events(connection, each)
        for device_id in forgotten:
            self._fronts.pop(device_id, None)
        self._fronts.update(fronts)

    def load(self) -> StoredState:
        """Load what a coordinator needs to start; the time this takes does not grow with the history."""
        with self._transaction() as connection, readable(self.name):
            if not self._keeps(KEPT):
                connection.execute(delete(CountedEnergyRow).where(CountedEnergyRow.planned_at < self._now() - KEPT))
            stored = load(connection, self._clocks is not None and self._clocks.is_doubtful)
        self._fronts = {record.device_id: record.fronts for record in stored.devices}
        return stored

    def round_of(self, plan_id: str) -> RoundRecord | None:
        """Load one round; None if it is not stored."""
        with self._reading() as connection:
            return round_of(connection, plan_id)

    def unplanned_of(self, run_id: str, number: int) -> UnplannedRound | None:
        """Load one round without a plan; None if it is not stored."""
        with self._reading() as connection:
            return unplanned_of(connection, run_id, number)

    def plan_ids_of(self, run_id: str) -> list[str]:
        """The ids of a run's rounds, oldest first."""
        with self._reading() as connection:
            return plan_ids_of(connection, run_id)

    def history_of(self, run_id: str) -> History:
        """Load a run's finished rounds, as planning needs them."""
        with self._reading() as connection:
            return history_of(connection, run_id)

    def audit_entries(self, since: datetime | None, limit: int) -> list[AuditEntry]:
        """Load the newest entries of the audit log, oldest first; none from before `since`."""
        with self._reading() as connection:
            return tables.audit_entries(connection, since, limit)

    def events(self, wanted: EventFilter) -> list[EventRecord]:
        """Load the newest events that a filter keeps, newest first."""
        with self._reading() as connection:
            return tables.events(connection, wanted)

    def times(self, of: TimesOf) -> dict[str, Times]:
        """Load the times of events, by id.

        Args:
            of: a query of `coordinator.store.tables`.
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
        """
        with self._transaction() as connection:
            if (until := self._keeps(older_than)) is not None:
                _log.info(
                    "no runs are deleted before %s, because the clock has jumped", until.isoformat("T", "seconds")
                )
                return None
            return delete_some(connection, self._now() - older_than, except_runs)

    def delete_some_of(self, run_id: str) -> bool:
        """Delete some rounds of a run in a short transaction; with its last round, delete the run.

        Returns: Whether the run is now deleted completely.
        """
        with self._transaction() as connection:
            return delete_some_of(connection, run_id)

    def _keeps(self, keep: timedelta) -> datetime | None:
        """The time until which nothing may be deleted because the date has jumped; None if old data may be deleted."""
        return None if self._clocks is None else self._clocks.keeps_until(keep)

    def require_owner(self) -> None:
        """Check that no other coordinator has taken the store over."""
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


def _open_file(connection: Connection, path: Path, check_rows: bool) -> None:
    """Check an SQLite file, and upgrade its tables after copying the file."""
    file = driver_connection(connection)
    require_undamaged(file, str(path), check_rows)
    version = version_of(connection)
    if version == newest_version() and checksums.is_sealed(file):
        return
    if version is not None:
        backup = path.with_name(f"{path.name}.tables-{version}.backup")
        copy_file(path, backup)
        _log.info("%s was copied to %s before its tables are upgraded", path, backup)
    checksums.forget(file)
    upgrade(connection)
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
