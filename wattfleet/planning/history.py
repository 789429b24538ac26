"""What a run's earlier rounds showed, as policies need it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

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
    """One round that is over.

    Attributes:
        number: from 1.
        parts: of the devices that were chosen, by id.
    """

    number: int
    parts: Mapping[str, Part]


@dataclass(frozen=True)
class History:
    """The rounds of a run that are over, oldest first."""

    rounds: Sequence[PastRound] = field(default_factory=tuple)

    @cached_property
    def times_done(self) -> Mapping[str, int]:
        """In how many rounds a device did its part."""
        counts: dict[str, int] = {}
        for past in self.rounds:
            for device_id, part in past.parts.items():
                if not part.failed:
                    counts[device_id] = counts.get(device_id, 0) + 1
        return counts

    @cached_property
    def latest(self) -> Mapping[str, tuple[int, Part]]:
        """The latest round in which a device did its part, and that part."""
        return {
            device_id: (past.number, part)
            for past in self.rounds
            for device_id, part in past.parts.items()
            if not part.failed
        }

    @cached_property
    def last_tried(self) -> Mapping[str, int]:
        """The latest round that a device was chosen for, whatever came of it."""
        return {device_id: past.number for past in self.rounds for device_id in past.parts}

    @cached_property
    def failures_in_a_row(self) -> Mapping[str, tuple[int, int]]:
        """How often a device has failed since it last did its part, and the round of its latest failure."""
        found: dict[str, tuple[int, int]] = {}
        for past in self.rounds:
            for device_id, part in past.parts.items():
                if part.failed:
                    found[device_id] = (found.get(device_id, (0, 0))[0] + 1, past.number)
                else:
                    found.pop(device_id, None)
        return found

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
