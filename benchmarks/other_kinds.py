"""Measure how boards of different kinds help each other: errors with and without rows of the same network elsewhere.

    python -m benchmarks.other_kinds [--draws 10] [--data ../shared/data] [--json]

A board has measured n modes of a network. Its predictor is transferred from the shipped reference alone, and from the
reference that also knows 16 modes of the same network on another kind of board. Real: ResNet-18 on the Orin Nano and on
the AGX Orin, each helped by the other, with every corpus of ResNet-18 left out of the prior. Simulated: three networks
on four kinds of board, each helped by one other kind. Errors are the mean over all other modes; the table shows medians
over draws, and the share of the true values that the 90 % intervals contain.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from edge_agent.devices.virtual.simulated import SimulatedDevice
from reference_models import load
from reference_models.training import percentage_errors, without_target
from wattfleet.core.modes import BOARDS, Hardware, Profile, Workload, WorkloadFacts, read_profile
from wattfleet.core.prediction import RooflinePredictor, restore_predictor

MODES = (0, 2, 5)
_REFERENCE = "agx_orin_resnet18"
_KINDS = ("agx-orin", "orin-nano", "orin-nx", "xavier-agx")
_NETWORKS = {"tagger": 32, "detector": 16, "classifier": 64}
_SHARED = 16
_TESTED = 300
_TIME_SD, _POWER_SD = 0.005, 0.01


@dataclass(frozen=True)
class Outcome:
    """Errors of one transfer, %, and the shares of true values within the 90 % intervals, %."""

    time_pct: float
    power_pct: float
    time_inside_pct: float
    power_inside_pct: float


@dataclass(frozen=True)
class Case:
    """A board that is helped by another one.

    Attributes:
        label: for the table.
        reference: adapted to the board.
        facts: known facts of the network.
        own: rows that the board measures, in order.
        elsewhere: rows of the network on another kind of board.
        board: that board.
        truth: rows to predict.
    """

    label: str
    reference: RooflinePredictor
    facts: WorkloadFacts
    own: Profile
    elsewhere: Profile
    board: Hardware
    truth: Profile

    def outcomes(self) -> Iterator[tuple[str, int, Outcome]]:
        """The outcomes with and without the other board, by the number of own rows."""
        helped = self.reference.with_elsewhere([(self.board, self.elsewhere)])
        for how, reference in (("alone", self.reference), ("with the other kind", helped)):
            for count in MODES:
                fitted = RooflinePredictor.fit(self.own.rows(np.arange(count)), reference, self.facts)
                yield how, count, _outcome(fitted, self.truth)


def _outcome(fitted: RooflinePredictor, truth: Profile) -> Outcome:
    found = fitted.predict(truth.modes, truth.batch)
    time_pct, power_pct = percentage_errors(found, truth)
    time_off = np.abs(np.log(found.minibatch_ms / truth.minibatch_ms)) / found.time_log_sd
    power_off = np.abs(np.log(found.power_mw / truth.power_mw)) / found.power_log_sd
    inside = (100 * float((off <= 1.645).mean()) for off in (time_off, power_off))
    return Outcome(float(time_pct.mean()), float(power_pct.mean()), *inside)


def measured_cases(data: Path, seed: int) -> Iterator[Case]:
    """Both boards of ResNet-18, each helped by the other."""
    rng = np.random.default_rng(seed)
    artefact = load(_REFERENCE)
    files = {"agx-orin": "agx_orin_resnet18.csv", "orin-nano": "orin_nano_resnet18.csv"}
    profiles = {kind: read_profile(data / name) for kind, name in files.items()}
    for kind, other in (("orin-nano", "agx-orin"), ("agx-orin", "orin-nano")):
        target, elsewhere = profiles[kind], profiles[other]
        reference = restore_predictor(artefact)
        assert isinstance(reference, RooflinePredictor), "the shipped reference is a roofline predictor"
        left = without_target(reference, artefact.details.population, target)
        if kind != "agx-orin":
            left = left.adapted(BOARDS["agx-orin"].hardware, BOARDS[kind].hardware)
        order = rng.permutation(len(target))
        yield Case(
            f"ResNet-18 on the {kind}, measured",
            left,
            WorkloadFacts(batch=16),
            target.rows(order[: max(MODES)]),
            elsewhere.rows(rng.choice(len(elsewhere), _SHARED, replace=False)),
            BOARDS[other].hardware,
            target.rows(order[max(MODES) :]),
        )


def simulated_cases(seed: int) -> Iterator[Case]:
    """Each simulated kind of board, helped by the next kind."""
    rng = np.random.default_rng(seed)
    for name, batch in _NETWORKS.items():
        workload = Workload(name, WorkloadFacts(batch=batch, loader_workers=2))
        for kind, other in zip(_KINDS, (*_KINDS[1:], _KINDS[0]), strict=True):
            device, helper = SimulatedDevice(kind, 2 * seed), SimulatedDevice(other, 2 * seed + 1)
            reference = restore_predictor(load(_REFERENCE), BOARDS[kind])
            assert isinstance(reference, RooflinePredictor), "the shipped reference is a roofline predictor"
            rows = _measured(device, workload, max(MODES) + _TESTED, rng)
            yield Case(
                f"simulated {kind}",
                reference,
                workload.facts,
                rows.rows(np.arange(max(MODES))),
                _measured(helper, workload, _SHARED, rng),
                BOARDS[other].hardware,
                rows.rows(np.arange(max(MODES), len(rows))),
            )


def _measured(device: SimulatedDevice, workload: Workload, count: int, rng: np.random.Generator) -> Profile:
    modes = device.modes[rng.choice(len(device.modes), count, replace=False)]
    minibatch_ms, power_mw = device.truth(modes, workload)
    return Profile(
        modes,
        minibatch_ms * np.exp(rng.normal(0, _TIME_SD, count)),
        power_mw * np.exp(rng.normal(0, _POWER_SD, count)),
        np.full(count, workload.facts.batch),
    )


def _print(found: Mapping[tuple[str, str], Mapping[int, list[Outcome]]]) -> None:
    print("| board | known | " + " | ".join(f"n = {count}" for count in MODES) + " |")
    print("|---" * (len(MODES) + 2) + "|")
    for (label, how), by_count in found.items():
        cells = []
        for each in by_count.values():
            values = np.median([list(asdict(one).values()) for one in each], axis=0)
            cells.append(f"{values[0]:.1f} / {values[1]:.1f} (inside {values[2]:.0f} / {values[3]:.0f})")
        print(f"| {label} | {how} | {' | '.join(cells)} |")


def main() -> None:
    """Print the errors."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.other_kinds",
        description="Compare transfers with and without rows of the same network on another kind of board.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--draws", type=int, default=10, help="random draws of each case")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the measured corpora")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    found: dict[tuple[str, str], dict[int, list[Outcome]]] = {}
    with threadpool_limits(1):
        for seed in range(args.draws):
            cases = [*(measured_cases(args.data, seed) if args.data.is_dir() else ()), *simulated_cases(seed)]
            for case in cases:
                for how, count, outcome in case.outcomes():
                    found.setdefault((case.label, how), {}).setdefault(count, []).append(outcome)
    if args.json:
        rows = [
            {"board": label, "known": how, "modes": count, "outcomes": [asdict(one) for one in each]}
            for (label, how), by_count in found.items()
            for count, each in by_count.items()
        ]
        print(json.dumps(rows, indent=1))
    else:
        _print(found)


if __name__ == "__main__":
    main()
