"""Exit 0 if every address given answers: `tls:host:port`, `tcp:host:port`, `unix:/path`, or a URL.

It uses the standard library only, because it runs every few seconds in each container.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
import urllib.request

TIMEOUT_S = 3.0


def check(address: str) -> None:
    """Connect to an address, or raise `OSError`."""
    scheme, _, rest = address.partition(":")
    if scheme in ("http", "https"):
        context = _unverified() if scheme == "https" else None
        urllib.request.urlopen(address, timeout=TIMEOUT_S, context=context).close()
    elif scheme in ("tcp", "tls"):
        host, _, port = rest.rpartition(":")
        with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
            if scheme == "tls":
                _unverified().wrap_socket(connection).close()
    elif scheme == "unix":
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(rest)
    else:
        raise ValueError(f"unknown kind of address {address!r}: use tls:, tcp:, unix:, http: or https:")


def _unverified() -> ssl.SSLContext:
    """Return a TLS context without verification, since the server runs in this container."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        try:
            check(wanted)
        except OSError as error:
            sys.exit(f"{wanted}: {error}")
