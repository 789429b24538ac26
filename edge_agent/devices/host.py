"""Physical devices, and a machine without power modes, whose current state is its only mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from edge_agent.devices.device import Activity, Knobs, Provenance
from edge_agent.devices.jetson.board import is_jetson, sign_of_hidden_jetson
from edge_agent.devices.meters import Nvml, PolledMeter, Rapl
from edge_agent.devices.tree import Tree
from wattfleet.common.clock import Clock
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import ModeArray, PowerMode, Workload, modes_to_array
from wattfleet_proto.device_state import BoardSample

# --- Physical ---------------------------------------------------------------------------------------------------------
# The common base of all boards that physically exist.


class _HasClock(Protocol):
    @property
    def clock(self) -> Clock: ...


class PhysicalBoard:
    """Base of the devices that represent hardware."""

    mode_persists = True

    @property
    def basis(self) -> str:
        """What its figures depend on apart from the mode."""
        return ""

    def try_knobs(self) -> None:
        """Do nothing, as no setting is known to be out of reach."""

    def built_in_workload(self, workload: Workload | None = None) -> Callable[[], None] | None:
        """Return None, since a program has to train on the board."""
        return None

    def begin_training(self: _HasClock, workload: Workload | None = None) -> PhysicalTraining:
        """Begin an app's training in the mode in force."""
        return PhysicalTraining(self.clock)


class PhysicalTraining:
    """An app's training on hardware, which does the work itself (an `AppTraining`).

    Args:
        clock: the device's clock.
    """

    first_minibatch_observed = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def minibatches_ended(self, seconds: Sequence[float], ended: Callable[[int, float], bool]) -> None:
        """Replay the minibatches of a report up to the first mode change; the later ones ran in the previous mode."""
        ended_s = self._clock.now_s() - sum(seconds)
        for index, took_s in enumerate(seconds):
            ended_s += took_s
            if ended(index, ended_s):
                return

    def learned(self, workload: Workload | None) -> None:
        """Do nothing, since the hardware trains whatever the app does."""

    def finish(self, minibatches: int) -> None:
        """End the training, whose work the hardware has done."""


# --- Host -------------------------------------------------------------------------------------------------------------
# A machine without power modes, such as a workstation or a Raspberry Pi; its current state is its only mode.

ABSENT_KHZ = 1_000_000
"""Placeholder for an unknown CPU frequency: a constant adds no information, and 1 GHz is easy to recognise."""
ABSENT_HZ = 1_000_000_000
"""Placeholder for an unknown GPU or memory clock."""

_CPUS = "/sys/devices/system/cpu"
# The zones that measure the chip: x86, Raspberry Pi, and other ARM boards.
_ON_CHIP = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc_thermal")


class HostDevice(PhysicalBoard):
    """A machine whose settings are never changed (a `Device`).

    Args:
        tree: the machine's files.
        clock: the time base of measurements.
        nvml: its NVIDIA GPUs; None if it has none.

    Attributes:
        is_jetson: whether it is a Jetson, whose power NVML does not report.

    Raises:
        InvalidInputError: it does not report which cores are online.
    """

    def __init__(self, tree: Tree, clock: Clock, nvml: Nvml | None) -> None:
        self._tree = tree
        self._clock = clock
        self._nvml = nvml
        self._rapl = Rapl(tree, clock)
        self.is_jetson = is_jetson(tree) or sign_of_hidden_jetson(tree) is not None
        self._live_power: Callable[[], float] | None = None
        self._modes = modes_to_array([self.current_mode()])

    @property
    def board_kind(self) -> str:
        """Always `host`."""
        return "host"

    @property
    def provenance(self) -> Provenance:
        """Always `hardware`."""
        return "hardware"

    @property
    def clock(self) -> Clock:
        """The time base of everything measured on it."""
        return self._clock

    @property
    def modes(self) -> ModeArray:
        """`[1, 4]`: the mode at start-up."""
        return self._modes

    @property
    def power_statement(self) -> str:
        """A sentence that states what the power figures include."""
        sources = []
        if self._nvml:
            sources.append(f"{self._nvml.gpus} GPU(s) by NVML")
        if self._rapl.packages:
            sources.append(f"{self._rapl.packages} CPU package(s) by RAPL")
        if sources:
            return f"power of {' and '.join(sources)}; the rest of the machine is not included"
        reason = "only root may read RAPL" if self._rapl.unreadable else "neither NVML nor RAPL is available"
        return f"power cannot be read ({reason}), so this machine cannot be profiled"

    @property
    def has_power_meter(self) -> bool:
        """Whether this process can read any power."""
        return self._nvml is not None or self._rapl.packages > 0

    @property
    def power_is_refused(self) -> bool:
        """Whether there are power counters that this process may not read."""
        return self._rapl.unreadable

    def current_mode(self) -> PowerMode:
        """Return the online cores and the highest frequencies, with placeholders for unknown ones."""
        clocks_hz = self._nvml.highest_clocks_hz() if self._nvml else None
        gpu_hz, mem_hz = clocks_hz or (ABSENT_HZ, ABSENT_HZ)
        return PowerMode(self._cores(), self._highest_cpu_khz(), gpu_hz, mem_hz)

    def apply(self, mode: PowerMode) -> None:
        """Accept the only mode, without changing anything.

        Raises:
            InvalidInputError: it is another mode.
        """
        only = PowerMode(*(int(knob) for knob in self._modes[0]))
        if mode != only:
            raise InvalidInputError(f"this machine does not offer the mode {mode.label()}; it has only {only.label()}")

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe the current mode if it differs; the owner may have taken a core offline or capped a clock."""
        in_force = self.current_mode()
        return [] if in_force == mode else [f"{in_force.label()} is in force"]

    def start_meter(self) -> PolledMeter:
        """Start sampling power; without a power source, every sample is missing."""
        return PolledMeter(self._power_reader(), self._clock)

    def _power_reader(self) -> Callable[[], float]:
        """Return a reader of the power of all sources, mW (NaN without any).

        RAPL gives the mean since the last reading.
        """
        sources: list[Callable[[], float]] = [self._nvml.power_mw] if self._nvml else []
        if self._rapl.packages:
            sources.append(self._rapl.reader())
        return lambda: sum(read_mw() for read_mw in sources) if sources else math.nan

    def conditions(self) -> BoardSample:
        """Return the hottest temperature of CPU and GPUs, and the CPU's thermal throttle count."""
        known = [self._nvml.temperature_c()] if self._nvml else []
        for zone in self._tree.glob("/sys/class/thermal/thermal_zone*"):
            if self._text(f"{zone}/type") in _ON_CHIP:
                millidegrees = self._number(f"{zone}/temp")
                known.append(None if millidegrees is None else millidegrees / 1e3)
        events = [
            self._number(path) for path in self._tree.glob(f"{_CPUS}/cpu*/thermal_throttle/package_throttle_count")
        ]
        counts = [count for count in events if count is not None]
        return BoardSample(
            temperature_c=max((temperature_c for temperature_c in known if temperature_c is not None), default=None),
            # Every core reports the count of its package.
            throttle_events=max(counts) if counts else None,
        )

    def activity(self) -> Activity:
        """Return the current power and the use of the GPUs."""
        if self._live_power is None:
            self._live_power = self._power_reader()
        return Activity(self._live_power(), gpu_use_share=self._nvml.use_share() if self._nvml else None)

    def measuring(self) -> AbstractContextManager[None]:
        """Change nothing, since the machine controls its own fans."""
        return nullcontext()

    def knobs(self) -> Knobs:
        """Return no settings, since nothing is ever changed."""
        return {}

    def restore(self, knobs: Knobs) -> None:
        """Do nothing, as nothing was changed.

        Raises:
            InvalidInputError: the settings are another device's.
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
                f"{_CPUS}/online holds {text!r}, which is not a list of cores; a Linux machine with sysfs is needed"
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
