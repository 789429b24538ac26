"""Parses network addresses."""

from __future__ import annotations

from wattfleet.errors import InvalidInputError


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`.

    Raises:
        InvalidInputError: the address does not have that form, or the port is out of range.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and "/" not in host and port.isdecimal() and int(port) <= 65535):
        raise InvalidInputError(f"{address!r} is not an address: write host:port, such as 127.0.0.1:7070")
    return host, int(port)


_EVERY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "::1"}


def reachable_here(address: str) -> str:
    """Return the host:port at which this machine reaches a server that listens at a host:port.

    Raises:
        InvalidInputError: the address is malformed.
    """
    host, port = split_address(address)
    return f"{_EVERY_HOST.get(host, host)}:{port}"
