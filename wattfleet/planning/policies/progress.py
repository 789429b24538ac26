"""As much progress per second as the watts allow: whom, how many and how long at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from wattfleet.errors import InvalidInputError
from wattfleet.planning.curves import Mask, Values
from wattfleet.planning.headroom import Headroom
from wattfleet.planning.policies.policy import Situation, Wish, everyone_of, only, require_count
from wattfleet.planning.utility import by_utility, by_utility_per_watt

_LIMITS = 32


@dataclass(frozen=True)
class Progress:
    """The devices that bring a run forward the most per second, and no more of them than that takes.

    Federated averaging over `k` of many unlike devices needs rounds in proportion to `1 + h / k` (Li et al., arXiv
    1907.02189, theorem 2), so that a round makes `k / (k + h)` of the progress that one with all devices makes. It
    takes its training and what messages take beside it. The quotient of the two is the most at some number of devices
    and some duration, which depend on the watts (Luo et al., arXiv 2012.08336, choose `k` from the same bound).

    A device counts in `k` by its samples and by how long its data has been left out, each relative to the mean, so
    that small and fast devices do not train alone. Nor does one that was left out for very long, as a newcomer is to a
    long run: a set counts for as many devices as it has at most.

    Attributes:
        count: devices in a round at most; None for as many as are of use.
        half_devices: number of devices `h` with which a round makes half the progress of one with all; the more alike
            the devices' data, the smaller.
        overhead_s: seconds of a round beside its training.
    """

    count: int | None = None
    half_devices: float = 3.0
    overhead_s: float = 10.0
    name: str = "progress"

    def __post_init__(self) -> None:
        require_count(self.count)
        if not (math.isfinite(self.half_devices) and self.half_devices > 0):
            raise InvalidInputError(
                f"half the progress of a round with all devices takes more than 0 devices, not {self.half_devices}"
            )
        if not 0 <= self.overhead_s < math.inf:
            raise InvalidInputError(f"a round takes 0 or more seconds beside its training, not {self.overhead_s}")

    @property
    def counts(self) -> bool:
        """Only where a number is given: else it takes as many as are of use, and more of them are of less use."""
        return self.count is not None

    def wish(self, situation: Situation) -> Wish:
        """The set that makes the most progress per second, among those of 32 durations."""
        curves, worth = situation.curves, _worth(situation)
        seats = len(worth) if self.count is None else situation.seats(self.count, len(worth))
        most, best = 0.0, np.zeros(len(worth), dtype=np.bool_)
        for limit_s in _limits_s(curves.time_s):
            extra_w = curves.extra_at(curves.steps_within(limit_s))
            for chosen in _sets(extra_w, worth, situation.headroom, seats):
                # The plan may find this set done sooner; it is judged by the time that all of it needs.
                gain = min(float(worth[chosen].sum()), float(np.count_nonzero(chosen)))
                progress = gain / (gain + self.half_devices) / (limit_s + self.overhead_s)
                if progress > most:
                    most, best = progress, chosen
        if not best.any():
            return everyone_of(situation, 1)  # the plan says what the watts lack
        return only(best, "among those that make the most progress per second", "others make more progress per second")


def _worth(situation: Situation) -> Values:
    """`[n]` what each device counts for: 1 in the mean, more with more samples and the longer it was left out."""
    history = situation.history
    latest = [history.latest.get(offer.device_id) for offer in situation.offers]
    # What was tried in vain was not left out: else whoever always fails would be worth the more the longer it does.
    tried = [history.last_tried.get(offer.device_id, 0) for offer in situation.offers]
    rounds = situation.server_round - np.array(tried, dtype=float)
    samples = np.array([np.nan if known is None else known[1].num_examples or np.nan for known in latest], dtype=float)
    told = np.isfinite(samples)
    samples = np.where(told, samples, samples[told].mean() if told.any() else 1.0)
    worth = rounds / rounds.mean() * samples / samples.mean()
    return np.asarray(worth, dtype=np.float64)


def _limits_s(times_s: Values) -> Values:
    """Durations of the training to try, from the fastest device's fastest mode to the slowest one's slowest."""
    if not len(times_s):
        return times_s
    return np.geomspace(times_s.min() * (1 + 1e-9), times_s.max(), _LIMITS)


def _sets(extra_w: Values, worth: Values, headroom: Headroom, seats: int) -> Iterator[Mask]:
    """Sets that the supplies carry and of which one is about the best, most often the first.

    By worth per watt, small devices can leave no room for one that is worth more than all of them, and can hold the
    seats of larger ones.
    """
    carried = by_utility_per_watt(extra_w, worth, headroom).chosen
    yield _of_most_worth(carried, worth, seats)
    yield _of_most_worth(extra_w <= headroom.alone_w, worth, 1)
    if np.count_nonzero(carried) > seats:
        yield _of_most_worth(by_utility(extra_w, worth, headroom), worth, seats)


def _of_most_worth(devices: Mask, worth: Values, seats: int) -> Mask:
    """As many of some devices as there are seats for."""
    if np.count_nonzero(devices) <= seats:
        return devices
    able = np.flatnonzero(devices)
    kept = np.zeros_like(devices)
    kept[able[np.argsort(-worth[able], kind="stable")[:seats]]] = True
    return kept
