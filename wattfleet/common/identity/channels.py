"""Channels to the coordinator, why a handshake failed, and the endpoint with its identity."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc

from wattfleet.common.addresses import IDENTITY_VARIABLE, split_address
from wattfleet.common.clock import utc_now
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError
from wattfleet.common.identity.identity_folder import CERTIFICATE, KEY, Identity, read_identity
from wattfleet.common.identity.peers import Role, UnknownPeerError
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.limits import MAX_ANSWER_BYTES

# --- Channels ---------------------------------------------------------------------------------------------------------
# Channels to the coordinator: mutual TLS with an identity, plaintext without one.


Options = Sequence[tuple[str, Any]]

_CONNECTING: Options = (
    # The timeout of one attempt to connect. gRPC's 20 s are too short for the three round trips of TCP, TLS and HTTP/2
    # over a link with a latency of 5 s in each direction.
    ("grpc.min_reconnect_backoff_ms", 45_000),
    # Callers that have to wait for the coordinator repeat their calls, with pauses. gRPC itself would repeat them
    # without a pause when a server closes a connection as unused because nothing reaches it, and allocate up to 1 GiB a
    # second.
    ("grpc.enable_retries", 0),
)

_CLIENT_OPTIONS: Options = (
    *_CONNECTING,
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # gRPC's own reconnect backoff grows to two minutes, during which a client would not notice that the coordinator is
    # back.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Without pings, a channel would use a connection that a firewall has forgotten for another quarter of an hour. The
    # answer to a ping takes 10 s over the slow link above.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # gRPC also pings to measure the bandwidth. If such a ping is lost, it sends no other.
    ("grpc.http2.ping_timeout_ms", 30_000),
)

PLAINTEXT_WARNING = "plaintext: anybody on the network can read and change everything"


def open_channel(address: str, identity: Identity | None) -> grpc.Channel:
    """Open a channel of a synchronous client to a coordinator; it connects at the first call.

    Args:
        address: the coordinator's host:port.
        identity: the client's identity; None for plaintext.
    """
    if identity is None:
        return grpc.insecure_channel(address, options=_CLIENT_OPTIONS)
    options = [*_CLIENT_OPTIONS, *_naming(identity.server_name)]
    return grpc.secure_channel(address, _credentials(identity), options=options)


def open_async_channel(address: str, identity: Identity | None, options: Options = ()) -> grpc.aio.Channel:
    """Open a channel for asyncio.

    Args:
        address: the coordinator's host:port.
        identity: the client's identity; None for plaintext.
        options: gRPC's options.
    """
    options = [*_CONNECTING, *options]
    if identity is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _credentials(identity), options=[*options, *_naming(identity.server_name)])


def open_enrolment_channel(address: str, trusted_pem: bytes, server_name: str) -> grpc.Channel:
    """Open a channel of a machine that has no certificate yet.

    Args:
        address: the coordinator's host:port for enrolment.
        trusted_pem: certificates of the authorities that the server's certificate must come from.
        server_name: the DNS name that the server's certificate must have.
    """
    credentials = grpc.ssl_channel_credentials(trusted_pem)
    return grpc.secure_channel(address, credentials, options=[*_CONNECTING, *_naming(server_name)])


def require_protected(address: str, identity: Identity | None, is_insecure: bool) -> bool:
    """Check that plaintext leaves this machine only if the user permits it.

    Args:
        address: host:port to listen on or to connect to; a unix socket never leaves the machine.
        identity: the identity that protects the channel, or None.
        is_insecure: whether `--insecure` was given.

    Returns:
        Whether to warn, because plaintext leaves this machine.

    Raises:
        InvalidInputError: plaintext would leave this machine, and `--insecure` was not given.
    """
    if identity is not None or address.startswith("unix:") or is_loopback(split_address(address)[0]):
        return False
    if not is_insecure:
        raise InvalidInputError(
            f"{address} is another machine's address, and there is no certificate to protect the connection: enrol "
            "this machine with an invite from `wattfleet coordinator invite`, or pass --insecure for plaintext"
        )
    return True


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address of this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _credentials(identity: Identity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(identity.trusted_pem, identity.key_pem, identity.certificate_pem)


def _naming(server_name: str) -> Options:
    return [("grpc.ssl_target_name_override", server_name)] if server_name else []


# --- Handshakes -------------------------------------------------------------------------------------------------------
# Finds out why the connection to a running coordinator fails; gRPC itself only reports "Socket closed".

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
    """Find out what is wrong with the connection."""
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


# --- Endpoint ---------------------------------------------------------------------------------------------------------
# How a client reaches its coordinator: the address, and the folder of the client's identity.

DEFAULT_ADDRESS = "127.0.0.1:7070"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A coordinator, and how a client connects to it.

    The identity is read again for each channel, so that a renewed certificate is used without a restart.

    Args:
        address: the coordinator's host:port.
        folder: the folder of the client's identity, which may be empty; None for plaintext.
        is_insecure: whether plaintext may leave this machine.
    """

    address: str
    folder: Path | None = None
    is_insecure: bool = False

    @classmethod
    def of(cls, address: str | None, folder: Path | None, is_insecure: bool = False) -> Endpoint:
        """Find the coordinator.

        Args:
            address: its host:port; None for the one at which the identity was enrolled, or else `DEFAULT_ADDRESS`.
            folder: the folder of the client's identity, which may be empty; None for plaintext.
            is_insecure: whether plaintext may leave this machine.

        Raises:
            InvalidInputError: the address is malformed, the identity is damaged, or plaintext would leave this machine
                although it must not.
        """
        identity = None if folder is None else read_identity(folder)
        found = address or (identity.coordinator if identity else "") or DEFAULT_ADDRESS
        if not found.startswith("unix:"):
            host, port = split_address(found)
            found = f"{host}:{port}"
        require_protected(found, identity, is_insecure)
        return cls(found, folder, is_insecure)

    def identity(self) -> Identity | None:
        """The identity that is on disk now; None for plaintext.

        Raises:
            InvalidInputError: the identity is damaged, or it was removed and plaintext must not leave this machine.
        """
        identity = None if self.folder is None else read_identity(self.folder)
        require_protected(self.address, identity, self.is_insecure)
        return identity

    @property
    def is_exposed(self) -> bool:
        """Whether plaintext leaves this machine.

        Raises:
            InvalidInputError: the identity is damaged.
        """
        return require_protected(self.address, self.identity(), self.is_insecure)

    @property
    def warning(self) -> str | None:
        """The warning about the connection for every screen and log; None unless plaintext leaves this machine.

        Raises:
            InvalidInputError: the identity is damaged.
        """
        return f"the connection to {self.address} is {PLAINTEXT_WARNING}" if self.is_exposed else None

    def channel(self) -> grpc.Channel:
        """Open a channel of a synchronous client; errors as for `identity`."""
        return open_channel(self.address, self.identity())

    def async_channel(self, options: Options) -> grpc.aio.Channel:
        """Open a channel for asyncio with gRPC's options; errors as for `identity`."""
        return open_async_channel(self.address, self.identity(), options)


def named_folder(named: Path | None, *defaults: Path) -> Path | None:
    """Find the folder of a client's identity.

    Args:
        named: the folder that the user named; None for that of the environment variable `WATTFLEET_IDENTITY`.
        defaults: folders to try otherwise, in order.

    Returns:
        None if nothing is named and no default has an identity.

    Raises:
        InvalidInputError: the named folder has no identity, or an identity is damaged.
    """
    if named is None and (variable := os.environ.get(IDENTITY_VARIABLE)):
        named = Path(variable)
    if named is not None:
        require_identity(named)
        return named
    return next((each for each in defaults if read_identity(each) is not None), None)


def require_identity(folder: Path) -> Identity:
    """Read the identity in a folder.

    Raises:
        InvalidInputError: there is no identity, or it is damaged.
    """
    identity = read_identity(folder)
    if identity is None:
        raise InvalidInputError(
            f"{folder} has no identity: enrol with `wattfleet join --identity {folder}`, on a device with"
            " `wattfleet agent join`, or name another folder"
        )
    return identity
