"""Runs all checks of a machine: board, device, state directory, installation, identity and socket."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path

from edge_agent.devices.device import Device
from edge_agent.devices.host import HostDevice
from edge_agent.devices.jetson.identity import is_jetson
from edge_agent.devices.meters.power_now import power_now_mw
from edge_agent.devices.tree import Tree
from edge_agent.diagnosis.finding import Finding, failing, fine, limited
from edge_agent.diagnosis.host import host_findings
from edge_agent.diagnosis.identity import identity_findings
from edge_agent.diagnosis.jetson import jetson_findings
from edge_agent.systemd.installation import InstalledConnection
from edge_agent.training.knob_backup import KnobBackupError, holder_of
from edge_agent.training.mode_change import has_backup
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_io.clock import utc_now
from wattfleet_io.systemd.installation import code_problem
from wattfleet_io.systemd.ownership import InstalledCode


def diagnose(
    spec: str,
    open_device: Callable[[], Device],
    state_directory: Path,
    device_folder: Path,
    socket_path: Path,
    code: InstalledCode,
    identity_folder: Path,
    root: Path = Path("/"),
    now: Callable[[], datetime] = utc_now,
) -> Iterator[Finding]:
    """Check everything that an agent needs.

    Args:
        spec: value of `--device`.
        open_device: opens the device.
        state_directory: the agent's directory.
        device_folder: folder with the backup of the device's settings.
        socket_path: socket where the agent serves the ClientApp.
        code: the code that it runs.
        identity_folder: folder of its key and certificate.
        root: root of the machine's files.
        now: the machine's time.
    """
    tree = _tree_of(spec)
    if tree is not None and is_jetson(tree):
        yield from jetson_findings(tree)
    elif tree is not None and spec != "auto":
        yield limited(
            "board",
            "not an NVIDIA Jetson",
            "pass --device simulated:<kind> to try things out, or --device host to train without power modes",
        )
    yield from _device(open_device)
    yield _state_directory(state_directory)
    yield _backup(device_folder)
    yield _installed(code)
    yield from identity_findings(identity_folder, InstalledConnection.read(root), now())
    yield _socket(socket_path)


def _tree_of(spec: str) -> Tree | None:
    """Return the files of the Jetson that `spec` names; None if it does not name one."""
    kind, _, folder = spec.partition(":")
    if kind not in ("auto", "sysfs", "nvpmodel", "jtop"):
        return None
    return Tree(Path(folder or "/"))


def _device(open_device: Callable[[], Device]) -> Iterator[Finding]:
    try:
        device = open_device()
        mode = device.current_mode()
    except WattfleetError as error:
        yield failing("device", str(error), "follow the advice above, or pass another --device")
        return
    if isinstance(device, HostDevice):
        yield from host_findings(device)
        return
    yield fine("device", f"{device.board_kind} ({device.provenance}), {len(device.modes):,} modes, mode {mode.label()}")
    if math.isnan(power_now_mw(device)):
        yield limited("power now", "cannot be read", "no mode can be measured without it; see the lines above")


def _state_directory(path: Path) -> Finding:
    nearest = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    if not os.access(nearest, os.W_OK | os.X_OK):
        return failing("state directory", f"{path}: not writable", "run as root, or pass another --state-dir")
    if nearest != path:
        return fine("state directory", f"{path}: will be created at the first start")
    free_mb = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize / 1e6
    if free_mb < _REQUIRED_FREE_MB:
        return failing(
            "state directory", f"{path}: only {free_mb:.0f} MB free", f"free at least {_REQUIRED_FREE_MB:.0f} MB"
        )
    return fine("state directory", f"{path}, {free_mb / 1e3:.1f} GB free")


_REQUIRED_FREE_MB = 50.0
"""A profile needs less than 1 MB, a reference a few."""


def _backup(folder: Path) -> Finding:
    try:
        holder, kept = holder_of(folder), has_backup(folder)
    except KnobBackupError as error:
        return limited("restore file", str(error), "run this as root")
    if holder is not None:
        return fine("restore file", f"process {holder} uses the device and will restore it")
    if kept:
        return limited(
            "restore file",
            f"{folder}: the device may not be in its owner's mode",
            "run `wattfleet agent restore`; the agent's next start restores it, too",
        )
    return fine("restore file", "none: the device has its owner's settings")


def _installed(code: InstalledCode) -> Finding:
    try:
        problem = code_problem(code)
    except InvalidInputError as error:
        return limited("installation", str(error), "run this as root")
    if problem is None:
        return fine("installation", f"{code.program}, which only root can write; the service can run it")
    return limited("installation", f"`wattfleet agent install` would refuse this. {problem.found}", problem.remedy)


def _socket(path: Path) -> Finding:
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        try:
            connection.connect(str(path))
        except PermissionError:
            return limited("socket", f"{path}: permission denied", "join its group: `usermod -aG wattfleet <user>`")
        except OSError:
            return limited("socket", f"{path}: no agent is running", "start one: `systemctl start wattfleet-agent`")
    return fine("socket", f"{path}: an agent is running")
