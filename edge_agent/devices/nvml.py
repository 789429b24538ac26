"""The GPUs of a workstation or server, through NVIDIA's NVML: what they draw, and their power limits as modes.

A mode of such a machine is one power limit for all of its GPUs. A `PowerMode` has clocks, so a clock stands there for
the limit (`limit_clock_hz`). Jetsons do not support NVML.
"""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from edge_agent.devices.device import KnobNotReachedError, ModeNotAppliedError
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import limit_clock_hz

_MHZ = 1_000_000
_STEPS_W = (5, 10, 20, 25, 50, 100, 200, 500)
_MAX_LIMITS = 17
"""Maximum of limits that are modes."""
_ROUNDED_MW = 1_000
"""A driver may round a limit by less than this, mW."""

FIXED = 'set `modes = "fixed"` in the machine\'s file'
"""What to do on a machine whose limits cannot be set."""


class GpuLimitError(ModeNotAppliedError):
    """A GPU's power limit cannot be read or set; the message says why, and what to do."""


class GpuLimitNotReachedError(GpuLimitError, KnobNotReachedError):
    """A GPU's power limit was set, and another one is in force."""


class Nvml:
    """The GPUs of a machine.

    Args:
        library: the module `pynvml`, initialised.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._gpus = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return len(self._gpus)

    @property
    def names(self) -> list[str]:
        """The product names of the GPUs; a GPU that does not report its own is `a GPU`."""
        return [self._known(self._library.nvmlDeviceGetName, gpu) or "a GPU" for gpu in self._gpus]

    def power_mw(self) -> float:
        """Return the current power of all GPUs, mW; NaN if one does not report it."""
        try:
            return float(sum(self._library.nvmlDeviceGetPowerUsage(gpu) for gpu in self._gpus))
        except self._library.NVMLError:
            return math.nan

    def temperature_c(self) -> float | None:
        """Return the temperature of the hottest GPU, degrees Celsius; None if one does not report it."""
        sensor = self._library.NVML_TEMPERATURE_GPU
        try:
            return float(max(self._library.nvmlDeviceGetTemperature(gpu, sensor) for gpu in self._gpus))
        except self._library.NVMLError:
            return None

    def use_share(self) -> float | None:
        """Return the mean use of all GPUs, 0 to 1; None if one does not report it."""
        try:
            return float(sum(self._library.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in self._gpus)) / (
                100 * len(self._gpus)
            )
        except self._library.NVMLError:
            return None

    def highest_clocks_hz(self) -> tuple[int, int] | None:
        """Return the highest clocks of the first GPU and of its memory, Hz; None if it does not report them."""
        try:
            gpu_mhz, memory_mhz = (
                int(self._library.nvmlDeviceGetMaxClockInfo(self._gpus[0], clock))
                for clock in (self._library.NVML_CLOCK_GRAPHICS, self._library.NVML_CLOCK_MEM)
            )
        except self._library.NVMLError:
            return None
        return gpu_mhz * _MHZ, memory_mhz * _MHZ

    def shared_with(self) -> list[str]:
        """Describe what else uses the GPUs: other processes and displays. What a GPU does not report is left out."""
        library = self._library
        processes = {
            process.pid
            for gpu in self._gpus
            for listed in (library.nvmlDeviceGetComputeRunningProcesses, library.nvmlDeviceGetGraphicsRunningProcesses)
            for process in self._known(listed, gpu) or ()
        } - {os.getpid()}
        displays = sum(bool(self._known(library.nvmlDeviceGetDisplayActive, gpu)) for gpu in self._gpus)
        return [
            *([f"{len(processes)} other process{'es' if len(processes) > 1 else ''}"] if processes else []),
            *(["a display"] if displays else []),
        ]

    def keeps_limits(self) -> bool:
        """Whether the driver stays loaded while no process uses the GPUs; if not, it forgets their limits then."""
        library = self._library
        return all(
            self._known(library.nvmlDeviceGetPersistenceMode, gpu) in (None, library.NVML_FEATURE_ENABLED)
            for gpu in self._gpus
        )

    def open_limits(self) -> PowerLimits:
        """Return the power limits of the GPUs, which can be set.

        Raises:
            InvalidInputError: a GPU has no limit that can be set, or they have no limit in common.
        """
        return PowerLimits(self._library, self._gpus, self.names)

    def _known(self, read: Callable[[Any], Any], gpu: Any) -> Any:
        with suppress(self._library.NVMLError):
            return read(gpu)
        return None


class PowerLimits:
    """The power limits of all GPUs, which a mode sets alike.

    Args:
        library: the module `pynvml`, initialised.
        gpus: their handles.
        names: their product names.

    Attributes:
        limits_mw: the limits that are modes, mW, ascending.

    Raises:
        InvalidInputError: a GPU has no limit that can be set, or they have no limit in common.
    """

    def __init__(self, library: Any, gpus: list[Any], names: list[str]) -> None:
        self._library = library
        self._names = names
        try:
            # A UUID, since the numbers of GPUs may change with each start.
            self._gpus = {str(library.nvmlDeviceGetUUID(gpu)): gpu for gpu in gpus}
            ranges = [library.nvmlDeviceGetPowerManagementLimitConstraints(gpu) for gpu in gpus]
            defaults = [library.nvmlDeviceGetPowerManagementDefaultLimit(gpu) for gpu in gpus]
        except library.NVMLError as error:
            raise InvalidInputError(f"{self._reason(error)}; {FIXED}") from None
        lowest, highest = max(low for low, _ in ranges), min(high for _, high in ranges)
        if lowest >= highest:
            spans = ", ".join(f"{low / 1e3:g} to {high / 1e3:g} W" for low, high in ranges)
            raise InvalidInputError(f"the GPUs have no power limits to choose from ({spans}); {FIXED}")
        self.limits_mw = _steps_mw(lowest, highest, [each for each in defaults if lowest <= each <= highest])

    def clocks_hz(self, highest_hz: int) -> dict[int, int]:
        """Return the GPU clock that stands for each limit, Hz, by limit in mW; distinct and ascending.

        Args:
            highest_hz: the GPU's highest clock, Hz.
        """
        return {limit_mw: self.clock_hz(limit_mw, highest_hz) for limit_mw in self.limits_mw}

    def clock_hz(self, limit_mw: int, highest_hz: int) -> int:
        """Return the GPU clock that stands for a limit, Hz; the limit need not be a mode's."""
        return limit_clock_hz(limit_mw, self.limits_mw[-1], highest_hz)

    def in_force_mw(self) -> int:
        """Return the highest limit in force, mW.

        Raises:
            GpuLimitError: a GPU does not report it.
        """
        return max(self._held().values())

    def differences(self, limit_mw: int) -> list[str]:
        """Describe which GPUs have another limit than this one, mW.

        Raises:
            GpuLimitError: a GPU does not report its limit.
        """
        return [
            f"{name}: wanted {limit_mw / 1e3:g} W, found {held_mw / 1e3:g} W"
            for name, held_mw in zip(self._names, self._held().values(), strict=True)
            if not _is_same(held_mw, limit_mw)
        ]

    def apply(self, limit_mw: int) -> None:
        """Set the limit of every GPU, mW. If one fails, those that were set before get their old limits again.

        Raises:
            GpuLimitNotReachedError: another limit is in force.
            GpuLimitError: a limit was refused.
        """
        before = self._held()
        done: dict[str, int] = {}
        try:
            for uuid, held_mw in before.items():
                done[uuid] = held_mw
                self._set(uuid, limit_mw)
            if found := [*self.differences(limit_mw), *self._not_enforced(limit_mw)]:
                raise GpuLimitNotReachedError("; ".join(found), "gpu_hz")
        except GpuLimitError:
            for uuid, held_mw in done.items():
                with suppress(GpuLimitError):
                    self._set(uuid, held_mw)
            raise

    def knobs(self) -> dict[str, str]:
        """Return the current limits, for `restore`.

        Raises:
            GpuLimitError: a GPU does not report its limit.
        """
        return {_knob(uuid): str(held_mw) for uuid, held_mw in self._held().items()}

    def restore(self, knobs: Mapping[str, str]) -> None:
        """Restore limits that `knobs` returned. If one fails, or a GPU was replaced, the others are still restored.

        Raises:
            InvalidInputError: they are no limits of GPUs.
            GpuLimitError: a limit was refused, another one was read back, or these are not the same GPUs any more. A
                GPU that the limits do not name keeps its own.
        """
        if not knobs or not all(_KNOB.fullmatch(name) and value.isdecimal() for name, value in knobs.items()):
            raise InvalidInputError(f"cannot restore the power limits {dict(knobs)}: they are no limits of GPUs")
        failed = []
        for uuid, name in zip(self._gpus, self._names, strict=True):
            if _knob(uuid) not in knobs:
                continue
            wanted_mw = int(knobs[_knob(uuid)])
            try:
                if self._held_by(uuid) == wanted_mw:
                    continue  # as the owner left it, which needs no permission
                self._set(uuid, wanted_mw)
                if not _is_same(held_mw := self._held_by(uuid), wanted_mw):
                    failed.append(f"{name}: wanted {wanted_mw / 1e3:g} W, found {held_mw / 1e3:g} W")
            except GpuLimitError as error:
                failed.append(str(error))
        if failed := [*failed, *self._exchanged(knobs)]:
            raise GpuLimitError(
                f"not restored: {'; '.join(failed)}. If it fails again, reboot: a GPU then starts at its default limit"
            )

    def _exchanged(self, knobs: Mapping[str, str]) -> list[str]:
        """Describe which GPUs were taken out or put in since the limits were read, and what to do."""
        present = {_knob(uuid): name for uuid, name in zip(self._gpus, self._names, strict=True)}
        gone = [f"{name.split('/')[1]} is missing" for name in sorted(set(knobs) - set(present))]
        new = [
            f"{name.split('/')[1]} ({product}) was put in since, and keeps its limit"
            for name, product in present.items()
            if name not in knobs
        ]
        if not gone and not new:
            return []
        return [
            f"{', '.join([*gone, *new])} (if you exchanged GPUs, nothing is left to restore: remove the backup"
            " device-before.json)"
        ]

    def may_set(self) -> str | None:
        """Return why the limits cannot be set; None if they can. Sets each limit to its present value."""
        try:
            for uuid, held_mw in self._held().items():
                self._set(uuid, held_mw)
        except GpuLimitError as error:
            return str(error)
        return None

    def _held(self) -> dict[str, int]:
        return {uuid: self._held_by(uuid) for uuid in self._gpus}

    def _held_by(self, uuid: str) -> int:
        with self._typed():
            return int(self._library.nvmlDeviceGetPowerManagementLimit(self._gpus[uuid]))

    def _set(self, uuid: str, limit_mw: int) -> None:
        with self._typed(f"to set {limit_mw / 1e3:g} W: "):
            self._library.nvmlDeviceSetPowerManagementLimit(self._gpus[uuid], limit_mw)

    def _not_enforced(self, limit_mw: int) -> list[str]:
        """Describe which GPUs are held below a limit by something else, such as their slot or their driver."""
        found = []
        for name, gpu in zip(self._names, self._gpus.values(), strict=True):
            with suppress(self._library.NVMLError):
                enforced_mw = int(self._library.nvmlDeviceGetEnforcedPowerLimit(gpu))
                if enforced_mw < limit_mw and not _is_same(enforced_mw, limit_mw):
                    found.append(f"{name}: {limit_mw / 1e3:g} W was set, but {enforced_mw / 1e3:g} W is enforced")
        return found

    @contextmanager
    def _typed(self, doing: str = "") -> Iterator[None]:
        """Turn an error of NVML into one of this module."""
        try:
            yield
        except self._library.NVMLError as error:
            raise GpuLimitError(f"{doing}{self._reason(error)}") from None

    def _reason(self, error: Exception) -> str:
        """Return what an error of NVML means for power limits, and what to do."""
        library = self._library
        known = {
            library.NVML_ERROR_NOT_SUPPORTED: "this GPU has no power limit that can be set, as most laptops' GPUs",
            library.NVML_ERROR_NO_PERMISSION: (
                "NVML: only root may set a GPU's power limit; run the agent as root, not in a container. The service"
                " needs the capability CAP_SYS_ADMIN for it (docs/devices.md)"
            ),
            library.NVML_ERROR_GPU_IS_LOST: "NVML: a GPU is lost; see `dmesg`, and reboot",
            library.NVML_ERROR_RESET_REQUIRED: "NVML: a GPU requires a reset; run `nvidia-smi -r`, or reboot",
            library.NVML_ERROR_INVALID_ARGUMENT: (
                "NVML: the GPU refused this limit; see the range in `nvidia-smi -q -d POWER`"
            ),
        }
        return known.get(getattr(error, "value", None), f"NVML: {error}; see `nvidia-smi` and `dmesg`")


def _steps_mw(lowest: int, highest: int, more: list[int]) -> tuple[int, ...]:
    """Return evenly spaced limits from the lowest to the highest, mW, both included, and some more if they fit."""
    for step_w in _STEPS_W:
        step_mw = step_w * 1_000
        first = -(-lowest // step_mw) * step_mw
        found = {lowest, *range(first, highest, step_mw), highest, *more}
        if len(found) <= _MAX_LIMITS:
            return tuple(sorted(found))
    return tuple(lowest + (highest - lowest) * each // (_MAX_LIMITS - 1) for each in range(_MAX_LIMITS))


def _is_same(held_mw: int, wanted_mw: int) -> bool:
    return abs(held_mw - wanted_mw) < _ROUNDED_MW


_KNOB = re.compile(r"gpu/[^/]+/limit_mw")


def _knob(uuid: str) -> str:
    return f"gpu/{uuid}/limit_mw"


def open_nvml() -> Nvml | None:
    """Return the machine's GPUs; None without `pynvml` (package nvidia-ml-py), a driver, or a GPU."""
    try:
        library = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None
    try:
        library.nvmlInit()
        found = Nvml(library)
    except library.NVMLError:
        return None
    return found if found.gpus else None
