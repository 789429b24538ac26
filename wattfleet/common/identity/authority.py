"""The fleet's certificate authority: it issues the certificates of the coordinator and of all its peers."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from wattfleet.common.identity.certificates import (
    Certificate,
    common_name,
    fingerprint,
    matches,
    new_key,
    read_certificate,
    read_key,
    requested_key,
    to_pem,
)
from wattfleet.common.identity.peers import Peer, Role
from wattfleet.core.errors import InvalidInputError

SERVER_NAME = "coordinator.wattfleet"
"""A DNS name of every server certificate; clients check it instead of the address, which may change."""

DEVICE_NAME = "device.wattfleet"
"""A DNS name of every device's certificate, for Prometheus, which reads metrics from a device at any address."""

LIFETIME = timedelta(days=3650)
VALID_FROM = datetime(2020, 1, 1, tzinfo=timezone.utc)
"""The start of every certificate's validity; a board without a battery-backed clock starts in the past."""

_SCHEME = "spiffe://"


class CertificateAuthority:
    """A key that signs certificates, and its own certificate.

    Args:
        key_pem: the key.
        certificate_pem: the certificate.

    Raises:
        InvalidInputError: key and certificate do not belong together, or the certificate does not name a fleet.
    """

    def __init__(self, key_pem: bytes, certificate_pem: bytes) -> None:
        if not matches(key_pem, certificate_pem):
            raise InvalidInputError(
                "the authority's key does not belong to its certificate: restore both from one backup"
            )
        self.key_pem = key_pem
        self.certificate_pem = certificate_pem
        self._key = read_key(key_pem)
        self._certificate = read_certificate(certificate_pem)
        self.fleet = _fleet_of(certificate_pem)

    @classmethod
    def create(cls, fleet: str, now: datetime) -> CertificateAuthority:
        """Create an authority with a new key.

        Args:
            fleet: the fleet's name, with which every id begins.
            now: the time; the authority is valid for `LIFETIME` from then.
        """
        key_pem = new_key()
        key = read_key(key_pem)
        name = common_name(f"Wattfleet {fleet} {secrets.token_hex(4)}")  # distinguishes two authorities of one fleet
        certificate = (
            _builder(name, name, key.public_key(), now + LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(_names(_SCHEME + fleet), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key_pem, to_pem(certificate))

    @property
    def fingerprint(self) -> bytes:
        """The SHA-256 of its certificate, 32 bytes."""
        return fingerprint(self._certificate)

    @property
    def not_after(self) -> datetime:
        """The end of its certificate's validity; no certificate that it issues is valid for longer."""
        return self._certificate.not_valid_after_utc

    def has_issued(self, certificate_pem: bytes) -> bool:
        """Whether this authority signed a certificate."""
        try:
            read_certificate(certificate_pem).verify_directly_issued_by(self._certificate)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True

    def issue(self, request_pem: bytes, peer: Peer, lifetime: timedelta, now: datetime) -> bytes:
        """Issue a client's certificate (PEM).

        A device's certificate is also valid for a server, because the agent serves metrics.

        Args:
            request_pem: the certificate request; only its key is used.
            peer: the owner.
            lifetime: how long the certificate is valid from `now`.
            now: the time.

        Raises:
            InvalidInputError: the request cannot be used, or the owner belongs to another fleet.
        """
        if peer.fleet != self.fleet:
            raise InvalidInputError(f"{peer} belongs to the fleet {peer.fleet!r}, not to {self.fleet!r}")
        usages, hosts = [ExtendedKeyUsageOID.CLIENT_AUTH], []
        if peer.role is Role.DEVICE:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            hosts.append(DEVICE_NAME)
        names = _names(peer.uri, hosts)
        return self._issue(requested_key(request_pem), str(peer), names, usages, lifetime, now)

    def issue_server(self, key_pem: bytes, hosts: Sequence[str], lifetime: timedelta, now: datetime) -> bytes:
        """Issue the coordinator's own certificate (PEM).

        Args:
            key_pem: its private key.
            hosts: names and IP addresses of the machine, for clients that check them, such as Prometheus.
            lifetime: how long the certificate is valid from `now`.
            now: the time.

        Raises:
            InvalidInputError: a host is neither a DNS name nor an IP address.
        """
        names = _names(f"{_SCHEME}{self.fleet}/coordinator", [SERVER_NAME, *hosts])
        server = ExtendedKeyUsageOID.SERVER_AUTH
        return self._issue(read_key(key_pem).public_key(), SERVER_NAME, names, [server], lifetime, now)

    def issue_superlink(self, request_pem: bytes, hosts: Sequence[str], lifetime: timedelta, now: datetime) -> bytes:
        """Issue the certificate of Flower's SuperLink (PEM). It never has the coordinator's or the devices' name.

        Args:
            request_pem: the certificate request; only its key is used.
            hosts: names and IP addresses at which SuperNodes and users reach the SuperLink.
            lifetime: how long the certificate is valid from `now`.
            now: the time.

        Raises:
            InvalidInputError: the request cannot be used, or a host is neither a DNS name nor an IP address.
        """
        for name, owner in ((SERVER_NAME, "the coordinator's own name"), (DEVICE_NAME, "the name of devices")):
            if name in hosts:
                raise InvalidInputError(f"{name} is {owner}: name the SuperLink's host")
        names = _names(f"{_SCHEME}{self.fleet}/superlink", hosts)
        server = ExtendedKeyUsageOID.SERVER_AUTH
        return self._issue(requested_key(request_pem), "Flower SuperLink", names, [server], lifetime, now)

    def _issue(
        self,
        key: ec.EllipticCurvePublicKey,
        subject: str,
        names: x509.SubjectAlternativeName,
        usages: Sequence[x509.ObjectIdentifier],
        lifetime: timedelta,
        now: datetime,
    ) -> bytes:
        until = min(now + lifetime, self.not_after)
        certificate = (
            _builder(common_name(subject), self._certificate.subject, key, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return to_pem(certificate)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    serial = x509.random_serial_number()
    return builder.serial_number(serial).not_valid_before(VALID_FROM).not_valid_after(until)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _names(uri: str, hosts: Sequence[str] = ()) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)]
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            try:
                names.append(x509.DNSName(host))
            except ValueError:
                raise InvalidInputError(f"{host!r} is neither a DNS name nor an IP address") from None
    return x509.SubjectAlternativeName(names)


def _fleet_of(certificate_pem: bytes) -> str:
    uri = Certificate.from_pem(certificate_pem).uri
    fleet = uri.removeprefix(_SCHEME)
    if fleet == uri or not fleet or "/" in fleet:
        raise InvalidInputError(
            "the authority's certificate does not name a fleet: create an authority with `wattfleet coordinator init`"
        )
    return fleet
