"""Parses network addresses, and the variables that state them."""

from __future__ import annotations

import re
from pathlib import Path

from wattfleet.core.errors import InvalidInputError

# --- Addresses --------------------------------------------------------------------------------------------------------
# Parses network addresses.


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


# --- Url passwords ----------------------------------------------------------------------------------------------------
# Detects passwords in URLs, such as a database's, and removes them from texts.

_OF_USER = re.compile(r"(?<=://)([^:/@\s]*):\S+@")
_OF_PARAMETER = re.compile(r"([?&](?:ssl)?password=)[^&#\s]+", re.IGNORECASE)
_HIDDEN = "***"


def has_password(text: str) -> bool:
    """Return whether a text has a URL with a password, for its user or among its parameters."""
    return bool(_OF_USER.search(text) or _OF_PARAMETER.search(text))


def without_passwords(text: str) -> str:
    """Return a text with `***` in place of passwords in URLs."""
    return _OF_PARAMETER.sub(rf"\1{_HIDDEN}", _OF_USER.sub(rf"\1:{_HIDDEN}@", text))


# --- Connection variables ---------------------------------------------------------------------------------------------
# The environment variables that define for all commands how to reach the coordinator.

COORDINATOR_VARIABLE = "WATTFLEET_COORDINATOR"
"""Its host:port."""

IDENTITY_VARIABLE = "WATTFLEET_IDENTITY"
"""The folder of the identity to use."""

INSECURE_VARIABLE = "WATTFLEET_INSECURE"
"""Whether plaintext may leave this machine if there is no identity."""

OPERATOR_FOLDER = Path("wattfleet-identity/operator")
"""Where `wattfleet coordinator init` puts the operator's identity, below the current directory."""
