"""Checks the protection of the connection to the coordinator: certificate, key, clock, and allowed plaintext."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from edge_agent.diagnosis.finding import Finding, failing, fine, limited
from edge_agent.exporter.protection import is_exposed
from edge_agent.systemd.installation import SETTINGS_PATH, InstalledConnection
from wattfleet.errors import InvalidInputError
from wattfleet_identity.authority import VALID_FROM
from wattfleet_identity.channels import PLAINTEXT_WARNING, is_loopback
from wattfleet_identity.identity_folder import FOLDER_MODE, KEY, Identity, read_identity, require_secret
from wattfleet_identity.peers import Role, UnknownPeerError
from wattfleet_identity.renewal import due_at, expiry_text, stored_at
from wattfleet_io.addresses import split_address

_ENROL = "enrol the board with `wattfleet agent join` and the line of `wattfleet coordinator invite`"
_AS_ROOT = "run this as root: `sudo wattfleet agent doctor`"
_SET_CLOCK = "let it follow a time server, such as with `sudo timedatectl set-ntp true`"
_CLOCK_LAG = timedelta(days=1)
"""A clock that is slow by less than this does no harm: it only delays the renewal of a certificate."""


def identity_findings(folder: Path, service: InstalledConnection | None, now: datetime) -> Iterator[Finding]:
    """Check the identity of a device, and the machine's clock against it.

    Args:
        folder: the folder of the identity; it need not exist.
        service: how the installed service connects; None if none is installed.
        now: the machine's time.
    """
    if not _may_enter(folder):
        yield limited("certificate", f"{folder}: permission denied", _AS_ROOT)
        return
    yield from _key(folder)
    identity = None
    try:
        identity = read_identity(folder)
    except InvalidInputError as error:
        yield failing("certificate", str(error), f"repair it, or {_ENROL}")
    else:
        yield (
            limited("certificate", f"none in {folder}", _ENROL)
            if identity is None
            else _certificate(folder, identity, now)
        )
    yield _clock(None if identity is None else stored_at(folder), now)
    yield _connection(identity, service)
    if service is not None and service.metrics_address:
        yield _metrics(folder, service)


def _may_enter(folder: Path) -> bool:
    return os.access(folder, os.R_OK | os.X_OK) if os.path.exists(folder) else True


def _key(folder: Path) -> Iterator[Finding]:
    """Check who may read the private key, if there is one."""
    if not (folder / KEY).exists():
        return
    try:
        require_secret(folder / KEY)
    except InvalidInputError as error:
        yield failing("key file", str(error).partition(": run")[0], f"run `chmod 600 {folder / KEY}`, and enrol again")
        return
    if stat.S_IMODE(folder.stat().st_mode) & ~FOLDER_MODE:
        yield limited("key file", f"other users may enter {folder}", f"run `chmod 700 {folder}`")
        return
    yield fine("key file", f"{folder / KEY}: only its owner may read it")


def _certificate(folder: Path, identity: Identity, now: datetime) -> Finding:
    found = f"{_owner(identity)}; {expiry_text(identity.certificate, now)}"
    if not _is_of_a_device(identity):
        return failing("certificate", f"{found}: it is not one of a device", _ENROL)
    if identity.certificate.not_after <= now:
        return failing("certificate", found, _ENROL)
    if due_at(folder) <= now:
        return limited(
            "certificate",
            f"{found}: its renewal is due",
            "the agent renews it while it reaches the coordinator; see `journalctl -u wattfleet-agent`",
        )
    return fine("certificate", found)


def _owner(identity: Identity) -> str:
    try:
        return str(identity.peer)
    except UnknownPeerError:
        return "names no peer"


def _is_of_a_device(identity: Identity) -> bool:
    try:
        return identity.peer.role is Role.DEVICE
    except UnknownPeerError:
        return False


def _clock(stored: datetime | None, now: datetime) -> Finding:
    """Check the machine's clock.

    Args:
        stored: when the certificate was stored, the later of this clock's and the invite's time; None without one.
        now: the machine's time.
    """
    shown = f"{now:%Y-%m-%d %H:%M} UTC"
    if now < VALID_FROM:
        return failing("clock", f"{shown}: no certificate is valid at that time", _SET_CLOCK)
    if stored is not None and now < stored - _CLOCK_LAG:
        return limited(
            "clock",
            f"{shown}, but the certificate was stored on {stored:%Y-%m-%d %H:%M} UTC: it would be renewed too late",
            _SET_CLOCK,
        )
    return fine("clock", shown)


def _metrics(folder: Path, service: InstalledConnection) -> Finding:
    """Check who may read the service's metrics."""
    address = service.metrics_address
    try:
        if is_exposed(address, folder, service.is_insecure):
            return limited("metrics", f"on {address} in {PLAINTEXT_WARNING}", _ENROL)
        is_local = is_loopback(split_address(address)[0])
    except InvalidInputError as error:
        problem, _, remedy = str(error).removeprefix("--metrics-address ").rpartition(": ")
        return failing("metrics", problem or remedy, remedy)
    return fine("metrics", f"on {address}, {'for this machine only' if is_local else 'for viewers and operators'}")


def _connection(identity: Identity | None, service: InstalledConnection | None) -> Finding:
    """Check whether the service may connect in plaintext."""
    if identity is not None:
        if service is not None and service.is_insecure:
            return limited(
                "connection",
                "mutual TLS; the service falls back to plaintext if the certificate is missing",
                f"remove the line with INSECURE from {SETTINGS_PATH}, and restart the service",
            )
        return fine("connection", "mutual TLS")
    if service is None:
        return limited("connection", "plaintext, to a coordinator on this machine only", _ENROL)
    if service.leaves_machine:
        return limited("connection", f"to {service.coordinator} in {PLAINTEXT_WARNING}", _ENROL)
    return fine("connection", f"plaintext to {service.coordinator}, which is this machine")
