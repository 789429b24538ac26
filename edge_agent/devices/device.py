"""The interface between the agent and a board."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wattfleet.common.clock import Clock
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import ModeArray, PowerMode, Provenance, Workload
from wattfleet_proto.device_state import BoardSample


class ModeNotAppliedError(WattfleetError):
    """A mode was set, but different settings were read back."""


class KnobNotReachedError(ModeNotAppliedError):
    """A mode was set, and one knob of it stands at another value, so that all modes with its value are in doubt.

    Args:
        message: what was found.
        knob: the knob, a field of `PowerMode`; empty if it is not known.
    """

    def __init__(self, message: str, knob: str = "") -> None:
        super().__init__(message)
        self.knob = knob


class DutyNotKeptError(InvalidInputError):
    """In this mode, the device would not answer its requests in time: use another mode, or clear its duty."""


@dataclass(frozen=True)
class PowerTrace:
    """Samples of board power.

    Attributes:
        at_s: `[m]` times of the samples, device-clock seconds, ascending.
        power_mw: `[m]` power, mW; NaN if a rail could not be read (missing is not zero).
    """

    at_s: NDArray[np.float64]
    power_mw: NDArray[np.float64]


@dataclass(frozen=True)
class Activity:
    """What a board is doing at one moment. Values that it does not report are None.

    Attributes:
        power_mw: its power, mW; NaN if it cannot be read.
        fan_share: speed of its fan, 0 to 1.
        gpu_use_share: use of its GPU in the last moments, 0 to 1.
        energy_mj: energy drawn since a fixed moment, mJ, if the board itself counts it.
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
        """Return the samples so far."""
        ...

    def stop(self) -> PowerTrace:
        """Stop sampling and return all samples."""
        ...


class AppTraining(Protocol):
    """An app's training from the view of its board, from `Device.begin_training` to `finish`.

    A physical board does the work itself. A virtual board has to be advanced by the minibatches that the app reports.
    """

    @property
    def first_minibatch_observed(self) -> bool:
        """Whether the observed time includes the first minibatch, which takes longer than the others."""
        ...

    def minibatches_ended(self, seconds: Sequence[float], ended: Callable[[int, float], bool]) -> None:
        """Replay the minibatches of one report, the last of which ended just now.

        Args:
            seconds: the duration of each minibatch, s.
            ended: called with the index of each minibatch and the time of its end, device-clock seconds; returns
                whether it changed the mode. The report's later minibatches are then skipped, as they were trained
                before the change.
        """
        ...

    def learned(self, workload: Workload | None) -> None:
        """Use what has become known of the workload since the training began, such as its batch size."""
        ...

    def finish(self, minibatches: int) -> None:
        """End a training with this total number of minibatches, including the reported ones."""
        ...


class Device(Protocol):
    """A board with its power modes."""

    @property
    def board_kind(self) -> str:
        """Kind of board, such as `agx-orin`."""
        ...

    @property
    def provenance(self) -> Provenance:
        """The source of its figures."""
        ...

    @property
    def basis(self) -> str:
        """What its figures depend on apart from the mode, in words, such as the rails that its power includes.

        Figures of another basis are kept apart. Empty if nothing but the mode matters.
        """
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
        """Return a function that trains one minibatch of a workload; None if a program has to be run on the device.

        Args:
            workload: the workload that a virtual board simulates; None for its built-in workload.
        """
        ...

    def try_knobs(self) -> None:
        """Find out which settings the board does not reach; `modes` are then without them.

        Call this before the first change, once the settings are backed up. They stay as they were.

        Raises:
            ModeNotAppliedError: a setting could not be restored.
        """
        ...

    def current_mode(self) -> PowerMode:
        """Return the current mode, read back from the board."""
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
        """Begin an app's training in the mode in force.

        Args:
            workload: the app's workload; None for the built-in workload of a virtual board.
        """
        ...

    def start_meter(self) -> PowerMeter:
        """Start sampling board power."""
        ...

    def conditions(self) -> BoardSample:
        """Return the current temperature and throttle count, and whatever else takes too many files to read often."""
        ...

    def activity(self) -> Activity:
        """Return what the board is doing now. May be called in any thread, even while another one measures."""
        ...

    def measuring(self) -> AbstractContextManager[None]:
        """Until the block ends, keep constant whatever would disturb a measurement, such as the fan."""
        ...

    def knobs(self) -> Knobs:
        """Return the current settings, for `restore`."""
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
