"""The workload that a stored predictor was fitted to: a network, its data and one minibatch size."""

from __future__ import annotations

from dataclasses import dataclass

from wattfleet.errors import InvalidInputError


@dataclass(frozen=True)
class FittedWorkload:
    """The training workload of a stored predictor; the paper counts another minibatch size as another workload.

    Source: PowerTrain, section 4.3.5.

    Attributes:
        name: network and data, such as `resnet18-imagenet`.
        minibatch: samples in a minibatch.
        minibatches_per_epoch: minibatches in one pass over the device's own data.
    """

    name: str
    minibatch: int
    minibatches_per_epoch: int

    def __post_init__(self) -> None:
        if not self.name or self.minibatch < 1 or self.minibatches_per_epoch < 1:
            raise InvalidInputError(
                f"workload {self.name!r} needs a name, at least 1 sample per minibatch and at least 1 minibatch per"
                f" epoch, not {self.minibatch} and {self.minibatches_per_epoch}"
            )
