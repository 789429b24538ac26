"""Rules for when an asynchronous server aggregates the updates that have arrived, and with which weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from benchmarks.federated.learning import Model, Trained
from benchmarks.federated.tasks import Parameters
from wattfleet.core.planning import least_whole
from wattfleet.flower.server.replies import Arrays, Update, step


@dataclass(frozen=True)
class Arrival:
    """An update that waits for the server's next aggregation.

    Attributes:
        device: number of the device.
        samples: number of the device's training samples.
        base: the model that it started from.
        trained: the result of its training.
    """

    device: int
    samples: int
    base: Model
    trained: Trained

    def update(self, current: Model) -> Update:
        """Convert it to an update of Wattfleet's FedBuff, whose staleness is the number of steps since its start."""
        staleness = current.server_round - self.base.server_round
        return Update(_arrays(self.base.parameters), _arrays(self.trained.parameters), staleness)


class Stepping(Protocol):
    """A rule for the server's aggregation steps."""

    @property
    def ends_rounds(self) -> bool:
        """Whether a step ends the round that was sent last. Otherwise a round ends with its last update."""
        ...

    def is_due(self, waiting: int, expected: int, replied: int) -> bool:
        """Whether the server should aggregate now.

        Args:
            waiting: number of updates in the buffer.
            expected: number of devices of the round that was sent last; 0 if it has ended.
            replied: how many of these devices have sent their updates.
        """
        ...

    def sends_early(self, waiting: int, training: int, expected: int) -> bool:
        """Whether free devices should start training before the next aggregation.

        Args:
            waiting: number of updates in the buffer.
            training: number of devices that train.
            expected: number of devices of the round that was sent last; 0 if it has ended.
        """
        ...

    def merged(self, current: Model, arrivals: Sequence[Arrival]) -> Parameters:
        """Return the global parameters after aggregating the updates."""
        ...


@dataclass(frozen=True)
class BufferedSteps:
    """FedBuff: aggregate after every `size` updates, which differ in weight only by their staleness.

    The rules and the arithmetic are those of `wattfleet.flower.server.fedbuff` (Nguyen et al. 2022, arXiv 2106.06639),
    with its default learning rate.

    Attributes:
        size: number of updates in the full buffer.
    """

    size: int
    ends_rounds: ClassVar[bool] = False

    def is_due(self, waiting: int, expected: int, replied: int) -> bool:
        """Whether the buffer is full."""
        return waiting >= self.size

    def sends_early(self, waiting: int, training: int, expected: int) -> bool:
        """Whether the trainings in flight are too few to fill the buffer."""
        return waiting + training < self.size

    def merged(self, current: Model, arrivals: Sequence[Arrival]) -> Parameters:
        """Return the parameters after a step of Wattfleet's FedBuff."""
        updates = [each.update(current) for each in arrivals]
        after = step(_arrays(current.parameters), updates, learning_rate=1.0)
        return {name: torch.from_numpy(array) for name, array in after.items()}


@dataclass(frozen=True)
class QuorumSteps:
    """Rounds that end once a share of their devices has replied. Late updates are used in the next aggregation.

    The weight of an update is the number of its device's samples, divided by `sqrt(1 + staleness)`. Without late
    updates this is federated averaging (FedAvg).

    Attributes:
        share: share of a round's devices whose replies end it.
    """

    share: float
    ends_rounds: ClassVar[bool] = True

    def is_due(self, waiting: int, expected: int, replied: int) -> bool:
        """Whether enough devices of the round have replied."""
        return expected > 0 and replied >= least_whole(self.share * expected)

    def sends_early(self, waiting: int, training: int, expected: int) -> bool:
        """Whether no round is in flight, because late trainings held the watts after the last aggregation."""
        return expected == 0

    def merged(self, current: Model, arrivals: Sequence[Arrival]) -> Parameters:
        """Return the current parameters plus the weighted mean of the devices' updates."""
        weights = [each.samples * each.update(current).weight for each in arrivals]
        return {
            name: value
            + sum(
                (weight / sum(weights)) * (each.trained.parameters[name] - each.base.parameters[name])
                for weight, each in zip(weights, arrivals, strict=True)
            )
            for name, value in current.parameters.items()
        }


STEPPINGS: Mapping[str, Stepping] = {"fedbuff": BufferedSteps(5), "quorum": QuorumSteps(0.8)}
"""The rules of the asynchronous methods, by name of the method."""


def is_asynchronous(name: str) -> bool:
    """Whether a method is asynchronous, so that the trainings of its rounds overlap."""
    return name.removeprefix("oracle-") in STEPPINGS


def _arrays(parameters: Parameters) -> Arrays:
    return {name: value.numpy() for name, value in parameters.items()}
