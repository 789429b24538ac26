"""The identity of the fleet's first operator, which is made with the authority: nobody could invite one yet."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.state.identities import Identities
from coordinator.state.identity_records import CertificateRecord
from wattfleet_identity.identity_folder import is_complete, read_identity, write_identity
from wattfleet_identity.peers import Role

NAME = "operator"
LIFETIME = timedelta(days=365)


def folder_of(authority: Path) -> Path:
    """Where the operator's identity is, beside an authority."""
    return authority / "operator"


def make_operator(authority: AuthorityFolder, coordinator: str, now: datetime) -> bool:
    """Make the operator's identity, unless there is one that can be used; returns whether it was made.

    Args:
        authority: issues the certificate.
        coordinator: the coordinator's host:port.
        now: the time.

    Raises:
        InvalidInputError: there is one that cannot be read.
        OSError: it cannot be written.
    """
    folder = folder_of(authority.folder)
    if is_complete(folder) and (found := read_identity(folder)) is not None and now < found.certificate.not_after:
        return False
    write_identity(folder, authority.own_identity(Role.OPERATOR, NAME, coordinator, LIFETIME, now))
    return True


def adopted(authority: AuthorityFolder, identities: Identities, now: datetime) -> list[CertificateRecord]:
    """Note the operator's certificate, which was issued before there was a store; returns what is to be stored.

    Raises:
        InvalidInputError: it cannot be read.
    """
    identity = read_identity(folder_of(authority.folder))
    if identity is None:
        return []
    certificate = identity.certificate
    if identities.find(certificate.serial) is not None or certificate.not_after <= now:
        return []
    by_successor = authority.successor is not None and authority.successor.has_issued(identity.certificate_pem)
    issuer = (authority.issuer if by_successor else authority.authority).fingerprint.hex()
    return [identities.issued(CertificateRecord(certificate.serial, identity.peer, issuer, now, certificate.not_after))]
