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
