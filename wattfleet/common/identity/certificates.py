"""Keys, certificate requests and certificates (ECDSA P-256, X.509, PEM)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import NameOID

from wattfleet.common.clock import utc_now
from wattfleet.common.identity.peers import Peer, UnknownPeerError
from wattfleet.core.errors import InvalidInputError, WattfleetError

_LARGEST_PEM = 64 * 1024
_LONGEST_COMMON_NAME = 64  # the limit of X.509


@dataclass(frozen=True, slots=True)
class Certificate:
    """The contents of a certificate.

    Args:
        serial: its serial number, hexadecimal.
        not_before: the start of its validity.
        not_after: the end of its validity.
        uri: the SPIFFE id of its owner; empty if it has none or several.
        hosts: DNS names and IP addresses of a server.
        key_digest: the digest of its public key, as `key_digest` computes it.
    """

    serial: str
    not_before: datetime
    not_after: datetime
    uri: str
    hosts: tuple[str, ...] = ()
    key_digest: bytes = b""

    @classmethod
    def from_pem(cls, pem: bytes) -> Certificate:
        """Read the first certificate of a PEM file.

        Raises:
            InvalidInputError: the file has no certificate.
        """
        certificate = read_certificate(pem)
        uris = _names_of(certificate, x509.UniformResourceIdentifier)
        return cls(
            f"{certificate.serial_number:x}",
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
            uris[0] if len(uris) == 1 else "",
            (*_names_of(certificate, x509.DNSName), *map(str, _names_of(certificate, x509.IPAddress))),
            key_digest(certificate.public_key()),
        )

    @property
    def peer(self) -> Peer:
        """Its owner.

        Raises:
            UnknownPeerError: the certificate does not name a peer.
        """
        if not self.uri:
            raise UnknownPeerError("the certificate has no SPIFFE id, or several URIs: issue another certificate")
        return Peer.from_uri(self.uri)

    def renew_at(self, issued_at: datetime) -> datetime:
        """The moment at which two thirds of its lifetime have passed.

        Args:
            issued_at: when it was issued; its validity starts long before, for boards without a clock.
        """
        return issued_at + (self.not_after - issued_at) * 2 / 3

    def remaining(self, now: datetime) -> timedelta:
        """How long it is still valid; negative if it has expired."""
        return self.not_after - now


def new_key() -> bytes:
    """Create a private key, and return it as unencrypted PEM (PKCS #8)."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def read_key(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Read a private key.

    Raises:
        InvalidInputError: it is not an unencrypted ECDSA key on the curve P-256.
    """
    try:
        key = serialization.load_pem_private_key(key_pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidInputError("the key is not an unencrypted PEM file with an ECDSA P-256 key: create a new one")
    return key


def request_certificate(key_pem: bytes) -> bytes:
    """Create a certificate request (PEM) that proves possession of a key; the issuer sets the name.

    Raises:
        InvalidInputError: the key cannot be used.
    """
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(read_key(key_pem), hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def key_digest(key: PublicKeyTypes) -> bytes:
    """The SHA-256 of a public key, 32 bytes."""
    return sha256(
        key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    ).digest()


def requested_key(request_pem: bytes) -> ec.EllipticCurvePublicKey:
    """Read the public key of a certificate request, after checking its signature.

    Raises:
        InvalidInputError: the text is not a request, its signature is wrong, or its key is not an ECDSA P-256 key.
    """
    try:
        if len(request_pem) > _LARGEST_PEM:
            raise ValueError
        request = x509.load_pem_x509_csr(request_pem)
        key = request.public_key()
        is_signed = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidInputError("the certificate request is unreadable: send a PKCS #10 request as PEM") from None
    if not is_signed:
        raise InvalidInputError("the certificate request's signature is wrong: sign it with the requested key")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidInputError(
            "the certificate request does not have an ECDSA P-256 key, which gRPC's TLS needs: create such a key"
        )
    return key


def read_certificate(pem: bytes) -> x509.Certificate:
    """Read the first certificate of a PEM file.

    Raises:
        InvalidInputError: the file has no certificate.
    """
    return read_certificates(pem)[0]


def read_certificates(pem: bytes) -> list[x509.Certificate]:
    """Read all certificates of a PEM file, one or more.

    Raises:
        InvalidInputError: the file has no certificate.
    """
    try:
        if len(pem) > _LARGEST_PEM:
            raise ValueError
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise InvalidInputError("the certificate is unreadable: it must be PEM") from None


def to_pem(*certificates: x509.Certificate) -> bytes:
    """Encode certificates as PEM."""
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates)


def fingerprint(certificate: x509.Certificate) -> bytes:
    """The SHA-256 of a certificate, 32 bytes."""
    return certificate.fingerprint(hashes.SHA256())


def common_name(text: str) -> x509.Name:
    """A subject name for people; programs read the SPIFFE id."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_LONGEST_COMMON_NAME])])


def matches(key_pem: bytes, certificate_pem: bytes) -> bool:
    """Whether a key belongs to a certificate.

    Raises:
        InvalidInputError: the key or the certificate is unreadable.
    """
    return read_key(key_pem).public_key() == read_certificate(certificate_pem).public_key()


def _names_of(
    certificate: x509.Certificate, kind: type[x509.DNSName | x509.IPAddress | x509.UniformResourceIdentifier]
) -> list[Any]:
    """The subject alternative names of one type."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [name.value for name in names if isinstance(name, kind)]


# --- Certificate check ------------------------------------------------------------------------------------------------
# Checks whether a peer's certificate is valid for a fleet, also during long calls.


class InvalidCertificateError(WattfleetError):
    """The caller's certificate has expired, was revoked, or belongs to another fleet: enrol again."""


class CertificateCheck:
    """Checks the certificates of peers; TLS has checked their signatures already."""

    def __init__(
        self,
        fleet: str,
        is_revoked: Callable[[str], bool] = lambda serial: False,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """Check certificates of one fleet.

        Args:
            fleet: the fleet that certificates must name.
            is_revoked: returns whether the certificate with a serial number was revoked.
            now: returns the time.
        """
        self._fleet = fleet
        self._is_revoked = is_revoked
        self._now = now

    def require_valid(self, certificate: Certificate) -> None:
        """Check that a certificate belongs to this fleet, has not expired and was not revoked.

        Raises:
            InvalidCertificateError: the certificate is not valid; the message states the remedy.
            UnknownPeerError: the certificate does not name a peer.
        """
        peer = certificate.peer
        if peer.fleet != self._fleet:
            raise InvalidCertificateError(
                f"the certificate belongs to the fleet {peer.fleet!r}, but this fleet is {self._fleet!r}: enrol with"
                " this coordinator"
            )
        self.require_still_valid(certificate)

    def require_still_valid(self, certificate: Certificate) -> None:
        """Check that a certificate that was valid has not expired or been revoked since.

        This is checked for every long call each second, so it must not parse the certificate's name.

        Raises:
            InvalidCertificateError: the certificate is no longer valid; the message states the remedy.
        """
        if certificate.not_after <= self._now():
            expired = f"expired on {certificate.not_after:%Y-%m-%d %H:%M} UTC"
            raise InvalidCertificateError(f"the certificate of {certificate.peer} {expired}: enrol again")
        if self._is_revoked(certificate.serial):
            raise InvalidCertificateError(f"the certificate of {certificate.peer} was revoked: enrol again")
