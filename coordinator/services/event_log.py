"""The log lines about devices, runs and rounds: what each is doing, its cost, and how it ended."""

from __future__ import annotations

import logging

from coordinator.state.records import DeviceRecord, RoundRecord, RunRecord
from wattfleet.errors import first_few
from wattfleet_io.console import count_of, duration_text
from wattfleet_io.logs import fields
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.run_end import is_stopped

_log = logging.getLogger(__name__)


def log_connected(device: DeviceRecord) -> None:
    """Log that a device has a session."""
    _log.info("%s is connected", device.device_id, extra=fields(device=device.device_id, state=device.state.value))


def log_offline(device: DeviceRecord) -> None:
    """Log that the session of a device has ended."""
    _log.info("%s is offline", device.device_id, extra=fields(device=device.device_id, state=device.state.value))


def log_state(before: DeviceRecord, after: DeviceRecord) -> None:
    """Log a device's report: a new state at level info, progress within a state at level debug."""
    level = logging.WARNING if after.state is DeviceState.DEGRADED else logging.INFO
    _log.log(
        logging.DEBUG if after.state is before.state else level,
        "%s is %s, %s measured%s",
        after.device_id,
        after.state.value,
        count_of(after.profiled_modes, "mode"),
        f": {after.detail}" if after.detail else "",
        extra=fields(
            device=after.device_id,
            state=after.state.value,
            profiled_modes=after.profiled_modes,
            detail=after.detail or None,
        ),
    )


def log_run_started(run: RunRecord) -> None:
    """Log that a run has started, or continues after its server was restarted."""
    _log.info(
        "run %s has started: %s, %s, workload %s",
        run.run_id,
        run.strategy,
        count_of(run.rounds, "round"),
        run.workload.name,
        extra=fields(run=run.run_id, strategy=run.strategy, rounds=run.rounds, workload=run.workload.name),
    )


def log_run_finished(run: RunRecord) -> None:
    """Log how a run ended."""
    has_failed = bool(run.error) and not is_stopped(run.error)
    _log.log(
        logging.WARNING if has_failed else logging.INFO,
        "run %s %s",
        run.run_id,
        f"ended with an error: {run.error}" if has_failed else f"was {run.error}" if run.error else "is finished",
        extra=fields(run=run.run_id, error=run.error or None),
    )


def log_cannot_plan(run_id: str, number: int, reason: str) -> None:
    """Log why a round cannot be planned."""
    _log.warning(
        "round %d of run %s cannot be planned: %s", number, run_id, reason, extra=fields(run=run_id, round=number)
    )


def log_planned(record: RoundRecord) -> None:
    """Log a round that was just planned."""
    plan = record.plan
    _log.info(
        "round %s is planned: %s of %s, %.1f of %.1f W, %s",
        record.plan_id,
        count_of(len(plan.assignments), "device"),
        f"{len(plan.decisions):,}",
        plan.planned_w,
        plan.site_budget_w,
        duration_text(plan.duration_s),
        extra=fields(
            run=record.run_id,
            round=record.number,
            devices=len(plan.assignments),
            considered=len(plan.decisions),
            planned_w=plan.planned_w,
            site_budget_w=plan.site_budget_w,
            planned_s=plan.duration_s,
        ),
    )


def log_trimmed(record: RoundRecord) -> None:
    """Log a round in flight that was trimmed, for example after its budget fell."""
    plan = record.plan
    _log.info(
        "round %s is trimmed to %.1f of %.1f W: %s in another mode, %s stopped",
        record.plan_id,
        plan.planned_w,
        plan.site_budget_w,
        count_of(len(plan.in_other_mode), "device"),
        f"{len(plan.stopped):,}",
        extra=fields(run=record.run_id, round=record.number, planned_w=plan.planned_w, stopped=len(plan.stopped)),
    )


def log_finished(record: RoundRecord) -> None:
    """Log a round that Flower's server has finished."""
    failed = [result.device_id for result in record.results if result.failure]
    late = [result.device_id for result in record.results if result.late]
    watts = record.observed_site_w
    parts = [
        f"{len(record.results) - len(failed):,} of {count_of(len(record.plan.assignments), 'device')} trained",
        f"{duration_text(record.wall_s)} ({duration_text(record.plan.duration_s)} planned)",
    ]
    if watts is not None:
        parts.append(f"{watts:.1f} W ({record.plan.planned_w:.1f} W planned)")
    if failed:
        parts.append(f"failed: {first_few(failed)}")
    if late:
        parts.append(f"late: {first_few(late)}")
    _log.log(
        logging.WARNING if failed else logging.INFO,
        "round %s is finished: %s",
        record.plan_id,
        ", ".join(parts),
        extra=fields(
            run=record.run_id,
            round=record.number,
            devices=len(record.plan.assignments),
            failed=failed or None,
            late=late or None,
            wall_s=record.wall_s,
            observed_w=watts,
        ),
    )
