"""The version of the protocol that this release speaks, and what it makes of others."""

from __future__ import annotations

from wattfleet.errors import WattfleetError
from wattfleet_proto.v1 import session_pb2

MAJOR, MINOR = 1, 2


class ProtocolVersionError(WattfleetError):
    """The other side speaks another major version of the protocol: update the older of the two."""


def own_version() -> session_pb2.ProtocolVersion:
    """The version that this release speaks."""
    return session_pb2.ProtocolVersion(major=MAJOR, minor=MINOR)


def common_version(theirs: session_pb2.ProtocolVersion) -> session_pb2.ProtocolVersion:
    """What both sides speak: the older of the two minor versions.

    Args:
        theirs: the other side's version; one that says nothing speaks 1.0, which had no such field.

    Raises:
        ProtocolVersionError: its major version is another.
    """
    major = theirs.major or 1
    if major != MAJOR:
        raise ProtocolVersionError(
            f"protocol {major}.{theirs.minor} and protocol {MAJOR}.{MINOR} have nothing in common:"
            " update the older of agent and coordinator"
        )
    return session_pb2.ProtocolVersion(major=MAJOR, minor=min(theirs.minor, MINOR))
