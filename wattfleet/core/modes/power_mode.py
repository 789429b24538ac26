"""Power modes, and the space of all modes that a device offers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.errors import InvalidInputError

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


# --- Boards -----------------------------------------------------------------------------------------------------------
# The boards that Wattfleet knows, and the values that each of their knobs can take.
#
# Sources: NVIDIA's nvpmodel configurations, and its data sheets for the hardware. A real device always reports its
# own tables; those here serve simulated boards. A host is no Jetson: a workstation or a Raspberry Pi.


@dataclass(frozen=True)
class Hardware:
    """Facts from a board's data sheet about the hardware behind its clocks.

    Attributes:
        gpu_cores: CUDA cores; of a board that computes on its CPU, the numbers that its cores multiply at once.
        mem_bus_bits: width of the memory bus, bits.
        lowest_preset_w: watts of the lowest of NVIDIA's presets or of the lowest power limit, else of an idle board,
            which scales the board's lowest power.
    """

    gpu_cores: int
    mem_bus_bits: int
    lowest_preset_w: float


@dataclass(frozen=True)
class Board:
    """A kind of board.

    Attributes:
        kind: the name on command lines, such as `agx-orin`.
        title: the product name.
        space: its power modes.
        presets: NVIDIA's preset modes by name, as its configurations state them. The device rounds a frequency that
            is not in its table, so a preset need not be in `space`.
        hardware: facts from its data sheet.
    """

    kind: str
    title: str
    space: ModeSpace
    presets: Mapping[str, PowerMode]
    hardware: Hardware


def limit_clock_hz(limit: float, highest_limit: float, highest_clock_hz: int) -> int:
    """The GPU clock that stands for a power limit in a mode of a workstation, Hz; whole MHz.

    A GPU's power rises about with the square of its clock, so this is about the clock that it reaches at the limit.
    The GPU chooses its own clock; this one orders the modes for a predictor.

    Args:
        limit: the power limit.
        highest_limit: the highest power limit, in the same unit.
        highest_clock_hz: the GPU's highest clock, Hz.
    """
    return round(highest_clock_hz * math.sqrt(limit / highest_limit) / 1e6) * 1_000_000


def _ladder_khz(highest_step: int, top: int) -> tuple[int, ...]:
    """Frequencies from 115,200 kHz in steps of 76,800 up to `highest_step`, then the top frequency."""
    return (*range(115_200, highest_step + 1, 76_800), top)


def _mhz(*values: float) -> tuple[int, ...]:
    return tuple(round(value * 1e6) for value in values)


def _preset(cores: int, cpu_mhz: float, gpu_mhz: float, mem_mhz: float) -> PowerMode:
    return PowerMode(cores, round(cpu_mhz * 1e3), round(gpu_mhz * 1e6), round(mem_mhz * 1e6))


_AGX_ORIN = ModeSpace(
    cores=tuple(range(1, 13)),
    cpu_khz=_ladder_khz(2_188_800, 2_201_600),
    gpu_hz=_mhz(*(114.75 + 102 * k for k in range(12)), 1300.5),
    mem_hz=_mhz(204, 665.6, 2133, 3199),
)
_ORIN_NANO = ModeSpace(
    cores=tuple(range(1, 7)),
    cpu_khz=_ladder_khz(1_497_600, 1_510_400),
    gpu_hz=_mhz(306, 408, 510, 612, 624.75),
    mem_hz=_mhz(204, 665.6, 2133),
)
_ORIN_NX = ModeSpace(
    cores=tuple(range(1, 9)),
    cpu_khz=_ladder_khz(1_958_400, 1_984_000),
    gpu_hz=_mhz(*(306 + 102 * k for k in range(7))),
    mem_hz=_mhz(204, 665.6, 2133, 3199),
)
_XAVIER_AGX = ModeSpace(
    cores=tuple(range(1, 9)),
    cpu_khz=tuple(range(115_200, 2_265_601, 76_800)),
    gpu_hz=_mhz(
        114.75,
        216.75,
        318.75,
        420.75,
        522.75,
        624.75,
        675.75,
        828.75,
        905.25,
        1032.75,
        1198.5,
        1236.75,
        1338.75,
        1377,
    ),
    mem_hz=_mhz(204, 408, 665.6, 800, 1065.6, 1331.2, 1600, 1866, 2133),
)

_AGX_ORIN_PRESETS = {
    "MAXN": _AGX_ORIN.highest,
    "15W": _preset(4, 1113.6, 420.75, 2133),
    "30W": _preset(8, 1728, 624.75, 3199),
    "50W": _preset(12, 1497.6, 828.75, 3199),
}
_ORIN_NANO_PRESETS = {
    "15W": _ORIN_NANO.highest,
    "7W": _preset(4, 960, 408, 2133),
}
_ORIN_NX_PRESETS = {
    "MAXN": _ORIN_NX.highest,
    "10W": _preset(4, 1190.4, 612, 2133),
    "15W": _preset(4, 1651.2, 612, 3199),
    "25W": _preset(8, 1497.6, 408, 3199),
}
_XAVIER_AGX_PRESETS = {
    "MAXN": _XAVIER_AGX.highest,
    "10W": _preset(2, 1200, 520, 1065.6),
    "15W": _preset(4, 1200, 670, 1331.2),
    "30W": _preset(8, 1200, 900, 1600),
}

# The knob that a host lacks stands at 1 GHz. The limits of an RTX 3090 are stated, and were not read from a card.
_RTX_3090_LIMITS_W = (100, *range(120, 350, 20), 350)
_RTX_3090 = ModeSpace(
    cores=(16,),
    cpu_khz=(4_900_000,),
    gpu_hz=tuple(limit_clock_hz(watts, 350, 2_100_000_000) for watts in _RTX_3090_LIMITS_W),
    mem_hz=_mhz(9751),
)
_RTX_3090_PRESETS = {
    f"{watts}W": PowerMode(16, 4_900_000, gpu_hz, 9_751_000_000)
    for watts, gpu_hz in zip(_RTX_3090_LIMITS_W, _RTX_3090.gpu_hz, strict=True)
}
_RASPBERRY_PI_5 = ModeSpace(
    cores=tuple(range(1, 5)),
    cpu_khz=tuple(range(1_500_000, 2_400_001, 100_000)),
    gpu_hz=_mhz(1000),
    mem_hz=_mhz(1000),
)

BOARDS: Mapping[str, Board] = {
    board.kind: board
    for board in (
        Board("agx-orin", "Jetson AGX Orin", _AGX_ORIN, _AGX_ORIN_PRESETS, Hardware(2048, 256, 15)),
        Board("orin-nano", "Jetson Orin Nano 8GB", _ORIN_NANO, _ORIN_NANO_PRESETS, Hardware(1024, 128, 7)),
        Board("orin-nx", "Jetson Orin NX 16GB", _ORIN_NX, _ORIN_NX_PRESETS, Hardware(1024, 128, 10)),
        Board("xavier-agx", "Jetson AGX Xavier", _XAVIER_AGX, _XAVIER_AGX_PRESETS, Hardware(512, 256, 10)),
        Board("rtx-3090", "workstation with an RTX 3090", _RTX_3090, _RTX_3090_PRESETS, Hardware(10_496, 384, 100)),
        Board("raspberry-pi-5", "Raspberry Pi 5", _RASPBERRY_PI_5, {}, Hardware(32, 32, 3)),
    )
}


def board_named(kind: str) -> Board:
    """The board of a kind, such as `agx-orin`.

    Raises:
        InvalidInputError: the kind is unknown.
    """
    if kind not in BOARDS:
        raise InvalidInputError(f"unknown board kind {kind!r}: choose one of {', '.join(BOARDS)}")
    return BOARDS[kind]


def board_with_modes(modes: ModeArray) -> Board | None:
    """The board with the fewest modes that offers all of `[n, 4]` modes; None if no known board does."""
    wanted = array_to_modes(modes)
    offering = [known for known in BOARDS.values() if all(mode in known.space for mode in wanted)]
    return min(offering, key=lambda known: len(known.space), default=None)
