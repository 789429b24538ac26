"""Opens the device named on a command line."""

from __future__ import annotations

import os
from pathlib import Path

from edge_agent.devices.device import Device
from edge_agent.devices.host import HostDevice, read_host_file
from edge_agent.devices.jetson.board import is_jetson, sign_of_hidden_jetson
from edge_agent.devices.jetson.description import open_described
from edge_agent.devices.jtop import open_jtop
from edge_agent.devices.nvml import open_nvml
from edge_agent.devices.nvpmodel import NvpmodelDevice
from edge_agent.devices.sysfs import SysfsDevice
from edge_agent.devices.tree import Tree
from edge_agent.devices.virtual.simulated import LiveSimulatedDevice, ReplayDevice, SimulatedDevice
from edge_agent.devices.virtual.virtual_board import VirtualBoard
from edge_agent.paths import BACKUP_FILE, DEFAULT_STATE_DIRECTORY, device_folder
from wattfleet.common.clock import SystemClock
from wattfleet.common.programs import run_no_program, run_program
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BOARDS

_THIS_MACHINE = Path("/")
_VIRTUAL = (*(f"simulated:{name}" for name in BOARDS), "simulated:<kind>:real-time", "replay:<file>.csv")
_REAL_TIME = ":real-time"
_PHYSICAL = ("auto", "sysfs", "sysfs:<folder>", "nvpmodel", "jtop", "host", "description:<file>.toml")


def open_device(
    spec: str, seed: int, state_directory: Path = Path(DEFAULT_STATE_DIRECTORY), root: Path = _THIS_MACHINE
) -> Device:
    """Open the device that `spec` names.

    Args:
        spec: `auto`, `sysfs`, `nvpmodel`, `jtop` or `host` for this machine, `sysfs:<folder>` for a Jetson's files
            below a folder, `description:<file>` for a board that `wattfleet agent describe` has described, or a board
            as for `open_virtual_board`. `simulated:<board kind>:real-time` is such a board on this machine's clock.
            `auto` is `sysfs` on a Jetson, even if its device tree is hidden, else `host`.
        seed: random seed of a virtual board.
        state_directory: directory where a device may keep files.
        root: root of this machine's files; `/` except in tests.

    Raises:
        InvalidInputError: the device is unknown or cannot be used.
        ModeNotAppliedError: the device does not report its current mode.
        JtopUnavailableError: jtop was chosen but cannot be used.
    """
    spec = _resolved(spec, root)
    kind, _, which = spec.partition(":")
    if spec == "sysfs":
        return _sysfs(root)
    if spec == "jtop":
        board = _sysfs(root)
        return open_jtop(board, board.power.rails)
    if spec == "host":
        return HostDevice(Tree(root), SystemClock(), open_nvml())
    if kind == "sysfs":
        return _sysfs(Path(which))
    if kind == "description":
        return open_described(Path(which))
    if spec == "nvpmodel":
        return NvpmodelDevice(Tree(root), SystemClock(), run_program, state_directory)
    if spec.endswith(_REAL_TIME):
        return LiveSimulatedDevice(which.removesuffix(_REAL_TIME), seed)
    return open_virtual_board(spec, seed)


def is_virtual(spec: str) -> bool:
    """Return whether `spec` names a virtual board, in virtual or in real time."""
    kind, _, which = spec.partition(":")
    return (kind == "simulated" and which.removesuffix(_REAL_TIME) in BOARDS) or (kind == "replay" and bool(which))


def folder_of_device(spec: str, state_directory: Path, root: Path = _THIS_MACHINE) -> Path:
    """Return the folder for a device's lock and the backup of its settings; the device need not be open.

    A Jetson has one folder, wherever its agents keep their state, so that two agents exclude each other, and so has a
    host whose file says that its modes are set, or said so when its settings were backed up. For a virtual board, and
    for a description or another host, which are never set, the folder is in the state directory and does not need root.

    Args:
        spec: the device, as for `open_device`.
        state_directory: the agent's state directory.
        root: root of this machine's files.

    Raises:
        InvalidInputError: the device is unknown, or the host's file cannot be used.
    """
    spec = _resolved(spec, root)
    if is_virtual(spec) or spec.startswith("description:"):
        return device_folder(state_directory)
    kind, _, folder = spec.partition(":")
    board_root = Path(folder) if kind == "sysfs" and folder else root
    found = device_folder(board_root / DEFAULT_STATE_DIRECTORY.lstrip("/"))
    # `os.path.exists`, since an ordinary user need not be able to see it.
    if spec == "host" and read_host_file(Tree(root)).modes == "fixed" and not os.path.exists(found / BACKUP_FILE):
        return device_folder(state_directory)
    return found


def open_virtual_board(spec: str, seed: int) -> VirtualBoard:
    """Open the virtual board that `spec` names.

    Args:
        spec: `simulated:<board kind>`, such as `simulated:agx-orin`, or `replay:<CSV file>`.
        seed: random seed of the board and its noise.

    Raises:
        InvalidInputError: the board is unknown, or its CSV file cannot be used.
    """
    if not is_virtual(spec):
        raise InvalidInputError(f"unknown device {spec!r}; choose one of {', '.join(_VIRTUAL)}")
    kind, _, which = spec.partition(":")
    return SimulatedDevice(which, seed) if kind == "simulated" else ReplayDevice(Path(which), seed)


def _resolved(spec: str, root: Path) -> str:
    """Replace `auto` by the device found on this machine."""
    kind, _, which = spec.partition(":")
    if spec == "auto":
        tree = Tree(root)
        return "sysfs" if is_jetson(tree) or sign_of_hidden_jetson(tree) else "host"
    has_place = kind in ("sysfs", "description") and which
    if spec not in _PHYSICAL and not has_place and not is_virtual(spec):
        raise InvalidInputError(f"unknown device {spec!r}; choose one of {', '.join((*_PHYSICAL, *_VIRTUAL))}")
    return spec


def _sysfs(root: Path) -> SysfsDevice:
    return SysfsDevice(Tree(root), SystemClock(), run_program if root == _THIS_MACHINE else run_no_program)
