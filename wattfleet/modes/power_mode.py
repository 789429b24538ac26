"""Power modes, and the space of all modes that a device offers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError

ModeArray = NDArray[np.float64]
"""`[n, 4]` power modes: cores, CPU kHz, GPU Hz, memory Hz."""


class PowerMode(NamedTuple):
    """One setting of a board's four knobs.

    Attributes:
        cores: CPU cores online.
        cpu_khz: CPU frequency, kHz.
        gpu_hz: GPU frequency, Hz.
        mem_hz: memory (EMC) frequency, Hz.
    """

    cores: int
    cpu_khz: int
    gpu_hz: int
    mem_hz: int

    def label(self) -> str:
        """A short label: cores, then GHz of CPU, GPU and memory, such as `12c 2.20/1.30/3.20`."""
        return f"{self.cores}c {self.cpu_khz / 1e6:.2f}/{self.gpu_hz / 1e9:.2f}/{self.mem_hz / 1e9:.2f}"


def modes_to_array(modes: Iterable[PowerMode]) -> ModeArray:
    """Stack modes into a `[n, 4]` array."""
    return np.array(list(modes), dtype=np.float64).reshape(-1, 4)


def array_to_modes(array: ModeArray) -> list[PowerMode]:
    """Convert the rows of a `[n, 4]` array to modes."""
    knobs = (map(round, values) for values in array.T.tolist())
    return list(map(PowerMode._make, zip(*knobs, strict=True)))


def nearest_mode(modes: ModeArray, wanted: PowerMode) -> PowerMode:
    """The mode among `[n, 4]` that is nearest to another one, by the sum of differences of the knobs' logarithms."""
    distance = np.abs(np.log(modes) - np.log(modes_to_array([wanted]))).sum(axis=1)
    (nearest,) = array_to_modes(modes[[int(distance.argmin())]])
    return nearest


@dataclass(frozen=True)
class ModeSpace:
    """All modes of a device: every combination of its knobs' values.

    Attributes:
        cores: numbers of CPU cores that can be online.
        cpu_khz: CPU frequencies, kHz.
        gpu_hz: GPU frequencies, Hz.
        mem_hz: memory frequencies, Hz.

    Raises:
        InvalidInputError: a knob has no value, a repeated value, or one that is not positive.
    """

    cores: tuple[int, ...]
    cpu_khz: tuple[int, ...]
    gpu_hz: tuple[int, ...]
    mem_hz: tuple[int, ...]

    def __post_init__(self) -> None:
        for knob in PowerMode._fields:
            values: Sequence[int] = getattr(self, knob)
            if not values or min(values) <= 0 or len(set(values)) != len(values):
                raise InvalidInputError(f"{knob}: needs one or more distinct positive values, not {values}")
            object.__setattr__(self, knob, tuple(sorted(values)))

    def __len__(self) -> int:
        return len(self.cores) * len(self.cpu_khz) * len(self.gpu_hz) * len(self.mem_hz)

    def __contains__(self, mode: PowerMode) -> bool:
        return (
            mode.cores in self.cores
            and mode.cpu_khz in self.cpu_khz
            and mode.gpu_hz in self.gpu_hz
            and mode.mem_hz in self.mem_hz
        )

    def array(self) -> ModeArray:
        """All modes, `[n, 4]`; the last knob varies fastest."""
        return np.array(list(itertools.product(self.cores, self.cpu_khz, self.gpu_hz, self.mem_hz)), dtype=np.float64)

    @property
    def highest(self) -> PowerMode:
        """Every knob at its maximum (MAXN)."""
        return PowerMode(self.cores[-1], self.cpu_khz[-1], self.gpu_hz[-1], self.mem_hz[-1])

    @property
    def lowest(self) -> PowerMode:
        """Every knob at its minimum, which is the mode of a parked device."""
        return PowerMode(self.cores[0], self.cpu_khz[0], self.gpu_hz[0], self.mem_hz[0])
