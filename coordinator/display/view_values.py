"""Messages of the view service as plain values by name, for tables and JSON."""

from __future__ import annotations

from dataclasses import asdict, fields
from datetime import datetime, timezone
from typing import Any

from wattfleet_proto.board_sample import BoardSample
from wattfleet_proto.convert import (
    board_sample_from_message,
    front_from_message,
    kept_duty_from_message,
    presets_from_messages,
    provenance_from_message,
    state_from_message,
    workload_from_message,
)
from wattfleet_proto.run_end import is_stopped
from wattfleet_proto.v1 import operator_pb2, power_pb2, session_pb2, view_pb2

Values = dict[str, Any]

_SAMPLE = tuple(each.name for each in fields(BoardSample))


def known(message: Any, name: str) -> Any:
    """Get a field of a message; None if it is not set."""
    return getattr(message, name) if message.HasField(name) else None


def state_word(state: session_pb2.DeviceState.ValueType) -> str:
    """A device's state in one word."""
    return state_from_message(state).value


def device_values(view: view_pb2.DeviceView) -> Values:
    """A device's values, without its front."""
    return {
        "device_id": view.device_id,
        "board": view.board,
        "provenance": provenance_from_message(view.provenance),
        "state": state_word(view.state),
        "detail": view.detail,
        "profiled_modes": view.profiled_modes,
        "mode_count": view.mode_count,
        "idle_w": known(view, "idle_w"),
        "fastest_epoch_s": known(view, "fastest_epoch_s"),
        "epoch_length_assumed": view.epoch_length_assumed,
        "supply": view.supply or None,
        "limit_w": known(view, "limit_w"),
        "site_tags": list(view.site_tags),
        "operator_tags": list(view.operator_tags),
        "drained": view.drained,
        "left_out": view.left_out or None,
        "trust": known(view, "trust"),
        "reference_digest": view.reference_digest or None,
        "workload": view.workload or None,
        "first_seen_unix_s": known(view, "first_seen_unix_s"),
        "last_seen_unix_s": known(view, "last_seen_unix_s"),
        "granted_plan_id": view.granted_plan_id or None,
        "granted_w": known(view, "granted_w"),
        "confirmed_w": known(view, "confirmed_w"),
        "observed_w": known(view, "observed_w"),
        "state_since_unix_s": known(view, "state_since_unix_s"),
        "target_modes": view.target_modes or None,
        "profiling_left_s": known(view, "profiling_left_s"),
        "sample": sample_values(view.sample) if view.HasField("sample") else None,
        "throttled_unix_s": known(view, "throttled_unix_s"),
        "observed_limit_w": known(view, "observed_limit_w"),
        "observed_run_id": view.observed_run_id or None,
        "observed_round": view.observed_round or None,
        "is_observed_run_live": view.is_observed_run_live,
        "duty": asdict(kept_duty_from_message(view.duty)) if view.HasField("duty") else None,
        "prediction_errors": _error_values(view.prediction_errors) if view.HasField("prediction_errors") else None,
    }


def _error_values(errors: view_pb2.PredictionErrors) -> Values:
    """How far a device's latest trainings were from its predictions: observed by predicted values."""
    return {
        "trainings": errors.trainings,
        "least_time_ratio": known(errors, "least_time_ratio"),
        "most_time_ratio": known(errors, "most_time_ratio"),
        "least_power_ratio": errors.least_power_ratio,
        "most_power_ratio": errors.most_power_ratio,
        "last_time_ratio": known(errors, "last_time_ratio"),
        "last_power_ratio": errors.last_power_ratio,
    }


def sample_values(message: session_pb2.BoardSample) -> Values:
    """The readings of a board's sensors; None for values that the board does not report."""
    sample = board_sample_from_message(message)
    # Not `asdict`, which deep-copies each value, because this runs for every device of a snapshot.
    values = {name: getattr(sample, name) for name in _SAMPLE}
    return {**values, "mode": None if sample.mode is None else sample.mode._asdict()}


def node_values(view: view_pb2.NodeView) -> Values:
    """A Flower node's values."""
    return {
        "node_id": view.node_id,
        "device_id": view.device_id,
        "device_state": state_word(view.device_state) if view.device_state else None,
        "pairing_problem": known(view, "pairing_problem"),
        "bound_unix_s": known(view, "bound_unix_s"),
        "connected_unix_s": known(view, "connected_unix_s"),
    }


def tagged_device_values(view: view_pb2.DeviceView) -> Values:
    """A device's values with all its tags, those of the site file and those of commands, in order."""
    values = device_values(view)
    return {**values, "tags": sorted({*values["site_tags"], *values["operator_tags"]})}


def front_values(view: view_pb2.DeviceView) -> list[Values] | None:
    """The modes of a device's front; None without a front."""
    if not view.HasField("front"):
        return None
    front = front_from_message(view.front)
    return [
        {
            "mode": front.mode(k)._asdict(),
            "batch": None if front.batch is None else int(front.batch[k]),
            "warmup_s": float(front.warmup_s[k]),
            "epoch_s": float(front.epoch_s[k]),
            "power_w": float(front.power_w[k]),
            "planned_w": float(front.planned_w[k]),
        }
        for k in range(len(front))
    ]


def preset_values(view: view_pb2.DeviceView) -> list[Values]:
    """The presets of a device's board with their predictions, as in `front_values`, and whether they were measured."""
    return [
        {
            "preset": each.name,
            "mode": each.front.mode(0)._asdict(),
            "warmup_s": float(each.front.warmup_s[0]),
            "epoch_s": float(each.front.epoch_s[0]),
            "power_w": float(each.front.power_w[0]),
            "planned_w": float(each.front.planned_w[0]),
            "is_measured": each.is_measured,
        }
        for each in presets_from_messages(view.presets)
    ]


def workload_values(message: power_pb2.Workload) -> Values:
    """A workload's name and its known facts."""
    workload = workload_from_message(message)
    facts = workload.facts
    return {
        "workload": workload.name,
        "task": facts.task.value,
        "batch": facts.batch,
        "loader_workers": facts.loader_workers,
        "processor": facts.processor.value,
        "parameters": facts.parameters,
        "step_flops": facts.step_flops,
        "precision": facts.precision,
    }


def device_workload_values(message: view_pb2.DeviceWorkload) -> Values:
    """The values of a workload on a device; the workload is None if its front counts for all."""
    is_known = message.HasField("workload")
    return {
        "workload": message.workload.name if is_known else None,
        "batch": known(message.workload, "batch") if is_known else None,
        "profiled_modes": message.profiled_modes,
        "minibatches_per_epoch": known(message, "minibatches_per_epoch"),
        "fastest_epoch_s": known(message, "fastest_epoch_s"),
        "epoch_length_assumed": is_known and not message.HasField("minibatches_per_epoch"),
        "reference_digest": message.reference_digest or None,
        "left_out": message.left_out or None,
        "trust": known(message, "trust"),
    }


def known_workload_values(view: view_pb2.WorkloadView) -> Values:
    """A workload's values, with its devices and runs."""
    return {
        **workload_values(view.workload),
        "devices": view.device_count,
        "measured_devices": view.measured_devices,
        "median_modes": known(view, "median_modes"),
        "live_run_ids": list(view.live_run_ids),
        "runs": view.run_count,
        "last_used_unix_s": known(view, "last_used_unix_s"),
    }


def budget_values(budget: operator_pb2.SupplyBudget) -> Values:
    """The budget in force at a supply, what is set aside and drawn there, and since when."""
    return {
        "supply": budget.supply,
        "parent": budget.parent or None,
        "watts": budget.watts,
        "set_aside_w": budget.set_aside_w,
        "drawn_w": budget.drawn_w,
        "devices": budget.devices,
        "measured_devices": budget.measured_devices,
        "source": budget.source,
        "fallback": budget.fallback,
        "reason": budget.reason,
        "since": time_text(budget.since_unix_s),
        "until": time_text(budget.until_unix_s) if budget.HasField("until_unix_s") else None,
    }


def event_values(event: view_pb2.FleetEvent) -> Values:
    """An event's values."""
    return {
        "at": time_text(event.at_unix_s),
        "kind": event.kind,
        "text": event.text,
        "needs_attention": event.needs_attention,
        "device_id": event.device_id or None,
        "run_id": event.run_id or None,
        "round": event.round or None,
        "supply": event.supply or None,
        "caller": event.caller or None,
    }


def time_text(unix_s: float) -> str:
    """Seconds since 1970 as a date and time in UTC, ISO 8601."""
    return datetime.fromtimestamp(unix_s, timezone.utc).isoformat(timespec="seconds")


def run_values(view: view_pb2.RunView) -> Values:
    """A run's values, without its rounds."""
    return {
        "run_id": view.run_id,
        "name": view.name or view.run_id,
        "labels": dict(sorted(view.labels.items())),
        "strategy": view.strategy,
        "rounds_asked_for": view.rounds,
        "initial_metrics": dict(sorted(view.initial_metrics.items())),
        "workload": view.workload.name or None,
        "state": _run_state(view),
        "finished": view.finished,
        "error": view.error,
        "started_unix_s": known(view, "started_unix_s"),
        "finished_unix_s": known(view, "finished_unix_s"),
    }


def _run_state(view: view_pb2.RunView) -> str:
    if view.error:
        return "stopped" if is_stopped(view.error) else "failed"
    return "finished" if view.finished else "running"


def round_values(view: view_pb2.RoundView) -> Values:
    """A round's totals, as first planned and as trimmed; a round without a plan has no planned totals."""
    is_trimmed = view.plan.HasField("first_planned")
    first = view.plan.first_planned if is_trimmed else view.plan
    unplanned = view.unplanned
    return {
        "round": view.round,
        "unplanned": unplanned,
        "plan_id": view.plan_id or None,
        "workload": view.workload or None,
        "epochs": None if unplanned else view.epochs,
        "devices": view.device_count,
        "failed": list(view.failed_device_ids),
        "late": list(view.late_device_ids),
        "site_budget_w": None if unplanned else first.site_budget_w,
        "planned_w": None if unplanned else first.planned_w,
        "idle_w": None if unplanned else view.idle_w,
        "observed_site_w": known(view, "observed_site_w"),
        "planned_s": None if unplanned else first.duration_s,
        "observed_s": known(view, "observed_duration_s"),
        "wall_s": known(view, "wall_s"),
        "training_j": known(view, "training_j"),
        "observed_trainings": view.observed_count,
        "deadline_s": view.plan.deadline_s or None,
        "in_other_mode": view.other_mode_count,
        "stopped": view.stopped_count,
        "trimmed_site_budget_w": view.plan.site_budget_w if is_trimmed else None,
        "trimmed_planned_w": view.plan.planned_w if is_trimmed else None,
        "trimmed_s": view.plan.duration_s if is_trimmed else None,
        "planned_unix_s": known(view, "planned_unix_s"),
        "finished_unix_s": known(view, "finished_unix_s"),
        "metrics": dict(sorted(view.metrics.items())),
    }
