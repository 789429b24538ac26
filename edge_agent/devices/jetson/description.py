"""A file with all that the agent would need of a board: written on the board, and read elsewhere as a device.

The file is fit to be attached to an issue: it holds the files below and nothing else, so no serial number or address. A
user or machine is named only if the owner has put a name into NVIDIA's configuration, for example that of a mode.
"""

from __future__ import annotations

import errno
import fnmatch
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.jetson.board import (
    GPU_FOLDERS,
    MIG_INSTANCES,
    OWN_BOARDS,
    BoardDescription,
    find_rails,
    identify,
    is_jetson,
    known_board,
    parse_description,
)
from edge_agent.devices.jetson.knobs import Memory
from edge_agent.devices.jetson.nvpmodel_conf import SYSTEM_CONF
from edge_agent.devices.sysfs import SysfsDevice
from edge_agent.devices.tree import Tree
from wattfleet.common.clock import SystemClock
from wattfleet.common.parsing import parse_toml
from wattfleet.common.programs import run_no_program
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Provenance

_CPU = "/sys/devices/system/cpu"
_MODEL = "/proc/device-tree/model"
_BPMP = "/sys/kernel/debug/bpmp/debug"
_CHIPS = "/sys/bus/i2c/drivers/ina*/*"
_SENSORS = ("name", "in*_label", "in*_input", "curr*_input", "power*_input", "power*_label", "oc*_event_cnt", "pwm*")
_FILES: Mapping[str, tuple[str, ...]] = {
    "/proc/device-tree": ("model", "compatible"),
    "/proc/sys/kernel": ("osrelease",),
    "/etc": ("nv_tegra_release", "nvpmodel.conf"),
    "/var/lib/nvpmodel": ("status",),
    _CPU: ("cpu[0-9]*", "cpu[0-9]*/online"),
    f"{_CPU}/cpufreq/policy*": ("scaling_*_frequencies", "scaling_*_freq", "scaling_governor", "*_cpus"),
    "/sys/class/devfreq/*": ("available_frequencies", "*_freq", "governor", "device/of_node/name", "device/load"),
    "/sys/kernel/nvpmodel_*_cap": ("*",),
    f"{_BPMP}/emc": ("possible_rates",),
    f"{_BPMP}/clk/emc": ("*rate", "mrq_rate_locked", "state"),
    f"{_CHIPS}/hwmon/hwmon*": _SENSORS,
    f"{_CHIPS}/iio:device*": ("rail_name_*", "in_*_input"),
    "/sys/class/hwmon/hwmon*": _SENSORS,
    "/sys/class/thermal/thermal_zone*": ("type", "temp"),
    "/sys/class/thermal/cooling_device*": ("type", "cur_state"),
    "/sys/devices/platform/pwm-fan*/hwmon/hwmon*": ("pwm*",),
    "/sys/devices/pwm-fan": ("*_pwm",),
    **{folder: ("*_pg_mask",) for folder in GPU_FOLDERS},
    MIG_INSTANCES.rpartition("/")[0]: (MIG_INSTANCES.rpartition("/")[2],),
}
"""The files that a description holds, by folder; serial numbers are in none of them."""
_CLASS_HWMON = re.compile(r"/sys/class/hwmon/[^/]+")
_OWN_HWMON = re.compile(r"soctherm_oc|ina[a-z0-9]*|[a-z_]*pwm[-_]?fan|pwm_tach")
"""Names of the sensors that matter in that folder. Others may name a device of the owner with its address."""
_MAX_CHARACTERS = 100_000
"""Maximum of a file's characters, enough for every configuration of nvpmodel."""
_MAX_BYTES = 4_000_000
"""Maximum of a description; one has some 50,000 bytes."""
_MAX_MODES = 100_000
"""Maximum of a described board's modes; AGX Xavier has some 30,000."""
_ERRNO_OF_NAME = {name: number for number, name in errno.errorcode.items()}

_HEADING = """\
# A description of a board, written by `wattfleet agent describe`. It holds kernel files and NVIDIA's configuration,
# without comments: no serial number or address. Names that you have put into that configuration, as those of modes, are
# kept.
#
# Read it as a device:     wattfleet agent doctor --device description:<this file>
"""
_UNKNOWN = f"""\
#
# Wattfleet does not know this board, so [board] is a draft. Check `rails`: their sum has to be the power of the whole
# board, so give its input rail if there is one, and no rail that is measured inside another. Then let the agent use it:
#     sudo install -D -m 644 <this file> {OWN_BOARDS}/<name>.toml
# Please attach this file to an issue, so that the board becomes known.
"""


@dataclass(frozen=True)
class Captured:
    """The files of a board.

    Attributes:
        files: their texts by path.
        unreadable: why others cannot be read, such as `EAGAIN`, by path.
        folders: folders that matter even if they are empty.
    """

    files: Mapping[str, str]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()


def describe(tree: Tree) -> tuple[str, bool]:
    """Return the description of a board, a TOML document, and whether Wattfleet knows it.

    Args:
        tree: the board's files.

    Raises:
        InvalidInputError: it is not a Jetson, or its device tree is hidden.
    """
    if not is_jetson(tree):
        identify(tree)  # says why
    board = known_board(tree)
    captured = capture(tree)
    content = {
        "board": (board or _draft(tree)).content(),
        "files": dict(captured.files),
        "unreadable": dict(captured.unreadable),
        "folders": {"paths": list(captured.folders)},
    }
    return f"{_HEADING}{'' if board else _UNKNOWN}\n{tomli_w.dumps(content, multiline_strings=True)}", board is not None


def capture(tree: Tree) -> Captured:
    """Read all files of a description."""
    files: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    folders: list[str] = []
    paths = dict.fromkeys(
        path
        for folder, names in _FILES.items()
        for name in names
        for path in tree.glob(f"{folder}/{name}")
        if _is_of_board(tree, path)
    )
    for path in paths:
        try:
            text = tree.read(path)[:_MAX_CHARACTERS]
        except IsADirectoryError:
            folders.append(path)
        except OSError as error:
            unreadable[path] = errno.errorcode.get(error.errno or 0, "EIO")
        else:
            files[path] = _without_comments(text) if path == SYSTEM_CONF else text
    return Captured(files, unreadable, tuple(folders))


def _is_of_board(tree: Tree, path: str) -> bool:
    """Return whether a file belongs to the board, and not to what the owner has attached, such as a mouse."""
    if (folder := _CLASS_HWMON.match(path)) is None:
        return True
    try:
        return _OWN_HWMON.fullmatch(tree.read(f"{folder[0]}/name")) is not None
    except OSError:
        return False


def _without_comments(text: str) -> str:
    """Return a configuration without comments, in which its owner may have written anything."""
    lines = (line.partition("#")[0].rstrip() for line in text.splitlines())
    return "\n".join(filter(None, lines))


def _draft(tree: Tree) -> BoardDescription:
    """Return a description of an unknown board to be checked by a person."""
    parts = re.findall(r"p\d{4}-\d{4}", tree.read("/proc/device-tree/compatible"))
    rails = list(find_rails(tree))
    inputs = [name for name in rails if name == "VIN" or name.endswith("_IN")]
    # 1 GHz is easy to recognize, and adds no information.
    memory = Memory(tree, (1_000_000_000,))
    return BoardDescription(
        kind=f"jetson-{parts[-1] if parts else 'unknown'}",
        modules=((tree.read(_MODEL) if tree.exists(_MODEL) else "") or "unnamed",),
        compatible=(parts[-1] if parts else "nvidia,tegra",),
        rails=tuple(inputs[:1] or rails) or ("unknown",),
        memory_hz=memory.table_hz,
    )


# --- As a device ------------------------------------------------------------------------------------------------------


class DescribedTree(Tree):
    """The files of a board in a description, which can be read only.

    Args:
        name: the name of the description.
        captured: its files.
    """

    def __init__(self, name: str, captured: Captured) -> None:
        super().__init__(Path(name))
        self._name = name
        self._captured = captured
        paths = [*captured.files, *captured.unreadable, *captured.folders]
        self._folders: dict[str, set[str]] = {folder: set() for folder in captured.folders}
        for path in paths:
            while path:
                folder, _, last = path.rpartition("/")
                self._folders.setdefault(folder, set()).add(last)
                path = folder

    def is_read_only(self, path: str) -> bool:
        """Return False: on the board, the file can be written."""
        return False

    def exists(self, path: str) -> bool:
        """Return whether the description has the file or folder."""
        return path in self._captured.files or path in self._captured.unreadable or path in self._folders

    def may_write(self, path: str) -> bool:
        """Return whether the description has the file, which root may write on the board."""
        return self.exists(path)

    def read(self, path: str) -> str:
        """Return the text of a file.

        Raises:
            OSError: the description does not have it, or the board's kernel did not answer.
        """
        text = self._captured.files.get(path)
        if text is None:
            code = _ERRNO_OF_NAME.get(self._captured.unreadable.get(path, "ENOENT"), errno.EIO)
            raise OSError(code, os.strerror(code), path)
        return text

    def write(self, path: str, text: str) -> None:
        """Refuse to write.

        Raises:
            ModeNotAppliedError: always.
        """
        raise ModeNotAppliedError(f"{self._name} is the description of a board, which cannot be set")

    def _named(self, folder: str, pattern: str) -> list[str]:
        return fnmatch.filter(self._folders.get(folder, ()), pattern)


class DescribedDevice(SysfsDevice):
    """A board in a description (a `Device`), which can be looked at only."""

    mode_persists = False

    def _list_modes(self) -> None:
        tables = self.cpu.table_khz, self.gpu.table_hz, self.memory.table_hz
        modes = self.cpu.cores * math.prod(map(len, tables))
        if modes > _MAX_MODES:
            raise InvalidInputError(
                f"the description has {modes:,} modes, more than {_MAX_MODES:,}: no board has so many; describe the"
                " board again"
            )
        super()._list_modes()

    @property
    def provenance(self) -> Provenance:
        """The source of its figures."""
        return "replayed"


def read_described(path: Path) -> DescribedTree:
    """Read a description of a board.

    Raises:
        InvalidInputError: the file cannot be read, or is not a description.
    """
    try:
        # Without O_NONBLOCK, a pipe would block until somebody writes to it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_BYTES + 1) if is_regular else b""
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None
    if not is_regular:
        raise InvalidInputError(f"{path}: is not a regular file; name one that `wattfleet agent describe` wrote")
    if len(content) > _MAX_BYTES:
        raise InvalidInputError(
            f"{path}: has more than {_MAX_BYTES:,} bytes; name a file that `wattfleet agent describe` wrote"
        )
    board = parse_description(content, str(path))
    tables = parse_toml(content)
    files, unreadable = (_texts(tables, name, path) for name in ("files", "unreadable"))
    table = tables.get("folders", {})
    folders = table.get("paths", []) if isinstance(table, dict) else None
    if not isinstance(folders, list) or not all(isinstance(folder, str) for folder in folders):
        raise InvalidInputError(f"{path}: paths of [folders] has to be a list of texts")
    # The board is identified by its own table, as it will be once that is installed.
    own = {f"{OWN_BOARDS}/{board.kind}.toml": tomli_w.dumps({"board": board.content()})}
    return DescribedTree(path.name, Captured({**files, **own}, unreadable, tuple(folders)))


def _texts(tables: Mapping[str, Any], name: str, path: Path) -> dict[str, str]:
    found = tables.get(name, {})
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise InvalidInputError(f"{path}: [{name}] has to hold texts; `wattfleet agent describe` writes one")
    return found


def open_described(path: Path) -> DescribedDevice:
    """Open the board in a description.

    Raises:
        InvalidInputError: the file is not a description, or lacks what a board needs.
    """
    return DescribedDevice(read_described(path), SystemClock(), run_no_program)
