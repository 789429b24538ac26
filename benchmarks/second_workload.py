"""Measure how a board's first workload helps its second: errors with and without the first, on measured corpora.

    python -m benchmarks.second_workload [--data ../shared/data] [--draws 20] [--processes 2] [--json]

The first workload is transferred to 50 random modes. The second is then transferred to a few modes, once from the
reference alone and once from the reference that also knows the first workload. Errors are taken over all modes that
were not drawn, and are medians over the draws. The population never contains the corpora of the two networks on this
board.

`new board`: the population has only the corpus of another board, so nothing is known about this board. That
corpus is of ResNet-18. As the second workload, ResNet-18 is therefore known from another board.
`known board`: the population has all corpora except those of the two networks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from reference_models import load
from reference_models.training import PopulationCorpus, percentage_errors, read_population
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import board_named
from wattfleet.core.prediction import (
    Member,
    Population,
    RooflinePredictor,
    measured_member,
    restore_predictor,
)

BOARD = "agx-orin"
_NETWORKS = {"agx_orin_mobilenetv3": "MobileNetV3", "agx_orin_resnet18": "ResNet-18", "agx_orin_yolov8n": "YOLOv8n"}
PAIRS = (("agx_orin_mobilenetv3", "agx_orin_yolov8n"), ("agx_orin_resnet18", "agx_orin_mobilenetv3"))
MODES = (2, 5, 10, 25, 50)
_FIRST_MODES = 50
_LISTED = Path(__file__).parent.parent / "reference_models" / "agx_orin_resnet18" / "population.toml"
# The first workload is drawn with other seeds than the second.
_FIRST_SEED = 1000


@dataclass(frozen=True)
class Case:
    """A first and a second workload of one board.

    Attributes:
        board: whether the population knows the board: `new board` or `known board`.
        first: name of the first workload's corpus.
        second: name of the second workload's corpus.
    """

    board: str
    first: str
    second: str


@dataclass(frozen=True)
class Outcome:
    """Median errors of the second workload over the draws, %, for each number of modes in `MODES`.

    Attributes:
        case: the workloads.
        time_without: error of the time without the first workload.
        time_with: error of the time with it.
        power_without: error of the power without the first workload.
        power_with: error of the power with it.
    """

    case: Case
    time_without: Sequence[float]
    time_with: Sequence[float]
    power_without: Sequence[float]
    power_with: Sequence[float]


def cases() -> list[Case]:
    """Return both orders of every pair, on a new board and on a known one."""
    orders = [order for pair in PAIRS for order in (pair, pair[::-1])]
    return [Case(board, first, second) for board in ("new board", "known board") for first, second in orders]


def reference(case: Case, corpora: Sequence[PopulationCorpus], members: Sequence[Member]) -> RooflinePredictor:
    """Return the reference before the first workload is measured."""
    of = {_name(corpus): corpus for corpus in corpora}
    networks = {of[case.first].network, of[case.second].network}
    if case.board == "new board":
        kept = [k for k, corpus in enumerate(corpora) if corpus.board.kind != BOARD]
    else:
        kept = [k for k, corpus in enumerate(corpora) if corpus.network not in networks]
    shipped = restore_predictor(load("agx_orin_resnet18"))
    if not isinstance(shipped, RooflinePredictor):
        raise InvalidInputError(f"the shipped reference is a {shipped.name!r} predictor: this needs a 'roofline' one")
    # A transfer uses only the population and the board of its reference.
    population = Population(tuple(members[k] for k in kept))
    return replace(shipped, hardware=board_named(BOARD).hardware, population=population)


def measure(case: Case, data: Path, members: Sequence[Member], draws: int) -> Outcome:
    """Transfer both workloads in every draw."""
    corpora = read_population(_LISTED, data)
    of = {_name(corpus): corpus for corpus in corpora}
    first, second = of[case.first], of[case.second]
    start = reference(case, corpora, members)
    errors = np.zeros((draws, len(MODES), 2, 2))
    for draw in range(draws):
        rows = _drawn(first, _FIRST_MODES, _FIRST_SEED + draw)
        fitted = RooflinePredictor.fit(first.profile.rows(rows), start, first.facts)
        knows_first = start.with_workload(fitted, first.facts)
        for k, modes in enumerate(MODES):
            for j, each in enumerate((start, knows_first)):
                errors[draw, k, j] = _errors_pct(second, _drawn(second, modes, draw), each)
    found = np.median(errors, axis=0)
    time, power = found[..., 0].T.tolist(), found[..., 1].T.tolist()
    return Outcome(case, time[0], time[1], power[0], power[1])


def _name(corpus: PopulationCorpus) -> str:
    return Path(corpus.name).stem


def _drawn(corpus: PopulationCorpus, modes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).choice(len(corpus.profile), modes, replace=False)


def _errors_pct(corpus: PopulationCorpus, drawn: np.ndarray, start: RooflinePredictor) -> tuple[float, float]:
    """Return the mean absolute percentage errors of time and power over the modes that were not drawn."""
    fitted = RooflinePredictor.fit(corpus.profile.rows(drawn), start, corpus.facts)
    others = np.ones(len(corpus.profile), dtype=bool)
    others[drawn] = False
    unseen = corpus.profile.rows(others)
    time, power = percentage_errors(fitted.predict(unseen.modes), unseen)
    return float(time.mean()), float(power.mean())


def needed(without: Sequence[float], with_first: Sequence[float]) -> list[float | None]:
    """Return how many modes with the first workload reach the error of `MODES` modes without it; None if too many.

    Between the measured numbers of modes, the error is interpolated linearly on logarithmic axes.
    """
    lowest = np.minimum.accumulate(with_first)
    modes = np.log(MODES)
    found: list[float | None] = []
    for target in without:
        below = np.flatnonzero(lowest <= target)
        if not len(below):
            found.append(None)
        elif below[0] == 0:
            found.append(float(MODES[0]))
        else:
            k = int(below[0])
            share = np.log(lowest[k - 1] / target) / np.log(lowest[k - 1] / lowest[k])
            found.append(float(np.exp(modes[k - 1] + share * (modes[k] - modes[k - 1]))))
    return found


def _print(outcomes: Sequence[Outcome]) -> None:
    """Print Markdown tables: the errors, and the modes that are needed."""
    numbers = " | ".join(f"n = {n}" for n in MODES) + " |\n|---|---|---|" + "---|" * len(MODES)
    print("Time / power MAPE, %:\n")
    print(f"| board | first, then second | first workload | {numbers}")
    for each in outcomes:
        for arm, time, power in (
            ("without", each.time_without, each.power_without),
            ("with", each.time_with, each.power_with),
        ):
            row = " | ".join(f"{of_time:.1f} / {of_power:.1f}" for of_time, of_power in zip(time, power, strict=True))
            print(f"| {each.case.board} | {_named(each.case)} | {arm} | {row} |")
    print("\nModes with the first workload for the error of n modes without it:\n")
    print(f"| board | first, then second | quantity | {numbers}")
    for each in outcomes:
        for quantity, without, known in (
            ("time", each.time_without, each.time_with),
            ("power", each.power_without, each.power_with),
        ):
            row = " | ".join(_count(count) for count in needed(without, known))
            print(f"| {each.case.board} | {_named(each.case)} | {quantity} | {row} |")


def _count(count: float | None) -> str:
    if count is None:
        return f"over {MODES[-1]}"
    return f"{MODES[0]} or fewer" if count <= MODES[0] else f"{count:.0f}"


def _named(case: Case) -> str:
    return f"{_NETWORKS[case.first]}, then {_NETWORKS[case.second]}"


def main() -> None:
    """Print the errors."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.second_workload",
        description="Compare a board's second workload with and without what the first one showed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="read the measured corpora from this folder"
    )
    parser.add_argument("--draws", type=int, default=20, help="set how often the modes are drawn")
    parser.add_argument("--processes", type=int, default=2, help="set how many cases are computed at the same time")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
    if min(arguments.draws, arguments.processes) < 1:
        parser.error("--draws and --processes must be 1 or more")
    try:
        corpora = read_population(_LISTED, arguments.data)
        members = [measured_member(each.profile, each.facts, each.board.hardware) for each in corpora]
        todo = cases()
        with ProcessPoolExecutor(arguments.processes, initializer=threadpool_limits, initargs=(1,)) as pool:
            work = [pool.submit(measure, case, arguments.data, members, arguments.draws) for case in todo]
            outcomes = []
            for case, future in zip(todo, work, strict=True):
                outcomes.append(future.result())
                print(f"{case.board}: {case.first}, then {case.second}", file=sys.stderr)
    except WattfleetError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        print(json.dumps([asdict(each) for each in outcomes], indent=2))
    else:
        _print(outcomes)


if __name__ == "__main__":
    main()
