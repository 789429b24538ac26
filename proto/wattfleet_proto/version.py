"""The protocol version of this release, and its compatibility with others."""

from __future__ import annotations

from wattfleet.errors import WattfleetError
from wattfleet_proto.v1 import session_pb2

MAJOR, MINOR = 2, 7

WORKLOADS_MINOR = 1
"""The first minor version that knows workloads."""

SHARING_MINOR = 2
"""The first minor version in which devices share measured modes."""

REVOCATIONS_MINOR = 7
"""The first minor version in which agents are told of revoked certificates."""


class ProtocolVersionError(WattfleetError):
    """The other side has another major version of the protocol: update the older of the two."""


def own_version() -> session_pb2.ProtocolVersion:
    """Return the version of this release."""
    return session_pb2.ProtocolVersion(major=MAJOR, minor=MINOR)


def common_version(theirs: session_pb2.ProtocolVersion) -> session_pb2.ProtocolVersion:
    """Return the version to use with another side: the older of the two minor versions.

    Args:
        theirs: the other side's version.

    Raises:
        ProtocolVersionError: the major versions differ.
    """
    if theirs.major != MAJOR:
        raise ProtocolVersionError(
            f"protocol {theirs.major}.{theirs.minor} is incompatible with protocol {MAJOR}.{MINOR}:"
            " update the older of agent and coordinator"
        )
    return session_pb2.ProtocolVersion(major=MAJOR, minor=min(theirs.minor, MINOR))
