"""Conversions between records and rows of the tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from sqlalchemy import Row

from coordinator.state.records import (
    DeviceOverrides,
    DeviceRecord,
    DeviceResult,
    NodeRecord,
    ObservedTraining,
    PublishedReference,
    RoundObservation,
    RoundRecord,
    RunRecord,
    UnplannedRound,
)
from coordinator.state.workload_fronts import EVERY_WORKLOAD, WorkloadFront
from wattfleet.budgets import Override
from wattfleet.choosing import Front
from wattfleet.modes import BatchOptions, Processor, Task, Workload, WorkloadFacts
from wattfleet_proto.convert import plan_from_message, plan_to_message
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.v1 import planning_pb2

Values = dict[str, Any]

_BATCHES = "batches"
_FRONT_COLUMNS = ("epoch_s", "power_w", "epoch_log_sd", "power_log_sd", "warmup_s")


def device_values(record: DeviceRecord) -> Values:
    """The column values of a device, without its fronts and its times."""
    return {
        "device_id": record.device_id,
        "board": record.board,
        "provenance": record.provenance,
        "mode_count": record.mode_count,
        "state": record.state.value,
        "profiled_modes": record.profiled_modes,
        "detail": record.detail,
        "idle_w": record.idle_w,
    }


def device_record(row: Row[Any], fronts: Iterable[WorkloadFront]) -> DeviceRecord:
    """Build a device from its columns and its fronts, the latest reported last."""
    return DeviceRecord(
        device_id=row.device_id,
        board=row.board,
        provenance=row.provenance,
        mode_count=row.mode_count,
        state=DeviceState(row.state),
        profiled_modes=row.profiled_modes,
        detail=row.detail,
        fronts=tuple(fronts),
        idle_w=row.idle_w,
    )


def workload_front_values(device_id: str, known: WorkloadFront) -> Values:
    """The column values of a device's front for a workload, without its time."""
    return {
        "device_id": device_id,
        "workload": known.name,
        "facts": {} if known.workload is None else _facts_values(known.workload),
        "points": front_bytes(known.front, known.workload is not None and known.workload.batches is not None),
        "minibatches_per_epoch": known.minibatches_per_epoch,
        "profiled_modes": known.profiled_modes,
        "reference_digest": known.reference_digest,
    }


def workload_front(row: Row[Any]) -> WorkloadFront:
    """Build a device's front for a workload from its columns.

    Raises:
        ImplausibleError: an earlier version has stored an implausible front.
    """
    return WorkloadFront(
        front_from_bytes(row.points, _BATCHES in row.facts),
        None if row.workload == EVERY_WORKLOAD else _workload(row.workload, row.facts),
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
    return {
        "node_id": str(record.node_id),
        "device_id": record.device_id,
        "pairing_problem": record.pairing_problem,
    }


def run_values(record: RunRecord) -> Values:
    """The column values of a run, without its times."""
    return {
        "run_id": record.run_id,
        "strategy": record.strategy,
        "rounds": record.rounds,
        "initial_metrics": record.initial_metrics,
        "error": record.error,
        "finished": record.finished,
        "owner": record.owner,
        "workload": record.workload.name,
        "facts": _facts_values(record.workload),
        "name": record.name,
        "labels": dict(record.labels),
    }


def run_record(row: Row[Any]) -> RunRecord:
    """Build a run from its columns."""
    return RunRecord(
        run_id=row.run_id,
        strategy=row.strategy,
        rounds=row.rounds,
        initial_metrics=row.initial_metrics,
        error=row.error,
        finished=row.finished,
        owner=row.owner,
        workload=_workload(row.workload, row.facts),
        name=row.name,
        labels=row.labels,
    )


def round_values(record: RoundRecord) -> Values:
    """The column values of a round, without its observations and its times."""
    message = plan_to_message(record.plan_id, record.plan, record.nodes)
    return {
        "plan_id": record.plan_id,
        "run_id": record.run_id,
        "number": record.number,
        "epochs": record.epochs,
        "plan": message.SerializeToString(deterministic=True),
        "nodes": record.nodes,
        "idle_w": record.idle_w,
        "results": [asdict(result) for result in record.results],
        "metrics": record.metrics,
        "wall_s": record.wall_s,
    }


def round_record(row: Row[Any], observations: Iterable[ObservedTraining]) -> RoundRecord:
    """Build a round from its columns and its observations."""
    return RoundRecord(
        plan_id=row.plan_id,
        run_id=row.run_id,
        number=row.number,
        epochs=row.epochs,
        plan=plan_from_message(planning_pb2.PlanRoundResponse.FromString(row.plan), row.epochs),
        nodes=row.nodes,
        idle_w=row.idle_w,
        observations={observed.device_id: observed for observed in observations},
        results=tuple(DeviceResult(**result) for result in row.results),
        metrics=row.metrics,
        wall_s=row.wall_s,
    )


def unplanned_values(record: UnplannedRound) -> Values:
    """The column values of a round without a plan."""
    return {
        "run_id": record.run_id,
        "number": record.number,
        "began_at": record.began_at,
        "ended_at": record.ended_at,
        "wall_s": record.wall_s,
        "results": [asdict(result) for result in record.results],
        "metrics": record.metrics,
    }


def unplanned_record(row: Row[Any]) -> UnplannedRound:
    """Build a round without a plan from its columns."""
    results = tuple(DeviceResult(**result) for result in row.results)
    return UnplannedRound(row.run_id, row.number, row.began_at, row.wall_s, results, row.metrics)


def observation_values(record: RoundObservation) -> Values:
    """The column values of an observation."""
    return {"plan_id": record.plan_id, **asdict(record.observed)}


def device_overrides_values(record: DeviceOverrides) -> Values:
    """The column values of a device's overrides."""
    return {
        "device_id": record.device_id,
        "tags": sorted(record.tags),
        "drained": record.drained,
        "trusted_after": record.trusted_after,
        "supply": record.supply,
    }


def device_overrides_record(row: Row[Any]) -> DeviceOverrides:
    """Build a device's overrides from their columns."""
    return DeviceOverrides(row.device_id, frozenset(row.tags), row.drained, row.trusted_after, row.supply)


def override_values(supply: str, override: Override) -> Values:
    """The column values of a supply's override."""
    return {"supply": supply, "watts": override.watts, "until": override.until}


def reference_values(record: PublishedReference) -> Values:
    """The column values of a published reference."""
    return {"digest": record.digest, "manifest": record.manifest, "weights": record.weights}
