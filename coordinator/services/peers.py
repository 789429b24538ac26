"""The peers of a gRPC server."""

from __future__ import annotations


def host_of(peer: str) -> str:
    """The host of a peer as gRPC names it, such as `ipv4:10.0.0.7:41234`; connections of one host have one name."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
