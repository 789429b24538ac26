"""What a Jetson says of itself: its model and software, its power rails and its temperatures."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from edge_agent.devices.tree import Tree
from wattfleet.common.parsing import parse_toml_table
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.device_state import BoardSample

_log = logging.getLogger(__name__)

# --- Description ------------------------------------------------------------------------------------------------------
# What the agent has to know of a kind of board and cannot read from its kernel: one file a kind.

OWN_BOARDS = "/etc/wattfleet/boards"
"""Folder for the descriptions of boards that Wattfleet does not have, or has wrong."""
DESCRIBE = "describe it with `sudo wattfleet agent describe`, which says what to do with the file"
"""What to do with an unknown board."""

_SHIPPED = Path(__file__).parent / "boards"
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


@dataclass(frozen=True)
class BoardDescription:
    """What is known of a kind of board, and its kernel does not say.

    Attributes:
        kind: its name, such as `agx-orin`.
        modules: the products of this kind, for people.
        compatible: parts of the device tree's `compatible` that only this kind has.
        rails: the power rails whose sum is the board's power: the input rail if it is measured, else all rails.
        memory_hz: the memory's usual frequencies, Hz, used if the kernel does not list them.
        memory_is_listed: whether debugfs of this kind lists the memory's frequencies.
        tpcs: TPCs of its chip; a module may have fewer, as the others are always off. None if unknown.
        gpu_driver: the kernel module that offers the GPU's frequencies.
        power_driver: the kernel module that reads the power rails.
        super_memory_hz: a further frequency of the memory with NVIDIA's Super clocks, Hz; None if there is none.
        super_gpu_hz: the GPU's frequency in MAXN_SUPER, Hz; None without such a mode.
        without_power_monitor: parts of `compatible` of kits that cannot measure their power.
    """

    kind: str
    modules: tuple[str, ...]
    compatible: tuple[str, ...]
    rails: tuple[str, ...]
    memory_hz: tuple[int, ...]
    memory_is_listed: bool = True
    tpcs: int | None = None
    gpu_driver: str = "nvgpu"
    power_driver: str = "ina3221"
    super_memory_hz: int | None = None
    super_gpu_hz: int | None = None
    without_power_monitor: tuple[str, ...] = ()

    def content(self) -> dict[str, Any]:
        """Return it as TOML-compatible values, without the default ones."""
        defaults = {field.name: field.default for field in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if value != defaults[name]
        }


def parse_description(content: bytes, name: str) -> BoardDescription:
    """Parse the description of a board: the table `board` of a TOML file. Other tables are ignored.

    Args:
        content: the file's content.
        name: the file's name, for messages.

    Raises:
        InvalidInputError: it is not a description.
    """
    known = {field.name: field for field in fields(BoardDescription)}
    try:
        found = parse_toml_table(content, "board", known, "`wattfleet agent describe` writes one")
    except ValueError as error:
        raise InvalidInputError(f"{name}: {error}") from None
    values: dict[str, Any] = {}
    for key, value in found.items():
        if (expected := _problem(str(known[key].type), value)) is not None:
            raise InvalidInputError(f"{name}: {key} has to be {expected}, not {value!r}")
        values[key] = tuple(value) if isinstance(value, list) else value
    needed = [field.name for field in fields(BoardDescription)[:5]]
    if missing := [key for key in needed if not values.get(key)]:
        raise InvalidInputError(f"{name}: lacks {', '.join(missing)}")
    if not _NAME.fullmatch(values["kind"]):
        raise InvalidInputError(f"{name}: kind may have a-z, 0-9, dots and hyphens, not {values['kind']!r}")
    values["memory_hz"] = tuple(sorted(values["memory_hz"]))
    return BoardDescription(**values)


def _problem(kind: str, value: Any) -> str | None:
    """Return what a value of a description should have been; None if it is of its kind."""
    each = value if isinstance(value, list) else [value]
    are_texts = all(isinstance(one, str) and one for one in each)
    are_numbers = all(type(one) is int and one > 0 for one in each)
    is_right, expected = {
        "str": (are_texts and each is not value, "a text"),
        "bool": (isinstance(value, bool), "true or false"),
        "int | None": (are_numbers and each is not value, "a positive number"),
        "tuple[str, ...]": (are_texts and each is value, "a list of texts"),
        "tuple[int, ...]": (are_numbers and each is value, "a list of positive numbers"),
    }[kind]
    return None if is_right else expected


@cache
def shipped_boards() -> tuple[BoardDescription, ...]:
    """Return the descriptions that come with Wattfleet."""
    return tuple(parse_description(path.read_bytes(), path.name) for path in sorted(_SHIPPED.glob("*.toml")))


def known_board(tree: Tree) -> BoardDescription | None:
    """Return the description of a board; None if there is none.

    Raises:
        InvalidInputError: one in the machine's own folder cannot be read.
    """
    compatible = _text_of(tree, _COMPATIBLE)
    boards = _all_boards(tree)
    return next((board for board in boards if any(part in compatible for part in board.compatible)), None)


def _all_boards(tree: Tree) -> tuple[BoardDescription, ...]:
    """Return all descriptions: those in the machine's own folder first, then the shipped ones."""
    own = []
    for path in tree.glob(f"{OWN_BOARDS}/*.toml"):
        try:
            own.append(parse_description(tree.read(path).encode(), path))
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None
    return (*own, *shipped_boards())


# --- Identity ---------------------------------------------------------------------------------------------------------
# Identifies the Jetson and its software.


_COMPATIBLE = "/proc/device-tree/compatible"
_MODEL = "/proc/device-tree/model"
_RELEASE = "/etc/nv_tegra_release"

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
        board: what is known of its kind.
        model: the board's own name.
        l4t: release of Jetson Linux, such as `35.4.1`; None if unknown.
        jetpack: major version of JetPack; None if unknown.
        is_super: whether its device tree has NVIDIA's Super clocks.
        has_power_monitor: whether this kit can measure its power at all.
    """

    board: BoardDescription
    model: str
    l4t: str | None
    jetpack: int | None
    is_super: bool
    has_power_monitor: bool

    @property
    def kind(self) -> str:
        """Kind of board, such as `agx-orin`."""
        return self.board.kind

    @property
    def usual_memory_hz(self) -> tuple[int, ...]:
        """The memory's usual frequencies, Hz, used if the kernel does not list them."""
        further_hz = self.board.super_memory_hz if self.is_super else None
        return tuple(sorted({*self.board.memory_hz, *([further_hz] if further_hz else [])}))


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
        InvalidInputError: it is not a Jetson, its device tree is hidden, or there is no description of it.
    """
    compatible = _text_of(tree, _COMPATIBLE)
    if (sign := sign_of_hidden_jetson(tree)) is not None:
        raise InvalidInputError(
            f"this looks like a Jetson ({sign} exists), but its device tree is hidden: {_COMPATIBLE} cannot be read;"
            f" {HIDDEN_DEVICE_TREE}"
        )
    if not is_jetson(tree):
        raise InvalidInputError(f"not a Jetson: {_COMPATIBLE} does not name an NVIDIA Tegra")
    board = known_board(tree)
    if board is None:
        raise InvalidInputError(
            f"{_COMPATIBLE}: unknown board {', '.join(compatible.split())}; supported are"
            f" {', '.join(board.kind for board in _all_boards(tree))}; {DESCRIBE}"
        )
    release = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", _text_of(tree, _RELEASE))
    model = _text_of(tree, _MODEL) or "unnamed"
    return JetsonIdentity(
        board=board,
        model=model,
        l4t=f"{release[1]}.{release[2]}" if release else None,
        jetpack=_JETPACK_OF_L4T.get(int(release[1])) if release else None,
        is_super="-super" in compatible or model.endswith("Super"),
        has_power_monitor=not any(part in compatible for part in board.without_power_monitor),
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
        rails: the rails whose sum it is.
    """

    def __init__(self, tree: Tree, rails: tuple[str, ...]) -> None:
        found = find_rails(tree)
        self.rails = rails
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
# Parts of the GPU (TPCs) that are off since boot, which only a reboot switches, and a GPU that MIG splits.

TPC_MASK = "tpc_pg_mask"
"""The file of the mask of TPCs."""
MIG_INSTANCES = "/proc/driver/nvidia/capabilities/gpu*/mig/gi*"
GPU_FOLDERS = ("/sys/devices/gpu.0", "/sys/devices/platform/gpu.0", "/sys/devices/platform/*.g*", "/sys/devices/*.g*")


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


def read_gating(tree: Tree, tpcs: int | None) -> GpuGating | None:
    """Return which TPCs of the GPU are on; None if the kernel does not report it.

    Args:
        tree: the board's files.
        tpcs: TPCs of its chip; None if unknown.
    """
    for pattern in GPU_FOLDERS:
        for path in tree.glob(f"{pattern}/{TPC_MASK}"):
            folder = path.rpartition("/")[0]
            if (mask := read_mask(tree, folder, TPC_MASK)) is not None:
                return GpuGating(folder, mask, tpcs)
    return None


def gpu_parts(tree: Tree, tpcs: int | None) -> list[str]:
    """Return in words which parts of the GPU a program has, apart from its clocks; empty if all of it.

    Args:
        tree: the board's files.
        tpcs: as for `read_gating`.
    """
    gating, instances = read_gating(tree, tpcs), len(tree.glob(MIG_INSTANCES))
    found = [gating.statement] if gating else []
    return [*found, *([f"split by MIG into {instances}"] if instances else [])]


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
    """Return the current temperature and throttle count, and the charge of the battery."""
    return BoardSample(
        temperature_c=_junction_c(tree), throttle_events=_throttle_events(tree), battery_share=read_battery_share(tree)
    )


def read_battery_share(tree: Tree) -> float | None:
    """Return the charge of the emptiest battery that feeds the machine, 0 to 1; None without one.

    A gauge that reports an impossible charge counts as none, and the log says so once.
    """
    found = []
    for supply in tree.glob("/sys/class/power_supply/*"):
        try:
            if tree.read(f"{supply}/type") != "Battery" or _feeds_another(tree, supply):
                continue
            text = tree.read(f"{supply}/capacity")
        except OSError:
            continue
        percent = int(text) if text.isascii() and text.removeprefix("-").isdigit() else -1
        if 0 <= percent <= 100:
            found.append(percent / 100)
        else:
            _warn_of_charge(supply, text[:20])
    return min(found, default=None)


def _feeds_another(tree: Tree, supply: str) -> bool:
    """Return whether a battery is that of a mouse or a keyboard."""
    try:
        return tree.read(f"{supply}/scope") == "Device"
    except OSError:
        return False


@cache
def _warn_of_charge(supply: str, text: str) -> None:
    _log.warning("%s reports a charge of %r, so it counts as unknown: check the battery's gauge", supply, text)


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


def read_throttle_alerts(tree: Tree) -> dict[str, int]:
    """Return the states of Thor's throttle alerts, such as `cpu-throttle-alert`: above 0 while it throttles.

    Raises:
        OSError: an alert cannot be read.
        ValueError: it does not contain a number.
    """
    kinds = {
        kind.removesuffix("/type"): tree.read(kind) for kind in tree.glob("/sys/class/thermal/cooling_device*/type")
    }
    return {kind: int(tree.read(f"{at}/cur_state")) for at, kind in kinds.items() if kind.endswith("-throttle-alert")}


def _junction_c(tree: Tree) -> float | None:
    on_chip = {
        kind: degrees
        for kind, degrees in read_zones(tree).items()
        if degrees is not None and (kind == _HOTTEST or _ON_CHIP.match(kind))
    }
    return on_chip.get(_HOTTEST, max(on_chip.values(), default=None))


def _throttle_events(tree: Tree) -> int | None:
    """Return the sum of all counters; None unless all can be read.

    Without counters, it is the number of alerts in force: an alert that begins counts as an event.
    """
    try:
        counts = read_throttle_counters(tree) or read_throttle_alerts(tree)
    except (OSError, ValueError):
        return None
    return sum(counts.values()) if counts else None
