"""Boards in virtual time for tests of an agent, and the workload that a training trains there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge_agent.devices.device import Activity, KnobNotReachedError, Knobs, PowerTrace
from edge_agent.devices.host import PhysicalBoard
from wattfleet.common.clock import VirtualClock
from wattfleet.core.modes import PowerMode, Provenance, Workload, modes_to_array
from wattfleet_proto.device_state import BoardSample

# --- Real time board --------------------------------------------------------------------------------------------------
# A physical board on a clock that advances only while the app trains.


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

    def conditions(self) -> BoardSample:
        return BoardSample()

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


# --- Scripted device --------------------------------------------------------------------------------------------------
# A board whose power, temperature and applied modes a test scripts, in virtual time.

SCRIPTED_MODE = PowerMode(4, 1_036_800, 510_000_000, 2_133_000_000)
OTHER_SCRIPTED_MODE = PowerMode(2, 1_036_800, 510_000_000, 2_133_000_000)

_FIRST_STEP_S = 6.0


class ScriptedDevice(PhysicalBoard):
    """A board with two modes (a `Device`); its meter samples `power_at` once a second.

    Args:
        step_s: seconds that a minibatch takes; the first one takes 6 s.
        power_at: power at a given time, mW.
    """

    board_kind = "scripted"
    provenance: Provenance = "hardware"

    def __init__(self, step_s: float = 0.25, power_at: Callable[[float], float] = lambda at_s: 13_000.0) -> None:
        self.clock = VirtualClock()
        self.modes = modes_to_array([SCRIPTED_MODE, OTHER_SCRIPTED_MODE])
        self.step_s = step_s
        self.power_at = power_at
        self.in_force = OTHER_SCRIPTED_MODE
        self.applied_as: dict[PowerMode, PowerMode] = {}
        self.steps = 0
        self.running_meters = 0
        self.conditions_at: Callable[[float], BoardSample] = lambda at_s: BoardSample()
        self.held = 0

    def conditions(self) -> BoardSample:
        return self.conditions_at(self.clock.now_s())

    def activity(self) -> Activity:
        return Activity(self.power_at(self.clock.now_s()))

    @contextmanager
    def measuring(self) -> Iterator[None]:
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    def current_mode(self) -> PowerMode:
        return self.in_force

    def apply(self, mode: PowerMode) -> None:
        self.in_force = self.applied_as.get(mode, mode)

    def differences(self, mode: PowerMode) -> list[str]:
        return [] if self.in_force == mode else [f"{self.in_force.label()} is in force"]

    def start_meter(self) -> ScriptedMeter:
        self.running_meters += 1
        return ScriptedMeter(self)

    def knobs(self) -> Knobs:
        return {}

    def restore(self, knobs: Knobs) -> None:
        """Do nothing, since nothing has to be restored."""

    def step(self) -> None:
        self.clock.sleep_s(_FIRST_STEP_S if self.steps == 0 else self.step_s)
        self.steps += 1


class ScriptedMeter:
    """A meter with one sample per second since its start."""

    def __init__(self, device: ScriptedDevice) -> None:
        self.device = device
        self.begin_s = device.clock.now_s()

    def read(self) -> PowerTrace:
        at_s = np.arange(self.begin_s, self.device.clock.now_s() + 1e-9, 1.0)
        return PowerTrace(at_s, np.array([self.device.power_at(at) for at in at_s]))

    def stop(self) -> PowerTrace:
        self.device.running_meters -= 1
        return self.read()


# --- Trained ----------------------------------------------------------------------------------------------------------
# The workload that a training trains, in tests without a learner.


def _nothing(power_limit_w: float) -> Any:
    return None


@dataclass
class Trained:
    """A workload with this many minibatches in an epoch."""

    minibatches_per_epoch: int = 500
    profiler: Callable[[float], Any] = _nothing
    first_gcycles: float = 0.0
    paced: Workload | None = None
    is_length_known: bool = True
    is_length_estimated: bool = False
    too_short: float = 0.0
    minibatch_s: float = 0.0
    profiled_modes: int = 5
    unreached: list[tuple[str, PowerMode]] = field(default_factory=list)
    spare_s: Callable[[], float] = lambda: math.inf

    def predicted_minibatch_s(self, mode: PowerMode) -> float:
        return self.minibatch_s

    def productive(
        self, power_limit_w: float, minibatches: float, spare_s: Callable[[], float], own_minibatch_s: float
    ) -> Any:
        self.spare_s = spare_s
        return self.profiler(power_limit_w)

    def training_was_too_short(self, minibatches: float) -> None:
        self.too_short = minibatches

    def knob_was_not_reached(self, mode: PowerMode, error: KnobNotReachedError) -> None:
        self.unreached.append((error.knob, mode))
