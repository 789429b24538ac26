"""The compared methods, which select the devices of a round and their modes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from benchmarks.federated.jobs import LOCAL_EPOCHS, Job, Method, training_s
from wattfleet.core.errors import InfeasibleBudgetError
from wattfleet.core.planning import Allowance, Assignment, EpochChoice, History, Offer, plan_round
from wattfleet.core.planning.policies import Deadline, Fair, FastestK, Oort, Policy, Progress, RandomK, Tiers


@dataclass(frozen=True)
class Planned:
    """Wattfleet's planner: the shortest round within the site's budget for the devices that the policy selects.

    Attributes:
        offers: the fronts that plans are made from.
        policy: the client-selection policy.
        site_budget_w: watts of the site.
        epochs: the number of local epochs, or the numbers that the plan may choose.
    """

    offers: Sequence[Offer]
    policy: Policy
    site_budget_w: float
    epochs: float | EpochChoice = LOCAL_EPOCHS

    @property
    def is_normalised(self) -> bool:
        """Whether devices of a round may train different numbers of epochs."""
        return isinstance(self.epochs, EpochChoice) and self.epochs.is_per_device

    def plan(self, server_round: int, history: History) -> Sequence[Job]:
        """Return the jobs of the plan's assignments."""
        allowance = Allowance.of_site(self.site_budget_w)
        plan = plan_round(self.offers, self.policy, allowance, self.epochs, server_round, history)
        return [Job(each, each.epochs) for each in plan.assignments]


@dataclass(frozen=True)
class EqualShares:
    """A uniform draw of devices that share the watts equally.

    Each drawn device gets an equal share of the watts above idle power, and trains in its fastest mode within it. A
    device without a mode within its share stays idle.

    Attributes:
        offers: the fronts that modes are chosen from.
        count: number of devices to draw.
        seed: seed of the draw. It is the same draw as that of the policy `random`.
        site_budget_w: watts of the site.
    """

    offers: Sequence[Offer]
    count: int
    seed: int
    site_budget_w: float
    is_normalised: ClassVar[bool] = False

    def plan(self, server_round: int, history: History) -> Sequence[Job]:
        """Return the jobs of the drawn devices, in modes within their shares."""
        number = range(len(self.offers))
        drawn = sorted(random.Random(f"{self.seed}/{server_round}").sample(number, min(self.count, len(number))))
        share_w = (self.site_budget_w - sum(offer.idle_w for offer in self.offers)) / len(drawn)
        found = []
        for offer in (self.offers[k] for k in drawn):
            front = offer.front
            # A device is parked when it is done, so every mode needs at least the idle watts.
            within = np.maximum(front.planned_w - offer.idle_w, 0.0) <= share_w
            if within.any():
                point = int(np.where(within, training_s(front, LOCAL_EPOCHS), np.inf).argmin())
                limit_w = max(float(front.planned_w[point]), offer.idle_w)
                expected = float(front.epoch_s[point]), float(front.power_w[point])
                warmup_s = float(front.warmup_s[point])
                found.append(Job(Assignment(offer.device_id, front.mode(point), *expected, limit_w, warmup_s)))
        if not found:
            raise InfeasibleBudgetError(
                f"{self.site_budget_w:g} W leave {share_w:.1f} W above idle power per device, too little for any mode"
            )
        return found


@dataclass(frozen=True)
class FleetOffers:
    """The fleet's fronts, as each method knows them. Every list has all devices in the same order.

    Attributes:
        predicted: fronts as the agents report them.
        true: fronts from the boards' true values.
        presets: NVIDIA's presets, with their true times and watts.
        maxn: the highest modes, with their true times and watts.
        predicted_batches: fronts over modes and batch sizes, as the agents report them.
        true_batches: the same from the boards' true values.
    """

    predicted: Sequence[Offer]
    true: Sequence[Offer]
    presets: Sequence[Offer]
    maxn: Sequence[Offer]
    predicted_batches: Sequence[Offer]
    true_batches: Sequence[Offer]


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
    "progress-batch": "`progress` that also chooses each device's batch",
    "progress-epochs": "`progress` that also chooses the local epochs of a round",
    "progress-work": "`progress` that also chooses the local epochs of each device",
    "progress-all": "`progress` that chooses batches and local epochs",
    "presets-4": "`presets` with 4 local epochs",
    "presets-8": "`presets` with 8 local epochs",
    "oracle-progress": "`progress` that knows the true values of every device",
    "oracle-progress-batch": "`progress-batch` that knows the true values of every device",
    "oracle-progress-work": "`progress-work` that knows the true values of every device",
    "oracle-progress-epochs": "`progress-epochs` that knows the true values of every device",
    "oracle-progress-all": "`progress-all` that knows the true values of every device",
    "oracle-fastest-k": "`fastest-k` that knows the true values of every device",
    "oracle-fair": "`fair` that knows the true values of every device",
    "oracle-random": "`random` that knows the true values of every device",
    "oracle-tiers": "`tiers` that knows the true values of every device",
    "fedbuff": "FedBuff under the planner: free devices get the watts that are left; a step after every 5 updates",
    "quorum": "`progress` whose rounds end at 80 % of the replies; late updates count in later rounds",
    "oracle-fedbuff": "`fedbuff` that knows the true values of every device",
    "oracle-quorum": "`quorum` that knows the true values of every device",
}
"""The compared methods by name."""


def method(
    name: str,
    offers: FleetOffers,
    count: int,
    deadline_s: float,
    site_budget_w: float,
    seed: int,
    progress: Progress,
    epochs: EpochChoice,
) -> Method:
    """Return one of `METHODS`, except for those in `asynchronous`.

    Args:
        name: name of the method.
        offers: the fleet.
        count: number of devices wanted in a round.
        deadline_s: seconds of training in a round, for FedCS.
        site_budget_w: watts of the site.
        seed: seed of the draws. It is the same for all methods, so all uniform draws select the same devices.
        progress: the policy of methods with `progress` in their name.
        epochs: the local epochs to choose from, for methods that choose them.
    """
    equal = {"presets-equal": offers.presets, "uniform": offers.predicted}
    if name in equal:
        return EqualShares(equal[name], count, seed, site_budget_w)
    knows = name.startswith("oracle-")
    own = name.removeprefix("oracle-")
    modes, batches = (offers.true, offers.true_batches) if knows else (offers.predicted, offers.predicted_batches)
    tuned: Mapping[str, Method] = {
        "progress-batch": Planned(batches, progress, site_budget_w),
        "progress-epochs": Planned(modes, progress, site_budget_w, epochs),
        "progress-work": Planned(modes, progress, site_budget_w, replace(epochs, is_per_device=True)),
        "progress-all": Planned(batches, progress, site_budget_w, replace(epochs, is_per_device=True)),
        "presets-4": Planned(offers.presets, RandomK(count, seed), site_budget_w, epochs=4),
        "presets-8": Planned(offers.presets, RandomK(count, seed), site_budget_w, epochs=8),
    }
    if own in tuned:
        return tuned[own]
    planned: Mapping[str, tuple[Sequence[Offer], Policy]] = {
        "progress": (modes, progress),
        "fastest-k": (modes, FastestK(count)),
        "fair": (modes, Fair(count)),
        "random": (modes, RandomK(count, seed)),
        "tiers": (modes, Tiers(count, seed=seed)),
        "oort": (modes, Oort(count, seed=seed)),
        "fedcs": (modes, Deadline(deadline_s)),
        "presets": (offers.presets, RandomK(count, seed)),
        "maxn": (offers.maxn, RandomK(count, seed)),
    }
    return Planned(*planned[own], site_budget_w)
