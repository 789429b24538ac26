"""Measure how boards of one kind help each other: errors with and without the measurements of other simulated units.

    python -m benchmarks.units_of_a_kind [--draws 3] [--json]

Each draw has five units of a kind, which deviate from each other as simulated boards do, and trains three workloads
that the shipped reference does not know. One unit has measured a few modes. Its predictor is transferred from the
reference alone, and from the reference that also knows what the other units have measured. In the rows `other work`,
four units train something else under the same name. Errors are means over 300 random modes; the table shows their
medians over draws, kinds and workloads. No measured corpus has several units of a kind, so these figures are simulated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from edge_agent.devices.virtual.simulated import SimulatedDevice
from reference_models import load
from reference_models.training import percentage_errors
from wattfleet.core.modes import BOARDS, ModeArray, Profile, Workload, WorkloadFacts
from wattfleet.core.prediction import RooflinePredictor, restore_predictor

KINDS = ("agx-orin", "orin-nano")
MODES = (0, 3, 5, 10)
_REFERENCE = "agx_orin_resnet18"
_BATCHES = {"tagger": 32, "detector": 16, "classifier": 64}
_UNITS = 4
_UNIT_MODES = 16
_TESTED = 300
# Noise of repeated measurements: log standard deviations of the time and of the power.
_TIME_SD, _POWER_SD = 0.005, 0.01
# Factors of time and power of a unit that trains something else.
_OTHER_WORK = 4.0, 1.3


@dataclass(frozen=True)
class Outcome:
    """One transfer.

    Attributes:
        time_pct: mean absolute error of the time, %.
        power_pct: the same for the power.
        time_inside_pct: share of the true times that the 90 % interval contains, %.
        power_inside_pct: the same for the power.
        cpu_s: CPU time of the fit.
    """

    time_pct: float
    power_pct: float
    time_inside_pct: float
    power_inside_pct: float
    cpu_s: float


def outcomes(kind: str, name: str, seed: int) -> Mapping[str, Mapping[int, Outcome]]:
    """Return the outcomes of one unit, by what is known about other units and by its own number of measured modes."""
    workload = Workload(name, WorkloadFacts(batch=_BATCHES[name], loader_workers=2))
    rng = np.random.default_rng(seed)
    unit, *others = (SimulatedDevice(kind, (_UNITS + 1) * seed + number) for number in range(_UNITS + 1))
    measured = [_measured(each, workload, _drawn(each, _UNIT_MODES, rng), rng) for each in others]
    slower, hungrier = _OTHER_WORK
    other_work = [
        Profile(each.modes, slower * each.minibatch_ms, hungrier * each.power_mw, each.batch) for each in measured
    ]
    known = {
        "alone": [],
        "one other": measured[:1],
        "four others, 3 modes each": [each.rows(np.arange(3)) for each in measured],
        "four others": measured,
        "four others, other work": other_work,
    }
    reference = restore_predictor(load(_REFERENCE), BOARDS[kind])
    assert isinstance(reference, RooflinePredictor), "the shipped reference is a roofline predictor"
    own = _measured(unit, workload, _drawn(unit, max(MODES), rng), rng)
    tested = _drawn(unit, _TESTED, rng)
    true_ms, true_mw = unit.truth(tested, workload)
    truth = Profile(tested, true_ms, true_mw, np.full(_TESTED, workload.facts.batch))
    return {
        label: {count: _outcome(own.rows(np.arange(count)), reference, units, workload, truth) for count in MODES}
        for label, units in known.items()
    }


def _drawn(device: SimulatedDevice, count: int, rng: np.random.Generator) -> ModeArray:
    return device.modes[rng.choice(len(device.modes), count, replace=False)]


def _measured(device: SimulatedDevice, workload: Workload, modes: ModeArray, rng: np.random.Generator) -> Profile:
    minibatch_ms, power_mw = device.truth(modes, workload)
    return Profile(
        modes,
        minibatch_ms * np.exp(rng.normal(0, _TIME_SD, len(modes))),
        power_mw * np.exp(rng.normal(0, _POWER_SD, len(modes))),
        np.full(len(modes), workload.facts.batch),
    )


def _outcome(
    own: Profile, reference: RooflinePredictor, units: Sequence[Profile], workload: Workload, truth: Profile
) -> Outcome:
    began_s = time.process_time()
    fitted = RooflinePredictor.fit(own, reference.with_units(units), workload.facts)
    cpu_s = time.process_time() - began_s
    found = fitted.predict(truth.modes, truth.batch)
    time_pct, power_pct = percentage_errors(found, truth)
    time_off = np.abs(np.log(found.minibatch_ms / truth.minibatch_ms)) / found.time_log_sd
    power_off = np.abs(np.log(found.power_mw / truth.power_mw)) / found.power_log_sd
    time_inside, power_inside = (100 * float((off <= 1.645).mean()) for off in (time_off, power_off))
    return Outcome(float(time_pct.mean()), float(power_pct.mean()), time_inside, power_inside, cpu_s)


def _print(found: Mapping[str, Mapping[int, Sequence[Outcome]]]) -> None:
    """Print a Markdown table: time / power MAPE in %, median and worst tenth, and the share within the intervals."""
    print("| known of other units | " + " | ".join(f"n = {count}" for count in MODES) + " | CPU s of a fit |")
    print("|---" * (len(MODES) + 2) + "|")
    for label, by_count in found.items():
        cells = []
        for each in by_count.values():
            rows = np.array([[one.time_pct, one.power_pct, one.time_inside_pct, one.power_inside_pct] for one in each])
            (time_pct, power_pct, *inside), worst = np.median(rows, axis=0), np.quantile(rows[:, :2], 0.9, axis=0)
            cells.append(
                f"{time_pct:.1f} / {power_pct:.1f} (worst tenth {worst[0]:.1f} / {worst[1]:.1f};"
                f" inside {inside[0]:.0f} / {inside[1]:.0f})"
            )
        cpu_s = np.median([one.cpu_s for one in by_count[max(MODES)]])
        print(f"| {label} | {' | '.join(cells)} | {cpu_s:.2f} |")


def main() -> None:
    """Print the errors."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.units_of_a_kind",
        description="Compare transfers with and without what other units of the board have measured.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--draws", type=int, default=3, help="set how many fleets of each kind and workload are drawn")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if arguments.draws < 1:
        parser.error("--draws must be 1 or more")
    found: dict[str, dict[int, list[Outcome]]] = {}
    for kind in KINDS:
        for name in _BATCHES:
            for seed in range(arguments.draws):
                for label, by_count in outcomes(kind, name, seed).items():
                    for count, each in by_count.items():
                        found.setdefault(label, {}).setdefault(count, []).append(each)
    if arguments.json:
        print(
            json.dumps(
                {label: {n: [asdict(one) for one in each] for n, each in by.items()} for label, by in found.items()}
            )
        )
    else:
        _print(found)


if __name__ == "__main__":
    with threadpool_limits(limits=1):
        main()
