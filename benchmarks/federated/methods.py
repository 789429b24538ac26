"""The compared methods: which devices each trains in a round, and in which mode."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wattfleet.choosing import Front
from wattfleet.errors import InfeasibleBudgetError
from wattfleet.planning import Allowance, Assignment, History, Offer, plan_round
from wattfleet.planning.policies import Deadline, Fair, FastestK, Oort, Policy, Progress, RandomK, Tiers

Values = NDArray[np.float64]

OVERHEAD_S = 1.5
"""Seconds of a round besides its training, about as `benchmarks.round_overhead` measures it for warm processes.

Flower alone needs 6 to 9 s for the messages of a small round.
"""


def training_s(front: Front, epochs: float) -> Values:
    """`[k]` median seconds of a training in each mode of a front, including the warm-up."""
    return front.warmup_s + epochs * front.epoch_s


class Method(Protocol):
    """A way to fill rounds."""

    def plan(self, server_round: int, epochs: float, history: History) -> Sequence[Assignment]:
        """The devices that train, each with its mode and watts.

        Raises:
            InfeasibleBudgetError: the site's budget is too small for any device.
        """
        ...


@dataclass(frozen=True)
class Planned:
    """Wattfleet's planner: the shortest round within the site's budget for the devices that the policy selects.

    Attributes:
        offers: fronts that are planned with.
        policy: the client-selection policy.
        site_budget_w: watts of the site.
    """

    offers: Sequence[Offer]
    policy: Policy
    site_budget_w: float

    def plan(self, server_round: int, epochs: float, history: History) -> Sequence[Assignment]:
        """The plan's assignments."""
        allowance = Allowance.of_site(self.site_budget_w)
        return plan_round(self.offers, self.policy, allowance, epochs, server_round, history).assignments


@dataclass(frozen=True)
class EqualShares:
    """A uniform draw. Each drawn device gets an equal share of the watts above idle power, and its fastest mode in it.

    A device without a mode within its share stays idle.

    Attributes:
        offers: fronts that modes are chosen from.
        count: number of devices to draw.
        seed: seed of the draw. The draw is that of the policy `random`.
        site_budget_w: watts of the site.
    """

    offers: Sequence[Offer]
    count: int
    seed: int
    site_budget_w: float

    def plan(self, server_round: int, epochs: float, history: History) -> Sequence[Assignment]:
        """The drawn devices, in modes within their shares."""
        number = range(len(self.offers))
        drawn = sorted(random.Random(f"{self.seed}/{server_round}").sample(number, min(self.count, len(number))))
        share_w = (self.site_budget_w - sum(offer.idle_w for offer in self.offers)) / len(drawn)
        found = []
        for offer in (self.offers[k] for k in drawn):
            front = offer.front
            # A device parks as soon as it is done, so every mode takes at least the idle watts.
            within = np.maximum(front.planned_w - offer.idle_w, 0.0) <= share_w
            if within.any():
                point = int(np.where(within, training_s(front, epochs), np.inf).argmin())
                limit_w = max(float(front.planned_w[point]), offer.idle_w)
                expected = float(front.epoch_s[point]), float(front.power_w[point])
                warmup_s = float(front.warmup_s[point])
                found.append(Assignment(offer.device_id, front.mode(point), *expected, limit_w, warmup_s))
        if not found:
            raise InfeasibleBudgetError(
                f"{self.site_budget_w:g} W leave {share_w:.1f} W above idle power per device, too little for any mode"
            )
        return found


@dataclass(frozen=True)
class FleetOffers:
    """The fleet as each method knows it; every list has all devices in the same order.

    Attributes:
        predicted: fronts that agents report.
        true: fronts of the boards' true values.
        presets: NVIDIA's presets, with their true times and watts.
        maxn: the highest modes, with their true times and watts.
    """

    predicted: Sequence[Offer]
    true: Sequence[Offer]
    presets: Sequence[Offer]
    maxn: Sequence[Offer]


METHODS: Mapping[str, str] = {
    "progress": "Wattfleet, policy `progress` (the default): selects the devices with the most progress per second",
    "fastest-k": "Wattfleet, policy `fastest-k`",
    "fair": "Wattfleet, policy `fair`",
    "random": "Wattfleet, policy `random`: devices are drawn, modes are planned",
    "tiers": "Wattfleet, policy `tiers`: devices of similar speed train together",
    "oort": "Wattfleet, policy `oort` (Oort's selection)",
    "fedcs": "Wattfleet, policy `deadline` (FedCS's selection)",
    "presets": "FedAvg, the best assignment of NVIDIA's presets to the drawn devices",
    "presets-equal": "FedAvg, each drawn device in its fastest preset within an equal share",
    "uniform": "FedAvg, each drawn device in its fastest predicted mode within an equal share",
    "maxn": "FedAvg at MAXN, as many drawn devices as fit",
    "oracle-progress": "`progress` that knows the true values of every device",
    "oracle-fastest-k": "`fastest-k` that knows the true values of every device",
    "oracle-fair": "`fair` that knows the true values of every device",
    "oracle-random": "`random` that knows the true values of every device",
    "oracle-tiers": "`tiers` that knows the true values of every device",
}
"""The compared methods by name."""


def method(
    name: str,
    offers: FleetOffers,
    count: int,
    epochs: float,
    deadline_s: float,
    site_budget_w: float,
    seed: int,
    overhead_s: float = OVERHEAD_S,
) -> Method:
    """One of `METHODS`.

    Args:
        name: name of the method.
        offers: the fleet.
        count: devices wanted in a round.
        epochs: local epochs.
        deadline_s: seconds of training in a round, for FedCS.
        site_budget_w: watts of the site.
        seed: seed of the draws. It is the same for all methods, so all uniform draws select the same devices.
        overhead_s: seconds of a round besides its training.
    """
    equal = {"presets-equal": offers.presets, "uniform": offers.predicted}
    if name in equal:
        return EqualShares(equal[name], count, seed, site_budget_w)
    planned: Mapping[str, tuple[Sequence[Offer], Policy]] = {
        "progress": (offers.predicted, Progress(overhead_s=overhead_s)),
        "fastest-k": (offers.predicted, FastestK(count)),
        "fair": (offers.predicted, Fair(count)),
        "random": (offers.predicted, RandomK(count, seed)),
        "tiers": (offers.predicted, Tiers(count, seed=seed)),
        "oort": (offers.predicted, Oort(count, seed=seed)),
        "fedcs": (offers.predicted, Deadline(deadline_s)),
        "presets": (offers.presets, RandomK(count, seed)),
        "maxn": (offers.maxn, RandomK(count, seed)),
        "oracle-progress": (offers.true, Progress(overhead_s=overhead_s)),
        "oracle-fastest-k": (offers.true, FastestK(count)),
        "oracle-fair": (offers.true, Fair(count)),
        "oracle-random": (offers.true, RandomK(count, seed)),
        "oracle-tiers": (offers.true, Tiers(count, seed=seed)),
    }
    return Planned(*planned[name], site_budget_w)
