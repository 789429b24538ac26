"""Issues certificates to peers with the authority in force, and records them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.state.identities import Identities
from coordinator.state.identity_records import CertificateRecord
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.certificates import Certificate
from wattfleet.common.identity.peers import Peer, Role
from wattfleet.core.errors import InvalidInputError

CertificateOf = Callable[[Any], Certificate | None]
"""Returns the certificate of an RPC's caller, given gRPC's context; None without one."""

MAX_FLOWER_KEY_BYTES = 4096


class AuthorityHolder(Protocol):
    """Holds the authority that is in force."""

    folder: AuthorityFolder

    def replace(self, folder: AuthorityFolder) -> None:
        """Put another state of the identity folder in force."""
        ...


@dataclass(frozen=True)
class PublicAddresses:
    """The addresses that machines use, each host:port.

    Attributes:
        enrolment: for machines that have no certificate yet.
        coordinator: for devices and Flower apps.
        operators: for operators and viewers.
        superlink: for Flower's SuperLink; empty if unknown.
    """

    enrolment: str
    coordinator: str
    operators: str
    superlink: str = ""

    def of(self, role: Role) -> str:
        """The address for a role."""
        return self.operators if role in (Role.OPERATOR, Role.VIEWER) else self.coordinator


class Issuing:
    """Issues certificates.

    Attributes:
        identities: records what is issued.
        holder: the authority in force.
        lifetime: the lifetime of a certificate.
        addresses: returns the addresses that enrolled machines receive.
        now: returns the time.
    """

    def __init__(
        self,
        identities: Identities,
        holder: AuthorityHolder,
        addresses: Callable[[], PublicAddresses],
        lifetime: timedelta,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """Issue with an authority.

        Args:
            identities: records what is issued.
            holder: the authority in force.
            addresses: returns the addresses that enrolled machines receive; ports are known once the server has
                started.
            lifetime: the lifetime of a certificate.
            now: returns the time.
        """
        self.identities = identities
        self.holder = holder
        self.addresses = addresses
        self.lifetime = lifetime
        self.now = now

    def issue(
        self, request_pem: bytes, peer: Peer, flower_key: str = "", lifetime: timedelta | None = None
    ) -> tuple[bytes, CertificateRecord]:
        """Issue a certificate, and return it as PEM with the record to store.

        Args:
            request_pem: the certificate request.
            peer: the owner.
            flower_key: the public key of the device's SuperNode.
            lifetime: its lifetime; None for the default.

        Raises:
            InvalidInputError: the request cannot be used.
        """
        now, issuer = self.now(), self.holder.folder.issuer
        certificate_pem = issuer.issue(request_pem, peer, lifetime or self.lifetime, now)
        certificate = Certificate.from_pem(certificate_pem)
        record = CertificateRecord(
            certificate.serial, peer, issuer.fingerprint.hex(), now, certificate.not_after, flower_key=flower_key
        )
        return certificate_pem, self.identities.issued(record)


def openssh_line(public_key: bytes) -> str:
    """Convert a SuperNode's public key to OpenSSH format; empty if there is no key.

    Args:
        public_key: the key in OpenSSH or PEM format.

    Raises:
        InvalidInputError: Flower does not accept the key.
    """
    if not public_key:
        return ""
    try:
        if len(public_key) > MAX_FLOWER_KEY_BYTES:
            raise ValueError
        is_pem = public_key.lstrip().startswith(b"-----")
        load = serialization.load_pem_public_key if is_pem else serialization.load_ssh_public_key
        key = load(public_key)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError
        encoded = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    except (ValueError, TypeError, UnicodeError) as error:
        del error
        raise InvalidInputError(
            "the SuperNode's public key is not an OpenSSH ECDSA key: make one with `ssh-keygen -t ecdsa -b 384`"
        ) from None
    return encoded.decode()
