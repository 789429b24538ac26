"""Channels to the coordinator: mutual TLS with an identity, plaintext without one."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any

import grpc

from wattfleet.errors import InvalidInputError
from wattfleet_identity.identity_folder import Identity
from wattfleet_io.addresses import split_address
from wattfleet_proto.message_sizes import MAX_ANSWER_BYTES

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
