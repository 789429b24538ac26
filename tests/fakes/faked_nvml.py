"""A fake of the module pynvml: GPUs with power limits, whose failures a test scripts.

`test_hosts` compares its constants, errors and signatures with the installed package.
"""

# ruff: noqa: N802 - named as pynvml names them

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any


class FakeNVMLError(Exception):
    """An error with its code, as pynvml raises it."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return f"error {self.value}"


@dataclass
class FakeGpu:
    """A GPU, in mW and MHz. `enforced_mw` is a limit that something else holds; `failing` maps functions to errors."""

    uuid: str = "GPU-0000"
    name: str = "NVIDIA GeForce RTX 3090"
    limit_mw: int = 350_000
    default_mw: int = 350_000
    least_mw: int = 100_000
    most_mw: int = 350_000
    enforced_mw: int | None = None
    power_mw: int = 151_000
    celsius: int = 61
    use: int = 40
    clocks_mhz: dict[int, int] = field(default_factory=lambda: {0: 2100, 2: 9501})
    persistence: int = 1
    display: int = 0
    processes: tuple[int, ...] = ()
    failing: dict[str, int] = field(default_factory=dict)
    is_deaf: bool = False
    set_to_mw: list[int] = field(default_factory=list)


class FakeNvml(types.ModuleType):
    """The module, with these GPUs. `lost` makes every call fail."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_GRAPHICS, NVML_CLOCK_MEM, NVML_FEATURE_ENABLED = 0, 0, 2, 1
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 2, 3, 4
    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED, NVML_ERROR_UNKNOWN = 15, 16, 999
    NVMLError = FakeNVMLError

    def __init__(self, *gpus: FakeGpu) -> None:
        super().__init__("pynvml")
        self.gpus = list(gpus) or [FakeGpu()]
        self.lost = False

    def fail(self, name: str, code: int) -> None:
        """Let a function fail on every GPU."""
        for gpu in self.gpus:
            gpu.failing[name] = code

    def _of(self, handle: int, name: str) -> FakeGpu:
        gpu = self.gpus[handle]
        if self.lost:
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        if name in gpu.failing:
            raise self.NVMLError(gpu.failing[name])
        return gpu

    def nvmlInit(self) -> None:
        if self.lost:
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self._of(handle, "nvmlDeviceGetName").name

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self._of(handle, "nvmlDeviceGetUUID").uuid

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        gpu = self._of(handle, "nvmlDeviceGetPowerUsage")
        return min(gpu.power_mw, gpu.limit_mw)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return self._of(handle, "nvmlDeviceGetTemperature").celsius

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return types.SimpleNamespace(gpu=self._of(handle, "nvmlDeviceGetUtilizationRates").use, memory=0)

    def nvmlDeviceGetMaxClockInfo(self, handle: int, type: int) -> int:
        return self._of(handle, "nvmlDeviceGetMaxClockInfo").clocks_mhz[type]

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:
        return self._of(handle, "nvmlDeviceGetPowerManagementLimit").limit_mw

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        gpu = self._of(handle, "nvmlDeviceGetEnforcedPowerLimit")
        return gpu.limit_mw if gpu.enforced_mw is None else min(gpu.limit_mw, gpu.enforced_mw)

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: int) -> int:
        return self._of(handle, "nvmlDeviceGetPowerManagementDefaultLimit").default_mw

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: int) -> list[int]:
        gpu = self._of(handle, "nvmlDeviceGetPowerManagementLimitConstraints")
        return [gpu.least_mw, gpu.most_mw]

    def nvmlDeviceSetPowerManagementLimit(self, handle: int, limit: int) -> None:
        gpu = self._of(handle, "nvmlDeviceSetPowerManagementLimit")
        if not gpu.least_mw <= limit <= gpu.most_mw:
            raise self.NVMLError(self.NVML_ERROR_INVALID_ARGUMENT)
        gpu.set_to_mw.append(limit)
        if not gpu.is_deaf:
            gpu.limit_mw = limit

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:
        return self._of(handle, "nvmlDeviceGetPersistenceMode").persistence

    def nvmlDeviceGetDisplayActive(self, handle: int) -> int:
        return self._of(handle, "nvmlDeviceGetDisplayActive").display

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        gpu = self._of(handle, "nvmlDeviceGetComputeRunningProcesses")
        return [types.SimpleNamespace(pid=pid) for pid in gpu.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:
        self._of(handle, "nvmlDeviceGetGraphicsRunningProcesses")
        return []
