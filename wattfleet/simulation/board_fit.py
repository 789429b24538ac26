"""Fits the simulated boards to real measurements and writes their data file.

    python -m wattfleet.simulation.board_fit --data ../shared/data
    python -m wattfleet.simulation.board_fit --data ../shared/data --check

Boards that were measured (AGX Orin, Orin Nano) are fitted. The others are derived from them by the numbers of their
cores and memory lanes, and compared with published figures. Of hosts, one time is known, and no power. Inference
workloads are fitted to the board on which they were measured, an AGX Orin. `docs/simulated-board.md` describes the
method.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.virtual import physics as parameters_file
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import BOARDS, Profile, board_named, modes_to_array, read_profile
from wattfleet.core.prediction.roofline import (
    PowerParameters,
    Prior,
    TimeParameters,
    power_mw,
    robust_fit,
    settings_of,
    step_time_ms,
)

TARGET = Path(parameters_file.__file__).with_name(parameters_file.FILE_NAME)
AGX_CORPUS, NANO_CORPUS = "agx_orin_resnet18.csv", "orin_nano_resnet18.csv"
HOSTS = "hosts.csv"
INFERENCE_CORPORA = {"mobilenetv3": "agx_orin_mobilenetv3_inference.csv", "resnet": "agx_orin_resnet_inference.csv"}
SERVED_BATCHES = (1, 4, 16, 32, 64)
MINIBATCHES_PER_EPOCH = 3125

# PowerTrain (doi:10.1016/j.future.2024.07.001), section 1: ResNet-18 on Xavier AGX at MAXN draws 36.4 W.
XAVIER_MAXN_MW = 36_400.0
# A robust fit to a simulated board absorbs part of the board's misfit in its parameters. With these factors, the misfit
# that remains is on average larger than for the AGX Orin's corpora, and as large as for the Orin Nano's 180 rows
# (`python -m benchmarks.board_fidelity`).
STRETCH_TIME, STRETCH_POWER = 1.8, 1.4

# Initial values of the fits and log standard deviations of their priors. The priors are so wide that the corpora
# decide.
_TIME_SD, _POWER_SD = 2.0, 1.0
_TIME_SCALE, _POWER_SCALE = 0.02, 0.015
_STARTS = 4
# Rows beyond the outermost levels are probably false (see `wattfleet reference audit`).
_LEVELS = np.array([0.5, 1, 2, 3, 5, 7.5, *range(10, 91, 5), 92.5, 95, 97, 98, 99, 99.5]) / 100
# A fit with another linear algebra library may end at slightly different parameters.
_CHECK_LOG_TOLERANCE = 0.02


@dataclass(frozen=True)
class BoardFit:
    """The physics of a board, and the log deviations of its corpus from it.

    Attributes:
        time: parameters of the step time.
        power: parameters of the power.
        time_misfit: `[n]` log(measured / modelled) time.
        power_misfit: `[n]` log(measured / modelled) power.
    """

    time: TimeParameters
    power: PowerParameters
    time_misfit: NDArray[np.float64]
    power_misfit: NDArray[np.float64]


def fit_board(profile: Profile) -> BoardFit:
    """Fit the physics robustly to a whole profile, of training or of inference with several batch sizes."""
    log_time, log_power = np.log(profile.minibatch_ms), np.log(profile.power_mw)
    settings = settings_of(profile.modes, profile.batch)

    def modelled_time(parameters: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(step_time_ms(TimeParameters.from_log(parameters), settings))

    start = _time_start(float(np.median(profile.minibatch_ms))).log()
    belief = Prior.independent(start, np.full(len(start), _TIME_SD))
    log_theta = robust_fit(modelled_time, log_time, belief, _TIME_SCALE, "cauchy", _STARTS)
    time = TimeParameters.from_log(log_theta)

    def modelled_power(parameters: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(power_mw(PowerParameters.from_log(parameters), time, settings))

    start = _power_start(float(np.median(profile.power_mw))).log()
    belief = Prior.independent(start, np.full(len(start), _POWER_SD))
    log_phi = robust_fit(modelled_power, log_power, belief, _POWER_SCALE, "cauchy", _STARTS)
    power = PowerParameters.from_log(log_phi)
    return BoardFit(
        time,
        power,
        log_time - np.log(step_time_ms(time, settings)),
        log_power - np.log(power_mw(power, time, settings)),
    )


def _time_start(typical_ms: float) -> TimeParameters:
    """Return initial parameters in which no resource dominates. Clocks are near 1 GHz, so 1 ms is about 1 Mcycle."""
    return TimeParameters(
        loading_mcycles=0.8 * typical_ms,
        loading_stall_mcycles=0.2 * typical_ms,
        launch_mcycles=0.1 * typical_ms,
        compute_mcycles=0.3 * typical_ms,
        serial_compute_mcycles=0.1 * typical_ms,
        traffic_mcycles=0.5 * typical_ms,
        fixed_ms=0.02 * typical_ms,
        workers=4.0,
        main_cores=1.0,
        background_ghz=0.1,
        gpu_overlap=1.0,
        launch_overlap=1.0,
        loading_overlap=6.0,
    )


def _power_start(typical_mw: float) -> PowerParameters:
    return PowerParameters(
        floor_mw=0.4 * typical_mw,
        core_clock_mw=0.002 * typical_mw,
        core_busy_mw=0.03 * typical_mw,
        gpu_clock_mw=0.1 * typical_mw,
        gpu_busy_mw=0.3 * typical_mw,
        gpu_stall_mw=0.05 * typical_mw,
        mem_clock_mw=0.02 * typical_mw,
        mem_traffic_mw=0.1 * typical_mw,
        mem_compute_mw=0.05 * typical_mw,
        core_voltage=1.0,
        core_knee_ghz=1.0,
        gpu_voltage=1.0,
        gpu_knee_ghz=0.5,
    )


# Power of the cores, the GPU and the memory, in mW.
_CORE_MW = ("core_clock_mw", "core_busy_mw")
_GPU_MW = ("gpu_clock_mw", "gpu_busy_mw", "gpu_stall_mw")
_MEM_MW = ("mem_clock_mw", "mem_traffic_mw", "mem_compute_mw")

# The work of a step, in Mcycles or ms.
_WORK = (
    "loading_mcycles", "loading_stall_mcycles", "launch_mcycles", "compute_mcycles", "serial_compute_mcycles",
    "traffic_mcycles", "fixed_ms",
)  # fmt: skip

_P = TypeVar("_P", TimeParameters, PowerParameters)


def _scaled(parameters: _P, names: tuple[str, ...], factor: float) -> _P:
    return replace(parameters, **{name: getattr(parameters, name) * factor for name in names})


def orin_nx(agx: BoardFit, nano: BoardFit, nano_profile: Profile) -> tuple[TimeParameters, PowerParameters]:
    """Derive an Orin NX 16GB: the Orin Nano's step at higher clocks and at the AGX Orin's voltages.

    All three carry the same chip. NX and Nano have 1,024 of its 2,048 CUDA cores and 128 of its 256 memory lanes
    in use, so a step costs the same cycles. The Nano's clocks end where voltages begin to rise, so its own curves
    do not cover those of the NX. Power is the Nano's floor plus half of the AGX Orin's GPU and memory power and its
    power per core. All parts except the floor are multiplied by one factor: the ratio of measured to calculated power
    on the Nano.
    """
    half = _scaled(agx.power, (*_GPU_MW, *_MEM_MW), 0.5)
    floor_mw = nano.power.floor_mw
    dynamic_mw = power_mw(half, nano.time, settings_of(nano_profile.modes, None)) - half.floor_mw
    excess = float(np.median((nano_profile.power_mw - floor_mw) / dynamic_mw))
    return nano.time, replace(_scaled(half, (*_CORE_MW, *_GPU_MW, *_MEM_MW), excess), floor_mw=floor_mw)


def xavier_agx(agx: BoardFit) -> tuple[TimeParameters, PowerParameters]:
    """Derive a Xavier AGX: the AGX Orin with 512 CUDA cores instead of 2,048, at 36.4 W.

    Its memory is as wide (256 lanes), so traffic costs the same cycles. Of its cores only the clock is known. This
    gives the published 8.47 minutes per epoch without any adjustment. Power is scaled as a whole.
    """
    time = _scaled(agx.time, ("compute_mcycles", "serial_compute_mcycles"), 2048 / 512)
    maxn = settings_of(modes_to_array([board_named("xavier-agx").space.highest]), None)
    factor = XAVIER_MAXN_MW / float(power_mw(agx.power, time, maxn)[0])
    return time, _scaled(agx.power, ("floor_mw", *_CORE_MW, *_GPU_MW, *_MEM_MW), factor)


# The power of hosts is stated, as none was recorded: limits of the card, and what such machines are known to draw, W.
RTX_3090_LIMIT_W, RTX_3090_REST_W = 350.0, 90.0
RASPBERRY_PI_5_BUSY_W, RASPBERRY_PI_5_FLOOR_W = 8.0, 2.6


def rtx_3090(agx: BoardFit, resnet18_ms: float) -> tuple[TimeParameters, PowerParameters]:
    """Derive a workstation with an RTX 3090: the AGX Orin with 10,496 CUDA cores and 384 memory lanes.

    Its step as a whole is scaled to the measured time. In its modes, the GPU's clock stands for a power limit. The
    voltage curve is such that the GPU's power is proportional to the limit.
    """
    time = _scaled(agx.time, ("compute_mcycles", "serial_compute_mcycles"), 2048 / 10_496)
    time = _scaled(time, ("traffic_mcycles",), 256 / 384)
    highest = settings_of(modes_to_array([board_named("rtx-3090").space.highest]), None)
    time = _scaled(time, _WORK, resnet18_ms / float(step_time_ms(time, highest)[0]))
    none = dict.fromkeys((*_CORE_MW, *_MEM_MW), 1e-3)
    # An idle GPU of this kind stops most of its clocks.
    agx_power = _scaled(agx.power, ("gpu_clock_mw",), 0.3)
    gpu = replace(agx_power, floor_mw=1e-3, gpu_voltage=0.5, gpu_knee_ghz=0.6, core_voltage=0.1, **none)
    factor = RTX_3090_LIMIT_W * 1e3 / float(power_mw(gpu, time, highest)[0])
    return time, replace(_scaled(gpu, _GPU_MW, factor), floor_mw=RTX_3090_REST_W * 1e3)


def raspberry_pi_5(agx: BoardFit, resnet18_ms: float) -> tuple[TimeParameters, PowerParameters]:
    """Derive a Raspberry Pi 5, which computes on its cores: work of the loader, as only this is spread over cores.

    A tenth of the step is on one core, and a fifth waits for the memory.
    """
    none = dict.fromkeys(("compute_mcycles", "serial_compute_mcycles", "traffic_mcycles"), 1e-3)
    time = replace(
        agx.time, **none, fixed_ms=1.0, workers=8.0, main_cores=0.01, background_ghz=0.05, loading_overlap=0.1,
        loading_mcycles=70.0, loading_stall_mcycles=10.0, launch_mcycles=2.4,
    )  # fmt: skip
    highest = settings_of(modes_to_array([board_named("raspberry-pi-5").space.highest]), None)
    time = _scaled(time, _WORK, resnet18_ms / float(step_time_ms(time, highest)[0]))
    nothing = dict.fromkeys((*_GPU_MW, *_MEM_MW), 1e-3)
    cores = replace(agx.power, floor_mw=1e-3, core_voltage=0.3, core_knee_ghz=1.5, **nothing)
    factor = (RASPBERRY_PI_5_BUSY_W - RASPBERRY_PI_5_FLOOR_W) * 1e3 / float(power_mw(cores, time, highest)[0])
    return time, replace(_scaled(cores, _CORE_MW, factor), floor_mw=RASPBERRY_PI_5_FLOOR_W * 1e3)


def host_times_ms(path: Path) -> dict[str, float]:
    """Return the time of a ResNet-18 step by device from the table of hosts, ms.

    Raises:
        InvalidInputError: the table cannot be read.
    """
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        return {row["device"]: float(row["minibatch_ms"]) for row in rows if row["workload"] == "resnet18"}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise InvalidInputError(f"{path}: cannot be read as times of hosts: {error}") from None


def build(data: Path) -> dict[str, Any]:
    """Return the content of the data file."""
    names = (AGX_CORPUS, NANO_CORPUS, *INFERENCE_CORPORA.values())
    profiles = {name: read_profile(data / name) for name in names}
    agx, nano = fit_board(profiles[AGX_CORPUS]), fit_board(profiles[NANO_CORPUS])
    hosts_ms = host_times_ms(data / HOSTS)
    derived = {
        "orin-nx": orin_nx(agx, nano, profiles[NANO_CORPUS]),
        "xavier-agx": xavier_agx(agx),
        "rtx-3090": rtx_3090(agx, hosts_ms["rtx-3090"]),
        "raspberry-pi-5": raspberry_pi_5(agx, hosts_ms["raspberry-pi-5"]),
    }
    parameters = {"agx-orin": (agx.time, agx.power), "orin-nano": (nano.time, nano.power), **derived}
    return {
        "made_by": "python -m wattfleet.simulation.board_fit",
        "workload": "ResNet-18 on ImageNet's validation images, minibatch 16, 4 loader workers",
        "source": "measurements behind PowerTrain, doi:10.1016/j.future.2024.07.001",
        "corpora": {
            name: {"rows": rows, "sha256": hashlib.sha256((data / name).read_bytes()).hexdigest()}
            for name, rows in (
                {name: len(profile) for name, profile in profiles.items()} | {HOSTS: len(hosts_ms)}
            ).items()
        },
        "deviation": {
            "source": f"what the fit leaves of {AGX_CORPUS}, stretched by {STRETCH_TIME} and {STRETCH_POWER}",
            "levels": _rounded(_LEVELS),
            "time": _rounded(_quantiles(agx.time_misfit, STRETCH_TIME)),
            "power": _rounded(_quantiles(agx.power_misfit, STRETCH_POWER)),
        },
        "boards": {
            kind: {
                "source": _SOURCES[kind],
                "time": _significant(asdict(time)),
                "power": _significant(asdict(power)),
            }
            for kind, (time, power) in parameters.items()
        },
        "inference": {name: _inference(profiles[corpus], corpus) for name, corpus in INFERENCE_CORPORA.items()},
    }


def _inference(profile: Profile, corpus: str) -> dict[str, Any]:
    """Return the data file's part for an inference workload.

    Its misfit is not stretched, since it is already three times as large as that of training.
    """
    fit = fit_board(profile)
    return {
        "source": f"fitted to {corpus}",
        "time": _significant(asdict(fit.time)),
        "power": _significant(asdict(fit.power)),
        "deviation": {
            "levels": _rounded(_LEVELS),
            "time": _rounded(_quantiles(fit.time_misfit, 1.0)),
            "power": _rounded(_quantiles(fit.power_misfit, 1.0)),
        },
    }


_SOURCES: Mapping[str, str] = {
    "agx-orin": f"fitted to {AGX_CORPUS}",
    "orin-nano": f"fitted to {NANO_CORPUS}",
    "orin-nx": (
        "time: orin-nano, which has as many CUDA cores (1,024) and memory lanes (128); power: orin-nano's floor, half"
        " of agx-orin's GPU and memory and its power per core, scaled to orin-nano's measurements"
    ),
    "xavier-agx": (
        "agx-orin with 2048/512 of its GPU cycles (PowerTrain, table 2: CUDA cores) and its power scaled to 36.4 W at"
        " MAXN (PowerTrain, section 1)"
    ),
    "rtx-3090": (
        "agx-orin with 2048/10496 of its GPU cycles and 256/384 of its traffic, scaled to the one time in hosts.csv;"
        " power stated, not measured: the card's limits, and 90 W for the rest of the machine"
    ),
    "raspberry-pi-5": (
        "work on cores and memory, scaled to the one time in hosts.csv; power stated, not measured: 8 W while busy at"
        " its highest clock, and a constant part of 2.6 W"
    ),
}


def _quantiles(log_misfit: NDArray[np.float64], stretch: float) -> NDArray[np.float64]:
    """Return the quantiles at `_LEVELS` of a misfit, centred at zero and stretched."""
    return stretch * (np.quantile(log_misfit, _LEVELS) - np.median(log_misfit))


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def _significant(parameters: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in parameters.items()}


def differences(kept: Mapping[str, Any], made: Mapping[str, Any]) -> list[str]:
    """List the differences between a data file and the result of fitting the corpora; empty if there are none."""
    found = [f"{name} differs" for name in ("workload", "source", "corpora") if kept.get(name) != made[name]]
    for kind in BOARDS:
        settings = settings_of(board_named(kind).space.array(), None)
        found += _parameter_differences(kind, kept.get("boards", {}).get(kind, {}), made["boards"][kind], settings)
    found += _deviation_differences("deviation", kept, made)
    modes = board_named("agx-orin").space.array()
    settings = settings_of(modes, np.resize(SERVED_BATCHES, len(modes)))
    for workload, parameters in made["inference"].items():
        name, before = f"inference of {workload}", kept.get("inference", {}).get(workload, {})
        found += _parameter_differences(name, before, parameters, settings)
        found += _deviation_differences(f"{name}: deviation", before, parameters)
    return found


def _parameter_differences(
    name: str, kept: Mapping[str, Any], made: Mapping[str, Any], settings: NDArray[np.float64]
) -> list[str]:
    try:
        old, new = (_modelled(parameters, settings) for parameters in (kept, made))
    except (KeyError, TypeError):
        return [f"{name}: the parameters do not match those of the current physics"]
    found = []
    for quantity, before, after in zip(("time", "power"), old, new, strict=True):
        off = float(np.abs(np.log(before / after)).max())
        if not off <= _CHECK_LOG_TOLERANCE:
            found.append(f"{name}: {quantity} is off by up to {off:.1%}")
    return found


def _deviation_differences(name: str, kept: Mapping[str, Any], made: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {column} differs"
        for column in ("levels", "time", "power")
        if not np.allclose(
            kept.get("deviation", {}).get(column, []), made["deviation"][column], atol=_CHECK_LOG_TOLERANCE
        )
    ]


def _modelled(parameters: Mapping[str, Any], settings: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    time, power = TimeParameters(**parameters["time"]), PowerParameters(**parameters["power"])
    return step_time_ms(time, settings), power_mw(power, time, settings)


def main(arguments: list[str] | None = None, report: Callable[[str], None] = print) -> int:
    """Write the data file, or check it; return 0 if it is up to date, 1 if it differs, 2 if the data cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m wattfleet.simulation.board_fit", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the measured corpora")
    parser.add_argument("--check", action="store_true", help="compare with the data file instead of writing it")
    options = parser.parse_args(arguments)
    try:
        made = build(options.data)
    except WattfleetError as error:
        report(f"error: {error}")
        return 2
    if not options.check:
        TARGET.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        report(f"wrote {TARGET}")
        return 0
    found = differences(json.loads(TARGET.read_text(encoding="utf-8")), made)
    for line in found:
        report(line)
    report(
        "the data file differs from a new fit to the corpora: run without --check to rewrite it"
        if found
        else "the data file is up to date"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
