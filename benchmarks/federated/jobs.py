"""What the methods of filling rounds have in common: a device's job in a round, and the interface of a method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.federated.boards import BASE_BATCH
from wattfleet.choosing import Front
from wattfleet.planning import Assignment, EpochChoice, History

Values = NDArray[np.float64]

OVERHEAD_S = 1.5
"""Seconds of a round besides its training, about as `benchmarks.round_overhead` measures it for warm processes.

Flower alone needs 6 to 9 s for the messages of a small round.
"""


LOCAL_EPOCHS = 2
"""As in `wattfleet simulate`."""

FIXED_EPOCHS = EpochChoice.fixed(LOCAL_EPOCHS)
"""No choice of the epochs."""


@dataclass(frozen=True)
class Job:
    """What a device does in a round.

    Attributes:
        assignment: its mode, batch and watts.
        epochs: local epochs, each as good as one with `BASE_BATCH`.
    """

    assignment: Assignment
    epochs: float = LOCAL_EPOCHS

    @property
    def device_id(self) -> str:
        """The device."""
        return self.assignment.device_id

    @property
    def batch(self) -> int:
        """Samples in a batch."""
        return self.assignment.batch or BASE_BATCH


def training_s(front: Front, epochs: float) -> Values:
    """`[k]` median seconds of a training in each mode of a front, including the warm-up."""
    return front.warmup_s + epochs * front.epoch_s


class Method(Protocol):
    """A way to fill rounds."""

    @property
    def is_normalised(self) -> bool:
        """Whether the devices' updates are averaged as by FedNova; otherwise as by FedAvg."""
        ...

    def plan(self, server_round: int, history: History) -> Sequence[Job]:
        """The devices that train, each with its mode, watts and work.

        Raises:
            InfeasibleBudgetError: the site's budget is too small for any device.
        """
        ...
