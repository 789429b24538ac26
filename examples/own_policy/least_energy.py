"""A custom client-selection policy: it selects the devices that need the least energy for an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wattfleet.core.planning import Offer
from wattfleet.core.planning.policies import PlanningContext, SelectionRequest, only_devices


@dataclass(frozen=True)
class LeastEnergy:
    """Selects the `count` devices that need the least energy for an epoch, each in its most efficient mode.

    Attributes:
        count: number of devices in a round (`--clients`); None for half of them, rounded up.
    """

    count: int | None = None
    name: str = "least-energy"
    has_count: ClassVar[bool] = True

    def request(self, context: PlanningContext) -> SelectionRequest:
        """Request the devices with the least energy."""
        energy_kj = np.array([least_energy_kj(offer) for offer in context.offers])
        places = context.places(self.count, len(energy_kj))
        chosen = np.zeros(len(energy_kj), dtype=np.bool_)
        chosen[np.argsort(energy_kj, kind="stable")[:places]] = True
        return only_devices(
            chosen,
            f"among the {places} devices with the least energy for an epoch",
            {k: f"needs {energy_kj[k]:.2f} kJ for an epoch, more than those selected" for k in np.flatnonzero(~chosen)},
        )


def least_energy_kj(offer: Offer) -> float:
    """The predicted energy of an epoch in the device's most efficient mode, kJ."""
    return float(np.min(offer.front.epoch_s * offer.front.power_w)) / 1e3
