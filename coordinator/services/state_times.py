"""Records since when each device is in its state, how long its profiling still takes, and when it last throttled."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from coordinator.state.records import DeviceRecord
from wattfleet_io.clock import unix_now_s
from wattfleet_proto.device_state import DeviceState


@dataclass
class _InState:
    """A device in one state.

    Attributes:
        state: the state.
        since_unix_s: when this coordinator first saw the state, seconds since 1970.
        modes: the number of measured modes at that time.
        grown_unix_s: when the newest mode was reported, seconds since 1970.
        grown_modes: the number of measured modes then.
    """

    state: DeviceState
    since_unix_s: float
    modes: int
    grown_unix_s: float
    grown_modes: int


class StateTimes:
    """The times of devices' states since this coordinator started.

    Args:
        known: returns the ids of the fleet's devices; others are dropped.
        target_modes: the most modes that each device measures.
        now_unix_s: returns the time, seconds since 1970.
    """

    def __init__(self, known: Collection[str], target_modes: int, now_unix_s: Callable[[], float] = unix_now_s) -> None:
        self._known = known
        self._target_modes = target_modes
        self._now_unix_s = now_unix_s
        self._devices: dict[str, _InState] = {}
        self._throttled_unix_s: dict[str, float] = {}

    def note(self, device: DeviceRecord) -> None:
        """Record a device's state and progress as just reported."""
        now, modes = self._now_unix_s(), device.profiled_modes
        seen = self._devices.get(device.device_id)
        if seen is None or seen.state is not device.state or modes < seen.grown_modes:
            self._devices[device.device_id] = _InState(device.state, now, modes, now, modes)
            if len(self._devices) > len(self._known):
                self._devices = {name: each for name, each in self._devices.items() if name in self._known}
        elif modes > seen.grown_modes:
            seen.grown_unix_s, seen.grown_modes = now, modes

    def note_throttling(self, device_id: str) -> None:
        """Record that a device's board has just throttled itself."""
        self._throttled_unix_s[device_id] = self._now_unix_s()
        if len(self._throttled_unix_s) > len(self._known):
            self._throttled_unix_s = {name: at for name, at in self._throttled_unix_s.items() if name in self._known}

    def throttled_unix_s(self, device_id: str) -> float | None:
        """When a device's board last throttled itself, seconds since 1970; None if this coordinator has not seen it."""
        return self._throttled_unix_s.get(device_id)

    def since_unix_s(self, device: DeviceRecord) -> float | None:
        """When a device's state began, seconds since 1970; None if this coordinator has not seen it."""
        seen = self._devices.get(device.device_id)
        return seen.since_unix_s if seen is not None and seen.state is device.state else None

    def target_modes(self, device: DeviceRecord) -> int:
        """The most modes that a device measures."""
        return min(self._target_modes, device.mode_count)

    def profiling_left_s(self, device: DeviceRecord) -> float | None:
        """The estimated remaining seconds of a device's profiling, which may end earlier.

        None if the device is not profiling, or has not measured a mode since it began.
        """
        seen = self._devices.get(device.device_id)
        if seen is None or not seen.state is device.state is DeviceState.PROFILING or seen.grown_modes == seen.modes:
            return None
        mode_s = (seen.grown_unix_s - seen.since_unix_s) / (seen.grown_modes - seen.modes)
        left = max(0, self.target_modes(device) - seen.grown_modes)
        return max(0.0, seen.grown_unix_s + left * mode_s - self._now_unix_s())
