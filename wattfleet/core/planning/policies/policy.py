"""The interface of client-selection policies: the planning context and the policy's request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning.curves import Curves, FrontTable, Headroom, Mask, Offer, Values, least_whole
from wattfleet.core.planning.energy import EnergyLimit
from wattfleet.core.planning.epoch_choice import EpochChoice
from wattfleet.core.planning.history import History


@dataclass(frozen=True)
class PlanningContext:
    """The information that a policy has about the round to plan.

    Attributes:
        server_round: number of the round, from 1.
        offers: the `n` candidates, by id.
        fronts: their fronts at the planning quantiles.
        choice: the numbers of local epochs that the policy may choose. A policy that chooses none gets the fewest.
        headroom: headroom of the supplies that feed them.
        history: earlier rounds of the run.
        over_selection: share of devices to select beyond the policy's number, so that some may fail.
        energy: the energy that the run has left; None for a run without an energy budget. The plan keeps to it,
            whatever the policy requests.
    """

    server_round: int
    offers: Sequence[Offer]
    fronts: FrontTable
    choice: EpochChoice
    headroom: Headroom
    history: History
    over_selection: float = 0.0
    energy: EnergyLimit | None = None

    @cached_property
    def curves(self) -> Curves:
        """Power curves of the candidates with the fewest local epochs."""
        return self.fronts.curves(self.choice.fewest)

    def places(self, count: int | None, among: int) -> int:
        """The number of devices to select among some: `count` or, if None, half of them, plus over-selection."""
        base = (among + 1) // 2 if count is None else count
        return min(among, least_whole(base * (1 + self.over_selection)))


@dataclass(frozen=True)
class SelectionRequest:
    """A policy's request. The plan selects the eligible devices with the least makespan.

    Attributes:
        count: number of devices to select.
        eligible: `[n]` devices that may be selected.
        priority: `[n]` devices to select before all others.
        exclusion_reasons: why a device is not eligible, by its index.
        selection_reasons: why the policy requests a device, by its index. Devices without an entry are selected for
            their makespan.
        deadline_s: seconds of training after which a device stops; None without a deadline.
        epochs: `[n]` local epochs of each device, each one of the context's choice; None for the fewest.
        within_s: seconds of training within which all devices finish, each with the least power that suffices; the
            supplies can power all of them. None for the least makespan.
    """

    count: int
    eligible: Mask
    priority: Mask
    exclusion_reasons: Mapping[int, str] = field(default_factory=dict)
    selection_reasons: Mapping[int, str] = field(default_factory=dict)
    deadline_s: float | None = None
    epochs: Values | None = None
    within_s: float | None = None


class Policy(Protocol):
    """A client-selection policy. It must be a pure function of the context, so that plans are reproducible."""

    @property
    def name(self) -> str:
        """The policy's name on command lines."""
        ...

    @property
    def has_count(self) -> bool:
        """Whether the policy selects a given number of devices; only then over-selection applies."""
        ...

    def request(self, context: PlanningContext) -> SelectionRequest:
        """Request devices for a round."""
        ...


def any_devices(context: PlanningContext, count: int | None) -> SelectionRequest:
    """Request any `count` devices; None for half of all devices, rounded up."""
    n = len(context.offers)
    return SelectionRequest(context.places(count, n), np.ones(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_))


def only_devices(
    chosen: Mask, selection_reasons: str | Mapping[int, str], exclusion_reasons: str | Mapping[int, str]
) -> SelectionRequest:
    """Request exactly some devices.

    Args:
        chosen: `[n]` the devices, one or more.
        selection_reasons: why these devices, one text for all or by index.
        exclusion_reasons: why not the others, likewise.
    """

    def by_index(reasons: str | Mapping[int, str], devices: Mask) -> Mapping[int, str]:
        return dict.fromkeys(map(int, np.flatnonzero(devices)), reasons) if isinstance(reasons, str) else reasons

    return SelectionRequest(
        int(chosen.sum()),
        chosen,
        np.zeros(len(chosen), dtype=np.bool_),
        exclusion_reasons=by_index(exclusion_reasons, ~chosen),
        selection_reasons=by_index(selection_reasons, chosen),
    )


def require_count(count: int | None) -> None:
    """Check a policy's number of devices.

    Raises:
        InvalidInputError: it is below 1.
    """
    if count is not None and count < 1:
        raise InvalidInputError(f"the number of devices must be 1 or more, not {count}")


def require_seed(seed: int) -> None:
    """Check a seed.

    Raises:
        InvalidInputError: it is negative.
    """
    if seed < 0:
        raise InvalidInputError(f"the seed must be 0 or more, not {seed}")
