"""Agents and coordinators of neighbouring versions can communicate."""

from __future__ import annotations

import pytest

from wattfleet_proto.names import MAJOR, MINOR, ProtocolVersionError, common_version, own_version
from wattfleet_proto.v1 import session_pb2


def version(major: int, minor: int) -> session_pb2.ProtocolVersion:
    return session_pb2.ProtocolVersion(major=major, minor=minor)


@pytest.mark.parametrize(
    ("theirs", "common"),
    [
        (version(MAJOR, MINOR), version(MAJOR, MINOR)),
        (version(MAJOR, MINOR + 1), version(MAJOR, MINOR)),
    ],
)
def test_the_older_minor_version_is_spoken(
    theirs: session_pb2.ProtocolVersion, common: session_pb2.ProtocolVersion
) -> None:
    assert common_version(theirs) == common
    assert common_version(own_version()) == own_version()


def test_another_major_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(ProtocolVersionError, match=r"1\.2 is incompatible with protocol 2\.\d+: update the older of"):
        common_version(version(1, 2))
