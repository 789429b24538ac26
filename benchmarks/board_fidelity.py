"""Compare simulated boards with real ones: misfit, noise, transients, transfer, and published figures.

    python -m benchmarks.board_fidelity --data ../shared/data [--json]

Real files and simulated boards go through the same steps. The misfit is that of a robust fit of the physics, and the
transfer uses the default predictor. The real profiler measures the simulated modes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.device import PowerTrace
from edge_agent.devices.virtual.physics import board_parameters
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.profiling.mode_measurement import settled_minibatch_ms, settled_power_mw
from edge_agent.profiling.profiler import Profiler
from reference_models.logs import RunLog, read_run_logs
from wattfleet.core.errors import WattfleetError
from wattfleet.core.modes import (
    BOARDS,
    ModeArray,
    Profile,
    Task,
    Workload,
    WorkloadFacts,
    array_to_modes,
    modes_to_array,
    read_profile,
)
from wattfleet.core.prediction import RooflinePredictor
from wattfleet.core.prediction.roofline import power_mw, settings_of, step_time_ms
from wattfleet.simulation.board_fit import AGX_CORPUS, INFERENCE_CORPORA, MINIBATCHES_PER_EPOCH, NANO_CORPUS, fit_board

# Minutes per epoch and watts at MAXN, ResNet-18 on 50,000 images. From PowerTrain, section 1; the Orin Nano's from the
# measurements behind that paper. No figure of an Orin NX is published.
PUBLISHED = {"agx-orin": (3.1, 51.1), "orin-nano": (9.47, 20.4), "xavier-agx": (8.47, 36.4)}
_SEEDS = (0, 1, 2)
_MODES = 1000
_TRANSFER_MODES, _TRANSFER_DRAWS = 50, 3


def misfit(log_misfit: NDArray[np.float64]) -> dict[str, float]:
    """Summarise the deviations of a model from measurements, in percent."""
    percent = 100 * np.abs(np.expm1(-log_misfit))
    return {
        "mean": float(percent.mean()),
        "median": float(np.median(percent)),
        "p90": float(np.quantile(percent, 0.9)),
        "p99": float(np.quantile(percent, 0.99)),
        "over_20": float(100 * (percent > 20).mean()),
    }


def misfit_of_best_fit(profile: Profile) -> dict[str, dict[str, float]]:
    """Return the misfit of the physics after a robust fit to a whole profile."""
    fit = fit_board(profile)
    return {"time": misfit(fit.time_misfit), "power": misfit(fit.power_misfit)}


def misfit_by_construction(kind: str, seed: int) -> dict[str, dict[str, float]]:
    """Return how far a simulated board deviates from its kind's physics over its mode space."""
    device, parameters = SimulatedDevice(kind, seed), board_parameters(kind)
    minibatch_ms, training_mw = device.truth(device.modes)
    settings = settings_of(device.modes, None)
    modelled_mw = power_mw(parameters.power, parameters.time, settings)
    return {
        "time": misfit(np.log(minibatch_ms / step_time_ms(parameters.time, settings))),
        "power": misfit(np.log(training_mw / modelled_mw)),
    }


def served(device: SimulatedDevice, workload: str, like: Profile) -> Profile:
    """Return the true values of an inference workload at the modes and batches of a profile."""
    rows = []
    for batch in like.batches:
        modes = like.rows(np.asarray(like.batch) == batch).modes
        values = device.truth(modes, Workload(workload, WorkloadFacts(Task.INFERENCE, batch=batch)))
        rows.append(np.column_stack([modes, *values, np.full(len(modes), batch)]))
    table = np.concatenate(rows)
    return Profile(table[:, :4], table[:, 4], table[:, 5], table[:, 6].astype(np.int64), Task.INFERENCE)


def inference(workload: str, profile: Profile) -> dict[str, dict[str, dict[str, float]]]:
    """Compare simulated boards that serve an inference workload with the measured file."""
    order = np.lexsort((*profile.modes.T, np.asarray(profile.batch)))
    real = profile.rows(order)
    tables = [served(SimulatedDevice("agx-orin", seed), workload, real) for seed in _SEEDS]
    against_file = [
        {
            "time": misfit(np.log(real.minibatch_ms / table.minibatch_ms)),
            "power": misfit(np.log(real.power_mw / table.power_mw)),
        }
        for table in tables
    ]
    return {
        "misfit": misfit_of_best_fit(real),
        "simulated_misfit": _mean([misfit_of_best_fit(table) for table in tables]),
        "simulated_against_file": _mean(against_file),
    }


def measured(device: SimulatedDevice, modes: ModeArray) -> Profile:
    """Measure `[n, 4]` modes with the profiler."""
    profiler = Profiler(device)
    return Profile.of(profiler.measure(mode, device.step).measurement for mode in array_to_modes(modes))


def repeatability(profile: Profile) -> dict[str, float]:
    """Return the scatter, in percent, between rows of neighbouring CPU frequencies, where these hardly matter.

    With eight or more cores and the slowest memory, only the memory limits a step.
    """
    cores, cpu_khz, gpu_hz, mem_hz = profile.modes.T
    calm = (cores >= 8) & (mem_hz == mem_hz.min()) & (cpu_khz >= 700_000)
    scatter: dict[str, float] = {}
    for name, values in (("time", profile.minibatch_ms), ("power", profile.power_mw)):
        departures: list[float] = []
        for group in np.unique(np.stack([cores, gpu_hz])[:, calm], axis=1).T:
            row = np.flatnonzero(calm & (cores == group[0]) & (gpu_hz == group[1]))
            row = row[np.argsort(cpu_khz[row])]
            x, y = cpu_khz[row], np.log(values[row])
            weight = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
            between = (1 - weight) * y[:-2] + weight * y[2:]
            departures += ((y[1:-1] - between) / np.sqrt(1 + weight**2 + (1 - weight) ** 2)).tolist()
        scatter[name] = float(100 * 1.4826 * np.median(np.abs(departures)))
    return scatter


def transfer(profile: Profile, reference: RooflinePredictor) -> dict[str, float]:
    """Return the median MAPE, in percent, of predictors transferred with a few modes, over all other modes."""
    errors = []
    for seed in range(_TRANSFER_DRAWS):
        some = np.random.default_rng(seed).choice(len(profile), _TRANSFER_MODES, replace=False)
        rest = profile.rows(np.setdiff1d(np.arange(len(profile)), some))
        prediction = RooflinePredictor.fit(profile.rows(some), reference).predict(rest.modes)
        errors.append(
            (
                np.abs(prediction.minibatch_ms / rest.minibatch_ms - 1).mean(),
                np.abs(prediction.power_mw / rest.power_mw - 1).mean(),
            )
        )
    time, power = 100 * np.median(errors, axis=0)
    return {"time": float(time), "power": float(power)}


def transients(logs: list[RunLog]) -> dict[str, float]:
    """Return typical transients of runs."""
    powers = [settled_power_mw(PowerTrace(log.sample_s, log.sample_mw), log.end_s) for log in logs]
    quiet = [settled_minibatch_ms(log.minibatch_ms).spread for log in logs if log.mode.cores == 6]
    loud = [settled_minibatch_ms(log.minibatch_ms).spread for log in logs if log.mode.cores < 6]
    return {
        "first_minibatch_gcycles": float(np.median([log.minibatch_ms[0] * log.mode.cpu_khz / 1e9 for log in logs])),
        "sample_interval_s": float(np.median(np.concatenate([np.diff(log.sample_s)[2:] for log in logs]))),
        "power_scatter_percent": float(100 * np.median([power.spread for power in powers if power])),
        "jitter_6_cores_percent": float(100 * np.median(quiet)),
        "jitter_2_and_4_cores_percent": float(100 * np.median(loud)),
    }


def simulated_log(device: SimulatedDevice, like: RunLog) -> RunLog:
    """Run a simulated board in the mode of a recorded run, with the same number of minibatches."""
    device.apply(like.mode)
    meter = device.start_meter()
    end_s = [device.clock.now_s()]
    for _ in like.minibatch_ms:
        device.step()
        end_s.append(device.clock.now_s())
    power = meter.stop()
    unknown = np.full((len(power.at_s), 4), np.nan)
    return RunLog(like.mode, np.diff(end_s) * 1e3, np.array(end_s[1:]), power.at_s, power.power_mw, unknown)


def maxn() -> dict[str, dict[str, float | None]]:
    """Return minutes per epoch and watts of each kind at its highest mode, by the physics and as published."""
    rows: dict[str, dict[str, float | None]] = {}
    for kind, board in BOARDS.items():
        parameters, at = board_parameters(kind), settings_of(modes_to_array([board.space.highest]), None)
        minutes, watts = PUBLISHED.get(kind, (None, None))
        rows[kind] = {
            "epoch_min": float(step_time_ms(parameters.time, at)[0]) * MINIBATCHES_PER_EPOCH / 60e3,
            "published_epoch_min": minutes,
            "watts": float(power_mw(parameters.power, parameters.time, at)[0]) / 1e3,
            "published_watts": watts,
        }
    return rows


def compare(data: Path) -> dict[str, Any]:
    """Return all comparisons, as a JSON document."""
    corpora = {name: read_profile(data / name) for name in (AGX_CORPUS, "agx_orin_mobilenetv3.csv", NANO_CORPUS)}
    reference = RooflinePredictor.fit(corpora[AGX_CORPUS])
    rows: dict[str, Any] = {}
    for name, profile in corpora.items():
        rows[name] = {"misfit": misfit_of_best_fit(profile)}
        if name != NANO_CORPUS:
            rows[name]["repeatability"] = repeatability(profile)
        if name != AGX_CORPUS:
            rows[name]["transfer"] = transfer(profile, reference)
    for kind in BOARDS:
        devices = [SimulatedDevice(kind, seed) for seed in _SEEDS]
        rng = np.random.default_rng(0)
        modes = corpora[AGX_CORPUS].modes if kind == "agx-orin" else devices[0].modes
        some = modes[rng.choice(len(modes), min(_MODES, len(modes)), replace=False)]
        profiles = [measured(device, some) for device in devices]
        rows[f"simulated:{kind}"] = {
            "misfit": _mean([misfit_of_best_fit(profile) for profile in profiles]),
            "misfit_by_construction": _mean([misfit_by_construction(kind, seed) for seed in _SEEDS]),
            "transfer": _mean([transfer(profile, reference) for profile in profiles]),
            "noise": _mean([_noise(device, profile) for device, profile in zip(devices, profiles, strict=True)]),
        }
    modes = corpora[AGX_CORPUS].modes
    calm = modes[(modes[:, 0] >= 8) & (modes[:, 3] == modes[:, 3].min())]
    rows["simulated:agx-orin"]["repeatability"] = repeatability(measured(SimulatedDevice("agx-orin", 0), calm))
    for workload, corpus in INFERENCE_CORPORA.items():
        rows[corpus] = inference(workload, read_profile(data / corpus))
    logs = read_run_logs(data / "orin_nano_resnet18_telemetry")
    nano = SimulatedDevice("orin-nano", 0)
    rows[NANO_CORPUS]["transients"] = transients(logs)
    rows["simulated:orin-nano"]["transients"] = transients([simulated_log(nano, log) for log in logs])
    return {"sources": rows, "maxn": maxn()}


def _noise(device: SimulatedDevice, profile: Profile) -> dict[str, float]:
    """Return the median deviation of a measurement from the true value, percent."""
    minibatch_ms, training_mw = device.truth(profile.modes)
    return {
        "time": float(100 * np.median(np.abs(profile.minibatch_ms / minibatch_ms - 1))),
        "power": float(100 * np.median(np.abs(profile.power_mw / training_mw - 1))),
    }


def _mean(documents: list[Any]) -> Any:
    """Return the means of each number over documents of the same structure."""
    if isinstance(documents[0], dict):
        return {name: _mean([document[name] for document in documents]) for name in documents[0]}
    return float(np.mean(documents))


def _lines(result: dict[str, Any]) -> list[str]:
    def flat(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {flat(inner)}" for name, inner in value.items())
        return "-" if value is None else f"{value:.2f}"

    lines = []
    for source, quantities in result["sources"].items():
        lines.append(source)
        for name, value in quantities.items():
            split = isinstance(next(iter(value.values())), dict)
            parts = [f"{inner}: {flat(value[inner])}" for inner in value] if split else [flat(value)]
            lines += [f"  {name:<22} {part}" for part in parts]
    return [*lines, "MAXN", *(f"  {kind:<22} {flat(row)}" for kind, row in result["maxn"].items())]


def main(arguments: list[str] | None = None, report: Callable[[str], None] = print) -> int:
    """Print the comparison; return 0, or 2 if the data cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.board_fidelity",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="read the measured corpora from this folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    try:
        result = compare(options.data)
    except WattfleetError as error:
        report(f"error: {error}")
        return 2
    report(json.dumps(result, indent=1) if options.json else "\n".join(_lines(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
