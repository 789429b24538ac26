"""Run federated rounds of 50 simulated boards under a site's budget: time to accuracy, energy, fairness, power.

    python -m benchmarks.federated [--seeds 5] [--budgets 300,450,600,900,1500] [--overhead-s 1.5] [--jobs 2] [--json]
        [--png FILE]

Boards are simulated and time is virtual. Profiles, predictors, plans and the training of a small network on
scikit-learn's digits are real. The profiles and the result are written to `--out`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor as Processes
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.federated.boards import facts
from benchmarks.federated.experiment import FLEET, Experiment, proxied, run_seed
from benchmarks.federated.jobs import OVERHEAD_S
from benchmarks.federated.methods import METHODS
from benchmarks.federated.picture import write_picture
from benchmarks.federated.result import Result, result_of
from benchmarks.federated.tables import tables
from benchmarks.federated.tasks import TASKS
from benchmarks.federated.tuning import TUNES
from wattfleet.core.planning.policies import Progress

RESULT = "result.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, or show an earlier result; return 0."""
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.federated",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--fleet", type=_fleet, default=dict(FLEET), help="set the boards, such as agx-orin:2,orin-nano:4"
    )
    parser.add_argument("--modes", type=int, default=50, help="limit how many modes each agent measures")
    parser.add_argument(
        "--budgets",
        type=_watts,
        default=Experiment.budgets_w,
        help="set the site's budgets in watts, separated by commas",
    )
    parser.add_argument("--task", choices=sorted(TASKS), default="digits", help="set what the devices learn")
    parser.add_argument(
        "--tune", choices=list(TUNES), default="modes", help="set what is tuned in addition to the devices of a round"
    )
    parser.add_argument(
        "--methods", type=_methods, help=f"run these instead of the methods of --tune: {', '.join(METHODS)}"
    )
    parser.add_argument("--until-reached", action="store_true", help="end each run at the second accuracy")
    parser.add_argument("--count", type=int, default=10, help="set the number of devices in a round")
    parser.add_argument("--rounds", type=int, default=120, help="set the number of rounds in every run")
    parser.add_argument(
        "--overhead-s",
        type=_overhead,
        default=OVERHEAD_S,
        help="set the seconds of a round in addition to its training",
    )
    parser.add_argument(
        "--half-devices",
        type=_devices,
        default=Progress.half_devices,
        help="set with how many devices `progress` expects a round to make half of the possible progress",
    )
    parser.add_argument("--seeds", type=int, default=5, help="set the number of seeds")
    parser.add_argument("--jobs", type=int, default=2, help="set the number of processes")
    parser.add_argument(
        "--out", type=Path, default=Path("out/federated"), help="write profiles and result to this folder"
    )
    parser.add_argument("--show", type=Path, help="show this earlier result without running anything")
    parser.add_argument("--png", type=Path, help="draw the plots to this file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _run(options: argparse.Namespace) -> Result:
    experiment = Experiment(
        boards=options.out / "boards",
        fleet=options.fleet,
        modes=options.modes,
        budgets_w=options.budgets,
        methods=options.methods or TUNES[options.tune],
        count=options.count,
        rounds=options.rounds,
        overhead_s=options.overhead_s,
        half_devices=options.half_devices,
        task=options.task,
        until_reached=options.until_reached,
    )
    seeds = range(options.seeds)
    with Processes(options.jobs) as processes:
        list(processes.map(partial(facts, folder=experiment.boards), experiment.units))
        proxied(experiment)  # once, before the seeds need it
        result = result_of(experiment, list(processes.map(partial(run_seed, experiment), seeds)))
    (options.out / RESULT).write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
    return result


def _fleet(text: str) -> dict[str, int]:
    return {kind: int(count) for kind, _, count in (item.partition(":") for item in text.split(","))}


def _watts(text: str) -> tuple[float, ...]:
    return tuple(float(watts) for watts in text.split(","))


def _overhead(text: str) -> float:
    overhead_s = float(text)
    if not 0 <= overhead_s < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or more, and finite, not {text}")
    return overhead_s


def _devices(text: str) -> float:
    devices = float(text)
    if not 0 < devices < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, and finite, not {text}")
    return devices


def _methods(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(METHODS)):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
