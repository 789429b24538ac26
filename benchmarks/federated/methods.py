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

OVERHEAD_S = 10.0
"""Seconds of a round besides its training. A Flower deployment needs about 9 s for the messages of a small round."""


def training_s(front: Front, epochs: float) -> Values:
    """`[k]` median seconds of a training in each mode of a front, its start included."""
    return front.warmup_s + epochs * front.epoch_s


class Method(Protocol):
    """A way to fill rounds."""

    def plan(self, server_round: int, epochs: float, history: History) -> Sequence[Assignment]:
        """Who trains, and how.

        Raises:
            InfeasibleBudgetError: the site's watts carry nobody.
        """
        ...


@dataclass(frozen=True)
class Planned:
    """Wattfleet's planner: the least duration under the site's watts for those whom the policy wants.

    Attributes:
        offers: fronts that are planned with.
        policy: who should train.
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
    """A uniform draw, each of whom gets the same watts above idling and takes its fastest mode within them.

    Who has no mode within its share is left idle.

    Attributes:
        offers: fronts that modes are chosen from.
        count: devices that are drawn.
        seed: of the draw, which is that of the policy `random`.
        site_budget_w: watts of the site.
    """

    offers: Sequence[Offer]
    count: int
    seed: int
    site_budget_w: float

    def plan(self, server_round: int, epochs: float, history: History) -> Sequence[Assignment]:
        """The drawn devices, in modes that keep their shares."""
        number = range(len(self.offers))
        drawn = sorted(random.Random(f"{self.seed}/{server_round}").sample(number, min(self.count, len(number))))
        share_w = (self.site_budget_w - sum(offer.idle_w for offer in self.offers)) / len(drawn)
        found = []
        for offer in (self.offers[k] for k in drawn):
            front = offer.front
            # Parked as soon as it is done, so that no mode takes fewer watts than idling.
            within = np.maximum(front.planned_w - offer.idle_w, 0.0) <= share_w
            if within.any():
                point = int(np.where(within, training_s(front, epochs), np.inf).argmin())
                limit_w = max(float(front.planned_w[point]), offer.idle_w)
                expected = float(front.epoch_s[point]), float(front.power_w[point])
                warmup_s = float(front.warmup_s[point])
                found.append(Assignment(offer.device_id, front.mode(point), *expected, limit_w, warmup_s))
        if not found:
            raise InfeasibleBudgetError(
                f"{self.site_budget_w:g} W leave {share_w:.1f} W above idling for each, in which none trains"
            )
        return found


@dataclass(frozen=True)
class FleetOffers:
    """The fleet as each method knows it; every list has all devices in the same order.

    Attributes:
        predicted: fronts that agents report.
        true: fronts of the boards' truth.
        presets: NVIDIA's presets, with their true times and watts.
        maxn: the highest modes, with their true times and watts.
    """

    predicted: Sequence[Offer]
    true: Sequence[Offer]
    presets: Sequence[Offer]
    maxn: Sequence[Offer]


METHODS: Mapping[str, str] = {
    "progress": "Wattfleet, policy `progress` (its default): whom and how many, by progress per second",
    "fastest-k": "Wattfleet, policy `fastest-k`",
    "fair": "Wattfleet, policy `fair`",
    "random": "Wattfleet, policy `random`: the modes are planned, the devices drawn",
    "tiers": "Wattfleet, policy `tiers`: devices of like speed train together",
    "oort": "Wattfleet, policy `oort` (Oort's selection)",
    "fedcs": "Wattfleet, policy `deadline` (FedCS's selection)",
    "presets": "FedAvg, the best assignment of NVIDIA's presets to the devices drawn",
    "presets-equal": "FedAvg, each drawn device its fastest preset within an equal share",
    "uniform": "FedAvg, each drawn device its fastest predicted mode within an equal share",
    "maxn": "FedAvg at MAXN, as many of those drawn as fit",
    "oracle-progress": "`progress` that knows every device's truth",
    "oracle-fastest-k": "`fastest-k` that knows every device's truth",
    "oracle-fair": "`fair` that knows every device's truth",
    "oracle-random": "`random` that knows every device's truth",
    "oracle-tiers": "`tiers` that knows every device's truth",
}
"""The compared methods by name."""


def method(
    name: str, offers: FleetOffers, count: int, epochs: float, deadline_s: float, site_budget_w: float, seed: int
) -> Method:
    """One of `METHODS`.

    Args:
        name: of the method.
        offers: the fleet.
        count: devices wanted in a round.
        epochs: local epochs.
        deadline_s: seconds of training in a round, for FedCS.
        site_budget_w: watts of the site.
        seed: of draws; the same for all, so that those who draw uniformly draw the same devices.
    """
    equal = {"presets-equal": offers.presets, "uniform": offers.predicted}
    if name in equal:
        return EqualShares(equal[name], count, seed, site_budget_w)
    planned: Mapping[str, tuple[Sequence[Offer], Policy]] = {
        "progress": (offers.predicted, Progress(overhead_s=OVERHEAD_S)),
        "fastest-k": (offers.predicted, FastestK(count)),
        "fair": (offers.predicted, Fair(count)),
        "random": (offers.predicted, RandomK(count, seed)),
        "tiers": (offers.predicted, Tiers(count, seed=seed)),
        "oort": (offers.predicted, Oort(count, seed=seed)),
        "fedcs": (offers.predicted, Deadline(deadline_s)),
        "presets": (offers.presets, RandomK(count, seed)),
        "maxn": (offers.maxn, RandomK(count, seed)),
        "oracle-progress": (offers.true, Progress(overhead_s=OVERHEAD_S)),
        "oracle-fastest-k": (offers.true, FastestK(count)),
        "oracle-fair": (offers.true, Fair(count)),
        "oracle-random": (offers.true, RandomK(count, seed)),
        "oracle-tiers": (offers.true, Tiers(count, seed=seed)),
    }
    return Planned(*planned[name], site_budget_w)
