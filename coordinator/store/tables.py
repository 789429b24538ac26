"""The tables of the store, the same in SQLite and in PostgreSQL. A change here needs a new file in `migrations/`."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import DateTime, Dialect, LargeBinary, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import BigInteger, Integer, TypeDecorator


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


class Device(Base):
    """A device in its newest state; a time is None if the event was before times were stored."""

    __tablename__ = "device"
    device_id: Mapped[str] = mapped_column(primary_key=True)
    board: Mapped[str]
    provenance: Mapped[str]
    mode_count: Mapped[int]
    state: Mapped[str]
    profiled_modes: Mapped[int]
    detail: Mapped[str]
    idle_w: Mapped[float | None]
    first_seen_at: Mapped[datetime | None]
    last_seen_at: Mapped[datetime | None]
    checksum: Mapped[int | None]


class DeviceFront(Base):
    """A device's front for one workload, in its own table because a device's state changes a hundred times as often."""

    __tablename__ = "workload_front"
    device_id: Mapped[str] = mapped_column(primary_key=True)
    # Empty if the front counts for every workload.
    workload: Mapped[str] = mapped_column(primary_key=True)
    facts: Mapped[dict[str, Any]] = mapped_column(JsonText)
    points: Mapped[bytes]
    minibatches_per_epoch: Mapped[int | None]
    profiled_modes: Mapped[int]
    reference_digest: Mapped[str]
    reported_at: Mapped[datetime | None]
    checksum: Mapped[int | None]


class Node(Base):
    """The device behind a Flower node."""

    __tablename__ = "node"
    # Flower's node ids use all 64 bits; the databases' integers are signed.
    node_id: Mapped[str] = mapped_column(primary_key=True)
    device_id: Mapped[str]
    pairing_problem: Mapped[str | None]
    bound_at: Mapped[datetime | None]
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
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None] = mapped_column(index=True)
    checksum: Mapped[int | None]
    name: Mapped[str]
    labels: Mapped[dict[str, str]] = mapped_column(JsonText)


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
    results: Mapped[list[dict[str, Any]]] = mapped_column(JsonText)
    metrics: Mapped[dict[str, float]] = mapped_column(JsonText)
    wall_s: Mapped[float | None]
    planned_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    checksum: Mapped[int | None]


class Observation(Base):
    """One device's observation in one round."""

    __tablename__ = "observation"
    plan_id: Mapped[str] = mapped_column(primary_key=True)
    device_id: Mapped[str] = mapped_column(primary_key=True)
    epoch_s: Mapped[float]
    power_w: Mapped[float]
    checksum: Mapped[int | None]
    beside_duty: Mapped[bool]


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


class Reference(Base):
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
    checksum: Mapped[int | None]
    # Only of a grant to measure, which belongs to no round.
    limit_w: Mapped[float | None]


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
