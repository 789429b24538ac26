"""What the coordinator keeps across restarts: SQLite in WAL mode, through SQLAlchemy."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from sqlalchemy import JSON, URL, Float, Integer, String, create_engine, event, select
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from coordinator.records import DeviceRecord, DeviceResult, DeviceState, ObservedTraining, RoundRecord, RunRecord
from wattfleet.errors import InvalidInputError
from wattfleet_proto.convert import front_from_message, front_to_message, plan_from_message, plan_to_message
from wattfleet_proto.v1 import planning_pb2, power_pb2


class _Base(DeclarativeBase):
    pass


class _Device(_Base):
    __tablename__ = "device"
    device_id: Mapped[str] = mapped_column(String, primary_key=True)
    board: Mapped[str]
    evidence: Mapped[str]
    mode_count: Mapped[int]
    state: Mapped[str]
    profiled_modes: Mapped[int]
    detail: Mapped[str]
    front: Mapped[str | None]
    idle_w: Mapped[float | None] = mapped_column(Float)
    reference_digest: Mapped[str]


class _Node(_Base):
    __tablename__ = "node"
    # Flower's node ids use all 64 bits, SQLite's integers are signed.
    node_id: Mapped[str] = mapped_column(String, primary_key=True)
    device_id: Mapped[str]


class _Run(_Base):
    __tablename__ = "run"
    order: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(String, unique=True)
    strategy: Mapped[str]
    rounds: Mapped[int]
    initial_metrics: Mapped[dict[str, float]] = mapped_column(JSON)
    error: Mapped[str]
    finished: Mapped[bool]


class _Round(_Base):
    __tablename__ = "round"
    order: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    plan_id: Mapped[str] = mapped_column(String, unique=True)
    run_id: Mapped[str] = mapped_column(String, index=True)
    number: Mapped[int]
    epochs: Mapped[float]
    plan: Mapped[str]
    idle_w: Mapped[float]
    failed: Mapped[list[str]] = mapped_column(JSON)
    metrics: Mapped[dict[str, float]] = mapped_column(JSON)
    wall_s: Mapped[float | None] = mapped_column(Float)


class _Results(_Base):
    # A table of its own, not a column of the round: files from before it was kept gain it when they are opened.
    __tablename__ = "round_results"
    plan_id: Mapped[str] = mapped_column(String, primary_key=True)
    results: Mapped[list[dict[str, Any]]] = mapped_column(JSON)


class _Observation(_Base):
    __tablename__ = "observation"
    plan_id: Mapped[str] = mapped_column(String, primary_key=True)
    device_id: Mapped[str] = mapped_column(String, primary_key=True)
    epoch_s: Mapped[float]
    power_w: Mapped[float]


def _pragmas(connection: object, _record: object) -> None:
    cursor = connection.cursor()  # type: ignore[attr-defined]  # the driver's own connection
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # what was acknowledged survives a power cut
    cursor.execute("PRAGMA busy_timeout=5000")
    cursor.close()


class Store:
    """The coordinator's records on disk; every save is on disk when it returns."""

    def __init__(self, path: Path) -> None:
        """Open, or create, the database file.

        Raises:
            InvalidInputError: the file cannot be used as a database.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._engine: Engine = create_engine(URL.create("sqlite", database=str(path)))
            event.listen(self._engine, "connect", _pragmas)
            _Base.metadata.create_all(self._engine)
        except (OSError, DatabaseError) as error:
            reason = error.orig if isinstance(error, DatabaseError) else error
            raise InvalidInputError(f"{path}: cannot be used as the coordinator's store: {reason}") from None

    def close(self) -> None:
        """Let go of the file."""
        self._engine.dispose()

    def save(self, record: DeviceRecord | RunRecord | RoundRecord) -> None:
        """Keep a record, in place of what was kept of it before."""
        with Session(self._engine) as session, session.begin():
            if isinstance(record, DeviceRecord):
                session.merge(_device_row(record))
            elif isinstance(record, RunRecord):
                order = session.scalar(select(_Run.order).where(_Run.run_id == record.run_id))
                session.merge(_run_row(record, order))
            else:
                order = session.scalar(select(_Round.order).where(_Round.plan_id == record.plan_id))
                session.merge(_round_row(record, order))
                session.merge(_Results(plan_id=record.plan_id, results=[asdict(result) for result in record.results]))
                for observed in record.observations.values():
                    session.merge(
                        _Observation(
                            plan_id=record.plan_id,
                            device_id=observed.device_id,
                            epoch_s=observed.epoch_s,
                            power_w=observed.power_w,
                        )
                    )

    def save_node(self, node_id: int, device_id: str) -> None:
        """Keep which device a Flower node is."""
        with Session(self._engine) as session, session.begin():
            session.merge(_Node(node_id=str(node_id), device_id=device_id))

    def devices(self) -> list[DeviceRecord]:
        """All devices."""
        with Session(self._engine) as session:
            return [_device_record(row) for row in session.scalars(select(_Device))]

    def nodes(self) -> dict[int, str]:
        """Flower node id -> device id."""
        with Session(self._engine) as session:
            return {int(row.node_id): row.device_id for row in session.scalars(select(_Node))}

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first."""
        with Session(self._engine) as session:
            rows = session.scalars(select(_Run).order_by(_Run.order))
            return [
                RunRecord(row.run_id, row.strategy, row.rounds, row.initial_metrics, row.error, row.finished)
                for row in rows
            ]

    def rounds(self) -> list[RoundRecord]:
        """All rounds, oldest first."""
        with Session(self._engine) as session:
            observations: dict[str, dict[str, ObservedTraining]] = {}
            for seen in session.scalars(select(_Observation)):
                observed = ObservedTraining(seen.device_id, seen.epoch_s, seen.power_w)
                observations.setdefault(seen.plan_id, {})[seen.device_id] = observed
            results = {
                kept.plan_id: tuple(DeviceResult(**result) for result in kept.results)
                for kept in session.scalars(select(_Results))
            }
            rows = session.scalars(select(_Round).order_by(_Round.order)).all()
            return [_round_record(row, observations.get(row.plan_id, {}), results.get(row.plan_id)) for row in rows]


def _device_row(record: DeviceRecord) -> _Device:
    front = None if record.front is None else json_format.MessageToJson(front_to_message(record.front), indent=None)
    return _Device(
        device_id=record.device_id,
        board=record.board,
        evidence=record.evidence,
        mode_count=record.mode_count,
        state=record.state.value,
        profiled_modes=record.profiled_modes,
        detail=record.detail,
        front=front,
        idle_w=record.idle_w,
        reference_digest=record.reference_digest,
    )


def _device_record(row: _Device) -> DeviceRecord:
    front = None if row.front is None else front_from_message(json_format.Parse(row.front, power_pb2.Front()))
    return DeviceRecord(
        device_id=row.device_id,
        board=row.board,
        evidence=row.evidence,
        mode_count=row.mode_count,
        state=DeviceState(row.state),
        profiled_modes=row.profiled_modes,
        detail=row.detail,
        front=front,
        idle_w=row.idle_w,
        reference_digest=row.reference_digest,
    )


def _run_row(record: RunRecord, order: int | None) -> _Run:
    return _Run(
        order=order,
        run_id=record.run_id,
        strategy=record.strategy,
        rounds=record.rounds,
        initial_metrics=record.initial_metrics,
        error=record.error,
        finished=record.finished,
    )


def _round_row(record: RoundRecord, order: int | None) -> _Round:
    message = plan_to_message(record.plan_id, record.plan, record.nodes)
    return _Round(
        order=order,
        plan_id=record.plan_id,
        run_id=record.run_id,
        number=record.number,
        epochs=record.epochs,
        plan=json_format.MessageToJson(message, indent=None),
        idle_w=record.idle_w,
        failed=list(record.failed),
        metrics=record.metrics,
        wall_s=record.wall_s,
    )


def _round_record(
    row: _Round, observations: dict[str, ObservedTraining], results: tuple[DeviceResult, ...] | None
) -> RoundRecord:
    message = json_format.Parse(row.plan, planning_pb2.PlanRoundResponse())
    if results is None:  # of a file from before they were kept
        results = tuple(DeviceResult(device_id, "no usable reply", share=0.0) for device_id in row.failed)
    return RoundRecord(
        plan_id=row.plan_id,
        run_id=row.run_id,
        number=row.number,
        epochs=row.epochs,
        plan=plan_from_message(message),
        nodes={assignment.device_id: assignment.node_id for assignment in message.assignments},
        idle_w=row.idle_w,
        observations=observations,
        results=results,
        metrics=row.metrics,
        wall_s=row.wall_s,
    )
