"""Builds the report of a simulation as plain data, with all figures."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.display.view_values import state_word
from edge_agent.devices.virtual.span_file import DatedWork, SpanFile
from edge_agent.devices.virtual.virtual_board import VirtualBoard
from edge_agent.paths import WORK_FILE
from edge_agent.profiling.stored_profile import read_predictor, read_profile
from edge_agent.profiling.workload_folders import WorkloadFolders
from wattfleet.modes import ModeArray, Workload
from wattfleet.prediction import Prediction, restore_predictor, warmup_s
from wattfleet_proto.convert import mode_from_message
from wattfleet_proto.v1 import view_pb2
from wattfleet_simulation.baselines import BaselineTraining, TrueBoard, random_draw, true_boards
from wattfleet_simulation.comparison import compared, not_compared, own_way
from wattfleet_simulation.report_duties import duties_of
from wattfleet_simulation.report_figures import is_predicted
from wattfleet_simulation.run import Snapshot
from wattfleet_simulation.settings import SimulatedApp, SimulationSettings


def build_report(
    settings: SimulationSettings,
    runs: Sequence[Snapshot],
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
            own = own_way(last.rounds, run["initial_accuracy"], work, idle_w, last.started_unix_s, until_unix_s)
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


def _workload(last: Snapshot) -> Workload:
    assert last.workload is not None, "a run that has ended has stated its workload"
    return last.workload


def _run(
    settings: SimulationSettings,
    app: SimulatedApp,
    last: Snapshot,
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
        "failed": list(view.failed_device_ids),
        "site_budget_w": budget_w,
        "planned_site_w": view.plan.planned_w,
        "observed_site_w": observed_w,
        "site_budget_held": None if observed_w is None else observed_w <= budget_w,
        "predicted_duration_s": view.plan.duration_s,
        "observed_duration_s": view.observed_duration_s if view.HasField("observed_duration_s") else None,
        "random_draw": random_draw(truth, chosen, mean_epochs, budget_w, settings.seed),
        "training_j": view.training_j if view.HasField("training_j") else None,
        "observed_trainings": view.observed_count,
        "trainings": view.device_count,
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
