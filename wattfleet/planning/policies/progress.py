"""The policy `progress`: the devices, their number, epochs and duration with the most progress per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattfleet.errors import InvalidInputError
from wattfleet.planning.curves import Values
from wattfleet.planning.history import History
from wattfleet.planning.offers import Offer
from wattfleet.planning.policies.policy import (
    PlanningContext,
    SelectionRequest,
    any_devices,
    only_devices,
    require_count,
)
from wattfleet.planning.policies.progress_search import ProgressSearch

_MAX_RELATIVE_SAMPLES = 100.0
"""Cap on the samples that count for a device, in multiples of the fleet's median."""


@dataclass(frozen=True)
class Progress:
    """Selects the set of devices that gives the run the most progress per second.

    Federated averaging over `k` of many heterogeneous devices needs a number of rounds in proportion to `1 + h / k`
    (Li et al., arXiv 1907.02189, theorem 2). So a round makes `k / (k + h)` of the progress of a round with all
    devices. Its duration is that of its training plus an overhead. Progress over duration has a maximum at some `k`
    and some duration, which depend on the budgets (Luo et al., arXiv 2012.08336, choose `k` from the same bound).
    Where the plan may choose the local epochs, it is multiplied by their progress (see `ProgressSearch`).

    In `k`, a device is weighted by its samples and by the number of rounds since it last took part, each relative to
    the mean. So it is not always the small and fast devices that train. A set never counts for more devices than it
    has, so a device that was absent for very long, such as one that joins a long run, does not train alone either.

    Attributes:
        count: maximum number of devices in a round; None for as many as are useful.
        half_devices: number of devices `h` with which a round makes half the progress of a round with all devices. The
            more similar the devices' data, the smaller it is.
        overhead_s: seconds of a round in addition to its training.
    """

    count: int | None = None
    half_devices: float = 3.0
    overhead_s: float = 10.0
    name: str = "progress"

    def __post_init__(self) -> None:
        require_count(self.count)
        if not (math.isfinite(self.half_devices) and self.half_devices > 0):
            raise InvalidInputError(
                f"the number of devices for half the progress must be above 0, not {self.half_devices}"
            )
        if not 0 <= self.overhead_s < math.inf:
            raise InvalidInputError(f"the overhead of a round must be 0 s or more, not {self.overhead_s}")

    @property
    def has_count(self) -> bool:
        """Only if a number is given. Otherwise the policy selects as many devices as are useful."""
        return self.count is not None

    def request(self, context: PlanningContext) -> SelectionRequest:
        """Request the set, and its local epochs, with the most progress per second among those that are tried."""
        worth = device_worth(context.offers, context.server_round, context.history)
        places = len(worth) if self.count is None else context.places(self.count, len(worth))
        found = ProgressSearch(context, worth, places, self.half_devices, self.overhead_s).best()
        if found is None:
            return any_devices(context, 1)  # planning then fails with an error that states the missing watts
        request = only_devices(
            found.chosen, "in the set with the most progress per second", "other devices make more progress per second"
        )
        if len(context.choice.options) == 1:
            return request
        epochs = np.array([option.epochs for option in context.choice.options])
        return replace(request, epochs=epochs[np.maximum(found.level, 0)])


def device_worth(offers: Sequence[Offer], server_round: int, history: History) -> Values:
    """`[n]` weight of each device, 1 on average. It grows with the samples and with the rounds since the last one.

    Args:
        offers: the devices.
        server_round: number of the round that is planned.
        history: earlier rounds of the run.
    """
    latest = [history.latest.get(offer.device_id) for offer in offers]
    # Failed rounds count too. Otherwise the weight of a device that always fails would grow.
    last_selected = [history.last_selected.get(offer.device_id, 0) for offer in offers]
    rounds = np.maximum(server_round - np.array(last_selected, dtype=float), 1.0)
    samples = np.array([np.nan if each is None else each[1].num_examples or np.nan for each in latest], dtype=float)
    known = np.isfinite(samples)
    if known.any():  # otherwise a device could report so many samples that the others have no weight
        samples = np.minimum(samples, _MAX_RELATIVE_SAMPLES * np.median(samples[known]))
    samples = np.where(known, samples, samples[known].mean() if known.any() else 1.0)
    worth = rounds / rounds.mean() * samples / samples.mean()
    return np.asarray(worth, dtype=np.float64)
