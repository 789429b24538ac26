"""What a Jetson says of itself: its model and software, its power rails and its temperatures."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol

from edge_agent.devices.tree import Tree
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.device_state import BoardSample

# --- Identity ---------------------------------------------------------------------------------------------------------
# Identifies the Jetson and its software.


_COMPATIBLE = "/proc/device-tree/compatible"
_MODEL = "/proc/device-tree/model"
_RELEASE = "/etc/nv_tegra_release"

# The part number of the module, or that of the kit if an old device tree names only that.
_KINDS = (
    (re.compile(r"p3701-"), "agx-orin"),
    (re.compile(r"p3767-000[0-2]"), "orin-nx"),
    (re.compile(r"p3767-000[3-5]"), "orin-nano"),
    (re.compile(r"p2888-|p2972-"), "xavier-agx"),
    (re.compile(r"p3448-|p3450-|jetson-nano"), "nano"),
)
_JETPACK_OF_L4T = {32: 4, 34: 5, 35: 5, 36: 6, 38: 7}


@dataclass(frozen=True)
class JetsonIdentity:
    """A Jetson and its software.

    Attributes:
        kind: kind of board, such as `agx-orin`.
        model: the board's own name.
        l4t: release of Jetson Linux, such as `35.4.1`; None if unknown.
        jetpack: major version of JetPack; None if unknown.
    """

    kind: str
    model: str
    l4t: str | None
    jetpack: int | None


def is_jetson(tree: Tree) -> bool:
    """Whether the device tree names an NVIDIA Tegra."""
    return "nvidia,tegra" in _text_of(tree, _COMPATIBLE)


def identify(tree: Tree) -> JetsonIdentity:
    """Identify the board and its software.

    Raises:
        InvalidInputError: it is not a Jetson, or its power rails are unknown.
    """
    compatible = _text_of(tree, _COMPATIBLE)
    if not is_jetson(tree):
        raise InvalidInputError(f"not a Jetson: {_COMPATIBLE} does not name an NVIDIA Tegra")
    kind = next((kind for pattern, kind in _KINDS if pattern.search(compatible)), None)
    if kind is None:
        raise InvalidInputError(
            f"{_COMPATIBLE}: unknown board {', '.join(compatible.split())}; supported are"
            f" {', '.join(kind for _, kind in _KINDS)}"
        )
    release = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", _text_of(tree, _RELEASE))
    return JetsonIdentity(
        kind=kind,
        model=_text_of(tree, _MODEL) or "unnamed",
        l4t=f"{release[1]}.{release[2]}" if release else None,
        jetpack=_JETPACK_OF_L4T.get(int(release[1])) if release else None,
    )


def _text_of(tree: Tree, path: str) -> str:
    """Return a file's text, with spaces for NULs; empty if it cannot be read."""
    try:
        return tree.read(path).replace("\0", " ")
    except OSError:
        return ""


# --- Rails ------------------------------------------------------------------------------------------------------------
# Reads the power rails measured by INA3221 chips, and sums those that make up the board's power.

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


# --- Thermal ----------------------------------------------------------------------------------------------------------
# Temperatures and throttle counters.

_HOTTEST = "tj-thermal"
# Zones on the chip. Other zones measure the carrier board, the regulators or the fan's own estimate.
_ON_CHIP = re.compile(r"(TJ|CPU|GPU|SOC\d|CV\d|AO|AUX|PLL)-therm", re.IGNORECASE)
_SWITCHED_OFF_BELOW_MC = -40_000


def read_conditions(tree: Tree) -> BoardSample:
    """Return the current temperature and throttle count."""
    return BoardSample(temperature_c=_junction_c(tree), throttle_events=_throttle_events(tree))


def read_zones(tree: Tree) -> dict[str, float | None]:
    """Return the temperature of every thermal zone, degrees Celsius; None if the zone is switched off or unreadable."""
    zones: dict[str, float | None] = {}
    for zone in tree.glob("/sys/class/thermal/thermal_zone*"):
        try:
            kind = tree.read(f"{zone}/type")
        except OSError:
            continue
        try:
            millidegrees = int(tree.read(f"{zone}/temp"))
        except (OSError, ValueError):
            # EAGAIN: this part of the chip is switched off.
            zones[kind] = None
            continue
        zones[kind] = millidegrees / 1e3 if millidegrees > _SWITCHED_OFF_BELOW_MC else None
    return zones


def read_throttle_counters(tree: Tree) -> dict[str, int]:
    """Return over-current and undervoltage events since boot by counter, such as `oc1`; empty without counters.

    Raises:
        OSError: a counter cannot be read.
        ValueError: it does not contain a number.
    """
    return {
        counter.rpartition("/")[2].removesuffix("_event_cnt"): int(tree.read(counter))
        for name in tree.glob("/sys/class/hwmon/hwmon*/name")
        if tree.read(name) == "soctherm_oc"
        for counter in tree.glob(f"{name.removesuffix('/name')}/oc*_event_cnt")
    }


def _junction_c(tree: Tree) -> float | None:
    on_chip = {
        kind: degrees
        for kind, degrees in read_zones(tree).items()
        if degrees is not None and (kind == _HOTTEST or _ON_CHIP.match(kind))
    }
    return on_chip.get(_HOTTEST, max(on_chip.values(), default=None))


def _throttle_events(tree: Tree) -> int | None:
    """Return the sum of all counters; None unless all can be read."""
    try:
        counts = read_throttle_counters(tree)
    except (OSError, ValueError):
        return None
    return sum(counts.values()) if counts else None
