"""A machine without power modes, such as a workstation or a Raspberry Pi: one mode, the one it is in."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from edge_agent.devices.device import Conditions, Knobs, Provenance
from edge_agent.devices.meters.nvml import Nvml
from edge_agent.devices.meters.polled_meter import PolledMeter
from edge_agent.devices.meters.rapl import Rapl
from edge_agent.devices.physical import PhysicalBoard
from edge_agent.devices.tree import Tree
from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeArray, PowerMode, modes_to_array
from wattfleet_io.clock import Clock

ABSENT_KHZ = 1_000_000
"""Stands for a CPU frequency that the machine does not tell; a constant says nothing, and 1 GHz reads as a unit."""
ABSENT_HZ = 1_000_000_000
"""The same for a GPU or a memory clock."""

_CPUS = "/sys/devices/system/cpu"
# The zones that measure the chip: x86, Raspberry Pi, and other ARM boards.
_ON_CHIP = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc_thermal")


class HostDevice(PhysicalBoard):
    """A machine as it is (a `Device`): it is measured and trained on, never set.

    Args:
        tree: the machine's files.
        clock: the time base of measurements.
        nvml: its NVIDIA GPUs, if it has any.

    Raises:
        InvalidInputError: it does not say which of its cores are online.
    """

    def __init__(self, tree: Tree, clock: Clock, nvml: Nvml | None) -> None:
        self._tree = tree
        self._clock = clock
        self._nvml = nvml
        self._rapl = Rapl(tree, clock)
        self._modes = modes_to_array([self.current_mode()])

    @property
    def board_kind(self) -> str:
        """Always `host`."""
        return "host"

    @property
    def provenance(self) -> Provenance:
        """What is measured here is real."""
        return "hardware"

    @property
    def clock(self) -> Clock:
        """The time base of everything measured on it."""
        return self._clock

    @property
    def modes(self) -> ModeArray:
        """`[1, 4]`: the mode that it was in at first."""
        return self._modes

    @property
    def power_statement(self) -> str:
        """What its power figures count, in words."""
        counted = []
        if self._nvml:
            counted.append(f"{self._nvml.gpus} GPU(s) by NVML")
        if self._rapl.packages:
            counted.append(f"{self._rapl.packages} CPU package(s) by RAPL")
        if counted:
            return f"power of {' and '.join(counted)}; the rest of the machine is not counted"
        reason = (
            "RAPL is there, but only root may read it" if self._rapl.unreadable else "neither NVML nor RAPL is there"
        )
        return f"no power can be read ({reason}), so this machine cannot be profiled for power"

    @property
    def has_power_meter(self) -> bool:
        """Whether there is anything whose power this process may read."""
        return self._nvml is not None or self._rapl.packages > 0

    @property
    def power_is_refused(self) -> bool:
        """Whether there are power counters that this process may not read."""
        return self._rapl.unreadable

    def current_mode(self) -> PowerMode:
        """The cores online and the highest frequency they may take now; a constant where there is none."""
        clocks_hz = self._nvml.highest_clocks_hz() if self._nvml else None
        gpu_hz, mem_hz = clocks_hz or (ABSENT_HZ, ABSENT_HZ)
        return PowerMode(self._cores(), self._highest_cpu_khz(), gpu_hz, mem_hz)

    def apply(self, mode: PowerMode) -> None:
        """Accept the only mode there is.

        Raises:
            InvalidInputError: it is another one.
        """
        only = PowerMode(*(int(knob) for knob in self._modes[0]))
        if mode != only:
            raise InvalidInputError(f"this machine does not offer the mode {mode.label()}: it has only {only.label()}")

    def differences(self, mode: PowerMode) -> list[str]:
        """What is in force instead; the owner may have taken a core offline, or capped a clock."""
        in_force = self.current_mode()
        return [] if in_force == mode else [f"{in_force.label()} is in force"]

    def start_meter(self) -> PolledMeter:
        """Begin to sample power; every sample is missing where nothing can be read."""
        sources: list[Callable[[], float]] = [self._nvml.power_mw] if self._nvml else []
        if self._rapl.packages:
            sources.append(self._rapl.reader())
        return PolledMeter(lambda: sum(read_mw() for read_mw in sources) if sources else math.nan, self._clock)

    def conditions(self) -> Conditions:
        """The hottest of CPU and GPUs, and the thermal throttling that the CPU counts."""
        known = [self._nvml.temperature_c()] if self._nvml else []
        for zone in self._tree.glob("/sys/class/thermal/thermal_zone*"):
            if self._text(f"{zone}/type") in _ON_CHIP:
                millidegrees = self._number(f"{zone}/temp")
                known.append(None if millidegrees is None else millidegrees / 1e3)
        events = [
            self._number(path) for path in self._tree.glob(f"{_CPUS}/cpu*/thermal_throttle/package_throttle_count")
        ]
        counted = [count for count in events if count is not None]
        return Conditions(
            max((temperature_c for temperature_c in known if temperature_c is not None), default=None),
            # Every core repeats the count of its package.
            max(counted) if counted else None,
        )

    def measuring(self) -> AbstractContextManager[None]:
        """Its fans are its own."""
        return nullcontext()

    def knobs(self) -> Knobs:
        """None: nothing of a host is ever changed."""
        return {}

    def restore(self, knobs: Knobs) -> None:
        """Nothing was changed, so there is nothing to put back.

        Raises:
            InvalidInputError: these are the knobs of another device.
        """
        if knobs:
            raise InvalidInputError(f"cannot restore {dict(knobs)}: this machine has no power modes")

    def _cores(self) -> int:
        text = self._text(f"{_CPUS}/online")
        try:
            ranges = [part.partition("-") for part in (text or "").split(",")]
            return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)
        except ValueError:
            raise InvalidInputError(
                f"{_CPUS}/online says {text!r}, not which cores are online: is this a Linux machine with sysfs?"
            ) from None

    def _highest_cpu_khz(self) -> int:
        limits = [self._number(path) for path in self._tree.glob(f"{_CPUS}/cpu*/cpufreq/scaling_max_freq")]
        return max((khz for khz in limits if khz is not None), default=ABSENT_KHZ)

    def _text(self, path: str) -> str | None:
        try:
            return self._tree.read(path)
        except OSError:
            return None

    def _number(self, path: str) -> int | None:
        try:
            return int(self._text(path) or "")
        except ValueError:
            return None
