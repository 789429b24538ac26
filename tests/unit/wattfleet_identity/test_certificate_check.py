"""Which certificates are accepted at the beginning of a call, and which ones during a session."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from wattfleet_identity.certificates import Certificate, CertificateCheck, InvalidCertificateError
from wattfleet_identity.peers import UnknownPeerError

NOW = datetime(2026, 5, 1, tzinfo=timezone.utc)
ORIN = Certificate("1f", NOW - timedelta(days=9), NOW + timedelta(days=1), "spiffe://fleet-1/device/orin")


def check(*revoked: str) -> CertificateCheck:
    return CertificateCheck("fleet-1", is_revoked=revoked.__contains__, now=lambda: NOW)


@pytest.mark.parametrize(
    ("certificate", "revoked", "reason"),
    [
        (replace(ORIN, not_after=NOW), "", "the certificate of device orin expired on 2026-05-01 00:00 UTC"),
        (ORIN, "1f", "the certificate of device orin was revoked"),
    ],
)
def test_an_expired_or_revoked_certificate_begins_no_call_and_keeps_no_session(
    certificate: Certificate, revoked: str, reason: str
) -> None:
    for require in (check(revoked).require_valid, check(revoked).require_still_valid):
        with pytest.raises(InvalidCertificateError, match=reason):
            require(certificate)


def test_a_valid_certificate_begins_a_call_and_keeps_its_session() -> None:
    check("2e").require_valid(ORIN)
    check("2e").require_still_valid(ORIN)


def test_another_fleets_certificate_or_one_without_a_name_begins_no_call() -> None:
    with pytest.raises(InvalidCertificateError, match="belongs to the fleet 'fleet-2', but this fleet is 'fleet-1'"):
        check().require_valid(replace(ORIN, uri="spiffe://fleet-2/device/orin"))
    with pytest.raises(UnknownPeerError):
        check().require_valid(replace(ORIN, uri=""))


def test_names_are_not_taken_apart_each_second() -> None:
    # With ten thousand sessions, parsing the names would block everything else for 0.2 s.
    check().require_still_valid(replace(ORIN, uri=""))
