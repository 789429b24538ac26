"""Plans of the policy `progress` that choose epochs and devices, compared with the best of all possible plans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.fakes.fleets import Fleet, done_s, drawn_w, fleet_on_racks, history_of, planned_w
from tests.fakes.plans import points_of
from wattfleet.planning import EpochChoice, History, Participation, plan_round
from wattfleet.planning.policies import Progress


def choice_of(chance: np.random.Generator, is_per_device: bool) -> EpochChoice:
    """Three numbers of epochs, more of which make more progress; two of them state `half_devices`."""
    numbers = np.sort(chance.choice(np.arange(1, 11), 3, replace=False)).tolist()
    progress = np.cumsum(chance.uniform(0.2, 1.0, 3)).tolist()
    half = {numbers[0]: float(chance.uniform(0.5, 4)), numbers[2]: float(chance.uniform(1, 8))}
    return EpochChoice.of(dict(zip(numbers, progress, strict=True)), half, is_per_device)


def worth_of(fleet: Fleet, history: History, server_round: int) -> NDArray[np.float64]:
    """The worth of each device: samples times rounds since its last selection, relative to the mean."""
    samples = np.array([history.latest[offer.device_id][1].num_examples or 0.0 for offer in fleet.offers])
    away = server_round - np.array([history.last_selected[offer.device_id] for offer in fleet.offers])
    worth = samples * away
    return np.asarray(worth / worth.mean(), dtype=np.float64)


def random_history(chance: np.random.Generator, devices: int) -> History:
    """Six rounds in which each device trained once, some longer ago than others."""
    last = chance.integers(1, 7, devices)
    return history_of(
        *(
            {
                f"device-{k}": Participation(num_examples=float(chance.integers(50, 200)))
                for k in range(devices)
                if last[k] == number
            }
            for number in range(1, 7)
        )
    )


def value(
    policy: Progress, choice: EpochChoice, worth: Sequence[float], level: Sequence[int], duration_s: float, n: int
) -> float:
    """Progress per second of a set of `n` devices, given each one's worth and the index of its number of epochs."""
    options = [choice.options[k] for k in level]
    mean = sum(w * option.progress for w, option in zip(worth, options, strict=True)) / sum(worth)
    devices = min(sum(worth), len(worth))
    stated = choice.options[max(level)].half_devices
    half = policy.half_devices if stated is None else stated
    return mean / (1 + half / devices * (n - devices) / (n - 1)) / (duration_s + policy.overhead_s)


def best_of_all(fleet: Fleet, policy: Progress, choice: EpochChoice, worth: NDArray[np.float64]) -> float:
    """The most progress per second over all sets, numbers of epochs and durations that the watts allow."""
    n, options = len(fleet.offers), choice.options
    # All combinations: for each device -1 for no training, or the index of an option.
    every = np.array(list(itertools.product(range(-1, len(options)), repeat=n)), dtype=np.int8)
    if not choice.is_per_device:
        every = every[[len(set(row[row >= 0].tolist())) == 1 for row in every]]
    every = every[(every >= 0).any(axis=1)]
    chosen = every >= 0
    weight, count = chosen @ worth, chosen.sum(axis=1)
    progress = np.append([option.progress for option in options], 0.0)[every]  # index -1 is the appended 0
    half = np.array([policy.half_devices if o.half_devices is None else o.half_devices for o in options])
    devices = np.minimum(weight, count)
    gain = (progress @ worth) / weight / (1 + half[every.max(axis=1)] / devices * (n - devices) / (n - 1))
    seconds = np.array(
        [[[done_s(o, p, option.epochs) for p in range(len(o.front))] for o in fleet.offers] for option in options]
    )
    extra_w = np.array([[planned_w(o, p) - o.idle_w for p in range(len(o.front))] for o in fleet.offers])
    names = fleet.allowance.supplies.names
    idle_w = drawn_w(fleet, {})
    spare_w = np.array([fleet.allowance.budget_w[name] - idle_w[name] for name in names])
    feeds = np.array([[name in fleet.allowance.supplies.path(o.supply) for o in fleet.offers] for name in names])
    best, left = 0.0, np.ones(len(every), dtype=np.bool_)
    for limit_s in np.unique(seconds):  # ascending: a set that fits within a duration is not tried again
        least_w = np.where(seconds <= limit_s, extra_w[None], np.inf).min(axis=2)  # [option, device]
        watts = np.vstack([least_w, np.zeros(n)])[every, np.arange(n)]
        able = left & (gain / (limit_s + policy.overhead_s) > best) & np.isfinite(watts).all(axis=1)
        rows = np.flatnonzero(able)
        fits = ((watts[rows] @ feeds.T.astype(float)) <= spare_w + 1e-9).all(axis=1)
        rows = rows[fits]
        left[rows] = False
        best = max(best, float((gain[rows] / (limit_s + policy.overhead_s)).max(initial=0.0)))
    return best


@pytest.mark.parametrize(
    ("is_per_device", "devices", "least"),
    [(False, 8, 1 - 1e-6), (True, 6, 0.99), (True, 2, 0.9)],
    ids=["equal", "own", "own, fewer than make half the progress"],
)
@pytest.mark.parametrize("seed", range(12))
def test_a_small_fleet_is_planned_as_well_as_by_trying_all(
    seed: int, is_per_device: bool, devices: int, least: float
) -> None:
    chance = np.random.default_rng(seed)
    fleet = fleet_on_racks(chance, devices, points=4, most_warmup_s=5.0)
    policy = Progress(half_devices=float(chance.uniform(0.5, 6)), overhead_s=float(chance.uniform(0, 40)))
    choice, history = choice_of(chance, is_per_device), random_history(chance, devices)
    plan = plan_round(fleet.offers, policy, fleet.allowance, choice, 7, history)
    worth = dict(zip((o.device_id for o in fleet.offers), worth_of(fleet, history, 7), strict=True))
    numbers = [option.epochs for option in choice.options]
    level = [numbers.index(assignment.epochs) for assignment in plan.assignments]
    assert is_per_device or len(set(level)) == 1
    own = [worth[each.device_id] for each in plan.assignments]
    made = value(policy, choice, own, level, plan.duration_s, devices)
    best = best_of_all(fleet, policy, choice, np.array(list(worth.values())))
    assert least * best <= made <= best * (1 + 1e-9), "nothing is better than all, so the oracle knows all"

    points = points_of(plan, fleet)
    total_w = drawn_w(fleet, points)
    assert all(total_w[name] <= fleet.allowance.budget_w[name] + 1e-6 for name in total_w)
    assert {use.supply: use.planned_w for use in plan.supplies} == pytest.approx(total_w)
    by_id = {offer.device_id: offer for offer in fleet.offers}
    epochs = {assignment.device_id: assignment.epochs for assignment in plan.assignments}
    slowest_s = max(done_s(by_id[each], points[each], own) for each, own in epochs.items())
    assert plan.duration_s == pytest.approx(slowest_s), "each device's own epochs count"
