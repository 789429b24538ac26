"""A physical board on a clock that advances only while the app trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from edge_agent.devices.device import Activity, Conditions, PowerTrace
from edge_agent.devices.host import PhysicalBoard
from wattfleet.modes import PowerMode, modes_to_array
from wattfleet_io.clock import VirtualClock

MODE = PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000)
OTHER = PowerMode(8, 1_728_000, 624_750_000, 3_199_000_000)
PARKED = PowerMode(1, 115_200, 114_750_000, 204_000_000)


class RealTimeBoard(PhysicalBoard):
    """A board whose minibatches end when the app reports them; its power is 12 W, or 9 W in `OTHER`."""

    board_kind = "orin-nano"
    provenance = "hardware"

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.modes = modes_to_array([MODE, OTHER, PARKED])
        self.mode = PARKED
        self.held = 0
        self.meters = 0

    def current_mode(self) -> PowerMode:
        return self.mode

    def apply(self, mode: PowerMode) -> None:
        self.clock.sleep_s(1.0)  # since mode changes take time on a Jetson
        self.mode = mode

    def conditions(self) -> Conditions:
        return Conditions(None, None)

    def activity(self) -> Activity:
        return Activity(9_000.0 if self.mode == OTHER else 12_000.0)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        self.held += 1
        yield
        self.held -= 1

    def differences(self, mode: PowerMode) -> list[str]:
        return [] if self.mode == mode else [f"{self.mode.label()} is in force"]

    def start_meter(self) -> RealTimeBoard.Meter:
        self.meters += 1
        return self.Meter(self)

    class Meter:
        def __init__(self, board: RealTimeBoard) -> None:
            self.board = board
            self.begin_s = board.clock.now_s()

        def read(self) -> PowerTrace:
            at_s = np.arange(self.begin_s, self.board.clock.now_s(), 0.2)
            return PowerTrace(at_s, np.full(len(at_s), 9000.0 if self.board.mode == OTHER else 12_000.0))

        def stop(self) -> PowerTrace:
            self.board.meters -= 1
            return self.read()
