"""Builds the report of a simulation as plain data, with all figures."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.display.values import state_word
from edge_agent.devices.virtual.simulated import DatedWork, SpanFile
from edge_agent.devices.virtual.virtual_board import VirtualBoard
from edge_agent.paths import SERVED_FILE, WORK_FILE
from edge_agent.profiling.stored_profile import WorkloadFolders, read_predictor, read_profile
from edge_agent.serving.device_turns import ServedSpan
from edge_agent.serving.serving_board import SWITCH_MS, simulated_duty
from wattfleet.core.duties import ConstantArrivals
from wattfleet.core.modes import ModeArray, Workload
from wattfleet.core.prediction import Prediction, restore_predictor, warmup_s
from wattfleet.simulation.baselines import BaselineTraining, TrueBoard, random_draw, true_boards
from wattfleet.simulation.comparison import compared, not_compared, own_way
from wattfleet.simulation.devices import FleetDevice
from wattfleet.simulation.report_figures import is_predicted
from wattfleet.simulation.run import SimulationProgress
from wattfleet.simulation.settings import SimulatedApp, SimulationSettings
from wattfleet_proto.convert import mode_from_message
from wattfleet_proto.v1 import view_pb2

# --- Report duties ----------------------------------------------------------------------------------------------------
# Reports how the boards of a simulation kept their duties: what each board served and trained, on its own clock.


Values = NDArray[np.float64]

_MOST_BUCKETS = 600
"""Number of time intervals in a plot; each is at least a second long."""

_NEGLIGIBLE_S = 0.01

_MOST_MISSED = 1000
"""How many late requests of a board a plot shows; those with the longest latency first."""


def duties_of(
    devices: Sequence[FleetDevice], state_directories: Mapping[str, Path], runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the report on the duties, by device; empty if there are none.

    Args:
        devices: the fleet.
        state_directories: each agent's state directory.
        runs: the runs in the report.
    """
    found = {}
    for device in devices:
        if device.duty is not None:
            spans = list(SpanFile(state_directories[device.device_id] / SERVED_FILE, ServedSpan).read())
            found[device.device_id] = _kept(device.duty, spans) | _training(device.device_id, spans, runs)
    return found


def _kept(text: str, spans: Sequence[ServedSpan]) -> dict[str, Any]:
    """Return a duty and how its requests were answered."""
    duty = simulated_duty(text)
    assert isinstance(duty.arrivals, ConstantArrivals), "simulated requests have a constant rate"
    at_s, latency_ms = _joined(spans, "arrival_s"), _joined(spans, "latency_ms")
    beside, alone = ([span for span in spans if span.is_training is wanted] for wanted in (True, False))
    late = np.flatnonzero(latency_ms > duty.latency_ms)
    shown = np.sort(late[np.argsort(-latency_ms[late], kind="stable")][:_MOST_MISSED])
    return {
        "duty": text,
        "network": duty.workload,
        "arrivals_per_s": duty.arrivals.per_s,
        "latency_ms": duty.latency_ms,
        "quantile": duty.quantile,
        "switch_ms": SWITCH_MS,
        "requests": len(latency_ms),
        "missed": len(late),
        "in_time_share": float((latency_ms <= duty.latency_ms).mean()) if len(latency_ms) else None,
        "beside_training": _quantiles(_joined(beside, "latency_ms")),
        "at_rest": _quantiles(_joined(alone, "latency_ms")),
        "spans": list(_merged(spans)),
        "series": _series(spans, at_s, latency_ms),
        "late": {"at_s": at_s[shown].round(2).tolist(), "latency_ms": latency_ms[shown].round(1).tolist()},
    }


def _training(device_id: str, spans: Sequence[ServedSpan], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what was trained while answering requests, and the ratio of planned to observed seconds per epoch."""
    trained = [span for span in spans if span.is_training]
    ratios = [
        part["predicted_epoch_s"] / part["observed_epoch_s"]
        for run in runs
        for one in run["rounds"]
        for part in one["assignments"]
        if part["device"] == device_id and part["observed_epoch_s"] is not None and not part["length_assumed"]
    ]
    return {
        "minibatches": sum(len(span.minibatch_end_s) for span in trained),
        "training_s": sum(span.end_s - span.begin_s for span in trained),
        "rest_s": sum(span.end_s - span.begin_s for span in spans if not span.is_training),
        "training_of_plan": float(np.median(ratios)) if ratios else None,
        "observed_trainings": len(ratios),
    }


def _quantiles(latency_ms: Values) -> dict[str, float | None]:
    names = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
    return {name: float(np.quantile(latency_ms, share)) if len(latency_ms) else None for name, share in names.items()}


def _merged(spans: Sequence[ServedSpan]) -> Iterator[dict[str, Any]]:
    """Merge spans of the same mode and kind that follow each other without a gap."""
    members: list[ServedSpan] = []
    for span, following in zip_longest(spans, spans[1:]):
        members.append(span)
        if following is None or not _continues(span, following):
            yield {
                "begin_s": members[0].begin_s,
                "end_s": span.end_s,
                "mode": span.mode._asdict(),
                "batch": span.batch,
                "is_training": span.is_training,
            }
            members.clear()


def _continues(span: ServedSpan, following: ServedSpan) -> bool:
    alike = (span.mode, span.is_training) == (following.mode, following.is_training)
    return alike and following.begin_s - span.end_s < _NEGLIGIBLE_S


def _series(spans: Sequence[ServedSpan], at_s: Values, latency_ms: Values) -> dict[str, Any]:
    """Return latencies and minibatches in intervals of equal length; intervals without requests are null."""
    begin_s = math.floor(min((span.begin_s for span in spans), default=0.0))
    end_s = max((span.end_s for span in spans), default=0.0)
    width_s = max(1.0, float(math.ceil((end_s - begin_s) / _MOST_BUCKETS)))
    edges = np.arange(begin_s, end_s + width_s, width_s)
    order = np.argsort(at_s, kind="stable")
    cuts = np.searchsorted(at_s[order], edges)
    parts = [latency_ms[order[first:last]] for first, last in pairwise(cuts.tolist())]
    ended = np.histogram(_joined(spans, "minibatch_end_s"), edges)[0]
    return {
        "width_s": width_s,
        "at_s": (edges[:-1] + width_s / 2).tolist(),
        **{
            name: [round(float(np.quantile(part, share)), 2) if len(part) else None for part in parts]
            for name, share in (("p50_ms", 0.5), ("p95_ms", 0.95))
        },
        "minibatches_per_s": (ended / width_s).round(3).tolist(),
    }


def _joined(spans: Sequence[ServedSpan], column: str) -> Values:
    return np.array([value for span in spans for value in getattr(span, column)], dtype=np.float64)


# --- Report -----------------------------------------------------------------------------------------------------------


def build_report(
    settings: SimulationSettings,
    runs: Sequence[SimulationProgress],
    boards: Mapping[str, VirtualBoard],
    state_directories: Mapping[str, Path],
    baselines: BaselineTraining,
) -> dict[str, Any]:
    """Return the content of `report.json` for a completed simulation.

    Args:
        settings: what was simulated.
        runs: the last snapshot of each run.
        boards: each device's board, with its true time and power.
        state_directories: each agent's state directory, with its fitted predictors.
        baselines: the trained baselines.
    """
    kinds = {boards[device.device_id].provenance for device in settings.devices}
    work = {
        device_id: list(SpanFile(folder / WORK_FILE, DatedWork).read())
        for device_id, folder in state_directories.items()
    }
    next_began = [*(run.started_unix_s for run in runs[1:]), math.inf]
    described = []
    for app, last, until_unix_s in zip(itertools.chain(*settings.apps), runs, next_began, strict=True):
        truth = true_boards(app, _workload(last), settings.seed, boards)
        run = _run(settings, app, last, truth, state_directories)
        if (reason := settings.why_not_compared(last.run_number)) is not None:
            comparison = not_compared(reason)
        else:
            idle_w = {device_id: board.idle_w for device_id, board in truth.items()}
            began_s, budget_w = last.started_unix_s, settings.site_budget_w
            own = own_way(last.rounds, run["initial_accuracy"], work, idle_w, budget_w, began_s, until_unix_s)
            comparison = compared(own, baselines.results(last.run_number), settings.site_budget_w)
        described.append({**run, "comparison": comparison})
    return {
        "provenance": "simulated" if "simulated" in kinds else "replayed",
        "wattfleet_version": version("wattfleet"),
        "settings": {
            "devices": {device.device_id: device.spec for device in settings.devices},
            "apps": ["+".join(map(str, together)) for together in settings.apps],
            "rounds": settings.rounds,
            "site_budget_w": settings.site_budget_w,
            "energy_budget_j": settings.energy_budget_j,
            "modes": settings.profile_modes,
            "policy": settings.policy,
            "clients": settings.clients,
            "deadline_s": settings.deadline_s,
            "own_epochs": settings.own_epochs,
            "duties": list(dict.fromkeys(device.duty for device in settings.devices if device.duty is not None)),
            "seed": settings.seed,
            "reference": settings.reference,
        },
        "runs": described,
        "duties": duties_of(settings.devices, state_directories, described),
        "elapsed_s": round(runs[-1].elapsed_s, 1),
    }


def _workload(last: SimulationProgress) -> Workload:
    assert last.workload is not None, "a run that has ended has stated its workload"
    return last.workload


def _run(
    settings: SimulationSettings,
    app: SimulatedApp,
    last: SimulationProgress,
    truth: Mapping[str, TrueBoard],
    state_directories: Mapping[str, Path],
) -> dict[str, Any]:
    """Return the report of one run: its workload, its devices and its rounds."""
    workload = _workload(last).name
    rounds = [_round(view, truth, settings) for view in last.rounds]
    return {
        "run": last.run_number,
        "network": app.network,
        "batch_sizes": list(app.batch_sizes),
        "local_epochs": list(app.local_epochs),
        "workload": workload,
        "devices": {
            device.device_id: _device(device, workload, truth[device.device_id], state_directories[device.device_id])
            for device in last.devices
        },
        "rounds": rounds,
        "median_error": {quantity: _median_error(rounds, quantity) for quantity in ("epoch_s", "power_w")},
        "initial_accuracy": last.initial_metrics.get("accuracy"),
        "final_accuracy": last.rounds[-1].metrics["accuracy"],
        "rounds_asked_for": last.rounds_in_run,
        "energy": None if last.energy is None else asdict(last.energy),
        "error": last.run_error,
    }


def _device(view: view_pb2.DeviceView, workload: str, truth: TrueBoard, state: Path) -> dict[str, Any]:
    """Return the report of one device: its profile and front for a workload, and the errors of its predictors.

    A device that has not trained assumes the length of its epochs. Its front is then scaled to the true length.
    """
    folder = WorkloadFolders(state).folder(workload)
    artefact, measured = read_predictor(folder), read_profile(folder)
    known = WorkloadFolders(state).known(workload)
    assert artefact is not None and known is not None, "a device with a front has stored its predictor"
    board, is_length_known = truth.board, known.minibatches_per_epoch is not None
    batch = known.workload.facts.batch
    predicted = restore_predictor(artefact).predict(
        board.modes, None if batch is None else np.full(len(board.modes), batch)
    )
    true_ms, true_mw = board.truth(board.modes, truth.workload if batch is None else truth.workload.with_batch(batch))
    first_gcycles = 0.0 if measured is None else measured.first_gcycles
    # With a choice of minibatch sizes, a known length is that of the size which was trained last.
    minibatches_per_epoch = known.counted_minibatches if is_length_known else truth.minibatches_per_epoch
    to_true_length = minibatches_per_epoch / known.counted_minibatches
    return {
        "board": view.board,
        "provenance": board.provenance,
        "mode_space": view.mode_count,
        "modes_profiled": view.profiled_modes,
        "minibatches_per_epoch": minibatches_per_epoch,
        "is_length_known": is_length_known,
        "idle_w": view.idle_w,
        "time_mape_pct": 100 * float(np.mean(np.abs(predicted.minibatch_ms / true_ms - 1))),
        "power_mape_pct": 100 * float(np.mean(np.abs(predicted.power_mw / true_mw - 1))),
        "state": state_word(view.state),
        "reference_digest": view.reference_digest,
        "front": [
            {
                "mode": mode_from_message(point.mode)._asdict(),
                "warmup_s": point.warmup_s,
                "epoch_s": point.epoch_s * to_true_length,
                "power_w": point.power_w,
                "epoch_log_sd": point.epoch_log_sd,
                "power_log_sd": point.power_log_sd,
            }
            for point in view.front.points
        ],
        # A sample of the whole mode space, so that a plot can show it behind the front.
        "space_sample": _space_sample(board.modes, predicted, first_gcycles, minibatches_per_epoch),
    }


def _space_sample(
    modes: ModeArray, predicted: Prediction, first_gcycles: float, minibatches_per_epoch: int
) -> dict[str, list[float]]:
    rows = np.random.default_rng(0).choice(len(modes), min(400, len(modes)), replace=False)
    return {
        "warmup_s": warmup_s(modes[rows], predicted.minibatch_ms[rows], first_gcycles).round(2).tolist(),
        "epoch_s": (predicted.minibatch_ms[rows] * minibatches_per_epoch / 1e3).round(2).tolist(),
        "power_w": (predicted.power_mw[rows] / 1e3).round(3).tolist(),
    }


def _round(view: view_pb2.RoundView, truth: Mapping[str, TrueBoard], settings: SimulationSettings) -> dict[str, Any]:
    """Return the report of one round: the devices and their modes, with predicted and observed figures."""
    seen = {observation.device_id: observation for observation in view.observations}
    chosen = [assignment.device_id for assignment in view.plan.assignments]
    mean_epochs = float(np.mean([assignment.epochs for assignment in view.plan.assignments] or [view.epochs]))
    observed_w, budget_w = view.observed_site_w if view.HasField("observed_site_w") else None, view.plan.site_budget_w
    return {
        "round": view.round,
        "selected": chosen,
        "assignments": [
            {
                "device": assignment.device_id,
                "mode": mode_from_message(assignment.mode)._asdict(),
                "predicted_warmup_s": assignment.warmup_s,
                "predicted_epoch_s": assignment.epoch_s,
                "observed_epoch_s": seen[assignment.device_id].epoch_s if assignment.device_id in seen else None,
                "predicted_power_w": assignment.power_w,
                "observed_power_w": seen[assignment.device_id].power_w if assignment.device_id in seen else None,
                "power_limit_w": assignment.power_limit_w,
                "batch": assignment.batch or None,
                "epochs": assignment.epochs,
                "epoch_log_sd": assignment.epoch_log_sd,
                "power_log_sd": assignment.power_log_sd,
                "modes_profiled": assignment.profiled_modes,
                "length_assumed": assignment.length_assumed,
            }
            for assignment in view.plan.assignments
        ],
        "decisions": {d.device_id: {"selected": d.selected, "reason": d.reason} for d in view.plan.decisions},
        "length_assumed": any(assignment.length_assumed for assignment in view.plan.assignments),
        "failed": list(view.failed),
        "site_budget_w": budget_w,
        "planned_site_w": view.plan.planned_w,
        "observed_site_w": observed_w,
        "site_budget_held": None if observed_w is None else observed_w <= budget_w,
        "predicted_duration_s": view.plan.duration_s,
        "observed_duration_s": view.observed_s if view.HasField("observed_s") else None,
        "random_draw": random_draw(truth, chosen, mean_epochs, budget_w, settings.seed),
        "training_j": view.training_j if view.HasField("training_j") else None,
        "observed_trainings": view.observed_trainings,
        "trainings": view.devices,
        "wall_s": view.wall_s,
        "accuracy": view.metrics.get("accuracy"),
        "loss": view.metrics.get("loss"),
    }


def _median_error(rounds: Sequence[Mapping[str, Any]], quantity: str) -> dict[str, Any]:
    """Return the median error of predictions against observations, as a share, and the number of trainings.

    A training counts if it was observed. Its seconds count if the device knew its minibatches per epoch when it was
    planned.
    """
    errors = [
        abs(part[f"observed_{quantity}"] / part[f"predicted_{quantity}"] - 1)
        for one in rounds
        for part in one["assignments"]
        if part[f"observed_{quantity}"] is not None and is_predicted(part, quantity)
    ]
    return {"share": float(np.median(errors)) if errors else None, "trainings": len(errors)}


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write the report. NaN is refused, since JSON has no such value."""
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
