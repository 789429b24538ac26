"""A proof of identity for protocols with bearer tokens but without client certificates, such as Flower's Control API.

It contains the certificate, the audience and the time of expiry, signed with the certificate's key. Whoever has it can
use it there for some hours, so it must be kept secret.
"""

from __future__ import annotations

import base64
import json
from datetime import datetime, timedelta, timezone
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from wattfleet.errors import WattfleetError
from wattfleet_identity.certificates import Certificate, read_certificate, read_certificates, read_key, to_pem
from wattfleet_identity.identity_folder import Identity

FOR_SUPERLINK = "superlink"
"""The audience of proofs from users of `flwr`."""

LIFETIME = timedelta(hours=12)
"""How long a proof can be used."""

_CLOCK_DIFFERENCE = timedelta(hours=1)
_LONGEST = 16_384
_HASH = ec.ECDSA(hashes.SHA256())
_DAMAGED = (
    InvalidSignature,
    UnsupportedAlgorithm,  # of the certificate's key
    KeyError,
    OverflowError,  # of a date
    OSError,  # likewise
    RecursionError,  # of deeply nested JSON
    TypeError,
    ValueError,
    WattfleetError,
)


class InvalidProofError(WattfleetError):
    """A proof is damaged, expired, for another audience, or from another authority: create a new one."""


def proof_of(identity: Identity, audience: str, now: datetime) -> str:
    """Create a proof of an identity that is valid for `LIFETIME`.

    Args:
        identity: the identity.
        audience: who may accept the proof; must equal the text that they expect.
        now: the time.
    """
    facts = {
        "certificate": to_pem(read_certificate(identity.certificate_pem)).decode(),
        "audience": audience,
        "expires_unix_s": int((now + LIFETIME).timestamp()),
    }
    claim = _encoded(json.dumps(facts).encode())
    return f"{claim}.{_encoded(read_key(identity.key_pem).sign(claim.encode(), _HASH))}"


def proven(proof: str, audience: str, trusted_pem: bytes, now: datetime) -> Certificate:
    """Verify a proof, and return the certificate of its owner.

    Args:
        proof: the text received.
        audience: the audience that the proof must have.
        trusted_pem: the authorities, one of which must have issued the certificate.
        now: the time.

    Raises:
        InvalidProofError: the proof is not valid; the message states the reason.
    """
    try:
        if len(proof) > _LONGEST:
            raise ValueError
        claim, signature = proof.split(".")
        facts: Any = json.loads(_decoded(claim))
        leaf = read_certificate(str(facts["certificate"]).encode())
        key = leaf.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError
        key.verify(_decoded(signature), claim.encode(), _HASH)
        is_meant = facts["audience"] == audience
        expires = datetime.fromtimestamp(float(facts["expires_unix_s"]), timezone.utc)
    except _DAMAGED:
        raise InvalidProofError("the proof of identity is damaged: create a new one") from None
    if not is_meant:
        raise InvalidProofError("the proof of identity is for another audience: create a new one")
    if not now < expires <= now + LIFETIME + _CLOCK_DIFFERENCE:
        state = (
            f"expired at {expires:%Y-%m-%d %H:%M} UTC: create a new one"
            if expires <= now
            else "is from the future: check the clocks, then create a new one"
        )
        raise InvalidProofError(f"the proof of identity {state}")
    if not any(_issued(leaf, authority, now) for authority in read_certificates(trusted_pem)):
        raise InvalidProofError("the certificate is from an authority that is not trusted: enrol with this fleet")
    certificate = Certificate.from_pem(to_pem(leaf))
    if not certificate.not_before <= now < certificate.not_after:
        raise InvalidProofError(
            f"the certificate expired on {certificate.not_after:%Y-%m-%d}: renew it, or enrol again"
        )
    return certificate


def _issued(leaf: x509.Certificate, authority: x509.Certificate, now: datetime) -> bool:
    """Whether an unexpired authority issued a client's certificate."""
    try:
        leaf.verify_directly_issued_by(authority)
        usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        is_authority = authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    return is_authority and ExtendedKeyUsageOID.CLIENT_AUTH in usage and now < authority.not_valid_after_utc


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
