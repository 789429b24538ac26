"""Measure how well the shipped reference, which is of a Jetson, starts on a workstation and on a Raspberry Pi.

    python -m benchmarks.hosts [--draws 10] [--data ../shared/data] [--json]

Real: the one time of ResNet-18 that is known of a machine, and the prediction for it before anything is measured there;
no power was recorded. Simulated: the error over all modes of simulated machines after n measured modes, the highest
first, then the lowest, then any. The table shows medians over boards, and the shares of the true values that the 90 %
intervals contain.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from edge_agent.devices.virtual.simulated import SimulatedDevice
from reference_models import load
from wattfleet.core.modes import BOARDS, Profile, WorkloadFacts, modes_to_array
from wattfleet.core.prediction import RooflinePredictor, restore_predictor
from wattfleet.simulation.board_fit import HOSTS, host_times_ms

MODES = (0, 1, 2, 3, 5, 8)
KINDS = ("rtx-3090", "raspberry-pi-5")
_REFERENCE = "agx_orin_resnet18"
_FACTS = WorkloadFacts(batch=16, loader_workers=4)
_TIME_SD, _POWER_SD = 0.005, 0.01
_90_PERCENT = 1.645


@dataclass(frozen=True)
class Start:
    """The prediction of a machine's one known time, before anything is measured there; all in ms."""

    measured_ms: float
    predicted_ms: float
    least_ms: float
    most_ms: float


@dataclass(frozen=True)
class Errors:
    """Median errors over all modes of a machine, %, and the shares of true values in the 90 % intervals, %."""

    time_pct: float
    power_pct: float
    time_inside_pct: float
    power_inside_pct: float


def start_of(kind: str, measured_ms: float) -> Start:
    """Predict the step in the highest mode of a kind of machine without any measurement."""
    predicted = _transferred(kind, Profile.of(())).predict(modes_to_array([BOARDS[kind].space.highest]))
    predicted_ms = float(predicted.minibatch_ms[0])
    factor = float(np.exp(_90_PERCENT * predicted.time_log_sd[0]))
    return Start(measured_ms, predicted_ms, predicted_ms / factor, predicted_ms * factor)


def errors_of(kind: str, count: int, seed: int) -> Errors:
    """Return the errors on a simulated machine after this number of measured modes."""
    device = SimulatedDevice(kind, seed)
    rng = np.random.default_rng(seed)
    inner = rng.permutation(np.arange(1, len(device.modes) - 1))
    rows = np.concatenate([[len(device.modes) - 1, 0], inner])[:count]
    minibatch_ms, power_mw = device.truth(device.modes)
    measured = Profile(
        device.modes[rows],
        minibatch_ms[rows] * np.exp(rng.normal(0, _TIME_SD, count)),
        power_mw[rows] * np.exp(rng.normal(0, _POWER_SD, count)),
    )
    found = _transferred(kind, measured).predict(device.modes)
    off_time, off_power = np.log(found.minibatch_ms / minibatch_ms), np.log(found.power_mw / power_mw)
    return Errors(
        100 * float(np.median(np.abs(np.expm1(off_time)))),
        100 * float(np.median(np.abs(np.expm1(off_power)))),
        100 * float(np.mean(np.abs(off_time) <= _90_PERCENT * found.time_log_sd)),
        100 * float(np.mean(np.abs(off_power) <= _90_PERCENT * found.power_log_sd)),
    )


def _transferred(kind: str, measured: Profile) -> RooflinePredictor:
    reference = restore_predictor(load(_REFERENCE), BOARDS[kind])
    assert isinstance(reference, RooflinePredictor)
    return RooflinePredictor.fit(measured, reference, _FACTS)


def _print(starts: Mapping[str, Start], errors: Mapping[str, Mapping[int, list[Errors]]]) -> None:
    print("| machine | measured | predicted, nothing measured | 90 % interval |\n|---|---|---|---|")
    for kind, start in starts.items():
        interval = f"{start.least_ms:,.0f} to {start.most_ms:,.0f} ms"
        print(f"| `{kind}` | {start.measured_ms:,.1f} ms | {start.predicted_ms:,.1f} ms | {interval} |")
    print(f"\n| machine | {' | '.join(f'n = {count}' for count in MODES)} |\n|{'---|' * (len(MODES) + 1)}")
    for kind, by_count in errors.items():
        cells = []
        for each in by_count.values():
            values = np.median([list(asdict(one).values()) for one in each], axis=0)
            cells.append(f"{values[0]:.0f} / {values[1]:.0f} (inside {values[2]:.0f} / {values[3]:.0f})")
        print(f"| `{kind}` | {' | '.join(cells)} |")


def main() -> None:
    """Print the starts and the errors."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hosts",
        description="Measure how well the shipped reference starts on machines that are no Jetsons.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--draws", type=int, default=10, help="simulated machines of each kind")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help=f"folder of {HOSTS}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    with threadpool_limits(1):
        times_ms = host_times_ms(args.data / HOSTS) if args.data.is_dir() else {}
        starts = {kind: start_of(kind, times_ms[kind]) for kind in KINDS if kind in times_ms}
        errors = {
            kind: {count: [errors_of(kind, count, seed) for seed in range(args.draws)] for count in MODES}
            for kind in KINDS
        }
    if args.json:
        documents = {
            kind: {n: [asdict(one) for one in each] for n, each in found.items()} for kind, found in errors.items()
        }
        print(
            json.dumps({"starts": {kind: asdict(one) for kind, one in starts.items()}, "errors": documents}, indent=1)
        )
    else:
        _print(starts, errors)


if __name__ == "__main__":
    main()
