"""A board whose power, temperature and applied modes a test scripts, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from edge_agent.devices.device import Activity, Conditions, Knobs, PowerTrace, Provenance
from edge_agent.devices.host import PhysicalBoard
from wattfleet.modes import PowerMode, modes_to_array
from wattfleet_io.clock import VirtualClock

MODE = PowerMode(4, 1_036_800, 510_000_000, 2_133_000_000)
OTHER = PowerMode(2, 1_036_800, 510_000_000, 2_133_000_000)

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
        self.modes = modes_to_array([MODE, OTHER])
        self.step_s = step_s
        self.power_at = power_at
        self.in_force = OTHER
        self.applied_as: dict[PowerMode, PowerMode] = {}
        self.steps = 0
        self.running_meters = 0
        self.conditions_at: Callable[[float], Conditions] = lambda at_s: Conditions(None, None)
        self.held = 0

    def conditions(self) -> Conditions:
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
