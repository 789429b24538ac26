"""Measure how long planning a round takes on one core, and how far the plan is from the exact optimum.

    python -m benchmarks.plan [--devices 100 1000 10000 100000] [--points 64] [--workloads 1] [--repeats 5]
        [--instances 200] [--json]

Fleets are random. Fronts follow power laws like those of boards. A site has circuits, each with racks of twenty
devices. The budgets cover a part of the watts that all devices would draw. Each time is the minimum of several repeats:

- `ms`: the allocation of half the fleet with the shortest makespan.
- `curves_ms`: the power curves, computed from the fronts before the allocation.
- `plan_ms`: the whole plan, including a reason for every device.
- `progress_ms`: the whole plan with the policy `progress`, which chooses devices, modes, six batches and three numbers
  of local epochs, the same for all devices of the round.
- `own_epochs_ms`: the same with a different number of epochs for each device.
- `coordinator_ms`: processor time for the plan of a run at a coordinator, with its snapshot of the fleet, in fleets of
  up to ten thousand. Each device has fronts of `--workloads` workloads, and the same number of runs is planned in turn.
- `coordinator_of_one_ms`: the same with one workload.
- `useful_ms`: the most useful set that meets a deadline, in fleets of up to ten thousand. If a solver is needed, it
  takes seconds.

`growth` is the exponent with which `ms` grows between the two largest fleets; `n log n` gives 1.1. `gap_pct` compares
small fleets with HiGHS, as shares of the optimum: the makespan of the largest possible number of devices, and the
utility of a set that meets a deadline.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, hstack
from threadpoolctl import threadpool_limits

from benchmarks.coordinator_plan import coordinator_plan_ms, snapshots_of
from wattfleet.core.budgets import Supplies, Supply
from wattfleet.core.choosing import Front
from wattfleet.core.planning import (
    SITE,
    Allowance,
    Curves,
    EpochChoice,
    Headroom,
    Offer,
    curves_of,
    max_utility,
    min_makespan,
    plan_round,
)
from wattfleet.core.planning.policies import FastestK, Progress

_RACK = 20
_RACKS_ON_A_CIRCUIT = 10
_SMALL_RACK = 5
_BATCHES = (8, 16, 32, 64, 128, 256)
_EPOCHS = (2, 4, 8)
_MOST_USEFUL_OF = 10_000
_MOST_COORDINATED = 10_000

Result = TypeVar("Result")
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Fleet:
    """The offers of devices, and the watts of their supplies."""

    offers: list[Offer]
    allowance: Allowance


def random_fleet(chance: np.random.Generator, devices: int, points: int, rack: int = _RACK) -> Fleet:
    """Return devices in racks on circuits of a site. A supply has a part of the watts that its devices would draw."""
    racks = math.ceil(devices / rack)
    circuits = math.ceil(racks / _RACKS_ON_A_CIRCUIT)
    supplies = Supplies(
        (
            Supply(SITE),
            *(Supply(f"circuit-{k}", SITE) for k in range(circuits)),
            *(Supply(f"rack-{k}", f"circuit-{k % circuits}") for k in range(racks)),
        )
    )
    offers = [
        Offer(f"device-{k:06}", _front(chance, points), float(chance.uniform(1, 6)), f"rack-{k % racks}")
        for k in range(devices)
    ]
    idle_w, extra_w = dict.fromkeys(supplies.names, 0.0), dict.fromkeys(supplies.names, 0.0)
    paths = {name: supplies.path(name) for name in supplies.names}
    for offer in offers:
        for name in paths[offer.supply]:
            idle_w[name] += offer.idle_w
            extra_w[name] += max(0.0, float(offer.front.planned_w[0]) - offer.idle_w)
    budget_w = {name: idle_w[name] + float(chance.uniform(0.2, 0.5)) * extra_w[name] + 1 for name in supplies.names}
    return Fleet(offers, Allowance(supplies, budget_w))


def _front(chance: np.random.Generator, points: int) -> Front:
    slowdown = np.cumprod(np.append(1.0, 1 + chance.uniform(0.1, 1.9, points - 1) * 1.5 / points))
    return Front(
        modes=np.tile([4.0, 1.5e9, 6e8, 2.1e9], (points, 1)),
        epoch_s=chance.uniform(5, 60) * slowdown,
        power_w=chance.uniform(2, 6) + chance.uniform(8, 50) * slowdown ** -chance.uniform(0.6, 1.6),
        epoch_log_sd=chance.uniform(0.02, 0.1, points),
        power_log_sd=np.full(points, chance.uniform(0.01, 0.05)),
        warmup_s=np.zeros(points),
        batch=chance.choice(_BATCHES, points),
    )


def measure(devices: Sequence[int], points: int, repeats: int, instances: int, workloads: int = 1) -> dict[str, object]:
    """Return all figures."""
    with threadpool_limits(limits=1), _solver_on_stderr():
        coordinator_ms = [
            coordinator_plan_ms(size, workloads, repeats, lambda chance: _front(chance, points))
            if size <= _MOST_COORDINATED
            else (None, None)
            for size in devices
        ]
        snapshots_ms = [
            [_least(take, repeats)[1] for take in snapshots_of(size, lambda chance: _front(chance, points))]
            if size <= _MOST_COORDINATED
            else [None, None]
            for size in devices
        ]
        timed = [_times(size, points, repeats) for size in devices]
        gaps = np.array([gap for seed in range(instances) for gap in _gaps(seed)])
    curves_ms, ms, plan_ms, progress_ms, own_epochs_ms, useful_ms = map(list, zip(*timed, strict=True))
    gap_pct = {"median": 100 * float(np.median(gaps)), "max": 100 * float(gaps.max())}
    return {
        "devices": list(devices),
        "points": points,
        "ms": ms,
        "curves_ms": curves_ms,
        "plan_ms": plan_ms,
        "progress_ms": progress_ms,
        "own_epochs_ms": own_epochs_ms,
        "coordinator_ms": [several_ms for _, several_ms in coordinator_ms],
        "coordinator_of_one_ms": [one_ms for one_ms, _ in coordinator_ms],
        "workloads": workloads,
        "copy_ms": [copy_ms for copy_ms, _ in snapshots_ms],
        "request_ms": [request_ms for _, request_ms in snapshots_ms],
        "useful_ms": useful_ms,
        "growth": _growth(devices, ms),
        "gap_pct": gap_pct,
        "instances": instances,
        "threads": 1,
    }


@contextmanager
def _solver_on_stderr() -> Iterator[None]:
    """Redirect standard output to standard error, since HiGHS sometimes prints a line that would corrupt the JSON."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def _times(devices: int, points: int, repeats: int) -> tuple[float, float, float, float, float, float | None]:
    """Return milliseconds for the curves, the allocation, whole plans of three kinds, and the most useful set."""
    chance = np.random.default_rng(devices)
    fleet = random_fleet(chance, devices, points)
    offers, allowance = fleet.offers, fleet.allowance
    half, all_devices, none = (devices + 1) // 2, np.ones(devices, dtype=np.bool_), np.zeros(devices, dtype=np.bool_)
    curves, curves_ms = _least(lambda: curves_of(offers, 1.0), repeats)
    headroom = allowance.headroom(offers)
    found, ms = _least(lambda: min_makespan(curves, headroom, half, all_devices, none), repeats)
    _, plan_ms = _least(lambda: plan_round(offers, FastestK(half), allowance, 1.0, 1), max(1, repeats // 2))
    same, own = EpochChoice.of(_EPOCHS), EpochChoice.of(_EPOCHS, is_per_device=True)
    _, progress_ms = _least(lambda: plan_round(offers, Progress(), allowance, same, 1), max(1, repeats // 2))
    _, own_epochs_ms = _least(lambda: plan_round(offers, Progress(), allowance, own, 1), max(1, repeats // 2))
    if devices > _MOST_USEFUL_OF:
        return curves_ms, ms, plan_ms, progress_ms, own_epochs_ms, None
    limit_s = found.limit_s if found is not None else float(curves.time_s.max())
    extra_w, utility = curves.extra_at(curves.steps_within(limit_s)), chance.lognormal(0, 1, devices)
    _, useful_ms = _least(lambda: max_utility(extra_w, utility, headroom), 1)
    return curves_ms, ms, plan_ms, progress_ms, own_epochs_ms, useful_ms


def _least(work: Callable[[], Result], repeats: int) -> tuple[Result, float]:
    """Return the result of a call, and its shortest time over several repeats, ms."""
    times_ms = []
    for _ in range(repeats):
        begun = perf_counter()
        result = work()
        times_ms.append(1e3 * (perf_counter() - begun))
    return result, min(times_ms)


def _growth(devices: Sequence[int], ms: Sequence[float]) -> float | None:
    if len(set(devices)) < 2:
        return None
    (small, before), (large, after) = sorted(zip(devices, ms, strict=True))[-2:]
    return math.log(after / before) / math.log(large / small)


# --- the exact optimum --------------------------------------------------------------------------------------------


def _gaps(seed: int) -> tuple[float, float]:
    """Return the gaps of a small fleet's duration, and of its utility within a deadline, as shares of the optimum."""
    chance = np.random.default_rng([seed, 1])
    devices = int(chance.integers(8, 25))
    fleet = random_fleet(chance, devices, int(chance.integers(2, 9)), _SMALL_RACK)
    curves, headroom = curves_of(fleet.offers, 1.0), fleet.allowance.headroom(fleet.offers)
    feeds = (headroom.supply_at[None] == np.arange(len(headroom.spare_w))[:, None, None]).any(axis=1)
    all_devices = np.ones(devices, dtype=np.bool_)
    found = min_makespan(curves, headroom, int(chance.integers(1, devices + 1)), all_devices, ~all_devices)
    if found is None:
        raise RuntimeError(f"instance {seed}: the budget is too low for any device")
    count = int((found.step >= 0).sum())
    duration_gap = found.limit_s / _least_duration_s(curves, headroom, feeds, count) - 1
    extra_w = curves.extra_at(curves.steps_within(found.limit_s * float(chance.uniform(0.8, 1.5))))
    utility = chance.lognormal(0, 1, devices)
    reached = float(utility[max_utility(extra_w, utility, headroom).chosen].sum())
    best = _most_utility(extra_w, utility, headroom, feeds)
    return max(0.0, duration_gap), max(0.0, 1 - reached / best) if best > 0 else 0.0


def _least_duration_s(curves: Curves, headroom: Headroom, feeds: NDArray[np.bool_], count: int) -> float:
    """Solve for the shortest duration of `count` devices: binaries for device and mode, and one duration bound."""
    steps, n = len(curves.time_s), len(curves)
    owner = np.repeat(np.arange(n), np.diff(curves.start))
    once = csr_array((np.ones(steps), (owner, np.arange(steps))), shape=(n, steps))
    watts = csr_array(feeds[:, owner] * curves.extra_w)
    found = milp(
        np.append(np.zeros(steps), 1.0),
        integrality=np.array([1] * steps + [0], dtype=np.int8),
        bounds=Bounds(0, np.append(np.ones(steps), np.inf)),
        constraints=[
            LinearConstraint(hstack([once, csr_array((n, 1))]), ub=1),
            LinearConstraint(hstack([watts, csr_array((len(feeds), 1))]), ub=headroom.spare_w),
            LinearConstraint(hstack([once * curves.time_s[None, :], csr_array(-np.ones((n, 1)))]), ub=0),
            LinearConstraint(np.append(np.ones(steps), 0.0), count, count),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if found.status != 0:
        raise RuntimeError(f"HiGHS found no optimum: {found.message}")
    return float(found.fun)


def _most_utility(extra_w: Values, utility: Values, headroom: Headroom, feeds: NDArray[np.bool_]) -> float:
    able = np.isfinite(extra_w)
    if not able.any():
        return 0.0
    found = milp(
        -utility[able],
        integrality=np.ones(int(able.sum()), dtype=np.int8),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(feeds[:, able] * extra_w[able], ub=headroom.spare_w),
        options={"mip_rel_gap": 0.0},
    )
    if found.status != 0:
        raise RuntimeError(f"HiGHS found no optimum: {found.message}")
    return -float(found.fun)


def _table(figures: dict[str, object]) -> Table:
    table = Table(title=f"Planning a round, {figures['points']} points per device, one core")
    table.add_column("Devices", justify="right")
    columns = {
        "ms": "Allocation",
        "curves_ms": "Curves",
        "plan_ms": "Whole plan",
        "progress_ms": "Progress, 3 epochs",
        "own_epochs_ms": "Own epochs",
        "coordinator_of_one_ms": "At a coordinator",
        "coordinator_ms": f"The same, workloads: {figures['workloads']}",
        "copy_ms": "Copy of the fleet",
        "request_ms": "Request",
        "useful_ms": "Most useful set",
    }
    for title in columns.values():
        table.add_column(f"{title}, ms", justify="right")
    rows = zip(*(figures[name] for name in ("devices", *columns)), strict=True)
    for devices, *times_ms in rows:
        table.add_row(f"{devices:,}", *("-" if ms is None else f"{ms:,.1f}" for ms in times_ms))
    return table


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan",
        description="Time round plans on one core.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000], help="set the fleet sizes"
    )
    parser.add_argument("--points", type=int, default=64, help="set the number of points of each front, 2 to 64")
    parser.add_argument("--workloads", type=int, default=1, help="set the number of fronts of each device, and of runs")
    parser.add_argument("--repeats", type=int, default=5, help="set how often each step is timed")
    parser.add_argument(
        "--instances", type=int, default=200, help="set the number of small fleets to compare with the optimum"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if min(*arguments.devices, arguments.repeats, arguments.instances, arguments.workloads) < 1:
        parser.error("--devices, --repeats, --instances and --workloads: give 1 or more")
    if not 2 <= arguments.points <= 64:
        parser.error("--points: give 2 to 64")
    figures = measure(arguments.devices, arguments.points, arguments.repeats, arguments.instances, arguments.workloads)
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return
    console = Console()
    console.print(_table(figures))
    gap, growth = figures["gap_pct"], figures["growth"]
    assert isinstance(gap, dict)
    console.print(f"Gap to the optimum: median {gap['median']:.4f} %, at most {gap['max']:.4f} %")
    if isinstance(growth, float):
        console.print(f"Growth between the two largest fleets: (number of devices)^{growth:.2f}")


if __name__ == "__main__":
    main()
