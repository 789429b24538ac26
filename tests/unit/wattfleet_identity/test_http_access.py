"""Who may read over HTTPS, once TLS has checked that a certificate is by a trusted authority."""

from __future__ import annotations

import ssl
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from wattfleet_identity.authority import CertificateAuthority
from wattfleet_identity.certificates import CertificateCheck, InvalidCertificateError, new_key, request_certificate
from wattfleet_identity.http_access import AccessDeniedError, HttpAccess, ServerTls
from wattfleet_identity.peers import Peer, Role

NOW = datetime(2026, 5, 1, tzinfo=timezone.utc)
AUTHORITY = CertificateAuthority.create("farm", NOW)
KEY = new_key()
OWN = AUTHORITY.issue_server(KEY, [], timedelta(days=9), NOW)


class Connection:
    """A TLS connection that only provides the caller's certificate."""

    def __init__(self, role: Role, lifetime: timedelta = timedelta(days=1)) -> None:
        self._pem = AUTHORITY.issue(request_certificate(KEY), Peer("farm", role, "anna"), lifetime, NOW)

    def getpeercert(self, binary_form: bool) -> bytes:
        return ssl.PEM_cert_to_DER_cert(self._pem.decode())


def access(fleet: str = "farm", is_revoked: bool = False) -> HttpAccess:
    check = CertificateCheck(fleet, lambda serial: is_revoked, lambda: NOW)
    return HttpAccess(lambda: ServerTls(KEY, OWN, AUTHORITY.certificate_pem), check)


@pytest.mark.parametrize("role", list(Role))
def test_viewers_and_operators_may_read_and_nobody_else(role: Role) -> None:
    connection: Any = Connection(role)
    if role in (Role.VIEWER, Role.OPERATOR):
        assert access().require_viewer(connection) is role
        return
    with pytest.raises(AccessDeniedError, match=f"{role.value} anna may not read this"):
        access().require_viewer(connection)


def test_a_viewer_of_another_fleet_or_with_an_invalid_certificate_may_not_read() -> None:
    viewer: Any = Connection(Role.VIEWER)
    with pytest.raises(InvalidCertificateError, match="belongs to the fleet 'farm', but this fleet is 'mill'"):
        access("mill").require_viewer(viewer)
    with pytest.raises(InvalidCertificateError, match="was revoked"):
        access(is_revoked=True).require_viewer(viewer)
    expired: Any = Connection(Role.VIEWER, timedelta(0))
    with pytest.raises(InvalidCertificateError, match="expired"):
        access().require_viewer(expired)
