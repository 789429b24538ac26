"""The plan of one round: assignments, decisions and the power of every supply."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from wattfleet.core.budgets import Supplies, Supply
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode
from wattfleet.core.planning.curves import SITE, Headroom, Offer


@dataclass(frozen=True, slots=True)
class Assignment:
    """The assignment of one selected device.

    Attributes:
        device_id: the device.
        mode: the power mode it trains in.
        epoch_s: predicted median seconds per epoch.
        power_w: predicted median watts.
        power_limit_w: watts allocated to it.
        warmup_s: predicted seconds of its warm-up, once per training.
        epoch_log_sd: standard deviation of the logarithm of the predicted time.
        power_log_sd: standard deviation of the logarithm of the predicted power.
        epochs: local epochs that it trains.
        batch: samples in a batch that the prediction holds for; None if they are unknown.
        profiled_modes: number of modes that the device has measured with the workload; 0 if the prediction is a prior.
        is_length_assumed: whether the number of minibatches in the device's epoch is unknown, so that its epoch may
            take far longer. The device then has no deadline in this round.
        idle_w: watts that the device draws while idle; known only if its energy is limited, and 0 otherwise.
        longest_s: seconds of training for which energy is set aside, after which the training is over; None if neither
            the run, nor a supply, nor a battery limits the device's energy.
    """

    device_id: str
    mode: PowerMode
    epoch_s: float
    power_w: float
    power_limit_w: float
    warmup_s: float
    epoch_log_sd: float = 0.0
    power_log_sd: float = 0.0
    epochs: float = 1.0
    batch: int | None = None
    profiled_modes: int = 0
    is_length_assumed: bool = False
    idle_w: float = 0.0
    longest_s: float | None = None

    @property
    def set_aside_j(self) -> float:
        """Joules above idle that are set aside for the training; 0 if nothing limits the device's energy."""
        return 0.0 if self.longest_s is None else max(0.0, self.power_limit_w - self.idle_w) * self.longest_s

    def training_s(self, epoch_s: float) -> float:
        """Seconds of the whole training at `epoch_s` seconds per epoch, including the predicted warm-up."""
        return self.warmup_s + self.epochs * epoch_s

    def with_limit(self, power_limit_w: float) -> Assignment:
        """The same assignment with other watts allocated to it."""
        return replace(self, power_limit_w=power_limit_w)


@dataclass(frozen=True)
class Decision:
    """Whether a device was selected, and the reason as text."""

    device_id: str
    selected: bool
    reason: str


@dataclass(frozen=True)
class SupplyUse:
    """The power that a plan allocates at one supply.

    Attributes:
        supply: name of the supply.
        budget_w: its budget in watts.
        planned_w: watts allocated to its devices, including idle ones.
    """

    supply: str
    budget_w: float
    planned_w: float


@dataclass(frozen=True)
class RoundPlan:
    """The plan of one round.

    Attributes:
        assignments: the selected devices, by id.
        decisions: one for every device that was considered, by id.
        duration_s: the makespan: seconds until the slowest selected device finishes, at the planning quantile.
        planned_w: watts allocated at all sites, including idle devices.
        site_budget_w: budget of all sites together, W.
        supplies: allocated power and budget of every supply.
        deadline_s: seconds of training after which a device stops; None without a deadline.
        first_planned: the plan before it was trimmed, without its decisions; None if it was never trimmed.
        enough_replies: number of devices that the policy wanted without over-selection; None for all.
    """

    assignments: tuple[Assignment, ...]
    decisions: tuple[Decision, ...]
    duration_s: float
    planned_w: float
    site_budget_w: float
    supplies: tuple[SupplyUse, ...] = ()
    deadline_s: float | None = None
    first_planned: RoundPlan | None = None
    enough_replies: int | None = None

    def assignment_of(self, device_id: str) -> Assignment | None:
        """The assignment of a device; None if the plan has none for it."""
        found = bisect_left(self.assignments, device_id, key=lambda each: each.device_id)
        if found == len(self.assignments) or self.assignments[found].device_id != device_id:
            return None
        return self.assignments[found]

    @property
    def set_aside_j(self) -> float | None:
        """Joules above idle that were set aside for the trainings; None in a run without an energy budget.

        A trim changes nothing: no training gets more watts or seconds than were set aside.
        """
        trainings = self.original.assignments
        if any(each.longest_s is None for each in trainings):
            return None
        return sum(each.set_aside_j for each in trainings)

    @property
    def original(self) -> RoundPlan:
        """The plan before any trim."""
        return self.first_planned or self

    @property
    def in_other_mode(self) -> tuple[str, ...]:
        """Ids of the devices that a trim moved to another mode."""
        now = {each.device_id: each.mode for each in self.assignments}
        return tuple(k.device_id for k in self.original.assignments if now.get(k.device_id) not in (None, k.mode))

    @property
    def stopped(self) -> tuple[str, ...]:
        """Ids of the devices that a trim stopped."""
        continuing = {each.device_id for each in self.assignments}
        return tuple(each.device_id for each in self.original.assignments if each.device_id not in continuing)


# --- Allowance --------------------------------------------------------------------------------------------------------
# The power that a round may draw at every supply.

_ROUNDING = 1e-9
"""Relative tolerance for sums of watts, which are not exact in binary."""


@dataclass(frozen=True)
class Allowance:
    """The budget of every supply, and the power that devices outside the round draw there.

    Attributes:
        supplies: the supply tree.
        budget_w: watts of every supply.
        elsewhere_w: watts of devices that are not offered to the round, by their supply.
        left_w: watts of every supply that the round leaves to other runs, by supply; no device draws them yet.

    Raises:
        InvalidInputError: a supply has no budget or a negative one, or watts are given for an unknown supply.
    """

    supplies: Supplies
    budget_w: Mapping[str, float]
    elsewhere_w: Mapping[str, float] = field(default_factory=dict)
    left_w: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.supplies.names:
            watts = self.budget_w.get(name)
            if watts is None or not (math.isfinite(watts) and watts >= 0):
                raise InvalidInputError(f"supply {name!r} needs a budget of 0 or more finite watts, not {watts}")
        unknown = sorted({*self.budget_w, *self.elsewhere_w} - set(self.supplies.names))
        if unknown:
            raise InvalidInputError(
                f"watts are given for unknown supplies ({', '.join(unknown)}): use {', '.join(self.supplies.names)}"
            )
        if not all(math.isfinite(watts) and watts >= 0 for watts in self.elsewhere_w.values()):
            raise InvalidInputError("watts drawn elsewhere must be finite and 0 or more")

    @classmethod
    def of_site(cls, site_budget_w: float, elsewhere_w: float = 0.0) -> Allowance:
        """One supply for all devices."""
        return cls(Supplies((Supply(SITE),)), {SITE: site_budget_w}, {SITE: elsewhere_w})

    @property
    def site_budget_w(self) -> float:
        """Watts of all sites together."""
        return sum(self.budget_w[name] for name in self.supplies.roots)

    def idle_w(self, offers: Sequence[Offer]) -> dict[str, float]:
        """Watts at every supply while all offered devices idle."""
        drawn_w = {name: self.elsewhere_w.get(name, 0.0) for name in self.supplies.names}
        for offer in offers:
            drawn_w[offer.supply] += offer.idle_w
        return self._summed_upwards(drawn_w)

    def headroom(self, offers: Sequence[Offer]) -> Headroom:
        """The power that the supplies have left while all offered devices idle.

        Raises:
            InvalidInputError: a device is fed by an unknown supply.
        """
        names = self.supplies.names
        unknown = sorted({offer.supply for offer in offers} - set(names))
        if unknown:
            raise InvalidInputError(
                f"devices are fed by unknown supplies ({', '.join(unknown)}): use {', '.join(names)}"
            )
        idle_w = self.idle_w(offers)
        paths = {name: self.supplies.path(name)[::-1] for name in names}
        levels = max(map(len, paths.values()))
        index = {name: k for k, name in enumerate(names)}
        padded = {name: [index[n] for n in path] + [-1] * (levels - len(path)) for name, path in paths.items()}
        return Headroom(
            spare_w=np.array([self._max_w(name) - idle_w[name] - self.left_w.get(name, 0.0) for name in names]),
            supply_at=np.array([padded[offer.supply] for offer in offers], dtype=np.intp).reshape(-1, levels).T,
        )

    def use(self, offers: Sequence[Offer], extra_w: Mapping[str, float]) -> tuple[SupplyUse, ...]:
        """The power allocated at every supply.

        Args:
            offers: the devices.
            extra_w: watts above idle of the devices that train, by device id.
        """
        added_w = dict.fromkeys(self.supplies.names, 0.0)
        for offer in offers:
            added_w[offer.supply] += extra_w.get(offer.device_id, 0.0)
        idle_w, above_w = self.idle_w(offers), self._summed_upwards(added_w)
        return tuple(SupplyUse(name, self.budget_w[name], idle_w[name] + above_w[name]) for name in self.supplies.names)

    def exceeded(self, use: Sequence[SupplyUse]) -> frozenset[str]:
        """The supplies whose budget is exceeded. A plan within `headroom` exceeds none."""
        return frozenset(each.supply for each in use if each.planned_w > self._max_w(each.supply))

    def _max_w(self, supply: str) -> float:
        return self.budget_w[supply] * (1 + _ROUNDING)

    def at_sites_w(self, use: Sequence[SupplyUse]) -> float:
        """The power allocated at all sites together, including the circuits below them."""
        sites = set(self.supplies.roots)
        return sum(each.planned_w for each in use if each.supply in sites)

    def _summed_upwards(self, own_w: Mapping[str, float]) -> dict[str, float]:
        total_w = dict.fromkeys(self.supplies.names, 0.0)
        for name, watts in own_w.items():
            for feeding in self.supplies.path(name):
                total_w[feeding] += watts
        return total_w
