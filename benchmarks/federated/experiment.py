"""All methods at all budgets for one seed, over one fleet."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.federated.boards import BoardFacts, Candidates, Unit, facts, open_board, units
from benchmarks.federated.figures import run_figures, series
from benchmarks.federated.learning import Federation
from benchmarks.federated.methods import METHODS, OVERHEAD_S, FleetOffers, method, training_s
from benchmarks.federated.rounds import LOCAL_EPOCHS, Member, run_rounds
from edge_agent.runtime.readiness import parked_mode
from reference_models import load
from wattfleet.errors import InfeasibleBudgetError
from wattfleet.planning import Offer

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
        rounds: number of rounds in every run.
        boards: folder where profiled boards are kept.
        overhead_s: seconds of a round besides its training, of every method alike.
    """

    boards: Path
    fleet: Mapping[str, int] = field(default_factory=lambda: dict(FLEET))
    modes: int = 50
    budgets_w: tuple[float, ...] = (300.0, 450.0, 600.0, 900.0, 1500.0)
    methods: tuple[str, ...] = tuple(METHODS)
    count: int = 10
    rounds: int = 120
    overhead_s: float = OVERHEAD_S

    @property
    def units(self) -> list[Unit]:
        """The boards."""
        return units(self.fleet, self.modes)


def run_seed(experiment: Experiment, seed: int) -> dict[str, Any]:
    """Every method at every budget: `[method][budget]`.

    Args:
        experiment: what is run.
        seed: of the data split, the training, the draws and the boards' noise.

    Returns:
        For each the figures and their series, or under `infeasible` why it could not be run.
    """
    torch.set_num_threads(1)
    known = [facts(unit, experiment.boards) for unit in experiment.units]
    federation = Federation(len(known), LOCAL_EPOCHS, seed)
    minibatches = minibatches_per_epoch(federation.samples)
    fleet = _fleet(experiment.units, known, minibatches)
    offers = _offers(experiment.units, known, minibatches)
    deadline_s = statistics.median(float(training_s(each.front, LOCAL_EPOCHS).min()) for each in offers.predicted)
    found: dict[str, Any] = {"deadline_s": deadline_s, "runs": {}}
    for name in experiment.methods:
        found["runs"][name] = {}
        for budget_w in experiment.budgets_w:
            filled = method(
                name, offers, experiment.count, LOCAL_EPOCHS, deadline_s, budget_w, seed, experiment.overhead_s
            )
            noise = f"{seed}/{name}/{budget_w:g}"
            try:
                rounds = run_rounds(filled, fleet, federation, experiment.rounds, noise)
            except InfeasibleBudgetError as error:
                found["runs"][name][f"{budget_w:g}"] = {"infeasible": str(error)}
                continue
            idle_w = sum(member.idle_w for member in fleet)
            found["runs"][name][f"{budget_w:g}"] = {
                **run_figures(rounds, len(fleet), idle_w, budget_w, experiment.overhead_s),
                "series": series(rounds, experiment.overhead_s),
            }
    return found


def minibatches_per_epoch(samples: Sequence[int]) -> list[int]:
    """Each device's share of the reference workload's epoch, as in `wattfleet simulate`."""
    epoch = load("agx_orin_resnet18").details.workload.minibatches_per_epoch
    return [max(1, round(epoch * count / sum(samples))) for count in samples]


def _fleet(boards: Sequence[Unit], known: Sequence[BoardFacts], minibatches: Sequence[int]) -> list[Member]:
    opened = [open_board(unit) for unit in boards]
    modes = {kind: parked_mode(board) for kind, board in {board.board_kind: board for board in opened}.items()}
    return [
        Member(unit.device_id, board, modes[unit.kind], each.idle_w, count)
        for unit, board, each, count in zip(boards, opened, known, minibatches, strict=True)
    ]


def _offers(boards: Sequence[Unit], known: Sequence[BoardFacts], minibatches: Sequence[int]) -> FleetOffers:
    def offers(candidates: Sequence[Candidates]) -> list[Offer]:
        return [
            Offer(unit.device_id, modes.front(count), each.idle_w)
            for unit, each, modes, count in zip(boards, known, candidates, minibatches, strict=True)
        ]

    return FleetOffers(
        predicted=offers([each.predicted for each in known]),
        true=offers([each.true for each in known]),
        presets=offers([each.presets for each in known]),
        maxn=offers([each.maxn for each in known]),
    )
