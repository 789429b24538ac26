"""The seam between the agent and a board."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import WattfleetError
from wattfleet.modes import ModeArray, PowerMode
from wattfleet_io.clock import Clock

Provenance = Literal["simulated", "replayed", "hardware"]
"""Where a figure comes from; carried by every report."""


class ModeNotAppliedError(WattfleetError):
    """A mode was set but the knobs read back differ."""


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
    """What may spoil a measurement or harm a board.

    Attributes:
        temperature_c: the hottest junction, degrees Celsius; None where the board does not say.
        throttle_events: times the board has throttled itself since it started; None where it does not count them.
    """

    temperature_c: float | None
    throttle_events: int | None


Knobs = Mapping[str, str]
"""Everything that `apply` and `measuring` may change, as it was found; text, so that it survives on disk."""


class PowerMeter(Protocol):
    """Power being sampled, from the moment the meter was started."""

    def read(self) -> PowerTrace:
        """What was sampled so far."""
        ...

    def stop(self) -> PowerTrace:
        """End sampling and return all of it."""
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

    def finish(self, minibatches: int) -> None:
        """End a training of so many minibatches, those that were reported included."""
        ...


class Device(Protocol):
    """One board with its power modes."""

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

    @property
    def built_in_workload(self) -> Callable[[], None] | None:
        """Trains one minibatch of the workload built into the device; None where a workload has to be run on it."""
        ...

    def current_mode(self) -> PowerMode:
        """The mode in force, read back from the board."""
        ...

    def apply(self, mode: PowerMode) -> None:
        """Put a mode in force.

        Raises:
            InvalidInputError: the board does not offer this mode.
            ModeNotAppliedError: it was set, but another one was read back.
        """
        ...

    def differences(self, mode: PowerMode) -> list[str]:
        """What is in force instead of a mode that was applied; nothing while every knob is as `apply` left it."""
        ...

    def begin_training(self) -> AppTraining:
        """An app begins to train in the mode in force."""
        ...

    def start_meter(self) -> PowerMeter:
        """Begin to sample board power."""
        ...

    def conditions(self) -> Conditions:
        """How the board fares now."""
        ...

    def measuring(self) -> AbstractContextManager[None]:
        """Hold what would disturb a measurement, such as a fan that follows the heat, until the block ends."""
        ...

    def knobs(self) -> Knobs:
        """What is in force now, for `restore`."""
        ...

    def restore(self, knobs: Knobs) -> None:
        """Put back what `knobs` returned, in this process or an earlier one.

        Raises:
            InvalidInputError: these knobs are not this board's.
            ModeNotAppliedError: they were written, but others were read back.
        """
        ...


def require_in_force(device: Device, mode: PowerMode) -> None:
    """Make sure that a mode is in force, every knob of it.

    Args:
        device: the board.
        mode: what was applied last.

    Raises:
        ModeNotAppliedError: something else is.
    """
    found = device.differences(mode)
    if found:
        raise ModeNotAppliedError(f"{mode.label()} was set, but {'; '.join(found)}")
