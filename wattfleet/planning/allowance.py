"""The watts that a round may draw at every supply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from wattfleet.budgets import Supplies, Supply
from wattfleet.errors import InvalidInputError
from wattfleet.planning.headroom import Headroom
from wattfleet.planning.offers import SITE, Offer
from wattfleet.planning.round_plan import SupplyUse

_ROUNDING = 1e-9
"""Share of a budget by which sums of decimal watts may be off in binary."""


@dataclass(frozen=True)
class Allowance:
    """What every supply allows, and what is drawn there whatever a round decides.

    Attributes:
        supplies: the tree.
        budget_w: watts of every supply.
        elsewhere_w: watts of devices that are not offered to the round, by the supply they hang behind.

    Raises:
        InvalidInputError: a supply has no budget, or a negative one; watts are stated for none of them.
    """

    supplies: Supplies
    budget_w: Mapping[str, float]
    elsewhere_w: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.supplies.names:
            watts = self.budget_w.get(name)
            if watts is None or not (math.isfinite(watts) and watts >= 0):
                raise InvalidInputError(f"supply {name!r} needs a budget of finite watts, not {watts}")
        unknown = sorted({*self.budget_w, *self.elsewhere_w} - set(self.supplies.names))
        if unknown:
            raise InvalidInputError(f"watts are stated for {', '.join(unknown)}, which is no supply")
        if not all(math.isfinite(watts) and watts >= 0 for watts in self.elsewhere_w.values()):
            raise InvalidInputError("watts drawn elsewhere must be finite and not negative")

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
        """What the supplies can carry beyond idling.

        Raises:
            InvalidInputError: a device hangs behind a supply that is not known.
        """
        names = self.supplies.names
        strangers = sorted({offer.supply for offer in offers} - set(names))
        if strangers:
            raise InvalidInputError(f"devices hang behind {', '.join(strangers)}, known are {', '.join(names)}")
        idle_w = self.idle_w(offers)
        paths = {name: self.supplies.path(name)[::-1] for name in names}
        levels = max(map(len, paths.values()))
        index = {name: k for k, name in enumerate(names)}
        padded = {name: [index[n] for n in path] + [-1] * (levels - len(path)) for name, path in paths.items()}
        return Headroom(
            spare_w=np.array([self._most_w(name) - idle_w[name] for name in names]),
            above=np.array([padded[offer.supply] for offer in offers], dtype=np.intp).reshape(-1, levels).T,
        )

    def use(self, offers: Sequence[Offer], extra_w: Mapping[str, float]) -> tuple[SupplyUse, ...]:
        """What is set aside at every supply, where some devices draw watts above idling, by device id."""
        added_w = dict.fromkeys(self.supplies.names, 0.0)
        for offer in offers:
            added_w[offer.supply] += extra_w.get(offer.device_id, 0.0)
        idle_w, above_w = self.idle_w(offers), self._summed_upwards(added_w)
        return tuple(SupplyUse(name, self.budget_w[name], idle_w[name] + above_w[name]) for name in self.supplies.names)

    def exceeded(self, use: Sequence[SupplyUse]) -> frozenset[str]:
        """The supplies that cannot carry what is set aside there; a plan that `headroom` allows exceeds none."""
        return frozenset(each.supply for each in use if each.planned_w > self._most_w(each.supply))

    def _most_w(self, supply: str) -> float:
        return self.budget_w[supply] * (1 + _ROUNDING)

    def at_sites_w(self, use: Sequence[SupplyUse]) -> float:
        """What is set aside at all sites together, circuits below them included."""
        sites = set(self.supplies.roots)
        return sum(each.planned_w for each in use if each.supply in sites)

    def _summed_upwards(self, own_w: Mapping[str, float]) -> dict[str, float]:
        total_w = dict.fromkeys(self.supplies.names, 0.0)
        for name, watts in own_w.items():
            for above in self.supplies.path(name):
                total_w[above] += watts
        return total_w
