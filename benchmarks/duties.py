"""Compare plans for inference duties during training with runs on simulated boards.

    python -m benchmarks.duties [--seeds 4] [--measure 40] [--json]

A board is planned twice: from the true values of all modes, and from predictors that were fitted to a few measurements
of its training and the same number of its inference. Then it serves the duty in the planned mode for ten minutes of
virtual time, event by event.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from edge_agent.devices.virtual.served_duty import SharedBoard, serve_duty
from edge_agent.devices.virtual.simulated import SimulatedDevice
from wattfleet.core.choosing import KnownModes
from wattfleet.core.duties import Demand, ModesWithDuty, NoTrainingTimeError, SharedMode, UnkeptDutyError, keep_duty
from wattfleet.core.errors import InfeasibleBudgetError
from wattfleet.core.modes import BatchArray, ModeArray, Profile, Task, Workload, WorkloadFacts
from wattfleet.core.prediction import RooflinePredictor

INFERENCES = ("mobilenetv3", "resnet")
DEMANDS = ((60.0, 1000.0), (60.0, 300.0), (30.0, 200.0), (120.0, 500.0))
BUDGETS_W = (25.0, 35.0, 45.0)
BATCHES = (1, 4, 16, 32, 64)
SWITCH_MS = 5.0
_RUN_S = 600.0
# About as many modes as in the measured files of inference.
_EVERY = 41


@dataclass(frozen=True)
class Case:
    """A planned board and its run; values are None if no plan keeps the duty and the budget.

    Attributes:
        inference: the inference workload.
        source: the values that the plan is made from.
        arrival_per_s: requests per second.
        latency_ms: limit of the latency.
        budget_w: the board's budget.
        seed: random seed of the board.
        plan_s: seconds to find all modes that keep the duty.
        plan: the planned mode, batch and number of minibatches.
        in_time: share of the run's requests within the limit.
        latency_p95_ms: 95 % quantile of the run's latencies.
        training_of_plan: minibatches per second of the run, relative to the plan.
        watts_of_plan: mean power of the run, relative to the plan.
    """

    inference: str
    source: str
    arrival_per_s: float
    latency_ms: float
    budget_w: float
    seed: int
    plan_s: float
    plan: SharedMode | None
    in_time: float | None = None
    latency_p95_ms: float | None = None
    training_of_plan: float | None = None
    watts_of_plan: float | None = None


def served(workload: str, batch: int) -> Workload:
    """Return an inference workload with a batch size."""
    return Workload(workload, WorkloadFacts(Task.INFERENCE, batch=batch))


def tables(device: SimulatedDevice, workload: str, modes: ModeArray) -> tuple[Profile, Profile]:
    """Return the true values of training, and of inference with all batch sizes."""
    by_batch = [device.truth(modes, served(workload, batch)) for batch in BATCHES]
    inference = Profile(
        np.tile(modes, (len(BATCHES), 1)),
        np.concatenate([batch_ms for batch_ms, _ in by_batch]),
        np.concatenate([power_mw for _, power_mw in by_batch]),
        np.repeat(BATCHES, len(modes)),
        Task.INFERENCE,
    )
    return Profile(modes, *device.truth(modes)), inference


def predicted(profile: Profile, measure: int, rng: np.random.Generator) -> KnownModes:
    """Return the predictions of a table after a few random rows of it were measured."""
    some = profile.rows(rng.choice(len(profile), measure, replace=False))
    batch: BatchArray | None = profile.batch
    prediction = RooflinePredictor.fit(some, None, WorkloadFacts(profile.task)).predict(profile.modes, batch)
    return KnownModes.of(profile.modes, prediction, some, batch)


def cases(seed: int, measure: int) -> Iterator[Case]:
    """Return all cases of one board."""
    device, rng = SimulatedDevice("agx-orin", seed), np.random.default_rng(seed)
    for workload in INFERENCES:
        training, inference = tables(device, workload, device.modes[::_EVERY])
        true = KnownModes.only_measured(training), KnownModes.only_measured(inference)
        few = predicted(training, measure, rng), predicted(inference, measure, rng)
        for source, known in (("all measured", true), (f"{measure} + {measure} measured", few)):
            for arrival_per_s, latency_ms in DEMANDS:
                demand, start_s = Demand(arrival_per_s, latency_ms), time.perf_counter()
                try:
                    kept: ModesWithDuty | None = keep_duty(*known, demand, SWITCH_MS)
                except UnkeptDutyError:
                    kept = None
                plan_s = time.perf_counter() - start_s
                for budget_w in BUDGETS_W:
                    head = (workload, source, arrival_per_s, latency_ms, budget_w, seed, plan_s)
                    try:
                        plan = None if kept is None else kept.fastest(1e3 * budget_w)
                    except (InfeasibleBudgetError, NoTrainingTimeError):
                        plan = None
                    run = () if plan is None else _run(device, workload, demand, plan)
                    yield Case(*head, plan, *run)


def _run(device: SimulatedDevice, workload: str, demand: Demand, plan: SharedMode) -> tuple[float, float, float, float]:
    """Run a board in its planned mode; return share in time, latency, and training and watts relative to the plan."""
    shared = SharedBoard(
        device.load(plan.mode),
        lambda requests: device.load(plan.mode, served(workload, requests)),
        plan.batch,
        SWITCH_MS,
    )
    run = serve_duty(shared, demand, _RUN_S, seed=0)
    return (
        run.share_within(demand.latency_ms),
        float(np.quantile(run.latency_ms, 0.95)),
        plan.minibatch_ms / run.minibatch_ms,
        run.power_mw / plan.power_mw,
    )


def summary(found: list[Case]) -> dict[str, dict[str, float]]:
    """Summarise for each source of plans how often the duty is kept and how much is trained."""
    best = {
        (case.inference, case.arrival_per_s, case.latency_ms, case.budget_w, case.seed): case.plan
        for case in found
        if case.source == "all measured"
    }
    rows = {}
    for source in dict.fromkeys(case.source for case in found):
        of_source = [case for case in found if case.source == source]
        run = [(case, case.plan) for case in of_source if case.plan is not None]
        in_time = np.array([case.in_time for case, _ in run], dtype=np.float64)
        training = np.array([case.training_of_plan for case, _ in run], dtype=np.float64)
        over = [1e3 * case.budget_w < (case.watts_of_plan or 0.0) * plan.power_mw for case, plan in run]
        shares = []
        for case in of_source:
            optimum = best[case.inference, case.arrival_per_s, case.latency_ms, case.budget_w, case.seed]
            if optimum is not None:
                shares.append(0.0 if case.plan is None else optimum.minibatch_ms / case.plan.minibatch_ms)
        rows[source] = {
            "problems": len(of_source),
            "solvable": len(shares),
            "planned": len(run),
            "duty_kept_percent": float(100 * (in_time >= 0.95).mean()),
            "least_in_time_percent": float(100 * in_time.min()),
            "training_of_plan_median": float(np.median(training)),
            "training_of_plan_p10": float(np.quantile(training, 0.1)),
            "training_of_optimum_median": float(np.median(shares)),
            "training_of_optimum_p10": float(np.quantile(shares, 0.1)),
            "over_budget_percent": float(100 * np.mean(over)),
            "plan_ms_median": float(1e3 * np.median([case.plan_s for case in of_source])),
        }
    return rows


def main(arguments: list[str] | None = None, report: Callable[[str], None] = print) -> int:
    """Print the comparison."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.duties",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=4, help="number of simulated boards")
    parser.add_argument("--measure", type=int, default=40, help="measurements of training, and of inference")
    parser.add_argument("--json", action="store_true", help="print all cases as JSON instead of a summary")
    options = parser.parse_args(arguments)
    found = [case for seed in range(options.seeds) for case in cases(seed, options.measure)]
    if options.json:
        report(json.dumps({"summary": summary(found), "cases": [asdict(case) for case in found]}, indent=1))
        return 0
    for source, values in summary(found).items():
        report(source)
        for name, value in values.items():
            report(f"  {name:<28} {value:.3g}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
