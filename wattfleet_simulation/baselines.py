"""Calculates what a round would have cost without Wattfleet, from the boards' true time and power."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from edge_agent.devices.mode_names import presets_of
from edge_agent.devices.virtual.virtual_board import VirtualBoard
from wattfleet.choosing import Front, predicted_front
from wattfleet.errors import InfeasibleBudgetError
from wattfleet.modes import ModeArray, Workload, WorkloadFacts, array_to_modes
from wattfleet.planning import Allowance, Offer, RoundPlan, plan_round
from wattfleet.planning.policies import FastestK
from wattfleet.prediction import Prediction
from wattfleet_simulation.digits_app.task import minibatches_per_epoch, sample_counts
from wattfleet_simulation.settings import SimulatedApp

_DRAWS = 200

PLAIN_FLOWER = "plain Flower"
MAXN = "the same devices in MAXN"
PRESETS = "the same devices in presets"


@dataclass(frozen=True)
class TrueBoard:
    """The true time and power of a board with a workload, as opposed to the predicted ones.

    Attributes:
        board: the board.
        workload: the workload that it trains.
        minibatches_per_epoch: minibatches in one local epoch.
        idle_w: watts while it idles.
    """

    board: VirtualBoard
    workload: Workload
    minibatches_per_epoch: int
    idle_w: float

    @cached_property
    def best(self) -> Front:
        """Return the Pareto front of the board's whole mode space."""
        return self._front(self.board.modes)

    @cached_property
    def highest(self) -> Front:
        """Return a front of one point, with every clock at its highest as in the preset MAXN."""
        modes = self.board.modes
        return self._front(modes[np.lexsort(modes.T)[-1:]])

    @cached_property
    def presets(self) -> Front | None:
        """Return the Pareto front of the board's presets; None if it has no presets."""
        offered = set(array_to_modes(self.board.modes))
        modes = [mode for mode in presets_of(self.board).values() if mode in offered]
        return self._front(np.array(modes)) if modes else None

    def _front(self, modes: ModeArray) -> Front:
        certain = np.zeros(len(modes))
        true = Prediction(*self.board.mean_truth(modes, self.workload), certain, certain)
        return predicted_front(modes, true, self.minibatches_per_epoch, self.board.mean_first_gcycles)


def true_boards(
    app: SimulatedApp,
    workload: Workload,
    seed: int,
    boards: Mapping[str, VirtualBoard],
    idle_w: Mapping[str, float],
) -> dict[str, TrueBoard]:
    """Return the truth about every device of a simulation with an app, by id; also of devices that never trained.

    Args:
        app: the app. If a plan may choose its minibatch size, this is the truth for its first size.
        workload: the workload as the run states it.
        seed: seed of the data split.
        boards: the boards, in the order of their data.
        idle_w: watts of each device while it idles.
    """
    # The rest of the facts that affect the boards' speed; an app's loader reports it when a device trains.
    paced = workload.completed(WorkloadFacts(batch=app.batch_size))
    samples = sample_counts(len(boards), seed)
    return {
        device_id: TrueBoard(board, paced, minibatches_per_epoch(count, app.batch_size), idle_w[device_id])
        for (device_id, board), count in zip(boards.items(), samples, strict=True)
    }


@dataclass(frozen=True)
class Cost:
    """The time, power and energy of a round.

    Attributes:
        duration_s: seconds until the slowest device has finished.
        site_w: watts of the site while all of them train.
        training_j: joules of the trainings.
    """

    duration_s: float
    site_w: float
    training_j: float


def compared(
    boards: Mapping[str, TrueBoard], chosen: Sequence[str], epochs: float, site_budget_w: float, seed: int
) -> dict[str, dict[str, Any] | None]:
    """Return what one round would have cost without Wattfleet: with plain Flower, in MAXN and in presets.

    Args:
        boards: all boards of the site.
        chosen: ids of the devices that trained in the round.
        epochs: local epochs of each device.
        site_budget_w: the site's budget, watts. Only the choice of presets keeps it.
        seed: seed of plain Flower's random draws.

    Returns:
        For each alternative, by name: `duration_s`, `site_w`, `training_j` and `over_budget_share`. For plain Flower,
        which draws the same number of devices at random and runs them in MAXN, these are means over all possible draws
        or over many. Presets have None if they cannot keep the budget, or if a board has no presets.
    """
    if not chosen:
        return {PLAIN_FLOWER: None, MAXN: None, PRESETS: None}
    draws = _draws(boards, len(chosen), seed)
    in_presets = _in_presets(boards, chosen, epochs, site_budget_w)
    return {
        PLAIN_FLOWER: _mean([_in_maxn(boards, draw, epochs) for draw in draws], site_budget_w),
        MAXN: _mean([_in_maxn(boards, chosen, epochs)], site_budget_w),
        PRESETS: None if in_presets is None else _mean([in_presets], site_budget_w),
    }


def _rest_w(boards: Mapping[str, TrueBoard], chosen: Iterable[str]) -> float:
    others = set(boards).difference(chosen)
    return sum(boards[each].idle_w for each in others)


def _in_maxn(boards: Mapping[str, TrueBoard], chosen: Sequence[str], epochs: float) -> Cost:
    parts = [boards[each].highest for each in chosen]
    seconds = [float(part.warmup_s[0] + epochs * part.epoch_s[0]) for part in parts]
    watts = [float(part.power_w[0]) for part in parts]
    joules = sum(w * s for w, s in zip(watts, seconds, strict=True))
    return Cost(max(seconds), _rest_w(boards, chosen) + sum(watts), joules)


def _in_presets(
    boards: Mapping[str, TrueBoard], chosen: Sequence[str], epochs: float, site_budget_w: float
) -> Cost | None:
    """The fastest combination of presets within the budget."""
    fronts = {each: front for each in chosen if (front := boards[each].presets) is not None}
    if len(fronts) < len(chosen):
        return None
    plan = _fastest(boards, fronts, epochs, site_budget_w)
    if plan is None:
        return None
    seconds = [each.training_s(each.epoch_s) for each in plan.assignments]
    joules = sum(each.power_w * s for each, s in zip(plan.assignments, seconds, strict=True))
    site_w = _rest_w(boards, chosen) + sum(each.power_w for each in plan.assignments)
    return Cost(max(seconds), site_w, joules)


def _fastest(
    boards: Mapping[str, TrueBoard], fronts: Mapping[str, Front], epochs: float, site_budget_w: float
) -> RoundPlan | None:
    """The shortest round in which all devices with a front train; None if the budget does not suffice for that."""
    offers = [Offer(each, front, boards[each].idle_w) for each, front in fronts.items()]
    allowance = Allowance.of_site(site_budget_w, _rest_w(boards, fronts))
    try:
        plan = plan_round(offers, FastestK(len(offers)), allowance, epochs, 1)
    except InfeasibleBudgetError:
        return None
    return plan if len(plan.assignments) == len(offers) else None


def random_draw(
    boards: Mapping[str, TrueBoard], chosen: Sequence[str], epochs: float, site_budget_w: float, seed: int
) -> dict[str, Any]:
    """Return how long a round takes with the chosen devices, and with as many devices drawn uniformly.

    It covers all possible draws, or many. Each set gets its own best modes within the same watts, by the boards' true
    values, so only the selection makes a difference.

    Args:
        boards: all boards of the site.
        chosen: ids of the devices that trained in the round.
        epochs: local epochs of each device.
        site_budget_w: the site's budget, watts.
        seed: seed of the draws, if not all are covered.

    Returns:
        `draws`: the number of drawn sets; `over_budget`: those that no modes keep within the budget;
        `selected_duration_s`: seconds with the chosen devices; `mean_duration_s` and `worst_duration_s`: seconds over
        the other sets. A value is None if the budget is too small for all of its sets.
    """

    def duration_s(devices: Sequence[str]) -> float | None:
        plan = _fastest(boards, {each: boards[each].best for each in devices}, epochs, site_budget_w)
        return None if plan is None else plan.duration_s

    sets = _draws(boards, len(chosen), seed) if chosen else []
    durations_s = [each for each in map(duration_s, sets) if each is not None]
    return {
        "draws": len(sets),
        "over_budget": len(sets) - len(durations_s),
        "selected_duration_s": duration_s(chosen) if chosen else None,
        "mean_duration_s": float(np.mean(durations_s)) if durations_s else None,
        "worst_duration_s": max(durations_s, default=None),
    }


def _draws(boards: Mapping[str, TrueBoard], count: int, seed: int) -> list[tuple[str, ...]]:
    """Return all sets of a number of devices, or many that are drawn uniformly."""
    devices = sorted(boards)
    if math.comb(len(devices), count) <= _DRAWS:
        return list(itertools.combinations(devices, count))
    generator, found = random.Random(seed), set[tuple[str, ...]]()
    while len(found) < _DRAWS:
        found.add(tuple(sorted(generator.sample(devices, count))))
    return sorted(found)


def _mean(costs: Sequence[Cost], site_budget_w: float) -> dict[str, Any]:
    return {
        "duration_s": float(np.mean([each.duration_s for each in costs])),
        "site_w": float(np.mean([each.site_w for each in costs])),
        "training_j": float(np.mean([each.training_j for each in costs])),
        "over_budget_share": float(np.mean([each.site_w > site_budget_w for each in costs])),
    }


def summary(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare a run with the alternatives, as means of a round.

    Only observed rounds count, so that all rows cover the same rounds.

    Args:
        rounds: the rounds in the report, each with its `baselines`.

    Returns:
        A row for this run, then one for each alternative: `name`, `rounds` (how many it covers), `duration_s`,
        `site_w`, `training_j` and `over_budget_share`. A value is None if no round has it.
    """
    seen = [one for one in rounds if one["training_j"] is not None and one["observed_duration_s"] is not None]
    own = [
        {
            "duration_s": one["observed_duration_s"],
            "site_w": one["observed_site_w"],
            "training_j": one["training_j"],
            "over_budget_share": float(not one["site_budget_held"]),
        }
        for one in seen
    ]
    rows = [_row("this run, as observed", own)]
    for name in (PLAIN_FLOWER, MAXN, PRESETS):
        rows.append(_row(name, [one["baselines"][name] for one in seen if one["baselines"][name] is not None]))
    return rows


def _row(name: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = ("duration_s", "site_w", "training_j", "over_budget_share")
    means = {key: float(np.mean([each[key] for each in found])) if found else None for key in keys}
    return {"name": name, "rounds": len(found), **means}
