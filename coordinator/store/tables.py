"""The tables of the store, the same in SQLite and in PostgreSQL. A change here needs a new file in `migrations/`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import Any, TypeVar

import numpy as np
from sqlalchemy import (
    Connection,
    DateTime,
    Dialect,
    Executable,
    Insert,
    LargeBinary,
    Row,
    String,
    Table,
    Text,
    bindparam,
    case,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import BigInteger, Integer, TypeDecorator

from coordinator.clocks import BootClock, Moment, jump_s, jump_text
from coordinator.state.identity_records import AuditEntry, CertificateRecord, ExpiredIdentities, InviteRecord
from coordinator.state.records import (
    BatteryCharge,
    DeviceOverrides,
    DeviceRecord,
    DeviceResult,
    EventFilter,
    EventRecord,
    ExpiredEvents,
    GivenUpTraining,
    GrantLifetime,
    NodeRecord,
    ObservedTraining,
    PinnedReferences,
    RemovedReference,
    RoundObservation,
    RoundRecord,
    RunRecord,
    StoredRecord,
    SupplyEnergyBudget,
    SupplyOverride,
    TrainingEnergy,
    UnplannedRound,
)
from coordinator.state.workload_fronts import WorkloadFront
from wattfleet.common.identity.peers import Peer, Role
from wattfleet.core.choosing import Front
from wattfleet.core.modes import BatchOptions, Processor, Task, Workload, WorkloadFacts
from wattfleet_proto.convert import plan_from_message, plan_to_message
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.v1 import planning_pb2

_log = logging.getLogger(__name__)


class AnyText(TypeDecorator[str]):
    """Text of any characters; NUL, which PostgreSQL cannot store, becomes the replacement character."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Convert a value for the database."""
        return None if value is None else value.replace("\x00", "\ufffd")


class JsonText(TypeDecorator[Any]):
    """JSON as text, because PostgreSQL's JSON cannot store NaN, such as the loss of a diverged run."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str:
        """Convert a value for the database."""
        return json.dumps(value)  # escapes NUL and everything else beyond ASCII

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Convert a value from the database."""
        return None if value is None else json.loads(value)


class UtcTime(TypeDecorator[datetime]):
    """A date and time, stored in UTC because SQLite's times have no offset."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert a value for the database."""
        return None if value is None else value.astimezone(timezone.utc)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert a value from the database."""
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


# The protocol's numbers are unsigned 32-bit integers, PostgreSQL's integers are signed.
Count = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Base of all tables. `checksum` is the row's checksum (see `checksums.py`); no code assigns it."""

    type_annotation_map = {str: AnyText, int: Count, datetime: UtcTime, bytes: LargeBinary}


class DeviceRow(Base):
    """A device in its newest state."""

    __tablename__ = "device"
    device_id: Mapped[str] = mapped_column(primary_key=True)
    board: Mapped[str]
    provenance: Mapped[str]
    mode_count: Mapped[int]
    state: Mapped[str]
    profiled_modes: Mapped[int]
    detail: Mapped[str]
    idle_w: Mapped[float | None]
    first_seen_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    checksum: Mapped[int | None]


class DeviceFront(Base):
    """A device's front for one workload, in its own table because a device's state changes a hundred times as often."""

    __tablename__ = "workload_front"
    device_id: Mapped[str] = mapped_column(primary_key=True)
    workload: Mapped[str] = mapped_column(primary_key=True)
    facts: Mapped[dict[str, Any]] = mapped_column(JsonText)
    points: Mapped[bytes]
    minibatches_per_epoch: Mapped[int | None]
    profiled_modes: Mapped[int]
    reference_digest: Mapped[str]
    reported_at: Mapped[datetime]
    checksum: Mapped[int | None]


class Node(Base):
    """The device behind a Flower node."""

    __tablename__ = "node"
    # Flower's node ids use all 64 bits; the databases' integers are signed.
    node_id: Mapped[str] = mapped_column(primary_key=True)
    device_id: Mapped[str]
    pairing_problem: Mapped[str | None]
    bound_at: Mapped[datetime]
    checksum: Mapped[int | None]


class Run(Base):
    """A Flower run."""

    __tablename__ = "run"
    order: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(unique=True)
    strategy: Mapped[str]
    rounds: Mapped[int]
    initial_metrics: Mapped[dict[str, float]] = mapped_column(JsonText)
    error: Mapped[str]
    finished: Mapped[bool]
    owner: Mapped[str]
    workload: Mapped[str]
    facts: Mapped[dict[str, Any]] = mapped_column(JsonText)
    name: Mapped[str]
    labels: Mapped[dict[str, str]] = mapped_column(JsonText)
    needs_all: Mapped[bool]
    energy_budget_j: Mapped[float | None]
    surveys_j: Mapped[float]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime | None] = mapped_column(index=True)
    checksum: Mapped[int | None]


class Round(Base):
    """A planned round, without its devices' observations."""

    __tablename__ = "round"
    order: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    plan_id: Mapped[str] = mapped_column(unique=True)
    run_id: Mapped[str] = mapped_column(index=True)
    number: Mapped[int]
    epochs: Mapped[float]
    plan: Mapped[bytes]
    nodes: Mapped[dict[str, int]] = mapped_column(JsonText)
    idle_w: Mapped[float]
    # Of a run with an energy budget, so that its account needs no plans.
    set_aside_j: Mapped[float | None]
    results: Mapped[list[dict[str, Any]]] = mapped_column(JsonText)
    metrics: Mapped[dict[str, float]] = mapped_column(JsonText)
    wall_s: Mapped[float | None]
    planned_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    checksum: Mapped[int | None]


class Observation(Base):
    """One device's observation in one round."""

    __tablename__ = "observation"
    plan_id: Mapped[str] = mapped_column(primary_key=True)
    device_id: Mapped[str] = mapped_column(primary_key=True)
    epoch_s: Mapped[float]
    power_w: Mapped[float]
    beside_duty: Mapped[bool]
    checksum: Mapped[int | None]


class TrainingEnergyRow(Base):
    """What one device's training has drawn, in a round of a run with an energy budget."""

    __tablename__ = "training_energy"
    plan_id: Mapped[str] = mapped_column(primary_key=True)
    device_id: Mapped[str] = mapped_column(primary_key=True)
    energy_j: Mapped[float]
    set_aside_j: Mapped[float]
    checksum: Mapped[int | None]


class CountedEnergyRow(Base):
    """What the trainings of one round count for the energy budgets and the batteries of one holder."""

    __tablename__ = "counted_energy"
    plan_id: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str] = mapped_column(primary_key=True)
    planned_at: Mapped[datetime]
    ends_at: Mapped[datetime]
    set_aside_j: Mapped[float]
    spent_j: Mapped[float]
    reported_at: Mapped[datetime | None]
    checksum: Mapped[int | None]


class UnplannedRoundRow(Base):
    """A round that trained without a plan."""

    __tablename__ = "unplanned_round"
    run_id: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    began_at: Mapped[datetime]
    ended_at: Mapped[datetime]
    wall_s: Mapped[float]
    results: Mapped[list[dict[str, Any]]] = mapped_column(JsonText)
    metrics: Mapped[dict[str, float]] = mapped_column(JsonText)
    checksum: Mapped[int | None]


class DeviceOverridesRow(Base):
    """What the operator set for a device by command."""

    __tablename__ = "device_overrides"
    device_id: Mapped[str] = mapped_column(primary_key=True)
    tags: Mapped[list[str]] = mapped_column(JsonText)
    drained: Mapped[bool]
    trusted_after: Mapped[str]
    supply: Mapped[str]
    checksum: Mapped[int | None]


class BudgetOverride(Base):
    """The watts that the operator set for a supply; there is no row if its configured source is in force."""

    __tablename__ = "budget_override"
    supply: Mapped[str] = mapped_column(primary_key=True)
    watts: Mapped[float]
    until: Mapped[datetime | None]
    checksum: Mapped[int | None]


class SupplyEnergyBudgetRow(Base):
    """The energy budget that the operator set for a supply; there is no row without one."""

    __tablename__ = "supply_energy_budget"
    supply: Mapped[str] = mapped_column(primary_key=True)
    budget_j: Mapped[float]
    per: Mapped[str]
    timezone: Mapped[str]
    checksum: Mapped[int | None]


class BatteryChargeRow(Base):
    """The charge that the operator stated for a battery."""

    __tablename__ = "battery_charge"
    holder: Mapped[str] = mapped_column(primary_key=True)
    share: Mapped[float]
    measured_at: Mapped[datetime]
    checksum: Mapped[int | None]


class ReferenceRow(Base):
    """A published reference predictor."""

    __tablename__ = "reference"
    digest: Mapped[str] = mapped_column(primary_key=True)
    manifest: Mapped[bytes]
    weights: Mapped[bytes]
    checksum: Mapped[int | None]


class ReferencePin(Base):
    """A pinned reference predictor."""

    __tablename__ = "reference_pin"
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str]
    checksum: Mapped[int | None]


class GivenUpTrainingRow(Base):
    """A device whose grant continues after its round or run has ended, or that measures outside of rounds."""

    __tablename__ = "given_up_training"
    device_id: Mapped[str] = mapped_column(primary_key=True)
    plan_id: Mapped[str]
    # Only of a grant to measure, which belongs to no round.
    limit_w: Mapped[float | None]
    checksum: Mapped[int | None]


class GrantLifetimeRow(Base):
    """One row or none: the longest lifetime of a grant that a device may still rely on."""

    __tablename__ = "grant_lifetime"
    only: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    lifetime_s: Mapped[float]
    checksum: Mapped[int | None]


class InviteRow(Base):
    """An invite; only the hash of its token is stored."""

    __tablename__ = "invite"
    token_hash: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    name: Mapped[str]
    site: Mapped[str]
    tags: Mapped[list[str]] = mapped_column(JsonText)
    made_at: Mapped[datetime]
    made_by: Mapped[str]
    expires_at: Mapped[datetime]
    uses_left: Mapped[int]
    checksum: Mapped[int | None]


class CertificateRow(Base):
    """A certificate that the authority issued."""

    __tablename__ = "certificate"
    serial: Mapped[str] = mapped_column(primary_key=True)
    peer: Mapped[str]
    issuer: Mapped[str]
    issued_at: Mapped[datetime]
    not_after: Mapped[datetime]
    revoked_at: Mapped[datetime | None]
    reason: Mapped[str]
    flower_key: Mapped[str]
    checksum: Mapped[int | None]


class AuditEntryRow(Base):
    """One request of an operator to change something."""

    __tablename__ = "audit_entry"
    order: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    entry_id: Mapped[str] = mapped_column(unique=True)
    at: Mapped[datetime] = mapped_column(index=True)
    caller: Mapped[str]
    method: Mapped[str]
    request: Mapped[str]
    outcome: Mapped[str]
    checksum: Mapped[int | None]


class EventRow(Base):
    """Something that happened in the fleet."""

    __tablename__ = "event"
    order: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    event_id: Mapped[str] = mapped_column(unique=True)
    at: Mapped[datetime] = mapped_column(index=True)
    kind: Mapped[str]
    text: Mapped[str]
    needs_attention: Mapped[bool]
    device_id: Mapped[str] = mapped_column(index=True)
    run_id: Mapped[str]
    round: Mapped[int]
    supply: Mapped[str]
    caller: Mapped[str]
    checksum: Mapped[int | None]


class CoordinatorTerm(Base):
    """One row: how often the store has changed its owner. Only the coordinator of the newest term may write."""

    __tablename__ = "coordinator_term"
    only: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    term: Mapped[int]
    checksum: Mapped[int | None]


class CoordinatorClock(Base):
    """One row: the clocks at the newest transaction, so that the next start notices a jump."""

    __tablename__ = "coordinator_clock"
    only: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    noted_at: Mapped[datetime]
    boot_id: Mapped[str]
    since_boot_s: Mapped[float]
    jumped_at: Mapped[datetime | None]
    checksum: Mapped[int | None]


# --- Statements -------------------------------------------------------------------------------------------------------
# Statements that insert or replace rows, in each database's dialect.

_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}

# Columns that keep the value of the first insert, and the column that triggers maintain.
_FIRST_STAYS = {"order", "first_seen_at", "started_at", "planned_at", "checksum"}


class Statements:
    """One statement per table that inserts a row or replaces the one with the same key, and some that delete rows."""

    def __init__(self, dialect: str) -> None:
        """Use a database's dialect.

        Args:
            dialect: sqlite or postgresql.
        """
        self._insert = _INSERT[dialect]
        self.device = self._replacing(DeviceRow, "device_id")
        self.front = self._replacing(DeviceFront, "device_id", "workload")
        self.no_front = delete(DeviceFront).where(
            DeviceFront.device_id == bindparam("of_device"), DeviceFront.workload == bindparam("gone")
        )
        self.forgotten = [
            delete(table).where(table.device_id == bindparam("gone"))
            for table in (DeviceRow, DeviceFront, DeviceOverridesRow, Node)
        ]
        self.node = self._replacing(Node, "node_id")
        self.run = self._replacing(Run, "run_id")
        self.round = self._replacing(Round, "plan_id")
        self.unplanned = self._replacing(UnplannedRoundRow, "run_id", "number")
        self.observation = self._replacing(Observation, "plan_id", "device_id")
        self.training_energy = self._replacing(TrainingEnergyRow, "plan_id", "device_id")
        self.device_overrides = self._replacing(DeviceOverridesRow, "device_id")
        self.override = self._replacing(BudgetOverride, "supply")
        self.counted_energy = self._replacing(CountedEnergyRow, "plan_id", "holder")
        self.contained_energy = delete(CountedEnergyRow).where(
            CountedEnergyRow.plan_id == bindparam("of_plan"), CountedEnergyRow.holder == bindparam("of_holder")
        )
        self.energy_budget = self._replacing(SupplyEnergyBudgetRow, "supply")
        self.battery_charge = self._replacing(BatteryChargeRow, "holder")
        self.reference = self._replacing(ReferenceRow, "digest")
        self.given_up = self._replacing(GivenUpTrainingRow, "device_id")
        self.not_given_up = delete(GivenUpTrainingRow).where(GivenUpTrainingRow.device_id == bindparam("gone"))
        self.grant_lifetime = self._replacing(GrantLifetimeRow, "only")
        self.invite = self._replacing(InviteRow, "token_hash")
        self.certificate = self._replacing(CertificateRow, "serial")
        self.audit_entry = self._replacing(AuditEntryRow, "entry_id")
        self.event = self._replacing(EventRow, "event_id")

    def _replacing(self, table_class: type[Base], *key: str) -> Insert:
        table: Table = table_class.metadata.tables[table_class.__tablename__]
        statement = self._insert(table)
        replaced = {
            column.name: statement.excluded[column.name]
            for column in table.columns
            if column.name not in _FIRST_STAYS and column.name not in key
        }
        if "finished_at" in replaced:
            ended = statement.excluded.finished_at
            # The time of the run's first end, unless it was started again since.
            replaced["finished_at"] = case((ended.is_(None), None), else_=func.coalesce(table.c.finished_at, ended))
        replacing: Insert = statement.on_conflict_do_update(index_elements=key, set_=replaced)
        return replacing


# --- Times ------------------------------------------------------------------------------------------------------------
# Times of events, which the store records because the fleet's state reads no clock.

TimesOf = Executable
"""A query for ids, each with its first and its last time."""

OF_DEVICES: TimesOf = select(DeviceRow.device_id, DeviceRow.first_seen_at, DeviceRow.last_seen_at)
OF_NODES: TimesOf = select(Node.node_id, Node.bound_at, Node.bound_at)
OF_RUNS: TimesOf = select(Run.run_id, Run.started_at, Run.finished_at)


def of_rounds(run_id: str) -> TimesOf:
    """A query for when the rounds of a run were planned and finished, by plan id."""
    return select(Round.plan_id, Round.planned_at, Round.finished_at).where(Round.run_id == run_id)


@dataclass(frozen=True)
class Times:
    """The first and last time of something: started and finished, or first and last seen.

    Attributes:
        first: the first time; None if it is not stored yet.
        last: the last time; None if it has not happened or is not stored yet.
    """

    first: datetime | None = None
    last: datetime | None = None

    @property
    def first_unix_s(self) -> float | None:
        """The first time in seconds since 1970, UTC; None if it is unknown."""
        return None if self.first is None else self.first.timestamp()

    @property
    def last_unix_s(self) -> float | None:
        """The last time in seconds since 1970, UTC; None if it is unknown."""
        return None if self.last is None else self.last.timestamp()


# --- Rows -------------------------------------------------------------------------------------------------------------
# Conversions between records and rows of the tables.

Values = dict[str, Any]

_BATCHES = "batches"
_FRONT_COLUMNS = ("epoch_s", "power_w", "epoch_log_sd", "power_log_sd", "warmup_s")


_Record = TypeVar("_Record")


def row_of(table: type[Base], record: object, **others: Any) -> Values:
    """The column values of a record: its attributes that are named like columns.

    Args:
        table: the table.
        record: the record.
        others: columns that the record has in another form.
    """
    return {
        **{name: getattr(record, name) for name in _columns(table) if name not in others and hasattr(record, name)},
        **others,
    }


def record_of(kind: type[_Record], row: Row[Any], **others: Any) -> _Record:
    """Build a record from the columns that are named like its fields.

    Args:
        kind: the record's class.
        row: the columns.
        others: fields that the row lacks, or has in another form.
    """
    return kind(**{name: getattr(row, name) for name in _fields(kind) if name not in others}, **others)


@cache
def _columns(table: type[Base]) -> tuple[str, ...]:
    return tuple(table.__table__.columns.keys())


def _fields(kind: Any) -> list[str]:
    return [each.name for each in fields(kind)]


def device_values(record: DeviceRecord) -> Values:
    """The column values of a device, without its fronts and its times."""
    return row_of(DeviceRow, record, state=record.state.value)


def device_record(row: Row[Any], fronts: Iterable[WorkloadFront]) -> DeviceRecord:
    """Build a device from its columns and its fronts, the latest reported last."""
    return record_of(DeviceRecord, row, state=DeviceState(row.state), fronts=tuple(fronts))


def workload_front_values(device_id: str, known: WorkloadFront) -> Values:
    """The column values of a device's front for a workload, without its time."""
    return row_of(
        DeviceFront,
        known,
        device_id=device_id,
        workload=known.name,
        facts=_facts_values(known.workload),
        points=front_bytes(known.front, known.workload.batches is not None),
    )


def workload_front(row: Row[Any]) -> WorkloadFront:
    """Build a device's front for a workload from its columns.

    Raises:
        ImplausibleError: the stored front is implausible.
    """
    return WorkloadFront(
        front_from_bytes(row.points, _BATCHES in row.facts),
        _workload(row.workload, row.facts),
        row.minibatches_per_epoch,
        row.profiled_modes,
        sys.intern(row.reference_digest),
    )


def _facts_values(workload: Workload) -> Values:
    """The known facts of a workload, and the batch sizes that its app can train with."""
    values = {name: value for name, value in asdict(workload.facts).items() if value is not None}
    if workload.batches is not None:
        values[_BATCHES] = {name: list(each) for name, each in asdict(workload.batches).items()}
    return values


def _workload(name: str, values: Values) -> Workload:
    """Build a workload from the result of `_facts_values`."""
    members = {"task": Task, "processor": Processor}
    facts = {each: members[each](value) if each in members else value for each, value in values.items()}
    options = facts.pop(_BATCHES, None)
    batches = None if options is None else BatchOptions(*(tuple(options[each.name]) for each in fields(BatchOptions)))
    return Workload(name, WorkloadFacts(**facts), batches)


def front_bytes(front: Front, has_batches: bool = False) -> bytes:
    """Encode a front as `[k, 9]` little-endian doubles: the mode's four knobs, then the front's columns.

    A start reads ten thousand fronts; decoding protocol messages would take six times as long.

    Args:
        front: the front.
        has_batches: whether to add a tenth column, the samples in a batch; 0 for the workload's own batch.
    """
    columns = [front.modes, *(getattr(front, name)[:, None] for name in _FRONT_COLUMNS)]
    if has_batches:
        columns.append(np.zeros((len(front), 1)) if front.batch is None else front.batch[:, None])
    return np.hstack(columns).astype("<f8").tobytes()


def front_from_bytes(points: bytes, has_batches: bool = False) -> Front:
    """Decode a front from its bytes (see `front_bytes`)."""
    table = np.frombuffer(points, "<f8").reshape(-1, 10 if has_batches else 9).astype(np.float64)
    batch = table[:, 9].astype(np.int64) if has_batches and table[:, 9].any() else None
    epoch_s, power_w, epoch_log_sd, power_log_sd, warmup_s = table[:, 4:9].T
    return Front(table[:, :4], epoch_s, power_w, epoch_log_sd, power_log_sd, warmup_s, batch)


def node_values(record: NodeRecord) -> Values:
    """The column values of a node."""
    return row_of(Node, record, node_id=str(record.node_id))


def run_values(record: RunRecord) -> Values:
    """The column values of a run, without its times."""
    workload, facts = record.workload.name, _facts_values(record.workload)
    return row_of(Run, record, workload=workload, facts=facts, labels=dict(record.labels))


def run_record(row: Row[Any]) -> RunRecord:
    """Build a run from its columns."""
    return record_of(RunRecord, row, workload=_workload(row.workload, row.facts))


def round_values(record: RoundRecord) -> Values:
    """The column values of a round, without its observations and its times."""
    message = plan_to_message(record.plan_id, record.plan, record.nodes)
    results = [asdict(result) for result in record.results]
    return row_of(Round, record, plan=message.SerializeToString(deterministic=True), results=results)


def round_record(
    row: Row[Any], observations: Iterable[ObservedTraining], energies: Iterable[TrainingEnergy] = ()
) -> RoundRecord:
    """Build a round from its columns, its observations, and what its trainings have drawn."""
    return record_of(
        RoundRecord,
        row,
        plan=plan_from_message(planning_pb2.PlanRoundResponse.FromString(row.plan)),
        observations={observed.device_id: observed for observed in observations},
        energies={each.device_id: each for each in energies},
        results=tuple(DeviceResult(**result) for result in row.results),
    )


def unplanned_values(record: UnplannedRound) -> Values:
    """The column values of a round without a plan."""
    return row_of(UnplannedRoundRow, record, results=[asdict(result) for result in record.results])


def unplanned_record(row: Row[Any]) -> UnplannedRound:
    """Build a round without a plan from its columns."""
    return record_of(UnplannedRound, row, results=tuple(DeviceResult(**result) for result in row.results))


def observation_values(record: RoundObservation) -> Values:
    """The column values of an observation."""
    return row_of(Observation, record.observed, plan_id=record.plan_id)


def device_overrides_values(record: DeviceOverrides) -> Values:
    """The column values of a device's overrides."""
    return row_of(DeviceOverridesRow, record, tags=sorted(record.tags))


def device_overrides_record(row: Row[Any]) -> DeviceOverrides:
    """Build a device's overrides from their columns."""
    return record_of(DeviceOverrides, row, tags=frozenset(row.tags))


# --- Event rows -------------------------------------------------------------------------------------------------------
# Saves, reads and deletes the events of the fleet.


def save_events(connection: Connection, statements: Statements, records: Sequence[StoredRecord]) -> None:
    """Save events."""
    if found := [row_of(EventRow, each) for each in records if isinstance(each, EventRecord)]:
        connection.execute(statements.event, found)


def drop_events(connection: Connection, expired: ExpiredEvents) -> None:
    """Delete old events."""
    connection.execute(delete(EventRow).where(EventRow.at < expired.now - expired.keep))
    newest = connection.scalar(select(func.max(EventRow.order))) or 0
    connection.execute(delete(EventRow).where(EventRow.order <= newest - expired.max_events))


def events(connection: Connection, wanted: EventFilter) -> list[EventRecord]:
    """The newest events that a filter keeps, newest first."""
    query = select(EventRow.__table__).order_by(EventRow.at.desc(), EventRow.order.desc()).limit(wanted.limit)
    if wanted.kinds:
        query = query.where(EventRow.kind.in_(wanted.kinds))
    if wanted.device_id:
        query = query.where(EventRow.device_id == wanted.device_id)
    if wanted.run_id:
        query = query.where(EventRow.run_id == wanted.run_id)
    if wanted.supplies is not None:
        query = query.where(EventRow.supply.in_(wanted.supplies))
    if wanted.since is not None:
        query = query.where(EventRow.at >= wanted.since)
    return [record_of(EventRecord, row) for row in connection.execute(query)]


# --- Identity rows ----------------------------------------------------------------------------------------------------
# Saves, loads and deletes invites, certificates, and entries of the audit log.


def save_identities(connection: Connection, statements: Statements, records: Sequence[StoredRecord]) -> None:
    """Save invites, certificates and entries of the audit log."""
    invites = [
        row_of(InviteRow, each, role=each.role.value, tags=sorted(each.tags))
        for each in records
        if isinstance(each, InviteRecord)
    ]
    certificates = [
        row_of(CertificateRow, each, peer=each.peer.uri) for each in records if isinstance(each, CertificateRecord)
    ]
    entries = [row_of(AuditEntryRow, each) for each in records if isinstance(each, AuditEntry)]
    for statement, values in (
        (statements.invite, invites),
        (statements.certificate, certificates),
        (statements.audit_entry, entries),
    ):
        if values:
            connection.execute(statement, values)


def drop(connection: Connection, expired: ExpiredIdentities) -> None:
    """Delete expired records."""
    connection.execute(delete(InviteRow).where(InviteRow.expires_at <= expired.now))
    connection.execute(delete(CertificateRow).where(CertificateRow.not_after <= expired.now))
    connection.execute(delete(AuditEntryRow).where(AuditEntryRow.at < expired.now - expired.keep))
    newest = connection.scalar(select(func.max(AuditEntryRow.order))) or 0
    connection.execute(delete(AuditEntryRow).where(AuditEntryRow.order <= newest - expired.max_entries))


def invites(connection: Connection) -> list[InviteRecord]:
    """All stored invites."""
    return [
        record_of(InviteRecord, row, role=Role(row.role), tags=frozenset(row.tags))
        for row in connection.execute(select(InviteRow.__table__))
    ]


def certificates(connection: Connection) -> list[CertificateRecord]:
    """All stored certificates."""
    return [
        record_of(CertificateRecord, row, peer=Peer.from_uri(row.peer))
        for row in connection.execute(select(CertificateRow.__table__))
    ]


def audit_entries(connection: Connection, since: datetime | None, limit: int) -> list[AuditEntry]:
    """The newest entries of the audit log, oldest first.

    Args:
        connection: in a transaction.
        since: leaves out earlier entries; None for all.
        limit: the most entries.
    """
    newest = select(AuditEntryRow.__table__).order_by(AuditEntryRow.order.desc()).limit(limit)
    if since is not None:
        newest = newest.where(AuditEntryRow.at >= since)
    return [record_of(AuditEntry, row) for row in reversed(connection.execute(newest).all())]


# --- Single rows ------------------------------------------------------------------------------------------------------
# Saves kinds of records that are few and whose rows may be deleted, one row at a time.


def save_single_rows(connection: Connection, statements: Statements, records: Sequence[StoredRecord]) -> None:
    """Save budgets, stated charges, the pinned references and records about grants; delete removed references."""
    for record in records:
        if isinstance(record, SupplyOverride):
            if record.override is None:
                connection.execute(delete(BudgetOverride).where(BudgetOverride.supply == record.supply))
            else:
                connection.execute(statements.override, [row_of(BudgetOverride, record.override, supply=record.supply)])
        elif isinstance(record, SupplyEnergyBudget):
            if record.budget is None:
                connection.execute(delete(SupplyEnergyBudgetRow).where(SupplyEnergyBudgetRow.supply == record.supply))
            else:
                row = row_of(SupplyEnergyBudgetRow, record.budget, supply=record.supply, per=record.budget.per.value)
                connection.execute(statements.energy_budget, [row])
        elif isinstance(record, BatteryCharge):
            connection.execute(statements.battery_charge, [row_of(BatteryChargeRow, record)])
        elif isinstance(record, PinnedReferences):
            connection.execute(delete(ReferencePin))
            if record.digests:
                ranked = [{"rank": rank, "digest": digest} for rank, digest in enumerate(record.digests, 1)]
                connection.execute(insert(ReferencePin), ranked)
        elif isinstance(record, RemovedReference):
            connection.execute(delete(ReferenceRow).where(ReferenceRow.digest == record.digest))
        elif isinstance(record, GrantLifetime):
            connection.execute(statements.grant_lifetime, [{"only": 1, "lifetime_s": record.lifetime_s}])
    given_up = [record for record in records if isinstance(record, GivenUpTraining)]
    if found := [row_of(GivenUpTrainingRow, each) for each in given_up if each.plan_id]:
        connection.execute(statements.given_up, found)
    if gone := [{"gone": each.device_id} for each in given_up if each.plan_id is None]:
        connection.execute(statements.not_given_up, gone)


# --- Clock record -----------------------------------------------------------------------------------------------------
# The clocks at the store's newest transaction, so that the next transaction or start notices a jump of the date.

_NOTED_EVERY_S = 60.0


class ClockRecord:
    """Records the clocks in the database, and corrects records that depend on the date when it jumps.

    Attributes:
        jumped_at: the date and time just after the newest jump; None if there was none.
        is_doubtful: the date was implausible after a start of the machine, so the elapsed time is unknown.
    """

    def __init__(self, clock: BootClock, now: Callable[[], datetime], max_absence_s: float) -> None:
        """Use the clocks of a machine.

        Args:
            clock: the time since the machine started.
            now: returns the date and time, with a UTC offset.
            max_absence_s: the most seconds by which the date may be ahead after a start of the machine.
        """
        self.jumped_at: datetime | None = None
        self.is_doubtful = False
        self._clock = clock
        self._now = now
        self._max_absence_s = max_absence_s
        self._newest: Moment | None = None
        self._written_s = -_NOTED_EVERY_S

    def open(self, connection: Connection) -> None:
        """Compare the clocks with those of the newest transaction of an earlier process."""
        row = connection.execute(select(CoordinatorClock.__table__)).one_or_none()
        if row is not None:
            self._newest = Moment(row.noted_at, row.boot_id, row.since_boot_s)
            self.jumped_at = row.jumped_at
        before = self._newest
        if self.note(connection) and before is not None and before.boot_id != self._clock.boot_id:
            self.is_doubtful = True
            _log.warning(
                "the machine was restarted with an implausible date, so it is unknown how much time has passed; if the "
                "machine was really off for this long, raise store.max_absence_days"
            )

    def note(self, connection: Connection) -> bool:
        """Compare the clocks with those at the newest transaction, and record them from time to time.

        Returns:
            Whether the date has jumped.
        """
        moment = Moment(self._now(), self._clock.boot_id, self._clock.since_boot_s())
        jumped_s = 0.0 if self._newest is None else jump_s(self._newest, moment, self._max_absence_s)
        if jumped_s:
            self.jumped_at = moment.noted_at
            _log.warning(
                "the clock was %s: overrides keep their remaining time, and the retention time of older runs starts "
                "again now",
                jump_text(jumped_s),
            )
            _move_overrides(connection, timedelta(seconds=jumped_s))
        self._newest = moment
        if jumped_s or moment.since_boot_s - self._written_s >= _NOTED_EVERY_S or moment.since_boot_s < self._written_s:
            self._written_s = moment.since_boot_s
            connection.execute(delete(CoordinatorClock))
            connection.execute(
                insert(CoordinatorClock).values(
                    only=1,
                    noted_at=moment.noted_at,
                    boot_id=moment.boot_id,
                    since_boot_s=moment.since_boot_s,
                    jumped_at=self.jumped_at,
                )
            )
        return bool(jumped_s)

    def keeps_until(self, keep: timedelta) -> datetime | None:
        """The time until which no run may be deleted because the date has jumped; None if runs may be deleted."""
        if self.jumped_at is None:
            return None
        until = self.jumped_at + keep
        return until if self._now() < until else None


def _move_overrides(connection: Connection, by: timedelta) -> None:
    """Move the ends of all budget overrides, so that their remaining time stays the same."""
    for row in connection.execute(select(BudgetOverride.supply, BudgetOverride.until)).all():
        if row.until is not None:
            moved = update(BudgetOverride).where(BudgetOverride.supply == row.supply).values(until=row.until + by)
            connection.execute(moved)
