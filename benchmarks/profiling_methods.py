"""Measure the loss of each profiling method: slower training and exceeded budgets, over all measured training corpora.

    python -m benchmarks.profiling_methods [--data ../shared/data] [--runs 20] [--method transfer] [--json]

The figures of `wattfleet.core.choosing.sampling` are the means over the files as printed here. Each file is
evaluated as `wattfleet evaluate choice` does, over the rows that pass its audit. `transfer` starts from the shipped
reference without the file's network. `scratch` chooses what to measure in the same way, but fits without a reference.
`binary-search` searches separately for each budget.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from wattfleet.core.modes import Profile, board_with_modes, read_profile
from wattfleet.core.prediction import MIN_MODES, Predictor, RooflinePredictor
from wattfleet.evaluation.judging.choices import ChoiceCases, evaluate_choice
from wattfleet.evaluation.judging.sources import audited, find_reference
from wattfleet.evaluation.methods import Fit, MeasureWhatMatters, Method, ModeSearch

_SHIPPED = "agx_orin_resnet18"
_TRANSFER_MODES = (0, 5, 10, 20, 50)
_SCRATCH_MODES = (10, 20, 50)


@dataclass(frozen=True)
class Target:
    """A corpus, and the first and last budget in W."""

    corpus: str
    budgets_w: tuple[int, int]


_TARGETS = (
    Target("orin_nano_resnet18", (8, 20)),
    Target("agx_orin_mobilenetv3", (17, 50)),
    Target("agx_orin_resnet18", (17, 50)),
    Target("agx_orin_yolov8n", (17, 50)),
)


@dataclass(frozen=True)
class Loss:
    """The loss of a method on one file.

    Attributes:
        method: the profiling method.
        limit: maximum number of modes to measure.
        corpus: the file.
        modes: mean number of measured modes.
        penalty_pct: mean time penalty, %.
        over_1w_pct: share of cases over the budget by more than 1 W, %.
    """

    method: str
    limit: int
    corpus: str
    modes: float
    penalty_pct: float
    over_1w_pct: float


def losses(data: Path, runs: int, methods: list[str]) -> Iterator[Loss]:
    """Evaluate the methods on every file."""
    for target in _TARGETS:
        profile = read_profile(data / f"{target.corpus}.csv")
        known = find_reference(_SHIPPED, profile).predictor("roofline", board_with_modes(profile.modes))
        assert isinstance(known, RooflinePredictor)
        trusted = audited(profile, known).trusted
        budgets_w = [float(watts) for watts in range(target.budgets_w[0], target.budgets_w[1] + 1)]

        def evaluated(method: Method[float], limit: int, budgets_w: list[float], runs: int) -> ChoiceCases:
            return evaluate_choice(profile, method, limit, budgets_w, runs, 0, trusted=trusted)  # noqa: B023  # called only within its own iteration

        for method in methods:
            if method == "binary-search":
                met = [watts for watts in budgets_w if watts * 1e3 >= profile.power_mw.min()]
                alone = [evaluated(ModeSearch(), len(profile), [watts], 1) for watts in met]
                yield _loss(method, len(profile), target, alone)
                continue
            scratch = method == "scratch"
            choosing = MeasureWhatMatters(_fit(None if scratch else known), spread=MIN_MODES if scratch else 3)
            for limit in _SCRATCH_MODES if scratch else _TRANSFER_MODES:
                yield _loss(method, limit, target, [evaluated(choosing, limit, budgets_w, runs)])


def _fit(known: RooflinePredictor | None) -> Fit:
    """Fit each profile once: with the same seed, a low limit measures the first modes of a higher one."""
    fitted: dict[str, Predictor] = {}

    def fit(profile: Profile) -> Predictor:
        rows = profile.sha256()
        if rows not in fitted:
            fitted[rows] = RooflinePredictor.fit(profile, known)
        return fitted[rows]

    return fit


def _loss(method: str, limit: int, target: Target, all_cases: list[ChoiceCases]) -> Loss:
    passing = [cases.penalty_passing_pct for cases in all_cases if cases.penalty_passing_pct is not None]
    penalty_pct = np.concatenate([values.ravel() for values in passing])
    judged = np.isfinite(penalty_pct)
    excess_w = np.concatenate([cases.excess_w.ravel() for cases in all_cases])
    modes = np.concatenate([cases.measured for cases in all_cases])

    def figures(value: np.floating) -> float:
        return round(float(value), 2)

    return Loss(
        method,
        limit,
        target.corpus,
        figures(modes.mean()),
        figures(penalty_pct[judged].mean()),
        figures(100 * (excess_w[judged] > 1).mean()),
    )


def main() -> None:
    """Print the losses, one line for each method and file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profiling_methods",
        description="Evaluate what each profiling method loses.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="read the corpora from this folder")
    parser.add_argument("--runs", type=int, default=20, help="set the number of runs of methods with random choices")
    names = ("transfer", "scratch", "binary-search")
    parser.add_argument("--method", choices=names, action="append", help="evaluate only this method; repeatable")
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line")
    arguments = parser.parse_args()
    for loss in losses(arguments.data, arguments.runs, arguments.method or list(names)):
        if arguments.json:
            print(json.dumps(asdict(loss)), flush=True)
        else:
            print(
                f"{loss.corpus:22} {loss.method:14} {loss.modes:6.1f} modes: {loss.penalty_pct:6.2f} % slower,"
                f" {loss.over_1w_pct:5.1f} % of cases over by more than 1 W",
                flush=True,
            )


if __name__ == "__main__":
    with threadpool_limits(limits=1):
        main()
