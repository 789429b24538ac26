"""Fronts and small fleets for tests of plans, runs over them, and the best plan, found by brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from hypothesis import strategies as st

from wattfleet.core.budgets import Supplies, Supply
from wattfleet.core.choosing import Front
from wattfleet.core.modes import PowerMode
from wattfleet.core.planning import SITE, Allowance, History, Offer, Participation, RoundPlan, Selection, plan_round
from wattfleet.core.planning.policies import (
    AllDevices,
    Deadline,
    Fair,
    FastestK,
    Oort,
    Policy,
    Progress,
    RandomK,
    Tiers,
)
from wattfleet_proto.device_state import READINGS, BoardSample

# --- Board samples ----------------------------------------------------------------------------------------------------

HOT = BoardSample(
    42.5,
    71.0,
    PowerMode(4, 1_036_800, 510_000_000, 2_133_000_000),
    3,
    0.5,
    0.9,
    1_200.0,
    **{name: True for name, reading in READINGS.items() if reading.flag},
    battery_share=0.8,
)
"""A sample in which every sensor of a board has a value."""


# --- Fronts -----------------------------------------------------------------------------------------------------------
# Fronts for tests, built from a few numbers instead of a fitted predictor.


def front(
    *points: tuple[float, float],
    epoch_log_sd: float | Sequence[float] = 0.0,
    power_log_sd: float = 0.0,
    warmup_s: float | Sequence[float] = 0.0,
) -> Front:
    """A front of (seconds per epoch, median watts) points; with no spread, the planned power equals the median.

    All points share one spread of the times and one start-up time.
    """
    k = len(points)
    modes = np.array([[4, 1_500_000 - step, 600_000_000, 2_133_000_000] for step in range(k)], dtype=np.float64)
    return Front(
        modes=modes.reshape(-1, 4),
        epoch_s=np.array([seconds for seconds, _ in points], dtype=np.float64),
        power_w=np.array([watts for _, watts in points], dtype=np.float64),
        epoch_log_sd=np.full(k, epoch_log_sd, dtype=np.float64),
        power_log_sd=np.full(k, power_log_sd),
        warmup_s=np.full(k, warmup_s, dtype=np.float64),
    )


def of_batches(front: Front, batches: Sequence[int]) -> Front:
    """The same front with a batch size for each point."""
    return Front(**columns_of(front), batch=np.array(batches))


def columns_of(front: Front) -> dict[str, Any]:
    """All fields of a front except its batches, as arrays by argument name."""
    names = ("modes", "epoch_s", "power_w", "epoch_log_sd", "power_log_sd", "warmup_s")
    return {name: getattr(front, name) for name in names}


@st.composite
def fronts(draw: st.DrawFn, most: int = 4, power_log_sd: float = 0.0) -> Front:
    """Fronts of whole seconds and whole watts, so that sums of watts are exact and ties are frequent."""
    k = draw(st.integers(1, most))
    seconds, starts_s = zip(*draw(seconds_and_starts(k)), strict=True)
    watts = draw(st.lists(st.integers(3, 20), min_size=k, max_size=k, unique=True))
    points = zip(seconds, sorted(watts, reverse=True), strict=True)
    return front(*points, power_log_sd=power_log_sd, warmup_s=starts_s)


@st.composite
def seconds_and_starts(draw: st.DrawFn, k: int) -> list[tuple[int, int]]:
    """Seconds per epoch and start-up seconds of some points in order; the epochs alone need not increase."""
    one_epoch_s = sorted(draw(st.lists(st.integers(1, 12), min_size=k, max_size=k, unique=True)))
    starts_s = [draw(st.integers(0, seconds - 1)) for seconds in one_epoch_s]
    return [(seconds - warmup_s, warmup_s) for seconds, warmup_s in zip(one_epoch_s, starts_s, strict=True)]


# --- Fleets -----------------------------------------------------------------------------------------------------------
# Small fleets behind nested supplies, and the best plan for each, found by brute force.

WATTS_QUANTILE = NormalDist().inv_cdf(0.95)
TIME_QUANTILE = NormalDist().inv_cdf(0.9)


@dataclass(frozen=True)
class Fleet:
    """Devices, and the budgets of their supplies."""

    offers: list[Offer]
    allowance: Allowance

    def with_watts(self, more_w: float) -> Fleet:
        """The same fleet with more watts at every supply."""
        budget_w = {name: watts + more_w for name, watts in self.allowance.budget_w.items()}
        return Fleet(self.offers, Allowance(self.allowance.supplies, budget_w, self.allowance.elsewhere_w))


def tree(**parents: str | None) -> Supplies:
    """Supplies by name, each with its parent."""
    return Supplies(tuple(Supply(name, parent) for name, parent in parents.items()))


TREES = (
    tree(site=None),
    tree(site=None, left="site", right="site"),
    tree(site=None, hall="site", rack="hall", shelf="hall"),
    tree(site=None, hall="site", other=None),
)


def fleet_on_racks(chance: np.random.Generator, devices: int, points: int = 6, most_warmup_s: float = 0.0) -> Fleet:
    """Devices of different speed, start-up time and power on two racks, whose budgets do not cover all of them."""
    offers = []
    for k in range(devices):
        slowdown = np.cumprod([1.0, *chance.uniform(1.1, 1.8, points - 1)])
        epoch_s = chance.uniform(5, 60) * slowdown
        power_w = chance.uniform(2, 6) + chance.uniform(8, 50) * slowdown ** -chance.uniform(0.6, 1.6)
        warmup_s = chance.uniform(0, most_warmup_s) if most_warmup_s else 0.0
        own = front(*zip(epoch_s, power_w, strict=True), epoch_log_sd=0.05, power_log_sd=0.03, warmup_s=warmup_s)
        offers.append(Offer(f"device-{k}", own, float(chance.uniform(1, 6)), ("left", "right")[k % 2]))
    all_w = sum(float(offer.front.planned_w[0]) for offer in offers)
    share = chance.uniform(0.3, 0.7, 3) * (1.0, 0.6, 0.6)
    supplies = tree(site=None, left="site", right="site")
    return Fleet(offers, Allowance(supplies, dict(zip(supplies.names, all_w * share, strict=True))))


@st.composite
def uneven_fronts(draw: st.DrawFn, most: int = 3, power_log_sd: float = 0.0) -> Front:
    """Fronts of whole watts whose points differ in uncertainty and in start-up time.

    A point that is slower at the quantile, or in a training of many epochs, need not be slower in the median of one
    epoch.
    """
    k = draw(st.integers(1, most))
    seconds, starts_s = zip(*draw(seconds_and_starts(k)), strict=True)
    watts = draw(st.lists(st.integers(3, 20), min_size=k, max_size=k, unique=True))
    spread = draw(st.lists(st.sampled_from([0.0, 0.1, 0.6]), min_size=k, max_size=k))
    points = zip(seconds, sorted(watts, reverse=True), strict=True)
    return front(*points, epoch_log_sd=spread, power_log_sd=power_log_sd, warmup_s=starts_s)


@st.composite
def fleets(draw: st.DrawFn, most: int = 4, power_log_sd: float = 0.0) -> Fleet:
    """Devices at any depth of a tree of supplies, some of which may not even cover the idle power.

    Some devices have a limit of their own, and some draw more power idle than training.
    """
    supplies = draw(st.sampled_from(TREES))
    offers = [
        Offer(
            f"device-{k}",
            draw(uneven_fronts(power_log_sd=power_log_sd)),
            float(draw(st.integers(0, 6))),
            draw(st.sampled_from(supplies.names)),
            draw(st.none() | st.integers(2, 20).map(float)),
        )
        for k in range(draw(st.integers(1, most)))
    ]
    budget_w = {name: float(draw(st.integers(2, 60))) for name in supplies.names}
    elsewhere_w = {name: float(draw(st.integers(0, 3))) for name in supplies.names}
    return Fleet(offers, Allowance(supplies, budget_w, elsewhere_w))


def planned_w(offer: Offer, point: int) -> float:
    """The power to reserve for a device in a mode: it may finish early, and then it idles."""
    training = offer.front
    return max(float(training.power_w[point] * math.exp(WATTS_QUANTILE * training.power_log_sd[point])), offer.idle_w)


def done_s(offer: Offer, point: int, epochs: float = 1.0) -> float:
    """Seconds of a training, including its start, that a mode does not exceed in nine cases of ten."""
    training = offer.front
    epoch_s = training.epoch_s[point] * math.exp(TIME_QUANTILE * training.epoch_log_sd[point])
    return float(training.warmup_s[point] + epochs * epoch_s)


def modes_within_limit(offer: Offer) -> list[int]:
    """The points of a device's front that are within its own limit."""
    limit_w = math.inf if offer.limit_w is None else offer.limit_w
    return [point for point in range(len(offer.front)) if planned_w(offer, point) <= limit_w]


def able(fleet: Fleet) -> list[Offer]:
    """The devices that could train if all others idled; if there are none, those whose own limit allows a training."""
    allowed = [offer for offer in fleet.offers if modes_within_limit(offer)]
    carried = [
        offer
        for offer in allowed
        if any(holds(fleet, {offer.device_id: point}, slack=1e-7) for point in modes_within_limit(offer))
    ]
    return carried or allowed


def drawn_w(fleet: Fleet, training: Mapping[str, int]) -> dict[str, float]:
    """Power at every supply while some devices train, each at a point of its front, and all others idle."""
    total = {
        name: sum(
            watts for low, watts in fleet.allowance.elsewhere_w.items() if name in fleet.allowance.supplies.path(low)
        )
        for name in fleet.allowance.supplies.names
    }
    for offer in fleet.offers:
        point = training.get(offer.device_id)
        for name in fleet.allowance.supplies.path(offer.supply):
            total[name] += offer.idle_w if point is None else planned_w(offer, point)
    return total


def holds(fleet: Fleet, training: Mapping[str, int], slack: float = 0.0) -> bool:
    """Whether every supply that feeds a training device stays within its budget."""
    total = drawn_w(fleet, training)
    feeding = {
        name
        for offer in fleet.offers
        if offer.device_id in training
        for name in fleet.allowance.supplies.path(offer.supply)
    }
    return all(total[name] <= fleet.allowance.budget_w[name] + slack for name in feeding)


def every_plan(fleet: Fleet, epochs: float = 1.0) -> Iterator[tuple[dict[str, int], float]]:
    """All sets of devices in all their modes that are within the budgets, with the seconds of the slowest device."""
    choices = [[None, *modes_within_limit(offer)] for offer in fleet.offers]
    for points in itertools.product(*choices):
        training = {
            offer.device_id: point for offer, point in zip(fleet.offers, points, strict=True) if point is not None
        }
        if training and holds(fleet, training):
            by_id = {offer.device_id: offer for offer in fleet.offers}
            yield training, max(done_s(by_id[device_id], point, epochs) for device_id, point in training.items())


def best(fleet: Fleet, wanted: int, first: Sequence[str] = (), epochs: float = 1.0) -> tuple[int, int, float] | None:
    """As many devices of `first`, then of all, as the budgets allow, up to the number wanted, in the least time."""
    found = [
        (-len(set(first) & set(training)), -len(training), slowest_s)
        for training, slowest_s in every_plan(fleet, epochs)
        if len(training) <= wanted
    ]
    if not found:
        return None
    firsts, count, slowest_s = min(found)
    return -firsts, -count, slowest_s


def history_of(*rounds: Mapping[str, Participation]) -> History:
    """A history of rounds, numbered from 1."""
    history = History()
    for number, parts in enumerate(rounds, 1):
        history = history.after(number, parts)
    return history


def many(n: int, idle_w: float = 2.0, **supply: str) -> list[Offer]:
    """Devices that are each a second slower than the one before."""
    return [
        Offer(f"device-{k:03}", front((10 + k, 30), (20 + k, 20)), idle_w, supply.get("supply", SITE)) for k in range(n)
    ]


# --- Plans ------------------------------------------------------------------------------------------------------------
# Round plans for tests: policies, histories and three devices with simple fronts.

sizes = st.none() | st.integers(1, 5)
seeds = st.integers(0, 9)
draws = st.builds(RandomK, sizes, seeds) | st.builds(Tiers, sizes, st.integers(1, 3), seeds) | st.builds(Oort, sizes)
policies = (
    st.builds(FastestK, sizes)
    | st.builds(AllDevices)
    | st.builds(Fair, sizes, st.none() | st.floats(0, 1))
    | st.builds(Deadline, st.integers(1, 40).map(float), st.sampled_from(["equal", "loss"]))
    | st.builds(Progress, sizes, st.sampled_from([0.5, 3.0]), st.sampled_from([0.0, 10.0]))
    | draws
)
participations = st.builds(Participation, st.booleans(), st.none() | st.integers(0, 500), st.none() | st.floats(0, 10))
histories = st.lists(
    st.dictionaries(st.sampled_from([f"device-{k}" for k in range(5)] + ["gone"]), participations, max_size=4),
    max_size=6,
).map(lambda rounds: history_of(*rounds))


def plan_of(
    fleet: Fleet,
    policy: Policy,
    epochs: float = 1.0,
    history: History | None = None,
    selection: Selection | None = None,
) -> RoundPlan:
    server_round = len(history.rounds) + 1 if history else 1
    return plan_round(fleet.offers, policy, fleet.allowance, epochs, server_round, history, selection)


def points_of(plan: RoundPlan, fleet: Fleet) -> dict[str, int]:
    """The point of its front that each chosen device is assigned."""
    by_id = {offer.device_id: offer.front for offer in fleet.offers}
    return {
        assignment.device_id: [
            by_id[assignment.device_id].mode(k) for k in range(len(by_id[assignment.device_id]))
        ].index(assignment.mode)
        for assignment in plan.assignments
    }


ORIN = Offer("orin", front((10, 50), (20, 30), (40, 20)), 5.0)
NANO = Offer("nano", front((35, 15), (60, 10)), 3.0)
XAVIER = Offer("xavier", front((25, 40), (45, 25)), 6.0)
THREE = [ORIN, NANO, XAVIER]


def site(watts: float) -> Allowance:
    return Allowance.of_site(watts)


def modes_of(plan: RoundPlan) -> dict[str, tuple[float, float]]:
    return {assignment.device_id: (assignment.epoch_s, assignment.power_w) for assignment in plan.assignments}


def reason_of(plan: RoundPlan, device_id: str) -> str:
    return next(decision.reason for decision in plan.decisions if decision.device_id == device_id)


# --- Runs -------------------------------------------------------------------------------------------------------------
# Runs of many rounds in which a test determines what each device does.


def run(
    offers: Sequence[Offer],
    policy: Policy,
    rounds: int,
    part: Callable[[str, int], Participation] = lambda device_id, number: Participation(),
    site_w: float = 100_000.0,
) -> History:
    """A run's history in which every chosen device completes every round."""
    history = History()
    for number in range(1, rounds + 1):
        plan = plan_round(offers, policy, Allowance.of_site(site_w), 1.0, number, history)
        parts = {a.device_id: part(a.device_id, number) for a in plan.assignments}
        history = history.after(number, parts)
    return history
