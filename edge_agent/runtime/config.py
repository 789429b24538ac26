"""How an agent runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wattfleet.choosing import SamplingSettings
from wattfleet.errors import InvalidInputError


@dataclass(frozen=True)
class AgentConfig:
    """How an agent runs.

    Attributes:
        device_id: the device's name, unlike any other in the fleet.
        coordinator: host:port of the coordinator.
        state_directory: where profile, reference, predictor and unsent reports are kept.
        device_folder: where what was in force on the device is kept, and its lock; the same for every agent that
            may change the device.
        socket: the unix socket for the ClientApp.
        minibatches_per_epoch: minibatches of one pass over the device's data.
        seed: of the choice of modes to profile.
        modes_first: modes to measure before the first round; the others are measured by apps that train by
            `wattfleet_flower.profiled`. None measures all of them first.
        tolerance: measuring ends once no choice of a mode promises to get faster by more than this share; 0 goes on
            to the coordinator's limit.
    """

    device_id: str
    coordinator: str
    state_directory: Path
    device_folder: Path
    socket: Path
    minibatches_per_epoch: int
    seed: int
    modes_first: int | None = None
    tolerance: float = SamplingSettings.tolerance

    def __post_init__(self) -> None:
        if not self.device_id or self.minibatches_per_epoch < 1:
            raise InvalidInputError("an agent needs a device id and at least one minibatch per epoch")
        if self.modes_first is not None and self.modes_first < 1:
            raise InvalidInputError(f"an agent measures at least 1 mode before the first round, not {self.modes_first}")
        if not 0 <= self.tolerance < 1:
            raise InvalidInputError(f"a tolerance is a share from 0 to below 1, not {self.tolerance:g}")
