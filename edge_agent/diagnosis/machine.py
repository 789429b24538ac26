"""The whole look: the board, the device as the agent would open it, and what the agent keeps."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from edge_agent.devices.device import Device
from edge_agent.devices.host import HostDevice
from edge_agent.devices.jetson.identity import is_jetson
from edge_agent.devices.meters.power_now import power_now_mw
from edge_agent.devices.tree import Tree
from edge_agent.diagnosis.finding import Finding, failing, fine, limited
from edge_agent.diagnosis.host import host_findings
from edge_agent.diagnosis.jetson import jetson_findings
from edge_agent.systemd.ownership import InstalledCode
from edge_agent.training.knob_backup import KnobBackupError, holder_of
from edge_agent.training.mode_change import has_backup
from wattfleet.errors import InvalidInputError, WattfleetError


def diagnose(
    spec: str,
    open_device: Callable[[], Device],
    state_directory: Path,
    device_folder: Path,
    socket_path: Path,
    code: InstalledCode,
) -> Iterator[Finding]:
    """Look at everything an agent needs.

    Args:
        spec: the device as the command line names it.
        open_device: opens it.
        state_directory: where the agent keeps its files.
        device_folder: where what was in force on the device is kept.
        socket_path: where it serves the ClientApp.
        code: what it runs.
    """
    tree = _tree_of(spec)
    if tree is not None and is_jetson(tree):
        yield from jetson_findings(tree)
    elif tree is not None and spec != "auto":
        yield limited(
            "board",
            "no NVIDIA Jetson",
            "use --device simulated:<kind> to try things out, or --device host to train without power modes",
        )
    yield from _device(open_device)
    yield _state_directory(state_directory)
    yield _kept(device_folder)
    yield _installed(code)
    yield _socket(socket_path)


def _tree_of(spec: str) -> Tree | None:
    """The files of the Jetson that a device's name speaks of; None where it speaks of none."""
    kind, _, folder = spec.partition(":")
    if kind not in ("auto", "sysfs", "nvpmodel", "jtop"):
        return None
    return Tree(Path(folder or "/"))


def _device(open_device: Callable[[], Device]) -> Iterator[Finding]:
    try:
        device = open_device()
        mode = device.current_mode()
    except WattfleetError as error:
        yield failing("device", str(error), "follow the advice above, or name another with --device")
        return
    if isinstance(device, HostDevice):
        yield from host_findings(device)
        return
    yield fine(
        "device", f"{device.board_kind} ({device.provenance}), {len(device.modes):,} modes, {mode.label()} in force"
    )
    if math.isnan(power_now_mw(device)):
        yield limited("power now", "cannot be read", "without it no mode can be measured; see the lines above")


def _state_directory(path: Path) -> Finding:
    nearest = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    if not os.access(nearest, os.W_OK | os.X_OK):
        return failing(
            "state directory", f"{path}: may not be written", "run as root, or name another with --state-dir"
        )
    if nearest != path:
        return fine("state directory", f"{path}: is made at the first start")
    free_mb = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize / 1e6
    if free_mb < _WANTED_FREE_MB:
        return failing("state directory", f"{path}: {free_mb:.0f} MB are free", f"free {_WANTED_FREE_MB:.0f} MB")
    return fine("state directory", f"{path}, {free_mb / 1e3:.1f} GB free")


_WANTED_FREE_MB = 50.0
"""A profile takes less than one, a reference a few."""


def _kept(folder: Path) -> Finding:
    try:
        holder, kept = holder_of(folder), has_backup(folder)
    except KnobBackupError as error:
        return limited("restore file", str(error), "run this as root")
    if holder is not None:
        return fine("restore file", f"process {holder} has the device and will restore it")
    if kept:
        return limited(
            "restore file",
            f"{folder}: the device may be in another mode than you left it in",
            "`wattfleet agent restore` puts it back; the agent's next start does, too",
        )
    return fine("restore file", "none: the device is as its owner left it")


def _installed(code: InstalledCode) -> Finding:
    # Every single file is looked at when the service is installed.
    try:
        writable = code.writable_by_others(contents=False)
    except InvalidInputError as error:
        return limited("installation", str(error), "look again as root")
    if writable is None:
        return fine("installation", f"{code.program}, in folders that only root may write")
    return limited(
        "installation",
        f"{code.program}: others than root may write {writable}",
        "for a service, which is root, install it as root in a folder such as /opt/wattfleet",
    )


def _socket(path: Path) -> Finding:
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        try:
            connection.connect(str(path))
        except PermissionError:
            return limited(
                "socket", f"{path}: may not be used", "add yourself to its group: `usermod -aG wattfleet <you>`"
            )
        except OSError:
            return limited("socket", f"{path}: no agent serves it", "start one: `systemctl start wattfleet-agent`")
    return fine("socket", f"{path}: an agent serves it")
