"""The interface of methods that select devices and modes for a round, and a device's job in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.federated.boards import BASE_BATCH
from wattfleet.core.choosing import Front
from wattfleet.core.planning import Assignment, EpochChoice, History

Values = NDArray[np.float64]

OVERHEAD_S = 1.5
"""Seconds of a round in addition to its training, about as `benchmarks.round_overhead` measures for warm processes.

Flower alone needs 6 to 9 s for the messages of a small round.
"""


LOCAL_EPOCHS = 2
"""Local epochs of a round, as in `wattfleet simulate`."""

FIXED_EPOCHS = EpochChoice.fixed(LOCAL_EPOCHS)
"""Local epochs for methods that do not choose them."""


@dataclass(frozen=True)
class Job:
    """The work of a device in a round.

    Attributes:
        assignment: the device's mode, batch size and watts.
        epochs: local epochs, each with the progress of an epoch with `BASE_BATCH`.
    """

    assignment: Assignment
    epochs: float = LOCAL_EPOCHS

    @property
    def device_id(self) -> str:
        """The device's id."""
        return self.assignment.device_id

    @property
    def batch(self) -> int:
        """The batch size."""
        return self.assignment.batch or BASE_BATCH


def training_s(front: Front, epochs: float) -> Values:
    """Return `[k]` median seconds of a training in each mode of a front, including the warm-up."""
    return front.warmup_s + epochs * front.epoch_s


class Method(Protocol):
    """A method that selects devices and modes for a round."""

    @property
    def is_normalised(self) -> bool:
        """Whether the devices' updates are averaged as in FedNova; otherwise as in FedAvg."""
        ...

    def plan(self, server_round: int, history: History) -> Sequence[Job]:
        """Return the devices that train, each with its mode, watts and work.

        Raises:
            InfeasibleBudgetError: the site's budget is too small for any device.
        """
        ...
