"""When an asynchronous server steps, and how it averages the updates that have arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from benchmarks.federated.learning import Model, Trained
from benchmarks.federated.tasks import Parameters
from wattfleet.planning import least_whole
from wattfleet_flower.server.buffered_aggregation import Arrays, Update, step


@dataclass(frozen=True)
class Arrival:
    """An update that waits for the server's next step.

    Attributes:
        device: the device, by number.
        samples: its training samples.
        base: the model that it started from.
        trained: what it made of that model.
    """

    device: int
    samples: int
    base: Model
    trained: Trained

    def update(self, current: Model) -> Update:
        """The update as Wattfleet's FedBuff has it, with the steps since its start."""
        staleness = current.server_round - self.base.server_round
        return Update(_arrays(self.base.parameters), _arrays(self.trained.parameters), staleness)


class Stepping(Protocol):
    """A rule for the server's steps."""

    @property
    def ends_rounds(self) -> bool:
        """Whether a step ends the round that was sent last; otherwise a round ends with its last update."""
        ...

    def is_due(self, waiting: int, expected: int, replied: int) -> bool:
        """Whether the server steps now.

        Args:
            waiting: updates that wait for a step.
            expected: devices of the round that was sent last; 0 if it has ended.
            replied: how many of them have sent their updates.
        """
        ...

    def sends_early(self, waiting: int, training: int, expected: int) -> bool:
        """Whether free devices get work before the next step.

        Args:
            waiting: updates that wait for a step.
            training: devices that train.
            expected: devices of the round that was sent last; 0 if it has ended.
        """
        ...

    def merged(self, current: Model, arrivals: Sequence[Arrival]) -> Parameters:
        """The parameters after a step."""
        ...


@dataclass(frozen=True)
class BufferedSteps:
    """FedBuff: a step after every `size` updates, which differ in weight only by their staleness.

    The conditions and the arithmetic are those of `wattfleet_flower.server.fedbuff`, with its default learning rate.

    Attributes:
        size: updates of a step.
    """

    size: int
    ends_rounds: ClassVar[bool] = False

    def is_due(self, waiting: int, expected: int, replied: int) -> bool:
        """Once the buffer is full."""
        return waiting >= self.size

    def sends_early(self, waiting: int, training: int, expected: int) -> bool:
        """Where the trainings in flight are too few to fill the buffer."""
        return waiting + training < self.size

    def merged(self, current: Model, arrivals: Sequence[Arrival]) -> Parameters:
        """The step of Wattfleet's FedBuff."""
        updates = [each.update(current) for each in arrivals]
        after = step(_arrays(current.parameters), updates, learning_rate=1.0)
        return {name: torch.from_numpy(array) for name, array in after.items()}


@dataclass(frozen=True)
class QuorumSteps:
    """Rounds that end once a share of their devices has replied; late updates count in the next step.

    An update weighs as much as its device's samples, divided by `sqrt(1 + staleness)`. Without late updates this is
    federated averaging.

    Attributes:
        share: of the devices of a round whose replies end it.
    """

    share: float
    ends_rounds: ClassVar[bool] = True

    def is_due(self, waiting: int, expected: int, replied: int) -> bool:
        """Once enough devices of the round have replied."""
        return expected > 0 and replied >= least_whole(self.share * expected)

    def sends_early(self, waiting: int, training: int, expected: int) -> bool:
        """Where no round could be planned after the last step, since late trainings held the watts."""
        return expected == 0

    def merged(self, current: Model, arrivals: Sequence[Arrival]) -> Parameters:
        """The weighted mean of what the devices have changed, added to the current parameters."""
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
"""The rules of the asynchronous methods by name."""


def is_asynchronous(name: str) -> bool:
    """Whether the trainings of a method's rounds overlap."""
    return name.removeprefix("oracle-") in STEPPINGS


def _arrays(parameters: Parameters) -> Arrays:
    return {name: value.numpy() for name, value in parameters.items()}
