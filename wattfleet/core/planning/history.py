"""The history of a run's earlier rounds, as policies need it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wattfleet.core.errors import InvalidInputError

_MAX_UTILITY = 1e24


@dataclass(frozen=True)
class Participation:
    """One device's participation in a round.

    Attributes:
        failed: whether no usable reply arrived.
        num_examples: number of training samples; None if the device did not report it.
        loss: mean training loss; None if the device did not report it.
        late: whether the round ended before the training. A later round uses the update; samples and loss are unknown.

    Raises:
        InvalidInputError: a number is not finite, or the number of samples is negative.
    """

    failed: bool = False
    num_examples: float | None = None
    loss: float | None = None
    late: bool = False

    def __post_init__(self) -> None:
        if self.num_examples is not None and not 0 <= self.num_examples < math.inf:
            raise InvalidInputError(f"the number of samples must be finite and 0 or more, not {self.num_examples}")
        if self.loss is not None and not math.isfinite(self.loss):
            raise InvalidInputError(f"the loss must be finite or omitted, not {self.loss}")


@dataclass(frozen=True)
class PastRound:
    """The record of one finished round.

    Attributes:
        number: number of the round, from 1.
        device_ids: the selected devices.
        utility: sum of loss times samples over the devices that completed the round and reported both.
    """

    number: int
    device_ids: tuple[str, ...]
    utility: float


@dataclass(frozen=True)
class History:
    """The finished rounds of a run, summarised per device.

    Attributes:
        rounds: the finished rounds, by number.
        times_completed: number of rounds that a device completed, in time or late, by device id.
        latest: the latest round that a device completed in time, and its participation.
        last_selected: the latest round that a device was selected for, completed or not.
        consecutive_failures: number of failures since a device last completed a round, and the round of the latest.
    """

    rounds: Sequence[PastRound] = ()
    times_completed: Mapping[str, int] = field(default_factory=dict)
    latest: Mapping[str, tuple[int, Participation]] = field(default_factory=dict)
    last_selected: Mapping[str, int] = field(default_factory=dict)
    consecutive_failures: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def after(self, number: int, participations: Mapping[str, Participation]) -> History:
        """The history with one more round. If it already has this round, it is returned unchanged.

        Args:
            number: number of the round, from 1. Rounds may end in another order than they began in.
            participations: participations of the selected devices, by id.
        """
        if any(past.number == number for past in self.rounds):
            return self
        times_completed, latest = dict(self.times_completed), dict(self.latest)
        last_selected, failures = dict(self.last_selected), dict(self.consecutive_failures)
        utility = 0.0
        ids = tuple(map(sys.intern, participations))  # thousands of rounds share one string per device
        for device_id, participation in zip(ids, participations.values(), strict=True):
            last_selected[device_id] = max(number, last_selected.get(device_id, 0))
            done = latest[device_id][0] if device_id in latest else 0
            count, failed = failures.get(device_id, (0, 0))
            if participation.failed and not participation.late:
                if number > done:
                    failures[device_id] = count + 1, max(number, failed)
                continue
            times_completed[device_id] = times_completed.get(device_id, 0) + 1
            if participation.late:  # it may still fail, so earlier failures still count
                continue
            utility += _bounded((participation.loss or 0.0) * (participation.num_examples or 0.0))
            if number > done:
                latest[device_id] = number, participation
            if number > failed:
                failures.pop(device_id, None)
        rounds = sorted((*self.rounds, PastRound(number, ids, utility)), key=lambda past: past.number)
        return History(tuple(rounds), times_completed, latest, last_selected, failures)

    def loss_of(self, device_id: str) -> float | None:
        """The latest training loss of a device; None if it never reported one."""
        return self.latest[device_id][1].loss if device_id in self.latest else None

    def statistical_utility(self, device_id: str) -> float | None:
        """The statistical utility of a device: its samples times its latest loss (Oort, section 4.2).

        Oort uses the root of the samples' mean squared loss. Apps report the mean loss, which is a lower bound of it.
        Negative losses, which some likelihoods have, count as 0. None if the device never reported both numbers.
        """
        if device_id not in self.latest:
            return None
        participation = self.latest[device_id][1]
        if participation.loss is None or participation.num_examples is None:
            return None
        return _bounded(max(participation.loss, 0.0) * participation.num_examples)


def _bounded(utility: float) -> float:
    """Clip a device's utility, so that it can be summed and squared without overflow."""
    return min(max(utility, -_MAX_UTILITY), _MAX_UTILITY)
