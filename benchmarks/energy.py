"""Run federated learning on 50 simulated boards until a global energy limit is used up: accuracy and time by method.

    python -m benchmarks.energy [--limits-kj 10,25,60] [--seeds 2] [--rounds 15] [--fleet KIND:COUNT,...] [--jobs 2]
        [--out DIR] [--show FILE] [--json]

What counts is the energy of trainings above the idle power of their boards, as in a run's energy budget. Boards are
simulated and time is virtual. Plans, and the training of a small network on scikit-learn's digits, split by a Dirichlet
draw, are real. Predictions are drawn: each board's true values with one error for its times and one for its watts above
idle, which are stated as the predictions' uncertainty. No watts are limited.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor as Processes
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.federated.boards import (
    BASE_BATCH,
    Board,
    BoardFacts,
    Candidates,
    Unit,
    facts,
    is_kept,
    keep,
    open_board,
    truth,
    units,
    with_batch,
)
from benchmarks.federated.experiment import FLEET, minibatches_per_epoch
from benchmarks.federated.jobs import LOCAL_EPOCHS, OVERHEAD_S, Job, training_s
from benchmarks.federated.learning import Federation, LocalWork, Model, Trained
from benchmarks.federated.tasks import TASKS
from edge_agent.runtime.readiness import parked_mode
from wattfleet.core.errors import EnergySpentError
from wattfleet.core.modes import PowerMode, board_named, modes_to_array, nearest_mode
from wattfleet.core.planning import Allowance, Assignment, EnergyLimit, History, Offer, Participation, plan_round
from wattfleet.core.planning.policies import Oort, Policy, Progress, RandomK
from wattfleet.core.prediction import Prediction, warmup_s

Values = NDArray[np.float64]

METHODS: Mapping[str, str] = {
    "wattfleet": "an energy budget and a number of rounds, policy `progress`",
    "wattfleet-open": "the same without a number of rounds",
    "fedjoule": "FedJoule's selection of any number of boards, with the same predictions and number of rounds",
    "fedjoule-10": "the same, of at most 10 boards",
    "flower": "a uniform draw of 10 boards at MAXN, until the energy is used up",
    "oort": "Oort's selection of 10 boards at MAXN, until the energy is used up",
    "presets": "the same draw, each board in the preset that truly takes the least energy",
    "oracle": "`wattfleet` that knows the true times and watts",
    "oracle-open": "`wattfleet-open` that knows the true times and watts",
    "exhaustive": "knows the true times, watts and the test data, and tries all sets of boards; up to 6 boards",
}
"""The compared methods by name."""

_COMPARED = ("fedjoule", "fedjoule-10", "flower", "oort", "presets")
_OWN = ("wattfleet", "wattfleet-open")
_COUNT = 10
_PERMUTATIONS = 10
_NO_WATT_LIMIT = Allowance.of_site(1e6)
_TIME_LOG_SD, _ABOVE_IDLE_LOG_SD = 0.08, 0.08
"""Errors of times, and of the watts above idle: about what an agent states after it has measured ten modes."""


# --- Methods ----------------------------------------------------------------------------------------------------------


class EnergyMethod(Protocol):
    """A method that selects the devices and modes of a round from the energy that is left."""

    def plan(self, server_round: int, history: History, model: Model, left_j: float) -> Sequence[Job]:
        """Return the jobs of a round.

        Raises:
            EnergySpentError: no device can train with what is left.
        """
        ...


@dataclass(frozen=True)
class Budgeted:
    """Wattfleet's planner with an energy budget.

    Attributes:
        offers: the fronts that plans are made from.
        limit_j: joules of the budget.
        rounds: number of rounds that the energy should last for; 0 without a number.
        policy: the client-selection policy.
    """

    offers: Sequence[Offer]
    limit_j: float
    rounds: int
    policy: Policy

    def plan(self, server_round: int, history: History, model: Model, left_j: float) -> Sequence[Job]:
        """Return the jobs of the plan."""
        if self.rounds and server_round > self.rounds:
            raise EnergySpentError("all rounds were trained")
        energy = EnergyLimit(left_j, max(0, self.rounds - server_round + 1), self.limit_j - left_j)
        found = plan_round(self.offers, self.policy, _NO_WATT_LIMIT, LOCAL_EPOCHS, server_round, history, energy=energy)
        return [Job(each, each.epochs) for each in found.assignments]


@dataclass(frozen=True)
class Unlimited:
    """A policy that knows of no energy, with the modes of the planner: with MAXN's fronts, the highest modes."""

    offers: Sequence[Offer]
    policy: Policy

    def plan(self, server_round: int, history: History, model: Model, left_j: float) -> Sequence[Job]:
        """Return the jobs of the plan."""
        found = plan_round(self.offers, self.policy, _NO_WATT_LIMIT, LOCAL_EPOCHS, server_round, history)
        return [Job(each, each.epochs) for each in found.assignments]


@dataclass(frozen=True)
class LeastEnergyPresets:
    """A uniform draw of devices, each in the point of its front with the least energy.

    Attributes:
        offers: the presets' true fronts.
        seed: seed of the draw, the same as that of the policy `random`.
    """

    offers: Sequence[Offer]
    seed: int

    def plan(self, server_round: int, history: History, model: Model, left_j: float) -> Sequence[Job]:
        """Return the jobs of the drawn devices."""
        number = range(len(self.offers))
        drawn = sorted(random.Random(f"{self.seed}/{server_round}").sample(number, min(_COUNT, len(number))))
        return [job_at(self.offers[k], int(expected_j(self.offers[k]).argmin())) for k in drawn]


class FedJoule:
    """FedJoule's client selection within a global energy limit.

    Source: Banerjee, Chandrashekar, Eswar and Simmhan, "Federated Learning within Global Energy Budget over
    Heterogeneous Edge Accelerators" (Euro-Par 2025, arXiv:2506.10413). Its abstract states what is implemented: a
    bi-level integer program that selects clients with the most accuracy by approximate Shapley values within the
    energy, and then reduces the time, with models that predict energy and time. The outer program takes the clients
    with the most value whose least energies fit into the round's even share. The inner one takes the modes with which
    these clients end the round soonest within the same joules. Both are solved exactly.

    The abstract leaves open how the values are approximated. Here they are those of GTG-Shapley (Liu et al., ACM TIST
    2022): permutations of a round's updates, truncated, judged by the loss on the server's own data. A client's value
    is the moving average of its rounds, and clients that have not trained count as the best one known.

    Args:
        offers: the fronts as the agents predict them.
        rounds: number of rounds that the energy should last for.
        federation: trains and merges updates.
        judge: returns the loss of a network on the server's own data.
        seed: seed of the permutations.
        most: maximum number of clients in a round.
    """

    def __init__(
        self,
        offers: Sequence[Offer],
        rounds: int,
        federation: Federation,
        judge: Callable[[Mapping[str, torch.Tensor]], float],
        seed: int,
        most: int,
    ) -> None:
        self._most = most
        self._offers, self._rounds, self._federation, self._judge = offers, rounds, federation, judge
        self._random = random.Random(seed)
        self._number = {offer.device_id: k for k, offer in enumerate(offers)}
        self._value: dict[int, float] = {}
        self._before: tuple[Model, dict[int, LocalWork]] | None = None

    def plan(self, server_round: int, history: History, model: Model, left_j: float) -> Sequence[Job]:
        """Return the jobs of the round."""
        if self._before is not None:
            self._learn(*self._before)
        if server_round > self._rounds:
            raise EnergySpentError("all rounds were trained")
        share_j = left_j / (self._rounds - server_round + 1)
        jobs = self._selected(share_j, self._most) or self._selected(left_j, most=1)
        if not jobs:
            raise EnergySpentError("no client's training fits into what is left")
        self._before = model, {self._number[job.device_id]: LocalWork(job.epochs) for job in jobs}
        return jobs

    def _selected(self, within_j: float, most: int) -> Sequence[Job]:
        costs, times = [expected_j(offer) for offer in self._offers], [training_time(offer) for offer in self._offers]
        least = np.array([each.min() for each in costs])
        best = max(self._value.values(), default=1.0)
        value = np.array([self._value.get(k, best) for k in range(len(self._offers))])
        # Values at or below 0 are clients that make the model worse. If all are, the least bad ones train.
        value = value - min(0.0, value.max()) + 1e-9
        chosen = _knapsack(value, least, within_j, most)
        if not len(chosen):
            return []
        limits = np.unique(np.concatenate([times[k] for k in chosen]))
        low, high = 0, len(limits) - 1
        while low < high:  # the soonest end whose least energy fits
            middle = (low + high) // 2
            needed = sum(float(costs[k][times[k] <= limits[middle]].min(initial=np.inf)) for k in chosen)
            low, high = (low, middle) if needed <= within_j else (middle + 1, high)
        return [
            job_at(self._offers[k], int(np.where(times[k] <= limits[low], costs[k], np.inf).argmin())) for k in chosen
        ]

    def _learn(self, model: Model, work: Mapping[int, LocalWork]) -> None:
        updates = self._federation.updates(model, work, model.server_round)
        values = shapley_values(
            model.parameters, updates, self._federation.samples, self._judge, self._random, _PERMUTATIONS
        )
        for client, value in values.items():
            self._value[client] = 0.5 * (self._value.get(client, value) + value)


def shapley_values(
    start: Mapping[str, torch.Tensor],
    updates: Mapping[int, Trained],
    samples: Sequence[int],
    judge: Callable[[Mapping[str, torch.Tensor]], float],
    draw: random.Random,
    permutations: int,
    tolerance: float = 1e-3,
) -> dict[int, float]:
    """Approximate Shapley values of the updates of a round, without further training.

    Args:
        start: the model before the round.
        updates: each client's trained parameters.
        samples: samples of all clients, which weight the updates.
        judge: returns the loss of a network; the value of a set is how much it lowers the loss.
        draw: draws the permutations.
        permutations: number of permutations; each begins with another client, as long as there are more of them.
        tolerance: a permutation ends once the loss differs by at most this share from that of all clients.
    """
    clients = sorted(updates)

    def loss(chosen: Sequence[int]) -> float:
        if not chosen:
            return judge(start)
        total = sum(samples[client] for client in chosen)
        weighted = [(updates[client].parameters, samples[client] / total) for client in chosen]
        nothing = torch.zeros(())
        return judge({name: sum((share * each[name] for each, share in weighted), nothing) for name in start})

    known: dict[frozenset[int], float] = {}

    def loss_of(chosen: Sequence[int]) -> float:
        key = frozenset(chosen)
        if key not in known:
            known[key] = loss(chosen)
        return known[key]

    nobody, everybody = loss_of([]), loss_of(clients)
    values = dict.fromkeys(clients, 0.0)
    for number in range(permutations):
        first = clients[number % len(clients)]
        others = [client for client in clients if client != first]
        order = [first, *draw.sample(others, len(others))]
        before = nobody
        for place, client in enumerate(order):
            if abs(before - everybody) <= tolerance * abs(nobody) and place:
                break
            after = loss_of(order[: place + 1])
            values[client] += (before - after) / permutations
            before = after
    return values


def _knapsack(value: Values, cost: Values, within: float, most: int) -> NDArray[np.intp]:
    """`[k]` indices of the at most `most` items with the most value whose costs fit; exact."""
    rows = np.vstack([cost, np.ones_like(cost)])
    found = milp(
        -value / value.max(),
        constraints=LinearConstraint(rows, ub=[within, most]),
        integrality=np.ones(len(value), dtype=np.int64),
        bounds=Bounds(0, 1),
    )
    return np.flatnonzero(found.x > 0.5) if found.x is not None else np.empty(0, dtype=np.intp)


@dataclass(frozen=True)
class Exhaustive:
    """The set of a small fleet that truly lowers the loss most per joule, each board in its true least energy.

    Attributes:
        offers: the true fronts.
        federation: trains and merges updates.
        judge: returns the loss of a network on the test data.
    """

    offers: Sequence[Offer]
    federation: Federation
    judge: Callable[[Mapping[str, torch.Tensor]], float]

    def plan(self, server_round: int, history: History, model: Model, left_j: float) -> Sequence[Job]:
        """Return the jobs of the best set."""
        least = [int(expected_j(offer).argmin()) for offer in self.offers]
        cost = [float(expected_j(offer).min()) for offer in self.offers]
        now = self.judge(model.parameters)
        best: tuple[float, tuple[int, ...]] = (-np.inf, ())
        for size in range(1, len(self.offers) + 1):
            for chosen in itertools.combinations(range(len(self.offers)), size):
                needed_j = sum(cost[k] for k in chosen)
                if needed_j <= left_j:
                    after = self.federation.after(model, {k: LocalWork(LOCAL_EPOCHS) for k in chosen})
                    best = max(best, ((now - self.judge(after.parameters)) / needed_j, chosen))
        if not best[1]:
            raise EnergySpentError("no board's training fits into what is left")
        return [job_at(self.offers[k], least[k]) for k in best[1]]


def training_time(offer: Offer) -> Values:
    """`[k]` median seconds of a training at each point of a front."""
    return training_s(offer.front, LOCAL_EPOCHS)


def expected_j(offer: Offer) -> Values:
    """`[k]` median joules above idle of a training at each point of a front."""
    return np.asarray(np.maximum(offer.front.power_w - offer.idle_w, 0.0) * training_time(offer))


def job_at(offer: Offer, point: int) -> Job:
    """A device's training at a point of its front."""
    front = offer.front
    epoch_s, power_w, limit_w, warmup_s = (
        float(values[point]) for values in (front.epoch_s, front.power_w, front.planned_w, front.warmup_s)
    )
    return Job(Assignment(offer.device_id, front.mode(point), epoch_s, power_w, limit_w, warmup_s))


# --- Runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """The settings of the comparison.

    Attributes:
        boards: folder in which the profiles of boards are stored.
        limits_kj: the global energy limits, kJ.
        fleet: number of boards by kind.
        rounds: number of rounds of the methods that state one.
        methods: names from `METHODS`.
        task: what the devices learn, one of `TASKS`.
    """

    boards: Path
    limits_kj: tuple[float, ...] = (10.0, 25.0, 60.0)
    fleet: Mapping[str, int] = field(default_factory=lambda: dict(FLEET))
    rounds: int = 15
    methods: tuple[str, ...] = tuple(name for name in METHODS if name != "exhaustive")
    task: str = "digits"


@dataclass(frozen=True)
class EnergyRun:
    """A run until its energy was used up.

    Attributes:
        accuracy: accuracy on the test data after each round.
        at_s: seconds from the start to the end of each round.
        spent_j: joules that were drawn after each round.
    """

    accuracy: list[float]
    at_s: list[float]
    spent_j: list[float]

    def figures(self, limit_j: float, targets: Sequence[float]) -> dict[str, Any]:
        """Return the run's figures; the accuracy is the mean of the last three rounds."""
        reached = (k for k in range(len(self.accuracy)) if _last(self.accuracy[: k + 1]) >= targets[0] and k >= 2)
        first = next(reached, None)
        return {
            "accuracy": _last(self.accuracy) if self.accuracy else 0.0,
            "rounds": len(self.accuracy),
            "time_s": self.at_s[-1] if self.at_s else 0.0,
            "used_share": self.spent_j[-1] / limit_j if self.spent_j else 0.0,
            "target_s": None if first is None else self.at_s[first],
            "target_kj": None if first is None else self.spent_j[first] / 1e3,
        }


def _last(accuracy: Sequence[float]) -> float:
    return statistics.mean(accuracy[-3:])


@dataclass(frozen=True)
class TrueBoard:
    """A board whose trainings take their true mean time and power.

    Attributes:
        board: the simulated board.
        idle_w: watts while parked.
        minibatches: minibatches in an epoch over its own data.
        known: the times and watts that were computed so far, by mode.
    """

    board: Board
    idle_w: float
    minibatches: int
    known: dict[PowerMode, tuple[float, float, float]] = field(default_factory=dict)

    def train(self, job: Job) -> tuple[float, float]:
        """Return the seconds of a training with its warm-up, and its joules above idle."""
        mode = job.assignment.mode
        if mode not in self.known:
            modes = modes_to_array([mode])
            minibatch_ms, power_mw = self.board.mean_truth(modes, with_batch(BASE_BATCH))
            first_s = float(warmup_s(modes, minibatch_ms, self.board.mean_first_gcycles)[0])
            self.known[mode] = float(minibatch_ms[0]) / 1e3, float(power_mw[0]) / 1e3, first_s
        minibatch_s, watts, first_s = self.known[mode]
        seconds = first_s + job.epochs * self.minibatches * minibatch_s
        return seconds, max(0.0, watts - self.idle_w) * seconds


def run_until_spent(
    method: EnergyMethod, fleet: Mapping[str, TrueBoard], federation: Federation, limit_j: float
) -> EnergyRun:
    """Run rounds until a limit is used up. A round that would exceed it does not count, and ends the run.

    Args:
        method: selects devices and modes.
        fleet: the devices by id, in the order of the federation's.
        federation: the devices' data, and the training of models.
        limit_j: the most joules of all trainings, above idle.
    """
    number = {device_id: k for k, device_id in enumerate(fleet)}
    model, history, run, spent_j, now_s = federation.start, History(), EnergyRun([], [], []), 0.0, 0.0
    for server_round in itertools.count(1):
        try:
            jobs = method.plan(server_round, history, model, limit_j - spent_j)
        except EnergySpentError:
            return run
        trained = [fleet[job.device_id].train(job) for job in jobs]
        spent_j += sum(joules for _, joules in trained)
        if spent_j > limit_j:
            return run
        now_s += max(seconds for seconds, _ in trained) + OVERHEAD_S
        work = {number[job.device_id]: LocalWork(job.epochs) for job in jobs}
        model = federation.after(model, work)
        told = {
            job.device_id: Participation(
                num_examples=federation.samples[number[job.device_id]], loss=model.losses[number[job.device_id]]
            )
            for job in jobs
        }
        history = history.after(server_round, told)
        run.accuracy.append(model.accuracy)
        run.at_s.append(now_s)
        run.spent_j.append(spent_j)
    raise AssertionError("rounds are counted without end")


def drawn_facts(unit: Unit, folder: Path) -> BoardFacts:
    """Return a board's true values and drawn predictions from the folder; compute and store them if they are missing.

    Args:
        unit: the board, of which no mode is measured.
        folder: the folder.
    """
    if not is_kept(unit, folder):
        device = open_board(unit)
        known = board_named(device.board_kind)
        true, presets, maxn = (
            truth(device, modes, (BASE_BATCH,))
            for modes in (
                device.modes,
                modes_to_array([nearest_mode(device.modes, mode) for mode in known.presets.values()]),
                modes_to_array([known.space.highest]),
            )
        )
        idle_w = device.load(parked_mode(device)).idle_mw / 1e3
        time_error, power_error, first_error = np.random.default_rng([unit.seed, len(unit.kind)]).standard_normal(3)
        above_mw = np.maximum(true.prediction.power_mw - 1e3 * idle_w, 0.0)
        power_mw = true.prediction.power_mw + above_mw * np.expm1(_ABOVE_IDLE_LOG_SD * power_error)
        prediction = Prediction(
            true.prediction.minibatch_ms * np.exp(_TIME_LOG_SD * time_error),
            power_mw,
            np.full(len(power_mw), _TIME_LOG_SD),
            _ABOVE_IDLE_LOG_SD * above_mw / power_mw,
        )
        first_gcycles = true.first_gcycles * float(np.exp(_TIME_LOG_SD * first_error))
        predicted = Candidates(true.modes, true.batch, prediction, first_gcycles)
        keep(unit, BoardFacts(idle_w, 0, predicted, true, presets, maxn), folder)
    return facts(unit, folder)


def run_seed(experiment: Experiment, seed: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Run every method within every limit; return `[method][limit in kJ]` figures.

    Args:
        experiment: the settings.
        seed: random seed of the data split, the training and the draws.
    """
    torch.set_num_threads(1)
    boards = units(experiment.fleet, 0)
    known = [drawn_facts(unit, experiment.boards) for unit in boards]
    task = TASKS[experiment.task]()
    federation = Federation(task, len(known), seed)
    minibatches = minibatches_per_epoch(federation.samples)
    fleet = {
        unit.device_id: TrueBoard(open_board(unit), each.idle_w, count)
        for unit, each, count in zip(boards, known, minibatches, strict=True)
    }
    offers = {
        kind: [
            Offer(unit.device_id, getattr(each, kind).front(count), each.idle_w)
            for unit, each, count in zip(boards, known, minibatches, strict=True)
        ]
        for kind in ("predicted", "true", "presets", "maxn")
    }
    own = np.random.default_rng(seed).permutation(len(task.train[1]))[:200]
    held = task.train[0][own], task.train[1][own]

    def loss(of: tuple[torch.Tensor, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> float:
        with torch.no_grad():
            logits = task.logits({name: value[None] for name, value in parameters.items()}, of[0][None])
        return float(torch.nn.functional.cross_entropy(logits[0], of[1]))

    def fedjoule(most: int) -> EnergyMethod:
        return FedJoule(offers["predicted"], experiment.rounds, federation, partial(loss, held), seed, most)

    def method(name: str, limit_j: float) -> EnergyMethod:
        progress, rounds = Progress(overhead_s=OVERHEAD_S), experiment.rounds
        made: Mapping[str, Callable[[], EnergyMethod]] = {
            "wattfleet": lambda: Budgeted(offers["predicted"], limit_j, rounds, progress),
            "wattfleet-open": lambda: Budgeted(offers["predicted"], limit_j, 0, progress),
            "fedjoule": lambda: fedjoule(len(boards)),
            "fedjoule-10": lambda: fedjoule(_COUNT),
            "flower": lambda: Unlimited(offers["maxn"], RandomK(_COUNT, seed)),
            "oort": lambda: Unlimited(offers["maxn"], Oort(_COUNT, seed=seed)),
            "presets": lambda: LeastEnergyPresets(offers["presets"], seed),
            "oracle": lambda: Budgeted(offers["true"], limit_j, rounds, progress),
            "oracle-open": lambda: Budgeted(offers["true"], limit_j, 0, progress),
            "exhaustive": lambda: Exhaustive(offers["true"], federation, partial(loss, task.test)),
        }
        return made[name]()

    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in experiment.methods:
        found[name] = {}
        for limit_kj in experiment.limits_kj:
            run = run_until_spent(method(name, limit_kj * 1e3), fleet, federation, limit_kj * 1e3)
            found[name][f"{limit_kj:g}"] = run.figures(limit_kj * 1e3, task.targets)
    return found


# --- Result -----------------------------------------------------------------------------------------------------------


def result_of(experiment: Experiment, seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON document: every seed's figures, and by how much the best compared method was beaten."""
    limits = [f"{limit:g}" for limit in experiment.limits_kj]
    goals = {}
    for limit in limits:
        means = {name: statistics.mean(seed[name][limit]["accuracy"] for seed in seeds) for name in experiment.methods}
        compared = {name: means[name] for name in _COMPARED if name in means}
        own = {name: means[name] for name in _OWN if name in means}
        if compared and own:
            best = max(compared, key=lambda name: compared[name])
            goals[limit] = {
                "best_compared": best,
                **{name: accuracy - compared[best] for name, accuracy in own.items()},
            }
    return {
        "provenance": "simulated",
        "fleet": dict(experiment.fleet),
        "rounds": experiment.rounds,
        "seeds": len(seeds),
        "limits_kj": limits,
        "target": TASKS[experiment.task]().targets[0],
        "runs": {
            name: {limit: [seed[name][limit] for seed in seeds] for limit in limits} for name in experiment.methods
        },
        "accuracy_above_best_compared": goals,
    }


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return a table of the means for each limit."""
    found = []
    for limit in result["limits_kj"]:
        table = Table(title=f"{limit} kJ above idle, {result['provenance']}, means of {result['seeds']} seeds")
        table.add_column("method")
        for title in ("accuracy, %", "rounds", "time, s", "used, %", f"s to {result['target']:.0%}", "kJ to it"):
            table.add_column(title, justify="right")
        for name, runs in result["runs"].items():
            each = {key: [run[key] for run in runs[limit]] for key in runs[limit][0]}
            never = any(value is None for value in each["target_s"])
            table.add_row(
                name,
                f"{100 * statistics.mean(each['accuracy']):.1f}",
                f"{statistics.mean(each['rounds']):.0f}",
                f"{statistics.mean(each['time_s']):,.0f}",
                f"{100 * statistics.mean(each['used_share']):.0f}",
                "-" if never else f"{statistics.mean(each['target_s']):,.0f}",
                "-" if never else f"{statistics.mean(each['target_kj']):.1f}",
            )
        if goal := result["accuracy_above_best_compared"].get(limit):
            above = ", ".join(f"{name} {100 * goal[name]:+.1f}" for name in _OWN if name in goal)
            table.caption = f"accuracy above the best compared method ({goal['best_compared']}), points: {above}"
        found.append(table)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison, or show an earlier result; return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.energy",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--limits-kj", default="10,25,60", help="set the energy limits in kJ, separated by commas")
    parser.add_argument("--fleet", default=",".join(f"{kind}:{n}" for kind, n in FLEET.items()), help="set the boards")
    parser.add_argument("--rounds", type=int, default=Experiment.rounds, help="set the rounds that methods spread over")
    parser.add_argument("--methods", default=",".join(Experiment.methods), help="run these methods")
    parser.add_argument("--task", choices=sorted(TASKS), default=Experiment.task, help="set what the devices learn")
    parser.add_argument("--seeds", type=int, default=2, help="set the number of seeds")
    parser.add_argument("--jobs", type=int, default=2, help="set the number of processes")
    parser.add_argument("--out", type=Path, default=Path("out/energy"), help="write profiles and result to this folder")
    parser.add_argument("--show", type=Path, help="show this earlier result without running anything")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    if options.show is None:
        pairs = (part.partition(":") for part in options.fleet.split(","))
        experiment = Experiment(
            boards=options.out / "boards",
            limits_kj=tuple(float(each) for each in options.limits_kj.split(",")),
            fleet={kind: int(count) for kind, _, count in pairs},
            rounds=options.rounds,
            methods=tuple(options.methods.split(",")),
            task=options.task,
        )
        if unknown := sorted(set(experiment.methods) - set(METHODS)):
            parser.error(f"unknown methods: {', '.join(unknown)}; choose from {', '.join(METHODS)}")
        with Processes(options.jobs) as processes:
            list(processes.map(partial(drawn_facts, folder=experiment.boards), units(experiment.fleet, 0)))
            result = result_of(experiment, list(processes.map(partial(run_seed, experiment), range(options.seeds))))
        (options.out / "result.json").write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
    else:
        result = json.loads(options.show.read_text(encoding="utf-8"))
    if options.json:
        print(json.dumps(result, indent=1, allow_nan=False))
    else:
        console = Console()
        for table in tables(result):
            console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
