"""What a run's earlier rounds showed, as policies need it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wattfleet.errors import InvalidInputError


@dataclass(frozen=True)
class Part:
    """One device's part in a round.

    Attributes:
        failed: no usable reply came.
        num_examples: samples that it trained on; None where it did not say.
        loss: mean loss while training; None where it did not say.

    Raises:
        InvalidInputError: a number that is not finite, or a negative number of samples.
    """

    failed: bool = False
    num_examples: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        if self.num_examples is not None and not 0 <= self.num_examples < math.inf:
            raise InvalidInputError(f"a device trains on a number of samples, not on {self.num_examples}")
        if self.loss is not None and not math.isfinite(self.loss):
            raise InvalidInputError(f"a loss has to be finite, or left out, not {self.loss}")


@dataclass(frozen=True)
class PastRound:
    """What is kept of one round that is over.

    Attributes:
        number: from 1.
        device_ids: that were chosen.
        gained: loss times samples, of the devices that did their part and told both.
    """

    number: int
    device_ids: tuple[str, ...]
    gained: float


@dataclass(frozen=True)
class History:
    """The rounds of a run that are over. It grows with its devices, and by little with each round.

    Attributes:
        rounds: by number.
        times_done: in how many rounds a device did its part.
        latest: the latest round in which a device did its part, and that part.
        last_tried: the latest round that a device was chosen for, whatever came of it.
        failures_in_a_row: how often a device has failed since it last did its part, and the round of its latest
            failure.
    """

    rounds: Sequence[PastRound] = ()
    times_done: Mapping[str, int] = field(default_factory=dict)
    latest: Mapping[str, tuple[int, Part]] = field(default_factory=dict)
    last_tried: Mapping[str, int] = field(default_factory=dict)
    failures_in_a_row: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def after(self, number: int, parts: Mapping[str, Part]) -> History:
        """The history with one round more; the same where it is there already.

        Args:
            number: from 1; rounds may end in another order than they began in.
            parts: of the devices that were chosen, by id.
        """
        if any(past.number == number for past in self.rounds):
            return self
        times_done, latest = dict(self.times_done), dict(self.latest)
        last_tried, failures = dict(self.last_tried), dict(self.failures_in_a_row)
        gained = 0.0
        ids = tuple(map(sys.intern, parts))  # a name in a thousand rounds is one name
        for device_id, part in zip(ids, parts.values(), strict=True):
            last_tried[device_id] = max(number, last_tried.get(device_id, 0))
            done = latest[device_id][0] if device_id in latest else 0
            count, failed = failures.get(device_id, (0, 0))
            if not part.failed:
                times_done[device_id] = times_done.get(device_id, 0) + 1
                gained += (part.loss or 0.0) * (part.num_examples or 0.0)
                if number > done:
                    latest[device_id] = number, part
                if number > failed:
                    failures.pop(device_id, None)
            elif number > done:
                failures[device_id] = count + 1, max(number, failed)
        rounds = sorted((*self.rounds, PastRound(number, ids, gained)), key=lambda past: past.number)
        return History(tuple(rounds), times_done, latest, last_tried, failures)

    def loss_of(self, device_id: str) -> float | None:
        """The latest training loss of a device; None where it never said."""
        return self.latest[device_id][1].loss if device_id in self.latest else None

    def statistical_utility(self, device_id: str) -> float | None:
        """How much there is to learn from a device: its samples times its latest loss (Oort, section 4.2).

        Oort takes the root of the samples' mean squared loss; apps report the mean loss, which bounds it from below.
        A loss below zero, as some likelihoods have it, counts as nothing left to learn. None where the device never
        said.
        """
        if device_id not in self.latest:
            return None
        part = self.latest[device_id][1]
        if part.loss is None or part.num_examples is None:
            return None
        return max(part.loss, 0.0) * part.num_examples
