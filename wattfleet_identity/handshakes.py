"""Finds out why the connection to a running coordinator fails; gRPC itself only reports "Socket closed"."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from wattfleet.errors import InvalidInputError
from wattfleet_identity.endpoint import Endpoint
from wattfleet_identity.identity_folder import CERTIFICATE, KEY, Identity
from wattfleet_identity.peers import Role, UnknownPeerError
from wattfleet_io.addresses import split_address
from wattfleet_io.clock import utc_now
from wattfleet_io.coordinator_channel import CoordinatorUnreachableError

_TIMEOUT_S = 3.0
# X.509 verification results, as OpenSSL numbers them.
_NOT_YET_VALID, _EXPIRED, _OTHER_NAME = 9, 10, 62
_UNKNOWN_ISSUER = (2, 18, 19, 20, 21)


class HandshakeError(CoordinatorUnreachableError):
    """The coordinator answers, but client and coordinator do not accept each other; the message states the reason."""


def why_refused(endpoint: Endpoint, now: Callable[[], datetime] = utc_now) -> HandshakeError | None:
    """Connect again to find out why no channel could be opened.

    Args:
        endpoint: the coordinator, and the client's identity.
        now: the time.

    Returns:
        None if nothing answers, or if nothing is wrong with the connection.
    """
    try:
        identity = endpoint.identity()
        text = _expiry(identity, now()) or _problem(endpoint, identity, now())
    except InvalidInputError as error:
        text = str(error)
    except OSError:
        text = None
    return None if text is None else HandshakeError(text)


def unreachable(endpoint: Endpoint) -> CoordinatorUnreachableError:
    """The error of a channel that could not be opened: what is wrong with the connection, or that nothing answers."""
    return why_refused(endpoint) or CoordinatorUnreachableError(f"no coordinator answers at {endpoint.address}")


def enrol_command(identity: Identity | None) -> str:
    """The command that enrols a client again, which differs between devices and other peers."""
    try:
        is_device = identity is not None and identity.peer.role is Role.DEVICE
    except UnknownPeerError:
        is_device = False
    return "wattfleet agent join" if is_device else "wattfleet join"


def _expiry(identity: Identity | None, now: datetime) -> str | None:
    if identity is None or identity.certificate.not_after > now:
        return None
    return (
        f"this machine's certificate expired on {identity.certificate.not_after:%Y-%m-%d}: enrol again with"
        f" `{enrol_command(identity)}`"
    )


def _problem(endpoint: Endpoint, identity: Identity | None, now: datetime) -> str | None:
    """Find out what is wrong with the connection.

    Raises:
        OSError: nothing answers.
    """
    context, name = _context(identity, endpoint.folder), None if identity is None else identity.server_name
    with socket.create_connection(split_address(endpoint.address), _TIMEOUT_S) as connection:
        try:
            with context.wrap_socket(connection, server_hostname=name) as protected:
                if identity is None:
                    return _requires_tls(endpoint.address)
                return None if _server_continues(protected) else _refuses(endpoint.address, identity)
        except ssl.SSLCertVerificationError as error:
            return _distrust(endpoint, identity, error, now)
        except ssl.SSLError as error:
            speaks_tls = "ALERT" in (error.reason or "")
            if identity is None:
                return _requires_tls(endpoint.address) if speaks_tls else None
            return _refuses(endpoint.address, identity) if speaks_tls else _speaks_plaintext(endpoint)


def _context(identity: Identity | None, folder: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if identity is None or folder is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    context.check_hostname = bool(identity.server_name)
    context.load_verify_locations(cadata=identity.trusted_pem.decode())
    context.load_cert_chain(os.fspath(folder / CERTIFICATE), os.fspath(folder / KEY))
    return context


def _server_continues(protected: ssl.SSLSocket) -> bool:
    """Whether the server continues after the handshake, in which it checks the client: gRPC then sends data at once."""
    try:
        return bool(protected.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False


def _requires_tls(address: str) -> str:
    return (
        f"the coordinator at {address} requires a certificate, but this machine has none: enrol with an invite from "
        "`wattfleet coordinator invite` and `wattfleet join`, on a device with `wattfleet agent join`"
    )


def _refuses(address: str, identity: Identity) -> str:
    return (
        f"the coordinator at {address} does not accept this machine's certificate, which another authority issued: "
        f"enrol with this coordinator with `{enrol_command(identity)}`"
    )


def _speaks_plaintext(endpoint: Endpoint) -> str:
    return (
        f"the coordinator at {endpoint.address} uses plaintext, but the identity in {endpoint.folder} needs TLS: "
        "create the coordinator's authority with `wattfleet coordinator init`, or name another address or an empty "
        "folder"
    )


def _distrust(endpoint: Endpoint, identity: Identity | None, error: ssl.SSLCertVerificationError, now: datetime) -> str:
    whose = f"the certificate of the coordinator at {endpoint.address}"
    if error.verify_code in _UNKNOWN_ISSUER:
        return (
            f"{whose} is not from the authority of the identity in {endpoint.folder}: check the address, and if the"
            f" coordinator has another authority, enrol again with `{enrol_command(identity)}`"
        )
    if error.verify_code in (_EXPIRED, _NOT_YET_VALID):
        state = "has expired" if error.verify_code == _EXPIRED else "is not valid yet"
        return (
            f"{whose} {state} at {now:%Y-%m-%d %H:%M} UTC, the time of this machine: set its clock if that is wrong,"
            " or else restart the coordinator, which renews its certificate"
        )
    if error.verify_code == _OTHER_NAME:
        name = identity.server_name if identity else ""
        return f"{whose} does not have the name {name!r}: check the address, and `server_name` in {endpoint.folder}"
    return f"{whose} cannot be verified: {error.verify_message}"
