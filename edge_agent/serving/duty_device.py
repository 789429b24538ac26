"""A board that answers requests: its mode changes between turns, and only to modes that keep its duty."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from edge_agent.devices.device import (
    Activity,
    AppTraining,
    Conditions,
    Device,
    Knobs,
    PowerMeter,
    Provenance,
)
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.turns import Kind
from wattfleet.errors import WattfleetError
from wattfleet.modes import ModeArray, PowerMode, Workload
from wattfleet_io.clock import Clock


class DutyDevice:
    """Passes all calls on to a board, but changes the mode only in a turn of its own.

    Args:
        board: the board.
        turns: the turns of this device.
    """

    def __init__(self, board: Device, turns: DeviceTurns) -> None:
        self._board = board
        self._turns = turns

    @property
    def board_kind(self) -> str:
        """Kind of board."""
        return self._board.board_kind

    @property
    def provenance(self) -> Provenance:
        """The source of its figures."""
        return self._board.provenance

    @property
    def clock(self) -> Clock:
        """The time base of everything measured on it."""
        return self._board.clock

    @property
    def modes(self) -> ModeArray:
        """`[n, 4]` modes that can be applied."""
        return self._board.modes

    @property
    def mode_persists(self) -> bool:
        """Whether a mode stays in force after the process that applied it has ended."""
        return self._board.mode_persists

    def built_in_workload(self, workload: Workload | None = None) -> Callable[[], None] | None:
        """Return a function that trains one minibatch of a workload in a turn; None if a program has to be run."""
        step = self._board.built_in_workload(workload)
        if step is None:
            return None

        def step_in_turn() -> None:
            with self._turns.from_thread(Kind.MINIBATCH):
                step()

        return step_in_turn

    def current_mode(self) -> PowerMode:
        """The current mode, read back from the board."""
        return self._board.current_mode()

    def apply(self, mode: PowerMode) -> None:
        """Apply a mode as soon as neither a batch of requests nor a minibatch is using the device.

        Raises:
            DutyNotKeptError: requests would not be answered in time in this mode.
            InvalidInputError: the board does not offer this mode.
            ModeNotAppliedError: it was set, but another one was read back.
        """
        self._turns.require_kept(mode)
        with self._turns.from_thread(Kind.CHANGE):
            self._set(mode)

    def _set(self, mode: PowerMode) -> None:
        """Apply a mode now, and note the mode in force.

        Raises:
            InvalidInputError: the board does not offer this mode.
            ModeNotAppliedError: it was set, but another one was read back.
        """
        try:
            self._board.apply(mode)
        except WattfleetError:
            self._note_mode()
            raise
        self._turns.in_mode(mode)

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe how the current settings differ from an applied mode; empty while they match."""
        return self._board.differences(mode)

    def begin_training(self, workload: Workload | None = None) -> AppTraining:
        """Begin an app's training in the mode in force."""
        return self._board.begin_training(workload)

    def start_meter(self) -> PowerMeter:
        """Start sampling board power."""
        return self._board.start_meter()

    def conditions(self) -> Conditions:
        """Return the current temperature and throttle count."""
        return self._board.conditions()

    def activity(self) -> Activity:
        """Return what the board is doing now."""
        return self._board.activity()

    def measuring(self) -> AbstractContextManager[None]:
        """Until the block ends, keep constant whatever would disturb a measurement, such as the fan."""
        return self._board.measuring()

    def knobs(self) -> Knobs:
        """Return the current settings, for `restore`."""
        return self._board.knobs()

    def restore(self, knobs: Knobs) -> None:
        """Restore settings that `knobs` returned.

        Raises:
            InvalidInputError: the settings are not this board's.
            ModeNotAppliedError: they were written, but other values were read back.
        """
        try:
            self._board.restore(knobs)
        finally:
            self._note_mode()

    def _note_mode(self) -> None:
        """Note the mode that is read back; if it cannot be read, note that it is unknown."""
        try:
            self._turns.in_mode(self._board.current_mode())
        except WattfleetError:
            self._turns.in_mode(None)
