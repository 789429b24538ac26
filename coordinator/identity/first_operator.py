"""The identity of the fleet's first operator. It is created with the authority, because nobody can invite one yet."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.state.identities import Identities
from coordinator.state.identity_records import CertificateRecord
from wattfleet_identity.endpoint import OPERATOR_FOLDER
from wattfleet_identity.identity_folder import is_complete, read_identity, write_identity
from wattfleet_identity.peers import Role

NAME = "operator"
LIFETIME = timedelta(days=365)


def folder_of(authority: Path) -> Path:
    """The folder of the operator's identity, next to that of the authority."""
    return authority / OPERATOR_FOLDER.name


def make_operator(authority: AuthorityFolder, now: datetime) -> bool:
    """Create the operator's identity unless there is a usable one, and return whether it was created.

    A coordinator that serves with this authority adds its address.

    Args:
        authority: issues the certificate.
        now: the time.

    Raises:
        InvalidInputError: there is an identity that cannot be read.
        OSError: the identity cannot be written.
    """
    folder = folder_of(authority.folder)
    if is_complete(folder) and (found := read_identity(folder)) is not None and now < found.certificate.not_after:
        return False
    write_identity(folder, authority.own_identity(Role.OPERATOR, NAME, "", LIFETIME, now))
    return True


def adopted(authority: AuthorityFolder, identities: Identities, now: datetime) -> list[CertificateRecord]:
    """Record the operator's certificate, which was issued before there was a store; return the records to store.

    Raises:
        InvalidInputError: the identity cannot be read.
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
