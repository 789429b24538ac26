"""Federated rounds of 50 simulated boards under a site's watts: time to accuracy, energy, fairness, watts kept.

    python -m benchmarks.federated [--seeds 5] [--budgets 300,450,600,900,1500] [--jobs 2] [--json] [--png FILE]

Boards are simulated and time is virtual; profiles, predictors, plans and the training of a small network on
scikit-learn's digits are real. What profiling finds is kept in `--out`, where the result is written, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor as Processes
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.federated.boards import facts
from benchmarks.federated.experiment import FLEET, Experiment, run_seed
from benchmarks.federated.methods import METHODS
from benchmarks.federated.picture import write_picture
from benchmarks.federated.result import Result, result_of
from benchmarks.federated.tables import tables

RESULT = "result.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, or show what an earlier run found; 0."""
    options = _parser().parse_args(arguments)
    result = _run(options) if options.show is None else json.loads(options.show.read_text(encoding="utf-8"))
    if options.png is not None:
        write_picture(result, options.png)
    if options.json:
        print(json.dumps(result, indent=1, allow_nan=False))
    else:
        console = Console()
        for table in tables(result):
            console.print(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.federated", description=__doc__.split("\n")[0])
    parser.add_argument("--fleet", type=_fleet, default=dict(FLEET), help="boards, such as agx-orin:2,orin-nano:4")
    parser.add_argument("--modes", type=int, default=50, help="modes that each agent measures at most")
    parser.add_argument("--budgets", type=_watts, default=Experiment.budgets_w, help="watts of the site, with commas")
    parser.add_argument("--methods", type=_methods, default=tuple(METHODS), help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--count", type=int, default=10, help="devices wanted in a round")
    parser.add_argument("--rounds", type=int, default=120, help="rounds of every run")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=Path("out/federated"), help="folder of profiles and result")
    parser.add_argument("--show", type=Path, help="a result that was written before; nothing is run")
    parser.add_argument("--png", type=Path, help="draw the plots into this file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _run(options: argparse.Namespace) -> Result:
    experiment = Experiment(
        boards=options.out / "boards",
        fleet=options.fleet,
        modes=options.modes,
        budgets_w=options.budgets,
        methods=options.methods,
        count=options.count,
        rounds=options.rounds,
    )
    seeds = range(options.seeds)
    with Processes(options.jobs) as processes:
        list(processes.map(partial(facts, folder=experiment.boards), experiment.units))
        result = result_of(experiment, list(processes.map(partial(run_seed, experiment), seeds)))
    (options.out / RESULT).write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
    return result


def _fleet(text: str) -> dict[str, int]:
    return {kind: int(count) for kind, _, count in (item.partition(":") for item in text.split(","))}


def _watts(text: str) -> tuple[float, ...]:
    return tuple(float(watts) for watts in text.split(","))


def _methods(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(METHODS)):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
