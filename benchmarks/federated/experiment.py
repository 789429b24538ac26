"""Runs all methods at all budgets for one seed, with one fleet."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.federated.asynchronous import asynchronous, run_asynchronously
from benchmarks.federated.boards import BASE_BATCH, BoardFacts, Candidates, Unit, facts, open_board, units
from benchmarks.federated.efficiency import Measured, measured, no_measurement
from benchmarks.federated.figures import reached, run_figures, series
from benchmarks.federated.jobs import LOCAL_EPOCHS, OVERHEAD_S, training_s
from benchmarks.federated.learning import Federation
from benchmarks.federated.methods import FleetOffers, method
from benchmarks.federated.rounds import Member, Round, Station, run_rounds
from benchmarks.federated.server_steps import is_asynchronous
from benchmarks.federated.tasks import TASKS
from benchmarks.federated.tuning import MODES_ALONE, is_tuned
from edge_agent.runtime.readiness import parked_mode
from reference_models import load
from wattfleet.core.errors import InfeasibleBudgetError
from wattfleet.core.planning import Offer
from wattfleet.core.planning.policies import Progress

FLEET: Mapping[str, int] = {"agx-orin": 16, "orin-nano": 16, "orin-nx": 9, "xavier-agx": 9}
"""50 boards, in the default shares of `wattfleet simulate`."""


@dataclass(frozen=True)
class Experiment:
    """The settings of the experiment.

    Attributes:
        fleet: number of boards by kind; the same boards for every seed.
        modes: maximum number of modes that each agent measures.
        budgets_w: the site's budgets, W.
        methods: names from `METHODS`.
        count: number of devices wanted in a round.
        rounds: number of rounds, or of server steps, in every run.
        boards: folder in which the profiles of boards are stored.
        overhead_s: seconds of a round in addition to its training, the same for every method.
        half_devices: number of devices with which `progress` expects a round to make half of the possible progress.
        task: what the devices learn, one of `TASKS`.
        until_reached: whether runs end once they have reached the second accuracy.
    """

    boards: Path
    fleet: Mapping[str, int] = field(default_factory=lambda: dict(FLEET))
    modes: int = 50
    budgets_w: tuple[float, ...] = (300.0, 450.0, 600.0, 900.0, 1500.0)
    methods: tuple[str, ...] = MODES_ALONE
    count: int = 10
    rounds: int = 120
    overhead_s: float = OVERHEAD_S
    half_devices: float = Progress.half_devices
    task: str = "digits"
    until_reached: bool = False

    @property
    def units(self) -> list[Unit]:
        """The boards."""
        return units(self.fleet, self.modes)


def run_seed(experiment: Experiment, seed: int) -> dict[str, Any]:
    """Run every method at every budget; return `[method][budget]`.

    Args:
        experiment: the settings.
        seed: random seed of the data split, the training, the draws and the boards' noise.

    Returns:
        For each run its figures and series, or under `infeasible` the reason why it could not be run.
    """
    torch.set_num_threads(1)
    known = [facts(unit, experiment.boards) for unit in experiment.units]
    task = TASKS[experiment.task]()
    federation = Federation(task, len(known), seed)
    shown = proxied(experiment)
    minibatches = minibatches_per_epoch(federation.samples)
    fleet = _fleet(experiment.units, known, minibatches)
    offers = _offers(experiment.units, known, minibatches, federation.samples, shown)
    deadline_s = statistics.median(float(training_s(each.front, LOCAL_EPOCHS).min()) for each in offers.predicted)

    progress = Progress(half_devices=experiment.half_devices, overhead_s=experiment.overhead_s)

    def enough(rounds: Sequence[Round]) -> bool:
        return experiment.until_reached and reached([one.accuracy for one in rounds], task.targets[1]) is not None

    def rounds_of(name: str, budget_w: float) -> list[Round]:
        stations = [Station(member, f"{seed}/{name}/{budget_w:g}", shown.batches) for member in fleet]
        if is_asynchronous(name):
            planned = asynchronous(name, offers, budget_w, progress)
            return run_asynchronously(planned, fleet, stations, federation, experiment.rounds, enough)
        filled = method(name, offers, experiment.count, deadline_s, budget_w, seed, progress, shown.epochs)
        return run_rounds(filled, fleet, stations, federation, experiment.rounds, shown.batches, enough)

    found: dict[str, Any] = {"deadline_s": deadline_s, "runs": {}}
    idle_w = sum(member.idle_w for member in fleet)
    for name in experiment.methods:
        overhead_s = None if is_asynchronous(name) else experiment.overhead_s
        found["runs"][name] = {}
        for budget_w in experiment.budgets_w:
            try:
                rounds = rounds_of(name, budget_w)
            except InfeasibleBudgetError as error:
                found["runs"][name][f"{budget_w:g}"] = {"infeasible": str(error)}
                continue
            found["runs"][name][f"{budget_w:g}"] = {
                **run_figures(rounds, len(fleet), idle_w, budget_w, overhead_s, task.targets),
                "series": series(rounds, overhead_s),
            }
    return found


def proxied(experiment: Experiment) -> Measured:
    """Return the measurements on the task's proxy, if a method uses them."""
    return measured(experiment.task, experiment.boards) if any(map(is_tuned, experiment.methods)) else no_measurement()


def minibatches_per_epoch(samples: Sequence[int]) -> list[int]:
    """Return each device's share of the reference workload's epoch, in minibatches, as in `wattfleet simulate`."""
    epoch = load("agx_orin_resnet18").details.workload.minibatches_per_epoch
    return [max(1, round(epoch * count / sum(samples))) for count in samples]


def _fleet(boards: Sequence[Unit], known: Sequence[BoardFacts], minibatches: Sequence[int]) -> list[Member]:
    opened = [open_board(unit) for unit in boards]
    modes = {kind: parked_mode(board) for kind, board in {board.board_kind: board for board in opened}.items()}
    return [
        Member(unit.device_id, board, modes[unit.kind], each.idle_w, count)
        for unit, board, each, count in zip(boards, opened, known, minibatches, strict=True)
    ]


def _offers(
    boards: Sequence[Unit],
    known: Sequence[BoardFacts],
    minibatches: Sequence[int],
    samples: Sequence[int],
    shown: Measured,
) -> FleetOffers:
    def offers(candidates: Sequence[Candidates]) -> list[Offer]:
        return [
            Offer(unit.device_id, modes.front(count), each.idle_w)
            for unit, each, modes, count in zip(boards, known, candidates, minibatches, strict=True)
        ]

    def tuned(candidates: Sequence[Candidates]) -> list[Offer]:
        return [
            Offer(unit.device_id, modes.batch_front(count * BASE_BATCH, most, shown.batches), each.idle_w)
            for unit, each, modes, count, most in zip(boards, known, candidates, minibatches, samples, strict=True)
        ]

    return FleetOffers(
        predicted=offers([each.predicted for each in known]),
        true=offers([each.true for each in known]),
        presets=offers([each.presets for each in known]),
        maxn=offers([each.maxn for each in known]),
        predicted_batches=tuned([each.predicted for each in known]),
        true_batches=tuned([each.true for each in known]),
    )
