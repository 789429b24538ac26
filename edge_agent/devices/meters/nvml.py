"""Power, temperature and clocks of a workstation's GPUs, from NVIDIA's NVML (Jetsons do not support it)."""

from __future__ import annotations

import importlib
import math
from typing import Any


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
        return gpu_mhz * 1_000_000, memory_mhz * 1_000_000


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
