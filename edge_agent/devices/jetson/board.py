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
    (re.compile(r"p3668-"), "xavier-nx"),
    (re.compile(r"p3834-"), "agx-thor"),
    (re.compile(r"p3448-|p3450-|jetson-nano"), "nano"),
)
# The kit Nano 2GB, which has no power monitor. Its module is that of the Nano.
_NANO_2GB = "p3542-"
# Files that only a Jetson has, and that a container shows without its device tree.
_SIGNS = (
    _RELEASE,
    "/sys/kernel/nvpmodel_clk_cap",
    "/sys/kernel/nvpmodel_emc_cap",
    "/sys/class/devfreq/*.ga10b",
    "/sys/class/devfreq/*.gv11b",
    "/sys/class/devfreq/*.gp10b",
    "/sys/class/devfreq/57000000.gpu",
    "/sys/class/devfreq/17000000.gpu",
    "/sys/class/devfreq/gpu-gpc-*",
)
HIDDEN_DEVICE_TREE = (
    "in a container, mount the host's files (`docker run -v /sys:/host/sys -v /proc:/host/proc:ro -v /etc:/host/etc:ro"
    " -v /var/lib/wattfleet:/host/var/lib/wattfleet ...`) and pass --device sysfs:/host"
)
"""What shows a device tree that a container hides."""
_JETPACK_OF_L4T = {32: 4, 34: 5, 35: 5, 36: 6, 38: 7, 39: 7}


@dataclass(frozen=True)
class JetsonIdentity:
    """A Jetson and its software.

    Attributes:
        kind: kind of board, such as `agx-orin`.
        model: the board's own name.
        l4t: release of Jetson Linux, such as `35.4.1`; None if unknown.
        jetpack: major version of JetPack; None if unknown.
        soc: chip, such as `tegra234`.
        is_super: whether its device tree has NVIDIA's Super clocks.
        has_power_monitor: whether this kit can measure its power at all.
    """

    kind: str
    model: str
    l4t: str | None
    jetpack: int | None
    soc: str
    is_super: bool
    has_power_monitor: bool


def is_jetson(tree: Tree) -> bool:
    """Whether the device tree names an NVIDIA Tegra."""
    return "nvidia,tegra" in _text_of(tree, _COMPATIBLE)


def sign_of_hidden_jetson(tree: Tree) -> str | None:
    """Return a file that only a Jetson has, if there is one but no device tree, as in some containers."""
    if _text_of(tree, _COMPATIBLE):
        return None
    for pattern in _SIGNS:
        for path in tree.glob(pattern):
            return path
    return None


def identify(tree: Tree) -> JetsonIdentity:
    """Identify the board and its software.

    Raises:
        InvalidInputError: it is not a Jetson, its device tree is hidden, or its power rails are unknown.
    """
    compatible = _text_of(tree, _COMPATIBLE)
    if (sign := sign_of_hidden_jetson(tree)) is not None:
        raise InvalidInputError(
            f"this looks like a Jetson ({sign} exists), but its device tree is hidden: {_COMPATIBLE} cannot be read;"
            f" {HIDDEN_DEVICE_TREE}"
        )
    if not is_jetson(tree):
        raise InvalidInputError(f"not a Jetson: {_COMPATIBLE} does not name an NVIDIA Tegra")
    kind = next((kind for pattern, kind in _KINDS if pattern.search(compatible)), None)
    if kind is None:
        raise InvalidInputError(
            f"{_COMPATIBLE}: unknown board {', '.join(compatible.split())}; supported are"
            f" {', '.join(kind for _, kind in _KINDS)}"
        )
    release = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", _text_of(tree, _RELEASE))
    model = _text_of(tree, _MODEL) or "unnamed"
    return JetsonIdentity(
        kind=kind,
        model=model,
        l4t=f"{release[1]}.{release[2]}" if release else None,
        jetpack=_JETPACK_OF_L4T.get(int(release[1])) if release else None,
        soc=re.findall(r"nvidia,(tegra\w+)", compatible)[0],
        is_super="-super" in compatible or model.endswith("Super"),
        has_power_monitor=_NANO_2GB not in compatible,
    )


def _text_of(tree: Tree, path: str) -> str:
    """Return a file's text, with spaces for NULs; empty if it cannot be read."""
    try:
        return tree.read(path).replace("\0", " ")
    except OSError:
        return ""


# --- Rails ------------------------------------------------------------------------------------------------------------
# Reads the power rails measured by INA3221 and INA238 chips, and sums those that make up the board's power.

# JetPack 5 and later, and JetPack 4. The hwmon number changes at every boot.
_HWMON_LABELS = "/sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/in[1-3]_label"
_IIO_NAMES = "/sys/bus/i2c/drivers/ina3221x/*/iio:device*/rail_name_*"
# The INA238 of Thor measures the board's input.
_INPUT_POWERS = "/sys/bus/i2c/drivers/ina238/*/hwmon/hwmon*/power1_input"
_INPUT = "VIN"
_NOT_CONNECTED = "NC"

_BOARD_RAILS = {
    # VDDQ_VDD2_1V8AO is measured inside VIN_SYS_5V0 (NVIDIA's guide of Jetson Linux 36).
    "agx-orin": ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    "orin-nx": ("VDD_IN",),
    "orin-nano": ("VDD_IN",),
    "xavier-agx": ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),
    "xavier-nx": ("VDD_IN",),
    "agx-thor": ("VIN",),
    "nano": ("POM_5V_IN",),
}
"""Rails whose sum is the power of each kind of board: the input rail if it is measured, else all rails."""


@dataclass(frozen=True)
class Supply:
    """Voltage and current of a rail.

    Attributes:
        rail: its name.
        volts: its voltage, V.
        amperes: its current, A.
    """

    rail: str
    volts: float
    amperes: float

    @property
    def text(self) -> str:
        """The rail with its voltage and current, in words."""
        return f"{self.rail} at {self.volts:.2f} V, {self.amperes:.2f} A"


class Rail(Protocol):
    """One measured rail."""

    @property
    def voltage_path(self) -> str:
        """The file of its voltage, mV."""
        ...

    @property
    def current_path(self) -> str:
        """The file of its current, mA."""
        ...

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
class PowerRail:
    """A rail whose driver reports power.

    Attributes:
        tree: the board's files.
        power_path: the file of its power.
        voltage_path: the file of its voltage, mV.
        current_path: the file of its current, mA.
        per_mw: units of the power's file in 1 mW.
    """

    tree: Tree
    power_path: str
    voltage_path: str
    current_path: str
    per_mw: float = 1.0

    def read_mw(self) -> float:
        """Return its current power, mW."""
        return int(self.tree.read(self.power_path)) / self.per_mw


def find_rails(tree: Tree) -> dict[str, Rail]:
    """Return the board's rails by name."""
    rails: dict[str, Rail] = {}
    rail: Rail
    for path in tree.glob(_HWMON_LABELS):
        folder, _, file = path.rpartition("/")
        channel = file.removeprefix("in").removesuffix("_label")
        rail = HwmonRail(tree, f"{folder}/in{channel}_input", f"{folder}/curr{channel}_input")
        rails |= {name: rail for name in _name_in(tree, path)}
    for path in tree.glob(_IIO_NAMES):
        folder, _, file = path.rpartition("/")
        channel = file.removeprefix("rail_name_")
        power, voltage, current = (f"{folder}/in_{what}{channel}_input" for what in ("power", "voltage", "current"))
        rail = PowerRail(tree, power, voltage, current)
        rails |= {name: rail for name in _name_in(tree, path)}
    inputs = tree.glob(_INPUT_POWERS)
    if len(inputs) == 1:
        folder = inputs[0].rpartition("/")[0]
        rails[_INPUT] = PowerRail(tree, inputs[0], f"{folder}/in1_input", f"{folder}/curr1_input", per_mw=1e3)
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
        self._tree = tree

    @property
    def included(self) -> str:
        """What the board's power includes, in words."""
        return " + ".join(self.rails)

    def read_supply(self) -> Supply | None:
        """Return voltage and current of the first rail, which is at the supply's voltage; None if unknown."""
        try:
            rail = self._needed[0]
            volts, amperes = (int(self._tree.read(path)) / 1e3 for path in (rail.voltage_path, rail.current_path))
        except (IndexError, OSError, ValueError):
            return None
        return Supply(self.rails[0], volts, amperes)

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


# --- GPU power gating -------------------------------------------------------------------------------------------------
# Parts of the GPU (TPCs) that are off since boot. Only a reboot switches them.

_TPCS = {"tegra194": 4, "tegra234": 8, "tegra264": 10}
"""TPCs of each chip. A module may have fewer: its others are always off."""
TPC_MASK = "tpc_pg_mask"
"""The file of the mask of TPCs."""
_GPUS = ("/sys/devices/gpu.0", "/sys/devices/platform/gpu.0", "/sys/devices/platform/*.g*", "/sys/devices/*.g*")


@dataclass(frozen=True)
class GpuGating:
    """Which TPCs of a GPU are on.

    Attributes:
        folder: the folder of its masks.
        mask: one bit for each TPC that is off.
        tpcs: TPCs of the chip; None if the chip is unknown.
    """

    folder: str
    mask: int
    tpcs: int | None

    @property
    def statement(self) -> str:
        """How many TPCs are on, in words."""
        return self.with_mask(self.mask)

    def with_mask(self, mask: int) -> str:
        """How many TPCs would be on with another mask, in words."""
        if self.tpcs is None:
            return f"TPC mask {mask:#x}"
        return f"{self.tpcs - (mask & ((1 << self.tpcs) - 1)).bit_count()} of {self.tpcs} TPCs on"


def read_gating(tree: Tree, soc: str) -> GpuGating | None:
    """Return which TPCs of the GPU are on; None if the kernel does not report it.

    Args:
        tree: the board's files.
        soc: its chip, such as `tegra234`.
    """
    for pattern in _GPUS:
        for path in tree.glob(f"{pattern}/{TPC_MASK}"):
            folder = path.rpartition("/")[0]
            if (mask := read_mask(tree, folder, TPC_MASK)) is not None:
                return GpuGating(folder, mask, _TPCS.get(soc))
    return None


def read_mask(tree: Tree, folder: str, name: str) -> int | None:
    """Return a mask of the GPU's power gating; None if it cannot be read.

    Args:
        tree: the board's files.
        folder: the folder of the masks.
        name: the mask's file, such as `fbp_pg_mask`.
    """
    try:
        return int(tree.read(f"{folder}/{name}"), 0)
    except (OSError, ValueError):
        return None


# --- Thermal ----------------------------------------------------------------------------------------------------------
# Temperatures and throttle counters.

_HOTTEST = "tj-thermal"
# Zones on the chip. Other zones measure the carrier board, the regulators or the fan's own estimate.
_ON_CHIP = re.compile(r"(TJ|CPU|GPU|SOC\d+|CV\d|AO|AUX|PLL)-therm", re.IGNORECASE)
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
