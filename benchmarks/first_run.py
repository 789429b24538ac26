"""Does the first run pay? A fleet that has measured nothing trains a new workload, the same again, and another network.

    python -m benchmarks.first_run [--boards 6|50] [--budgets 60,80,100] [--seeds 5] [--data digits|fashion]
        [--rounds 20] [--out out/first_run.csv]

Boards and time are simulated (`benchmarks.virtual_fleet`); the coordinator, the agents, `PowerAware` and the training
of the model are the product's and real. All costs count: surveys, measurements, planning, waiting, and idle boards. The
baselines train the same data on the same boards from the same parameters for as many rounds, and know the boards' true
time and power.
"""

from __future__ import annotations

import argparse
import csv
import logging
import statistics
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from rich.console import Console
from rich.table import Table

from benchmarks.federated.experiment import FLEET, minibatches_per_epoch
from benchmarks.federated.figures import reached
from benchmarks.federated.jobs import LOCAL_EPOCHS, OVERHEAD_S
from benchmarks.federated.learning import Federation, LocalWork, Model
from benchmarks.federated.tasks import TASKS, LearningTask
from benchmarks.virtual_fleet import Busy, Call, LoopClock, NodeWork, VirtualFleet, VirtualGrid, virtual_fleet
from edge_agent.devices.virtual.simulated import SimulatedDevice
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.modes import Workload, WorkloadFacts
from wattfleet.flower import PlanningError, PowerAware
from wattfleet.simulation.baselines import (
    PLAIN_FLOWER,
    PRESETS,
    BestPresets,
    PlainFlower,
    TrainedBoards,
    TrueBoard,
    Way,
)
from wattfleet.simulation.baselines import idle_w as true_idle_w
from wattfleet.simulation.virtual_time import stretches

NEW, AGAIN, OTHER = "new workload", "the same again", "another network"
"""The three runs of a fleet, in this order."""

WATTFLEET = "Wattfleet"


@dataclass(frozen=True)
class Site:
    """A fleet and its usual budget.

    Attributes:
        kinds: number of boards by kind.
        usual_w: the site's budget unless other budgets are given, W.
        drawn: devices that the baseline with presets draws in a round; None for half of them, as `wattfleet simulate`.
    """

    kinds: Mapping[str, int]
    usual_w: float
    drawn: int | None


SITES = {
    6: Site({"agx-orin": 2, "orin-nano": 2, "orin-nx": 1, "xavier-agx": 1}, 100.0, None),
    50: Site(FLEET, 900.0, 10),
}
"""The boards of `wattfleet simulate`, and those of `benchmarks.federated`, by their number."""

_BATCH, _LOADER_WORKERS = 16, 4
_PARAMETERS = {NEW: 11.7e6, AGAIN: 11.7e6, OTHER: 5.5e6}
"""The size of the network whose times and power the boards have: as ResNet-18, then as MobileNetV3-Large."""


@dataclass(frozen=True)
class Outcome:
    """One run of one method. Its fields are the columns of the CSV. None: not reached, or not measured.

    Attributes:
        boards: number of boards.
        budget_w: the site's budget, W.
        seed: random seed of the boards, the data split, the network's work and the training.
        data: what is learned.
        run: which of the three runs.
        method: Wattfleet or the baseline.
        rounds: rounds trained.
        low_s: seconds from the run's start until the lower accuracy.
        low_kj: energy of all boards until then, kJ.
        high_s: the same for the higher accuracy.
        high_kj: the same.
        total_s: seconds of the whole run; the sum of the following three.
        survey_s: of these, before plans that devices have measured for.
        waiting_s: of these, for plans, and for devices that measured beside a round to stop.
        training_s: of these, from plans to the ends of their rounds.
        total_kj: energy of all boards, kJ.
        trained: boards that trained in a round.
        per_round: mean number of boards in a round.
        fewest_modes: modes measured by the end of the run, of the board with the fewest.
        mean_modes: the mean over the boards.
        first_plan_ratio: the first round's observed training, as a multiple of its plan.
        plan_ratio: the median over the later rounds.
        used_share: share of the budget that is drawn, on average, while a board neither trains nor measures.
        reserved_share: share of the budget that is granted or idle power then.
        idle_board_share: share of the run in which a board neither trains nor measures.
        failures: trainings whose replies came too late or not at all.
        problem: why the run ended early; empty if it did not.
    """

    boards: int
    budget_w: float
    seed: int
    data: str
    run: str
    method: str
    rounds: int
    low_s: float | None
    low_kj: float | None
    high_s: float | None
    high_kj: float | None
    total_s: float
    survey_s: float
    waiting_s: float
    training_s: float
    total_kj: float
    trained: int
    per_round: float
    fewest_modes: int | None = None
    mean_modes: float | None = None
    first_plan_ratio: float | None = None
    plan_ratio: float | None = None
    used_share: float | None = None
    reserved_share: float | None = None
    idle_board_share: float | None = None
    failures: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Case:
    """A fleet within a budget, with one seed.

    Attributes:
        site: the fleet.
        budget_w: the site's budget, W.
        seed: random seed of the boards, the data split, the network's work and the training.
        task: what is learned.
        rounds: rounds of each run.
        federation: the devices' data and the training of models.
    """

    site: Site
    budget_w: float
    seed: int
    task: LearningTask
    rounds: int
    federation: Federation

    @property
    def boards(self) -> list[tuple[str, int]]:
        """Kind and seed of each board; as in `wattfleet simulate`, other boards for each seed."""
        kinds = [kind for kind, count in self.site.kinds.items() for _ in range(count)]
        return [(kind, 1000 * self.seed + k) for k, kind in enumerate(kinds)]

    def workload(self, run: str) -> Workload:
        """Return what a run trains, with its true facts; the work that these leave open differs for each seed."""
        name = f"seed {self.seed}, {OTHER if run == OTHER else NEW}"
        return Workload(name, WorkloadFacts(batch=_BATCH, loader_workers=_LOADER_WORKERS, parameters=_PARAMETERS[run]))

    def outcome(self, run: str, method: str, rounds: Sequence[_Round], **rest: Any) -> Outcome:
        """Return an outcome with the times to the task's accuracies."""
        accuracy = [each.accuracy for each in rounds]
        found: dict[str, Any] = {}
        for name, target in zip(("low", "high"), self.task.targets, strict=True):
            at = reached(accuracy, target)
            found |= (
                {f"{name}_s": None, f"{name}_kj": None}
                if at is None
                else {f"{name}_s": rounds[at].end_s, f"{name}_kj": rounds[at].energy_kj}
            )
        return Outcome(
            boards=len(self.boards),
            budget_w=self.budget_w,
            seed=self.seed,
            data=self.task.name,
            run=run,
            method=method,
            rounds=len(rounds),
            total_s=rounds[-1].end_s if rounds else 0.0,
            total_kj=rounds[-1].energy_kj if rounds else 0.0,
            trained=len(set[str]().union(*(each.devices for each in rounds))),
            per_round=statistics.mean([len(each.devices) for each in rounds] or [0.0]),
            **found,
            **rest,
        )


@dataclass(frozen=True)
class _Round:
    """The end of a round: seconds and kJ since the run's start, accuracy, and the devices that trained."""

    end_s: float
    energy_kj: float
    accuracy: float
    devices: frozenset[str]


# --- Wattfleet ------------------------------------------------------------------------------------------------------


class _Training:
    """Trains a node's copy of the model on its own data, and evaluates models."""

    def __init__(self, case: Case, devices: Sequence[str]) -> None:
        self._case, self._number = case, {device_id: k for k, device_id in enumerate(devices)}

    def initial(self) -> ArrayRecord:
        """Return the initial parameters."""
        return ArrayRecord(OrderedDict(self._case.federation.start.parameters))

    def learn(self, message: Message, device_id: str) -> RecordDict:
        """Train a round, and return the reply's content."""
        parameters = message.content["arrays"].to_torch_state_dict()
        device = self._number[device_id]
        model = Model(parameters, 0.0)
        order = int(message.content["config"]["server-round"]) - 1
        trained = self._case.federation.updates(model, {device: LocalWork(LOCAL_EPOCHS)}, order)[device]
        metrics = {"num-examples": self._case.federation.samples[device], "train_loss": trained.loss}
        arrays = ArrayRecord(OrderedDict(trained.parameters))
        return RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})

    def accuracy(self, arrays: ArrayRecord) -> float:
        """Return the accuracy of a model on the test data."""
        return self._case.task.accuracy(arrays.to_torch_state_dict())


def wattfleet_runs(case: Case, folder: Path) -> Iterator[Outcome]:
    """Run the three runs on one fleet, one after the other, and yield each.

    Args:
        case: the fleet, within its budget.
        folder: for the fleet's state.
    """
    with virtual_fleet(folder, case.boards, case.budget_w) as fleet:
        for number, run in enumerate((NEW, AGAIN, OTHER), 1):
            yield _run(case, fleet, run, number)


def _run(case: Case, fleet: VirtualFleet, run: str, number: int) -> Outcome:
    devices, workload = list(fleet.boards), case.workload(run)
    training = _Training(case, devices)
    lengths = minibatches_per_epoch(case.federation.samples)
    work = NodeWork(workload, dict(zip(devices, lengths, strict=True)), training.learn)
    grid = VirtualGrid(fleet, number, work, OVERHEAD_S)
    began_s, began_j = fleet.loop.time(), fleet.energy_j()
    calls_before, busy_before = len(fleet.planner.calls), len(fleet.busy)
    ends: list[tuple[float, float, float]] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        accuracy = training.accuracy(arrays)
        if server_round > 0:
            ends.append((fleet.loop.time() - began_s, (fleet.energy_j() - began_j) / 1e3, accuracy))
        return MetricRecord({"accuracy": accuracy})

    stated = Workload(workload.name, WorkloadFacts(parameters=workload.facts.parameters))
    strategy = PowerAware(
        FedAvg(fraction_evaluate=0.0, min_available_nodes=len(devices)),
        fleet.planner,
        local_epochs=LOCAL_EPOCHS,
        workload=stated,
        clock=LoopClock(fleet.loop),
    )
    problem = ""
    try:
        strategy.start(grid, training.initial(), num_rounds=case.rounds, evaluate_fn=evaluate)
    except PlanningError as error:
        problem = str(error)
    spent, rounds, ratios, failures = _Spent(), list[_Round](), list[float](), 0
    calls = fleet.planner.calls[calls_before:]
    busy = fleet.busy[busy_before:]
    for (plan, finish, is_surveyed), (end_s, energy_kj, accuracy) in zip(_rounds_of(calls), ends, strict=False):
        spent.add(plan, finish, is_surveyed, began_s, end_s)
        answered = frozenset(each.device_id for each in finish.request.results if not each.failure)
        failures += sum(bool(each.failure) for each in finish.request.results)
        rounds.append(_Round(end_s, energy_kj, accuracy, answered))
        # A device that did not reply in time took at least as long as the round.
        took_s = [each.end_s - each.begin_s for each in busy if each.plan_id == plan.answer.plan_id]
        is_late = len(answered) < len(finish.request.results)
        observed_s = max([*took_s, finish.request.wall_s] if is_late else took_s)
        ratios.append(observed_s / plan.answer.duration_s)
    modes = fleet.measured_modes(workload.name).values()
    used = _use_of_watts(case, fleet, busy, began_s, fleet.loop.time())
    return case.outcome(
        run,
        WATTFLEET,
        rounds,
        survey_s=spent.survey_s,
        waiting_s=spent.waiting_s,
        training_s=spent.training_s,
        fewest_modes=min(modes),
        mean_modes=statistics.mean(modes),
        first_plan_ratio=ratios[0] if ratios else None,
        plan_ratio=statistics.median(ratios[1:]) if len(ratios) > 1 else None,
        failures=failures,
        problem=problem,
        **used,
    )


@dataclass
class _Spent:
    """How a run's time was spent; its fields are those of `Outcome`."""

    survey_s: float = 0.0
    waiting_s: float = 0.0
    training_s: float = 0.0
    _until_s: float = 0.0

    def add(self, plan: Call, finish: Call, is_surveyed: bool, began_s: float, end_s: float) -> None:
        """Add a round that ended with its evaluation, `end_s` seconds after the run's start at `began_s`."""
        before_s = plan.began_s - began_s - self._until_s
        if is_surveyed:
            self.survey_s += before_s
        else:
            self.waiting_s += before_s
        self.training_s += finish.began_s - plan.ended_s
        self.waiting_s += plan.ended_s - plan.began_s + began_s + end_s - finish.began_s
        self._until_s = end_s


def _rounds_of(calls: Sequence[Call]) -> Iterator[tuple[Call, Call, bool]]:
    """Yield the plan and the end of each round, and whether devices measured before the plan."""
    plan, is_surveyed = None, False
    for call in calls:
        if call.method == "PlanMeasuring" and call.request.HasField("survey_s"):
            is_surveyed |= bool(call.answer.assignments)
        elif call.method == "PlanRound":
            plan = call
        elif call.method == "FinishRound" and plan is not None:
            yield plan, call, is_surveyed
            plan, is_surveyed = None, False


def _use_of_watts(
    case: Case, fleet: VirtualFleet, busy: Sequence[Busy], begin_s: float, end_s: float
) -> dict[str, float | None]:
    """Return how much of the budget is used while at least one board neither trains nor measures."""
    idle_w = {name: true_idle_w(board) for name, board in fleet.boards.items()}
    limits_w = {
        (call.answer.plan_id, each.device_id): each.power_limit_w
        for call in fleet.planner.calls
        if call.method in ("PlanRound", "PlanMeasuring")
        for each in call.answer.assignments
    }
    moments = np.unique(
        [begin_s, end_s]
        + [moment for each in busy for moment in (each.begin_s, each.end_s) if begin_s < moment < end_s]
    )
    lasts_s, middles = np.diff(moments), (moments[1:] + moments[:-1]) / 2
    count, reserved_w = np.zeros(len(middles)), np.full(len(middles), sum(idle_w.values()))
    for each in busy:
        inside = (each.begin_s < middles) & (middles < each.end_s)
        count += inside
        reserved_w += inside * (limits_w[each.plan_id, each.device_id] - idle_w[each.device_id])
    left_out = count < len(fleet.boards)
    left_out_s = float(lasts_s[left_out].sum())
    if not left_out_s:
        return {"used_share": None, "reserved_share": None, "idle_board_share": 0.0}
    drawn_j = sum(_energies_j(board.drawn, moments)[left_out].sum() for board in fleet.boards.values())
    return {
        "used_share": float(drawn_j) / left_out_s / case.budget_w,
        "reserved_share": float((reserved_w * lasts_s)[left_out].sum()) / left_out_s / case.budget_w,
        "idle_board_share": left_out_s / (end_s - begin_s),
    }


def _energies_j(drawn: Sequence[tuple[float, float]], moments: np.ndarray) -> np.ndarray:
    """Return the energy between successive moments, `[n - 1]` J, from a board's changes of power in s and mW."""
    at_s, power_mw = np.array(drawn).T
    energy_j = np.concatenate([[0.0], np.cumsum(power_mw[:-1] * np.diff(at_s)) / 1e3])
    place = np.maximum(np.searchsorted(at_s, moments, side="right") - 1, 0)
    return np.diff(energy_j[place] + power_mw[place] * (moments - at_s[place]) / 1e3)


# --- baselines ------------------------------------------------------------------------------------------------------


def baseline_runs(case: Case) -> list[Outcome]:
    """Train the baselines, if a board fits: the first run and its repetition are the same for them."""
    found = []
    for run in (NEW, OTHER):
        lengths = minibatches_per_epoch(case.federation.samples)
        boards = {}
        for (kind, seed), length in zip(case.boards, lengths, strict=True):
            board = SimulatedDevice(kind, seed)
            boards[f"{kind}-{seed:02}"] = TrueBoard(board, case.workload(run), length, true_idle_w(board))
        ways: dict[str, Way] = {
            PRESETS: BestPresets(boards, case.budget_w, case.seed, LOCAL_EPOCHS, case.site.drawn),
            PLAIN_FLOWER: PlainFlower(boards, case.budget_w, case.seed),
        }
        for name, way in ways.items():
            with suppress(InfeasibleBudgetError):
                found.append(_baseline(case, run, name, way, boards))
    return found


def _baseline(case: Case, run: str, name: str, way: Way, boards: Mapping[str, TrueBoard]) -> Outcome:
    number = {device_id: k for k, device_id in enumerate(boards)}
    idle_w = {device_id: board.idle_w for device_id, board in boards.items()}
    fleet, model, rounds = TrainedBoards(boards, case.seed), case.federation.start, list[_Round]()
    now_s = energy_kj = 0.0
    for server_round in range(1, case.rounds + 1):
        modes = way.modes(server_round)
        [stretch] = stretches([(server_round, fleet.train(modes, LOCAL_EPOCHS), {})], idle_w)
        model = case.federation.after(model, {number[each]: LocalWork(LOCAL_EPOCHS) for each in modes})
        now_s += OVERHEAD_S + stretch.end_s
        energy_kj += (sum(idle_w.values()) * OVERHEAD_S + stretch.energy_j) / 1e3
        rounds.append(_Round(now_s, energy_kj, model.accuracy, frozenset(modes)))
    return case.outcome(run, name, rounds, survey_s=0.0, waiting_s=0.0, training_s=now_s)


# --- tables and command ---------------------------------------------------------------------------------------------


def times(outcomes: Iterable[Outcome]) -> Table:
    """Return when and with how much energy each method reaches the accuracies, and where Wattfleet's time goes."""
    shown = Table(title="Simulated boards and time, all costs counted, medians over the seeds; –: not reached")
    _add_columns(
        shown,
        *("budget, W", "run", "method", "lower accuracy, s", "kJ", "higher accuracy, s", "kJ", "whole run, s"),
        *("of it survey, s", "waiting, s", "in rounds, s"),
    )
    for same in _alike(outcomes):
        names = ("low_s", "low_kj", "high_s", "high_kj", "total_s", "survey_s", "waiting_s", "training_s")
        shown.add_row(f"{same[0].budget_w:g}", same[0].run, same[0].method, *(_of(same, n, "{:,.0f}") for n in names))
    return shown


def devices(outcomes: Iterable[Outcome]) -> Table:
    """Return which boards train and measure, how exact plans are, and how the watts are used."""
    shown = Table(title="Boards, plans and watts, medians over the seeds")
    _add_columns(
        shown,
        *("budget, W", "run", "method", "boards that train", "boards a round", "replies lost", "fewest modes"),
        *("mean modes", "first plan: observed / planned", "later plans", "time with an idle board"),
        *("drawn then / budget", "reserved then / budget"),
    )
    for same in _alike(outcomes):
        shown.add_row(
            f"{same[0].budget_w:g}",
            same[0].run,
            same[0].method,
            f"{_of(same, 'trained', '{:.0f}')} of {same[0].boards:g}",
            _of(same, "per_round", "{:.1f}"),
            *(_of(same, name, "{:.0f}") for name in ("failures", "fewest_modes", "mean_modes")),
            *(_of(same, name, "{:.2f}") for name in ("first_plan_ratio", "plan_ratio")),
            *(_of(same, name, "{:.0%}") for name in ("idle_board_share", "used_share", "reserved_share")),
        )
    return shown


def _add_columns(shown: Table, *headings: str) -> None:
    for heading in headings:
        is_text = heading in ("run", "method", "against")
        shown.add_column(heading, justify="left" if is_text else "right", no_wrap=is_text)


def _alike(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Return the outcomes of all seeds, by budget, run and method."""

    def key(each: Outcome) -> tuple[float, int, str]:
        return each.budget_w, (NEW, AGAIN, OTHER).index(each.run), each.method

    return [list(same) for _, same in groupby(sorted(outcomes, key=key), key)]


def _of(same: Sequence[Outcome], name: str, form: str) -> str:
    return _text(_median([getattr(each, name) for each in same]), form)


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median, counting what was not reached as the worst; None if that is the median or nothing counts."""
    numbers = [float("inf") if each is None else float(each) for each in values]
    found = statistics.median(numbers) if numbers else float("inf")
    return None if found == float("inf") else found


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def gains(outcomes: Sequence[Outcome]) -> Table:
    """Return how much sooner Wattfleet reaches the accuracies than the baselines: the median of the seeds' ratios."""
    shown = Table(
        title="Baseline's seconds and kJ as a multiple of Wattfleet's: above 1, Wattfleet is better; 0: only the"
        " baseline reached it"
    )
    _add_columns(shown, "budget, W", "run", "against", "lower accuracy, s", "kJ", "higher accuracy, s", "kJ")
    for budget_w in sorted({each.budget_w for each in outcomes}):
        for run in (NEW, AGAIN, OTHER):
            for method in (PRESETS, PLAIN_FLOWER):
                cells = [
                    _text(_median(_ratios(outcomes, budget_w, run, method, name)), "{:.2f}")
                    for name in ("low_s", "low_kj", "high_s", "high_kj")
                ]
                shown.add_row(f"{budget_w:g}", run, method, *cells)
    return shown


def _ratios(outcomes: Sequence[Outcome], budget_w: float, run: str, method: str, name: str) -> list[float | None]:
    """Return a baseline's value as a multiple of Wattfleet's for each seed; None where it is unknown.

    A baseline that has not reached the accuracy counts with its whole run if this is a multiple of at least 1, which is
    a lower bound. Otherwise, nothing is known: its rounds ended before Wattfleet reached it.
    """
    of = {(each.run, each.method, each.seed): each for each in outcomes if each.budget_w == budget_w}
    found: list[float | None] = []
    for seed in sorted({each.seed for each in outcomes}):
        own = of.get((run, WATTFLEET, seed))
        other = of.get((OTHER if run == OTHER else NEW, method, seed))
        if own is None or other is None:
            continue
        its, mine = getattr(other, name), getattr(own, name)
        if mine is None:
            found.append(None if its is None else 0.0)
        else:
            ratio = (its or getattr(other, f"total_{name.rpartition('_')[2]}")) / mine
            found.append(ratio if its or ratio >= 1 else None)
    return found


def goals(outcomes: Sequence[Outcome]) -> Table:
    """Return the goals of the issue "the first run pays" with the measured values: the worst over the budgets."""
    budgets_w = sorted({each.budget_w for each in outcomes})

    def against_presets(run: str, names: Sequence[str]) -> list[float]:
        """The medians over the seeds, for each budget and accuracy; nothing where neither reaches the accuracy."""
        found = (_median(_ratios(outcomes, watts, run, PRESETS, name)) for watts in budgets_w for name in names)
        return [each for each in found if each is not None]

    def own(run: str, name: str) -> list[float]:
        """The medians over the seeds, for each budget."""
        same = [each for each in outcomes if (each.run, each.method) == (run, WATTFLEET)]
        found = [_median([getattr(each, name) for each in same if each.budget_w == watts]) for watts in budgets_w]
        return [each for each in found if each is not None]

    seconds, energy, count = ("low_s", "high_s"), ("low_kj", "high_kj"), outcomes[0].boards
    ratios = own(NEW, "first_plan_ratio")
    rows: list[tuple[str, str, list[float], str]] = [
        ("first run: time of presets / own time, worst budget", "at least 1", against_presets(NEW, seconds), "{:.2f}"),
        (
            "first run: energy of presets / own energy, worst budget",
            "at least 1",
            against_presets(NEW, energy),
            "{:.2f}",
        ),
        (
            "second run: time of presets / own time, worst budget",
            "at least 1.9",
            against_presets(AGAIN, seconds),
            "{:.2f}",
        ),
        ("boards that train in the first run", f"{count:g}", own(NEW, "trained"), "{:.0f}"),
        ("modes measured on each board by the end of the first run", "at least 20", own(NEW, "fewest_modes"), "{:.0f}"),
        ("modes measured on each board by the end of the second run", "50", own(AGAIN, "fewest_modes"), "{:.0f}"),
        ("first run: watts drawn while a board is idle", "at least 90 %", own(NEW, "used_share"), "{:.0%}"),
    ]
    shown = Table(title="Goals")
    for heading in ("goal", "wanted", "measured"):
        shown.add_column(heading, justify="left" if heading == "goal" else "right")
    for goal, wanted, values, form in rows:
        shown.add_row(goal, wanted, _text(min(values, default=None), form))
    middle = _text(statistics.median(against_presets(NEW, seconds) or [0.0]), "{:.2f}")
    shown.add_row("first run: time of presets / own time, median budget", "at least 1.3", middle)
    worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio), default=None)
    shown.add_row("first plan: observed / planned, worst budget", "0.8 to 1.25", _text(worst, "{:.2f}"))
    return shown


def measure(count: int, budgets_w: Sequence[float], seeds: Iterable[int], data: str, rounds: int) -> Iterator[Outcome]:
    """Run everything, and yield the outcomes, seed by seed.

    Args:
        count: number of boards, one of `SITES`.
        budgets_w: the site's budgets, W.
        seeds: the seeds.
        data: one of `TASKS`.
        rounds: rounds of each run.

    Raises:
        InvalidInputError: the data set is missing.
    """
    torch.set_num_threads(1)
    site, task = SITES[count], TASKS[data]()
    for seed in seeds:
        federation = Federation(task, count, seed)
        for budget_w in budgets_w:
            case = Case(site, budget_w, seed, task, rounds, federation)
            yield from baseline_runs(case)
            with tempfile.TemporaryDirectory() as folder:
                yield from wattfleet_runs(case, Path(folder))


def write(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the outcomes as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, [each.name for each in fields(Outcome)])
        rows.writeheader()
        rows.writerows(map(asdict, outcomes))


def read(path: Path) -> list[Outcome]:
    """Read outcomes that `write` has written."""
    texts = {each.name for each in fields(Outcome) if each.type == "str"}
    outcomes = []
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            values: dict[str, Any] = {
                name: text if name in texts else float(text) if text else None for name, text in row.items()
            }
            outcomes.append(Outcome(**values))
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, or 2 if the data set is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_run",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--boards", type=int, choices=sorted(SITES), default=6, help="set the number of boards")
    parser.add_argument(
        "--budgets", type=_watts, help="set the budgets in watts, separated by commas; None for the usual one"
    )
    parser.add_argument("--seeds", type=_seeds, default=range(1), help="set the number of seeds, or seeds such as 2-4")
    parser.add_argument("--data", choices=sorted(TASKS), default="digits", help="set what the devices learn")
    parser.add_argument("--rounds", type=int, default=20, help="set the number of rounds in every run")
    parser.add_argument("--out", type=Path, default=Path("out/first_run.csv"), help="write the rows to this file")
    parser.add_argument("--show", type=Path, nargs="+", help="show these earlier files without running anything")
    options = parser.parse_args(arguments)
    # Its own programs show what the parts of the product log; here, thousands of virtual minutes pass.
    logging.disable(logging.ERROR)
    console = Console(width=180)
    budgets_w = options.budgets or (SITES[options.boards].usual_w,)
    found = [each for path in options.show or () for each in read(path)]
    try:
        for each in () if found else measure(options.boards, budgets_w, options.seeds, options.data, options.rounds):
            found.append(each)
            write(found, options.out)
            ended = f"; it ended early: {each.problem}" if each.problem else ""
            console.print(
                f"{each.boards} boards, {each.data}, seed {each.seed}, {each.budget_w:g} W: {each.method}, {each.run},"
                f" {each.total_s:,.0f} s, computed after {time.process_time():,.0f} s{ended}"
            )
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return 2
    console.print(times(found), devices(found), gains(found), goals(found))
    return 0


def _seeds(text: str) -> range:
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(first))


def _watts(text: str) -> tuple[float, ...]:
    return tuple(float(watts) for watts in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
