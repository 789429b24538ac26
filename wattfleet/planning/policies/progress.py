"""The policy `progress`: the devices, their number, epochs and duration with the most progress per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattfleet.errors import InvalidInputError
from wattfleet.planning.curves import Curves, Mask, Values
from wattfleet.planning.history import History
from wattfleet.planning.makespan import min_makespan
from wattfleet.planning.offers import Offer
from wattfleet.planning.policies.policy import (
    PlanningContext,
    SelectionRequest,
    any_devices,
    only_devices,
    require_count,
)
from wattfleet.planning.policies.progress_search import ProgressSearch

_BEST, _OTHERS = "in the set with the most progress per second", "other devices make more progress per second"
_DUE = "it has not trained in this run yet, and each device trains within its first rounds"
_FILLED = "it finishes within the round with the watts that the others leave"

_SPARE_ROUNDS = 2
"""Rounds in which each device is selected once, beyond those that are enough if every round selects others."""

_MAX_RELATIVE_SAMPLES = 100.0
"""Cap on the samples that count for a device, in multiples of the fleet's median."""


@dataclass(frozen=True)
class Progress:
    """Selects the set of devices that gives the run the most progress per second.

    Federated averaging over `k` of a run's `n` heterogeneous devices, drawn without replacement, needs a number of
    rounds in proportion to `1 + h / k * (n - k) / (n - 1)` (Li et al., arXiv 1907.02189, theorem 3). A round makes the
    inverse of this of the progress of a round with all devices. Its duration is that of its training plus an overhead.
    Progress over duration has a maximum at some `k` and some duration, which depend on the budgets (Luo et al., arXiv
    2012.08336, choose `k` from the same bound). Where the plan may choose the local epochs, it is multiplied by their
    progress (see `ProgressSearch`).

    In `k`, a device is weighted by its samples times the number of rounds since it last took part, relative to the
    mean. So it is not always the small and fast devices that train. A set never counts for more devices than it
    has, so a device that was absent for very long, such as one that joins a long run, does not train alone either.

    A device whose time is uncertain is tried with optimism (UCB: Auer et al. 2002, doi:10.1023/A:1013689704352): its
    weight is multiplied by the upper end of its speed, one standard deviation above the median. And no device starves:
    each one that its supplies can power is selected within the first `ceil(n / k) + 2` rounds, where `k` of `n` devices
    train in a round. Watts that are left then go to further devices that finish within the round anyway.

    Attributes:
        count: maximum number of devices in a round; None for as many as are useful.
        half_devices: number of devices `h` of a much larger fleet with which a round makes half the progress of a round
            with all devices. The more similar the devices' data, the smaller it is.
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
        search = ProgressSearch(context, worth, places, self.half_devices, self.overhead_s)
        found = search.best()
        if found is None:
            return any_devices(context, 1)  # planning then fails with an error that states the missing watts
        due = _due(context, found.chosen)
        if due.any():
            found = search.with_due(found, due)
        best = found.chosen & ~due
        epochs = np.array([option.epochs for option in context.choice.options])[search.level_to_join(found)]
        chosen = _filled(context, context.fronts.curves(epochs), best | due, due, worth, places)
        reasons = {int(k): _BEST if best[k] else _DUE if due[k] else _FILLED for k in np.flatnonzero(chosen)}
        request = replace(only_devices(chosen, reasons, _OTHERS), priority=due & chosen)
        return request if len(context.choice.options) == 1 else replace(request, epochs=epochs)


def _due(context: PlanningContext, best: Mask) -> Mask:
    """`[n]` the devices to select beyond the best set, so that each device trains within the first rounds.

    Args:
        context: the round.
        best: `[n]` the best set.
    """
    last_selected = context.history.last_selected
    waiting = np.array([offer.device_id not in last_selected for offer in context.offers], dtype=np.bool_)
    waiting &= np.isfinite(context.curves.fastest_s)
    rounds = math.ceil(len(best) / int(best.sum())) + _SPARE_ROUNDS
    missing = math.ceil(int(waiting.sum()) / max(1, rounds - context.server_round + 1)) - int((waiting & best).sum())
    due = np.zeros_like(best)
    others = np.flatnonzero(waiting & ~best)
    # Those that need the fewest watts: more of them train in the same round.
    due[others[np.argsort(context.curves.min_extra_w[others], kind="stable")][: max(0, missing)]] = True
    return due


def _filled(context: PlanningContext, curves: Curves, wanted: Mask, due: Mask, worth: Values, places: int) -> Mask:
    """`[n]` the devices of a set that the supplies can power, and others that finish within its time with what is left.

    Args:
        context: the round.
        curves: power curves of all devices.
        wanted: `[n]` the set.
        due: `[n]` the devices of the set that have priority.
        worth: `[n]` weight of each device.
        places: maximum number of devices.
    """
    headroom = context.headroom
    count = min(places, int(wanted.sum()))
    allocation = min_makespan(curves, headroom, count, wanted, due)
    assert allocation is not None, "the supplies can power the best set"
    chosen = allocation.step >= 0
    extra_w = curves.extra_at(curves.steps_within(allocation.limit_s))
    left_w = headroom.spare_w - headroom.drawn_w(extra_w, np.flatnonzero(chosen))
    if context.choice.is_per_device:
        return np.asarray(chosen)  # a device with fewer epochs than the others may lower the progress of the round
    others = np.flatnonzero(~chosen & np.isfinite(extra_w))
    for k in others[np.argsort(-worth[others], kind="stable")]:
        path = headroom.supply_at[:, k]
        path = path[path >= 0]
        if chosen.sum() < places and (extra_w[k] <= left_w[path]).all():
            chosen[k] = True
            left_w[path] -= extra_w[k]
    return np.asarray(chosen)


def device_worth(offers: Sequence[Offer], server_round: int, history: History) -> Values:
    """`[n]` weight of each device, 1 on average.

    It grows with the samples, with the rounds since the device was last selected, and with the uncertainty of its time.

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
    speed = np.exp([float(offer.front.epoch_log_sd[0]) for offer in offers])
    worth = rounds * samples * speed
    return np.asarray(worth / worth.mean(), dtype=np.float64)
