"""The server certificates that clients accept: those of devices, under the one name that all devices share."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from wattfleet.errors import InvalidInputError
from wattfleet_identity.authority import DEVICE_NAME, SERVER_NAME, CertificateAuthority
from wattfleet_identity.certificates import Certificate, may_serve, new_key, request_certificate
from wattfleet_identity.peers import Peer, Role

NOW = datetime(2026, 5, 1, tzinfo=timezone.utc)
A_DAY = timedelta(days=1)
AUTHORITY = CertificateAuthority.create("farm", NOW)
REQUEST = request_certificate(new_key())


@pytest.mark.parametrize("role", list(Role))
def test_only_a_devices_certificate_may_serve_and_never_as_the_coordinator(role: Role) -> None:
    issued = AUTHORITY.issue(REQUEST, Peer("farm", role, SERVER_NAME), A_DAY, NOW)
    assert may_serve(issued) == (role is Role.DEVICE)
    assert Certificate.from_pem(issued).hosts == ((DEVICE_NAME,) if role is Role.DEVICE else ())


@pytest.mark.parametrize("name", [DEVICE_NAME, SERVER_NAME])
def test_a_superlink_gets_no_name_of_others(name: str) -> None:
    assert may_serve(AUTHORITY.issue_superlink(REQUEST, ["link.example"], A_DAY, NOW))
    with pytest.raises(InvalidInputError, match="name the SuperLink's host"):
        AUTHORITY.issue_superlink(REQUEST, ["link.example", name], A_DAY, NOW)
