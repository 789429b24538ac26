"""The workload that a stored predictor was fitted to: a network, its data and one minibatch size."""

from __future__ import annotations

from dataclasses import dataclass

from wattfleet.errors import InvalidInputError
from wattfleet.modes.workload_facts import LARGEST_COUNT


@dataclass(frozen=True)
class FittedWorkload:
    """The training workload of a stored predictor; the paper counts another minibatch size as another workload.

    Source: PowerTrain, section 4.3.5.

    Attributes:
        name: network and data, such as `resnet18-imagenet`.
        minibatch: samples in a minibatch.
        minibatches_per_epoch: minibatches in one pass over the device's own data.

    Raises:
        InvalidInputError: the name is empty, or a number is not whole or out of range.
    """

    name: str
    minibatch: int
    minibatches_per_epoch: int

    def __post_init__(self) -> None:
        is_whole = type(self.minibatch) is int and type(self.minibatches_per_epoch) is int
        if (
            not (isinstance(self.name, str) and self.name and is_whole)
            or not 1 <= self.minibatch <= LARGEST_COUNT
            or self.minibatches_per_epoch < 1
        ):
            raise InvalidInputError(
                f"workload {self.name!r} needs a name, 1 to {LARGEST_COUNT:,} samples per minibatch and at least 1"
                f" minibatch per epoch, not {self.minibatch!r} and {self.minibatches_per_epoch!r}"
            )
