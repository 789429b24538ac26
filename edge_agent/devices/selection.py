"""Which device a command line names."""

from __future__ import annotations

from pathlib import Path

from edge_agent.devices.device import Device
from edge_agent.devices.jetson.identity import is_jetson
from edge_agent.devices.jetson.programs import run_no_program, run_program
from edge_agent.devices.jetson.tree import Tree
from edge_agent.devices.nvpmodel import NvpmodelDevice
from edge_agent.devices.replay import ReplayDevice
from edge_agent.devices.simulated import SimulatedDevice
from edge_agent.devices.soft_board import SoftBoard
from edge_agent.devices.sysfs import SysfsDevice
from edge_agent.devices.system_clock import SystemClock
from edge_agent.paths import DEFAULT_STATE_DIRECTORY
from wattfleet.boards import BOARDS
from wattfleet.errors import InvalidInputError

_THIS_MACHINE = Path("/")
_SOFT = (*(f"simulated:{name}" for name in BOARDS), "replay:<file>.csv")
_HARD = ("auto", "sysfs", "sysfs:<folder>", "nvpmodel")


def open_device(
    spec: str, seed: int, state_directory: Path = Path(DEFAULT_STATE_DIRECTORY), root: Path = _THIS_MACHINE
) -> Device:
    """The device that `spec` names.

    Args:
        spec: `auto`, `sysfs` or `nvpmodel` for this machine, `sysfs:<folder>` for a Jetson's files below a folder, or
            a soft board as `open_soft_board` takes it.
        seed: of a soft device.
        state_directory: where a device may write what it needs.
        root: where the files of this machine are, `/` outside of tests.

    Raises:
        InvalidInputError: no such device, or none that can be used.
        ModeNotAppliedError: a device does not say which mode is in force.
    """
    kind, _, which = spec.partition(":")
    if spec == "auto":
        if is_jetson(Tree(root)):
            return _sysfs(root)
        raise InvalidInputError(f"auto: this is no Jetson; choose one of {', '.join(_SOFT)}")
    if spec == "sysfs":
        return _sysfs(root)
    if kind == "sysfs" and which:
        return _sysfs(Path(which))
    if spec == "nvpmodel":
        return NvpmodelDevice(Tree(root), SystemClock(), run_program, state_directory)
    board = _soft_board(spec, seed)
    if board is None:
        raise InvalidInputError(f"unknown device {spec!r}: choose one of {', '.join((*_HARD, *_SOFT))}")
    return board


def open_soft_board(spec: str, seed: int) -> SoftBoard:
    """The board that is not there which `spec` names.

    Args:
        spec: `simulated:<board kind>`, such as `simulated:agx-orin`, or `replay:<CSV file>`.
        seed: decides on its noise.

    Raises:
        InvalidInputError: no such board, or a CSV file that cannot be used.
    """
    board = _soft_board(spec, seed)
    if board is None:
        raise InvalidInputError(f"unknown device {spec!r}: choose one of {', '.join(_SOFT)}")
    return board


def _sysfs(root: Path) -> SysfsDevice:
    return SysfsDevice(Tree(root), SystemClock(), run_program if root == _THIS_MACHINE else run_no_program)


def _soft_board(spec: str, seed: int) -> SoftBoard | None:
    kind, _, which = spec.partition(":")
    if kind == "simulated" and which in BOARDS:
        return SimulatedDevice(which, seed)
    if kind == "replay" and which:
        return ReplayDevice(Path(which), seed)
    return None
