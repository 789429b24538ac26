"""The caller of an RPC, according to the certificate of the connection."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from wattfleet_identity.certificates import Certificate

_read = lru_cache(maxsize=4096)(Certificate.from_pem)


def certificate_of(context: Any) -> Certificate | None:
    """The certificate of a caller's connection, verified by TLS; None without one.

    Args:
        context: gRPC's context of the call.
    """
    pem = context.auth_context().get("x509_pem_cert")
    return _read(pem[0]) if pem else None


def peer_of(context: Any) -> str:
    """The id in a caller's certificate; empty without one."""
    certificate = certificate_of(context)
    return "" if certificate is None else certificate.uri
