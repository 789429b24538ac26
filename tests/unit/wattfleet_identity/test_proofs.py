"""Proofs of identity: which ones are accepted, and which ones are not."""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from tests.fakes.certified import CertifiedFleet
from wattfleet_identity.certificates import new_key, read_key
from wattfleet_identity.identity_folder import FOR_SUPERLINK, InvalidProofError, proof_of, proven
from wattfleet_identity.peers import Role
from wattfleet_io.clock import utc_now

DAY = timedelta(days=1)


def test_a_proof_names_its_maker(fleet: CertifiedFleet) -> None:
    own = fleet.identity(Role.FLOWER, "app")
    found = proven(proof_of(own, FOR_SUPERLINK, utc_now()), FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())
    assert found.serial == own.certificate.serial and str(found.peer) == "flower app"


@pytest.mark.parametrize(
    ("audience", "later", "lifetime", "why"),
    [
        ("another", timedelta(0), DAY, "is for another audience"),
        (FOR_SUPERLINK, timedelta(hours=2), timedelta(hours=1), "the certificate expired on"),
        (FOR_SUPERLINK, timedelta(hours=13), DAY, "the proof of identity expired at .*: create a new one"),
        (FOR_SUPERLINK, timedelta(hours=-2), DAY, "is from the future: check the clocks"),
    ],
)
def test_a_proof_for_another_or_of_the_past_proves_nothing(
    fleet: CertifiedFleet, audience: str, later: timedelta, lifetime: timedelta, why: str
) -> None:
    proof = proof_of(fleet.identity(Role.FLOWER, lifetime=lifetime), audience, utc_now())
    with pytest.raises(InvalidProofError, match=why):
        proven(proof, FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now() + later)


def test_a_proof_holds_for_half_a_day_and_not_for_ever(fleet: CertifiedFleet) -> None:
    own, now = fleet.identity(Role.FLOWER, "app"), utc_now()
    proof = proof_of(own, FOR_SUPERLINK, now)
    assert proven(proof, FOR_SUPERLINK, fleet.authority.trusted_pem, now + timedelta(hours=11))
    # A proof with a future date, which would be valid for longer, is refused.
    lasting = proof_of(own, FOR_SUPERLINK, now + timedelta(days=20))
    with pytest.raises(InvalidProofError, match="create a new one"):
        proven(lasting, FOR_SUPERLINK, fleet.authority.trusted_pem, now)


def test_a_proof_of_another_authority_proves_nothing(fleet: CertifiedFleet, tmp_path: Path) -> None:
    stranger = CertifiedFleet.create(tmp_path / "other").identity(Role.OPERATOR)
    with pytest.raises(InvalidProofError, match="authority that is not trusted"):
        proven(proof_of(stranger, FOR_SUPERLINK, utc_now()), FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())


def test_a_certificate_of_somebody_else_needs_its_key(fleet: CertifiedFleet) -> None:
    victim = fleet.identity(Role.OPERATOR)
    thief = CertifiedFleet(fleet.authority).identity(Role.VIEWER)
    claim = json.dumps(
        {"certificate": victim.certificate_pem.decode(), "audience": FOR_SUPERLINK, "expires_unix_s": 9e9}
    ).encode()
    forged = base64.urlsafe_b64encode(claim).decode().rstrip("=")
    signature = proof_of(thief, FOR_SUPERLINK, utc_now()).split(".")[1]
    with pytest.raises(InvalidProofError, match="damaged"):
        proven(f"{forged}.{signature}", FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())


@pytest.mark.parametrize("text", ["", ".", "a.b", "x" * 20_000, "\ud800.\ud800", "WzFd.AAAA"])
def test_rubbish_is_no_proof(fleet: CertifiedFleet, text: str) -> None:
    with pytest.raises(InvalidProofError, match="damaged"):
        proven(text, FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())


def test_a_deeply_nested_claim_is_no_proof(fleet: CertifiedFleet) -> None:
    claim = base64.urlsafe_b64encode(b"[" * 9_000).decode()
    with pytest.raises(InvalidProofError, match="damaged"):
        proven(f"{claim}.AAAA", FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())


def test_a_time_that_no_date_can_represent_is_no_proof(fleet: CertifiedFleet) -> None:
    owner = fleet.identity(Role.OPERATOR)
    facts = {"certificate": owner.certificate_pem.decode(), "audience": FOR_SUPERLINK, "expires_unix_s": 1.8e18}
    claim = base64.urlsafe_b64encode(json.dumps(facts).encode()).decode().rstrip("=")
    signature = read_key(owner.key_pem).sign(claim.encode(), ec.ECDSA(hashes.SHA256()))
    proof = f"{claim}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"
    with pytest.raises(InvalidProofError, match="damaged"):
        proven(proof, FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())


def test_a_servers_certificate_proves_nobody(fleet: CertifiedFleet) -> None:
    from wattfleet_identity.certificates import request_certificate
    from wattfleet_identity.identity_folder import Identity

    key = new_key()
    authority = fleet.authority.authority
    pem = authority.issue_superlink(request_certificate(key), ["localhost"], timedelta(days=1), utc_now())
    server = Identity(key, pem, fleet.authority.trusted_pem)
    with pytest.raises(InvalidProofError, match="authority that is not trusted"):
        proven(proof_of(server, FOR_SUPERLINK, utc_now()), FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())
