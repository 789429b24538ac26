"""Computes ratios to baseline 1 and to the best choice, their means over tasks and seeds, and whether goals are met."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from benchmarks.joint.boards import KINDS, LEVELS, NETWORKS, frequencies
from benchmarks.joint.compare import (
    BASELINE,
    BEST_OF,
    EXHAUSTIVE,
    MEASURED_MORE,
    OURS,
    OURS_ALL_MODES,
    PREDICTED,
    THRIFTIEST,
    THRIFTIEST_ALL_MODES,
    Case,
    ProxyCase,
)
from benchmarks.joint.runs import BATCHES, SEEDS, TaskRuns

GOAL_SOONER, GOAL_BEHIND_PCT = 1.7, 8.0

Result = dict[str, Any]


@dataclass(frozen=True)
class Ratio:
    """A judged choice compared with others on the same board, task, limit and seed.

    Attributes:
        case: the choice.
        sooner: time of baseline 1, divided by the choice's time.
        energy: the choice's energy, divided by that of baseline 1.
        behind_pct: additional time compared with the best choice, %; additional energy for methods that choose the
            least energy.
    """

    case: Case
    sooner: float
    energy: float
    behind_pct: float


def ratios(cases: Sequence[Case]) -> Iterator[Ratio]:
    """Return the ratios of every method in `BEST_OF`."""
    known = {(c.kind, c.task, c.level, c.seed, c.method): c for c in cases}
    for case in cases:
        if case.method not in BEST_OF:
            continue
        place = (case.kind, case.task, case.level, case.seed)
        first, best = known[(*place, BASELINE)], known[(*place, BEST_OF[case.method])]
        by_energy = best.method in (THRIFTIEST, THRIFTIEST_ALL_MODES)
        more = case.energy_j / best.energy_j if by_energy else case.time_s / best.time_s
        yield Ratio(case, first.time_s / case.time_s, case.energy_j / first.energy_j, 100 * (more - 1))


def result_of(runs: Mapping[str, TaskRuns], cases: Sequence[Case], proxies: Sequence[ProxyCase]) -> Result:
    """Return the JSON document of the result.

    Args:
        runs: the runs of all tasks.
        cases: all judged choices.
        proxies: the cases with every task as the proxy of every other.
    """
    found = list(ratios(cases))
    by_limit = figures(found, lambda case: (case.kind, case.level, case.method))
    return {
        "provenance": "boards simulated; samples to the accuracy from trainings on a CPU",
        "wattfleet_version": version("wattfleet"),
        "settings": {
            "batches": BATCHES,
            "seeds": SEEDS,
            "levels": LEVELS,
            "networks_on_boards": {name: asdict(network) for name, network in NETWORKS.items()},
        },
        "relative_samples": {
            name: dict(zip(each.efficiency.batches, each.efficiency.relative_samples, strict=True))
            for name, each in runs.items()
        },
        "by_limit": by_limit,
        "by_task": figures(found, lambda case: (case.kind, case.task, case.level, case.method)),
        "goals": goals(by_limit),
        "profiling": profiling(cases),
        "proxies": proxy_matrix(proxies),
    }


def figures(found: Iterable[Ratio], group: Callable[[Case], tuple[object, ...]]) -> list[dict[str, Any]]:
    """Return means of each group's ratios, and the standard deviations over seeds of their means over tasks."""
    groups: dict[tuple[object, ...], list[Ratio]] = defaultdict(list)
    for ratio in found:
        groups[group(ratio.case)].append(ratio)
    rows = []
    for members in groups.values():
        one = members[0].case
        tasks = {ratio.case.task for ratio in members}
        rows.append(
            {
                "kind": one.kind,
                "task": one.task if len(tasks) == 1 else "all",
                "level": one.level,
                "limit_w": one.limit_w,
                "method": one.method,
                "sooner": _spread(members, lambda ratio: ratio.sooner),
                "energy": _spread(members, lambda ratio: ratio.energy),
                "behind_pct": _spread(members, lambda ratio: ratio.behind_pct),
                "batches": sorted({ratio.case.batch for ratio in members}),
                "cases": len(members),
                "over_limit": sum(ratio.case.power_w > ratio.case.limit_w for ratio in members),
                "worst_excess_pct": max(100 * (ratio.case.power_w / ratio.case.limit_w - 1) for ratio in members),
            }
        )
    return rows


def _spread(members: Sequence[Ratio], value: Callable[[Ratio], float]) -> dict[str, float]:
    by_seed: dict[int, list[float]] = defaultdict(list)
    for ratio in members:
        by_seed[ratio.case.seed].append(value(ratio))
    means = [statistics.fmean(values) for values in by_seed.values()]
    return {"mean": statistics.fmean(means), "sd": statistics.stdev(means) if len(means) > 1 else 0.0}


def goals(by_limit: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return both goals on each board, by means over tasks and seeds: at the tightest limit, and over all limits."""
    found = []
    for kind in KINDS:
        for method in (OURS, OURS_ALL_MODES, *PREDICTED, MEASURED_MORE):
            own = [each for each in by_limit if (each["kind"], each["method"]) == (kind, method)]
            sooner = [each["sooner"]["mean"] for each in own if each["level"] == 0]
            if not sooner:
                continue
            behind_pct = statistics.fmean(each["behind_pct"]["mean"] for each in own)
            found.append(
                {
                    "kind": kind,
                    "method": method,
                    "sooner_at_tightest": sooner[0],
                    "sooner_met": sooner[0] >= GOAL_SOONER,
                    "behind_pct": behind_pct,
                    "behind_met": behind_pct <= GOAL_BEHIND_PCT,
                }
            )
    return found


def profiling(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return how many GPU frequencies and batch sizes the published order measures at each limit, and its loss.

    The loss is the additional time of its choice compared with the choice among all of them with the same proxy, %.
    """
    known = {(c.kind, c.task, c.level, c.seed): c for c in cases if c.method == EXHAUSTIVE}
    groups: dict[tuple[str, float], list[Case]] = defaultdict(list)
    for case in cases:
        if case.method == OURS:
            groups[case.kind, case.limit_w].append(case)
    return [
        {
            "kind": kind,
            "limit_w": limit_w,
            "measured": statistics.fmean(case.measurements or 0 for case in own),
            "of": frequencies(kind) * len(BATCHES),
            "loss_pct": statistics.fmean(
                100 * (case.time_s / known[case.kind, case.task, case.level, case.seed].time_s - 1) for case in own
            ),
        }
        for (kind, limit_w), own in groups.items()
    ]


def proxy_matrix(proxies: Sequence[ProxyCase]) -> dict[str, dict[str, float]]:
    """Return by how many percent the choice is slower than the fastest one on average, by proxy and target."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in proxies:
        found[case.proxy][case.target].append(case.slower_pct)
    return {
        proxy: {target: statistics.fmean(values) for target, values in by_target.items()}
        for proxy, by_target in found.items()
    }
