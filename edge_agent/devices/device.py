"""The interface between the agent and a board."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.modes import ModeArray, PowerMode, Workload
from wattfleet_io.clock import Clock

Provenance = Literal["simulated", "replayed", "hardware"]
"""Where a figure comes from; every report carries it."""


class ModeNotAppliedError(WattfleetError):
    """A mode was set, but the settings read back differ."""


class DutyNotKeptError(InvalidInputError):
    """In this mode, the device would not answer its requests in time: use another mode, or clear its duty."""


@dataclass(frozen=True)
class PowerTrace:
    """Samples of board power.

    Attributes:
        at_s: `[m]` device-clock seconds of each sample, ascending.
        power_mw: `[m]` milliwatts; NaN where a rail could not be read (missing is not zero).
    """

    at_s: NDArray[np.float64]
    power_mw: NDArray[np.float64]


@dataclass(frozen=True)
class Conditions:
    """Temperature and throttling of a board.

    Attributes:
        temperature_c: the hottest junction, degrees Celsius; None if the board does not report it.
        throttle_events: times the board has throttled itself since boot; None if it does not count them.
    """

    temperature_c: float | None
    throttle_events: int | None


@dataclass(frozen=True)
class Activity:
    """What a board does at one moment. None is what it does not report.

    Attributes:
        power_mw: its power, mW; NaN if it cannot be read.
        fan_share: speed of its fan, 0 to 1.
        gpu_use_share: use of its GPU in the last moments, 0 to 1.
        energy_mj: millijoules drawn since a fixed moment, where the board itself counts them.
    """

    power_mw: float
    fan_share: float | None = None
    gpu_use_share: float | None = None
    energy_mj: float | None = None


Knobs = Mapping[str, str]
"""The values of all settings that `apply` and `measuring` may change, as text for storing on disk."""


class PowerMeter(Protocol):
    """Samples power from its start until it is stopped."""

    def read(self) -> PowerTrace:
        """The samples so far."""
        ...

    def stop(self) -> PowerTrace:
        """Stop sampling and return all samples."""
        ...


class AppTraining(Protocol):
    """An app's training as one board experiences it, from `Device.begin_training` to `finish`.

    A physical board does the work itself. A virtual board has to be advanced by the minibatches that the app reports.
    """

    @property
    def first_minibatch_observed(self) -> bool:
        """Whether the first minibatch, which takes longer than the others, falls into the time that is observed."""
        ...

    def minibatches_ended(self, seconds: Sequence[float], ended: Callable[[int, float], bool]) -> None:
        """Replay the minibatches of one report, the last of which ended just now.

        Args:
            seconds: how long each of them took.
            ended: called with each one's index and the device-clock second at which it ended. Returns whether it
                changed the mode. Minibatches that were trained before such a change are skipped.
        """
        ...

    def learned(self, workload: Workload | None) -> None:
        """Take what has become known of the workload since the training began, such as its batch."""
        ...

    def finish(self, minibatches: int) -> None:
        """End a training of so many minibatches, those that were reported included."""
        ...


class Device(Protocol):
    """A board with its power modes."""

    @property
    def board_kind(self) -> str:
        """Kind of board, such as `agx-orin`."""
        ...

    @property
    def provenance(self) -> Provenance:
        """Where its figures come from."""
        ...

    @property
    def clock(self) -> Clock:
        """The time base of everything measured on it."""
        ...

    @property
    def modes(self) -> ModeArray:
        """`[n, 4]` modes that can be applied."""
        ...

    @property
    def mode_persists(self) -> bool:
        """Whether a mode stays in force after the process that applied it has ended."""
        ...

    def built_in_workload(self, workload: Workload | None = None) -> Callable[[], None] | None:
        """A function that trains one minibatch of a workload; None where a program has to be run on the device.

        Args:
            workload: what the device is to pace; None for what it stands for if it is not told.
        """
        ...

    def current_mode(self) -> PowerMode:
        """The current mode, read back from the board."""
        ...

    def apply(self, mode: PowerMode) -> None:
        """Apply a mode.

        Raises:
            InvalidInputError: the board does not offer this mode.
            ModeNotAppliedError: it was set, but another one was read back.
        """
        ...

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe how the current settings differ from an applied mode; empty while they match."""
        ...

    def begin_training(self, workload: Workload | None = None) -> AppTraining:
        """An app begins to train in the mode in force.

        Args:
            workload: what it trains; None for what a virtual board stands for if it is not told.
        """
        ...

    def start_meter(self) -> PowerMeter:
        """Start sampling board power."""
        ...

    def conditions(self) -> Conditions:
        """The current temperature and throttle count."""
        ...

    def activity(self) -> Activity:
        """What the board does now. It may be asked from any thread, also while another one measures."""
        ...

    def measuring(self) -> AbstractContextManager[None]:
        """Keep what would disturb a measurement constant until the block ends, such as the fan."""
        ...

    def knobs(self) -> Knobs:
        """The current settings, for `restore`."""
        ...

    def restore(self, knobs: Knobs) -> None:
        """Restore settings that `knobs` returned, in this process or an earlier one.

        Raises:
            InvalidInputError: the settings are not this board's.
            ModeNotAppliedError: they were written, but other values were read back.
        """
        ...


def require_in_force(device: Device, mode: PowerMode) -> None:
    """Check that a mode is still applied, with every setting.

    Args:
        device: the board.
        mode: the mode applied last.

    Raises:
        ModeNotAppliedError: a setting differs.
    """
    found = device.differences(mode)
    if found:
        raise ModeNotAppliedError(f"{mode.label()} was set, but {'; '.join(found)}")
