"""Reads the power rails measured by INA3221 chips, and sums those that make up the board's power."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from edge_agent.devices.tree import Tree

# JetPack 5 and later, and JetPack 4. The hwmon number changes at every boot.
_HWMON_LABELS = "/sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/in[1-3]_label"
_IIO_NAMES = "/sys/bus/i2c/drivers/ina3221x/*/iio:device*/rail_name_*"
_NOT_CONNECTED = "NC"

_BOARD_RAILS = {
    "agx-orin": ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO"),
    "orin-nx": ("VDD_IN",),
    "orin-nano": ("VDD_IN",),
    "xavier-agx": ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),
    "nano": ("POM_5V_IN",),
}
"""Rails whose sum is the power of each kind of board: the input rail if it is measured, else all rails."""


class Rail(Protocol):
    """One measured rail."""

    def read_mw(self) -> float:
        """Return its current power, mW.

        Raises:
            OSError: the chip cannot be read.
            ValueError: the chip does not return a number.
        """
        ...


@dataclass(frozen=True)
class HwmonRail:
    """A rail measured as voltage and current."""

    tree: Tree
    voltage_path: str
    current_path: str

    def read_mw(self) -> float:
        """Return its current power, mW; mV times mA gives microwatts."""
        return int(self.tree.read(self.voltage_path)) * int(self.tree.read(self.current_path)) / 1e3


@dataclass(frozen=True)
class IioRail:
    """A rail whose driver reports power."""

    tree: Tree
    power_path: str

    def read_mw(self) -> float:
        """Return its current power, mW."""
        return float(int(self.tree.read(self.power_path)))


def find_rails(tree: Tree) -> dict[str, Rail]:
    """Return the board's rails by name."""
    rails: dict[str, Rail] = {}
    for path in tree.glob(_HWMON_LABELS):
        folder, _, file = path.rpartition("/")
        channel = file.removeprefix("in").removesuffix("_label")
        rail = HwmonRail(tree, f"{folder}/in{channel}_input", f"{folder}/curr{channel}_input")
        rails |= {name: rail for name in _name_in(tree, path)}
    for path in tree.glob(_IIO_NAMES):
        folder, _, file = path.rpartition("/")
        channel = file.removeprefix("rail_name_")
        rails |= {name: IioRail(tree, f"{folder}/in_power{channel}_input") for name in _name_in(tree, path)}
    return rails


class BoardPower:
    """The power of a whole board.

    Args:
        tree: the board's files.
        kind: kind of board.
    """

    def __init__(self, tree: Tree, kind: str) -> None:
        found = find_rails(tree)
        self.rails = _BOARD_RAILS[kind]
        self.missing = tuple(name for name in self.rails if name not in found)
        self._needed = [found[name] for name in self.rails if name in found]

    def read_mw(self) -> float:
        """Return the board's current power, mW; NaN if any rail cannot be read, as the sum would be incomplete."""
        if self.missing:
            return math.nan
        try:
            return sum(rail.read_mw() for rail in self._needed)
        except (OSError, ValueError):
            return math.nan


def _name_in(tree: Tree, path: str) -> list[str]:
    try:
        name = tree.read(path)
    except OSError:
        return []
    return [] if name == _NOT_CONNECTED else [name]
