"""Exit 0 if every address given answers: `tcp:host:port`, `unix:/path`, or an `http://` address.

It uses the standard library only, because it runs every few seconds in each container.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import urllib.request

TIMEOUT_S = 3.0


def check(address: str) -> None:
    """Connect to an address, or raise `OSError`."""
    scheme, _, rest = address.partition(":")
    if scheme == "http":
        urllib.request.urlopen(address, timeout=TIMEOUT_S).close()
    elif scheme == "tcp":
        host, _, port = rest.rpartition(":")
        socket.create_connection((host, int(port)), TIMEOUT_S).close()
    elif scheme == "unix":
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(rest)
    else:
        raise ValueError(f"unknown kind of address {address!r}: use tcp:, unix: or http:")


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        try:
            check(wanted)
        except OSError as error:
            sys.exit(f"{wanted}: {error}")
