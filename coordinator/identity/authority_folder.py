"""The folder with the keys of the fleet's authority and of the coordinator's own server.

`authority.key` and `authority.pem` sign certificates; `trusted.pem` has every authority whose certificates are
accepted. `server.key` and `server.pem` are the coordinator's. Each certificate of the server has its own key; while
both are replaced, `server.key` has the old and the new key.

While the authority is being replaced, `next.key` and `next.pem` belong to the new one, which issues the certificates of
all peers. The old authority still issues the server's certificate, because some peers do not know the new one yet.
After every single write, the folder can be read and the replacement can be continued.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from coordinator.errors import RotationError
from coordinator.state.identities import Identities
from coordinator.state.identity_records import CertificateRecord
from wattfleet.common.addresses import OPERATOR_FOLDER
from wattfleet.common.atomic_files import read_regular_file, remove_file, replace_file
from wattfleet.common.identity.authority import SERVER_NAME, CertificateAuthority
from wattfleet.common.identity.certificates import (
    Certificate,
    fingerprint,
    matches,
    new_key,
    read_certificates,
    request_certificate,
    to_pem,
)
from wattfleet.common.identity.http_access import ServerTls
from wattfleet.common.identity.identity_folder import (
    SECRET_MODE,
    Identity,
    is_complete,
    make_private_folder,
    read_identity,
    require_secret,
    write_identity,
)
from wattfleet.common.identity.peers import Peer, Role
from wattfleet.core.errors import InvalidInputError

AUTHORITY_KEY, AUTHORITY, TRUSTED = "authority.key", "authority.pem", "trusted.pem"
SERVER_KEY, SERVER = "server.key", "server.pem"
NEXT_KEY, NEXT = "next.key", "next.pem"

_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)
SERVER_LIFETIME = timedelta(days=90)


@dataclass(frozen=True)
class AuthorityFolder:
    """The authority and the server's certificate, as read from a folder.

    Attributes:
        folder: its path.
        authority: signs the server's certificate and, unless it is being replaced, all others.
        trusted_pem: the authorities whose certificates are accepted.
        server_key_pem: the server's key.
        server_pem: the server's certificate.
        successor: the authority that replaces it; None if it is not being replaced.
    """

    folder: Path
    authority: CertificateAuthority
    trusted_pem: bytes
    server_key_pem: bytes = field(repr=False)
    server_pem: bytes
    successor: CertificateAuthority | None = None

    @classmethod
    def exists(cls, folder: Path) -> bool:
        """Whether a folder contains an authority."""
        return (folder / AUTHORITY).exists()

    @classmethod
    def create(cls, folder: Path, hosts: Sequence[str], now: datetime, fleet: str | None = None) -> AuthorityFolder:
        """Create an authority and a server's certificate.

        Args:
            folder: the path; created if absent.
            hosts: names and addresses of this machine, for clients that check them, such as Prometheus.
            now: the time.
            fleet: the fleet's name; None for a random one.

        Raises:
            InvalidInputError: there is an authority already, the folder cannot be written, or a host is neither a DNS
                name nor an IP address.
        """
        if cls.exists(folder):
            raise InvalidInputError(
                f"{folder} has an authority already: with a new one, every machine would have to enrol again. To "
                "replace it without a gap, use `wattfleet coordinator rotate-authority`"
            )
        authority = CertificateAuthority.create(fleet or f"fleet-{secrets.token_hex(4)}", now)
        key_pem = new_key()
        server_pem = authority.issue_server(key_pem, hosts, SERVER_LIFETIME, now)
        try:
            make_private_folder(folder)
            replace_file(folder / SERVER_KEY, key_pem, mode=SECRET_MODE)
            replace_file(folder / SERVER, server_pem)
            replace_file(folder / AUTHORITY_KEY, authority.key_pem, mode=SECRET_MODE)
            replace_file(folder / TRUSTED, authority.certificate_pem)
            # Written last: without it, the folder has no authority.
            replace_file(folder / AUTHORITY, authority.certificate_pem)
        except OSError as error:
            raise InvalidInputError(f"cannot write to {folder}: {error.strerror}") from None
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> AuthorityFolder:
        """Read an authority and the server's certificate.

        Raises:
            InvalidInputError: a file is missing or damaged, or others may read a key.
        """
        try:
            for name in (AUTHORITY_KEY, SERVER_KEY):
                require_secret(folder / name)
            key, certificate, trusted, server_key, server = (
                read_regular_file(folder / name) for name in (AUTHORITY_KEY, AUTHORITY, TRUSTED, SERVER_KEY, SERVER)
            )
            successor = _successor(folder)
        except OSError as error:
            raise InvalidInputError(
                f"cannot read {error.filename}: {error.strerror}. Restore the folder {folder} from a backup, or create "
                "a new authority with `wattfleet coordinator init`; every machine then has to enrol again"
            ) from None
        read_certificates(trusted)
        server_key = next((each for each in _keys_in(server_key) if matches(each, server)), b"")
        if not server_key:
            raise InvalidInputError(f"{folder / SERVER_KEY} is not the key of {folder / SERVER}: restore both")
        if successor is not None and key == successor.key_pem:  # the replacement was interrupted before its last step
            certificate, successor = successor.certificate_pem, None
        return cls(folder, CertificateAuthority(key, certificate), trusted, server_key, server, successor)

    @property
    def issuer(self) -> CertificateAuthority:
        """The authority that issues the certificates of all peers."""
        return self.successor or self.authority

    @property
    def server(self) -> Certificate:
        """The contents of the server's certificate."""
        return Certificate.from_pem(self.server_pem)

    @property
    def server_tls(self) -> ServerTls:
        """The server's key and certificate for HTTPS, and the authorities that it trusts."""
        return ServerTls(self.server_key_pem, self.server_pem, self.trusted_pem)

    def with_new_server(self, now: datetime) -> AuthorityFolder:
        """Issue the server's next certificate, for a new key and the same hosts.

        Raises:
            OSError: the folder cannot be written; the current certificate stays.
        """
        return self._with_server_of(self.authority, now)

    def begin_rotation(self, now: datetime) -> AuthorityFolder:
        """Create the authority's successor, which then issues the certificates of all peers.

        Peers trust it once they have renewed, so the old authority issues the server's certificate until then.

        Raises:
            RotationError: there is a successor already.
            OSError: the folder cannot be written; the authority stays.
        """
        if self.successor is not None:
            raise RotationError(
                "the authority is being replaced already: finish this with `wattfleet coordinator rotate-authority "
                "finish` once all certificates were renewed"
            )
        self._complete_replacement()
        successor = CertificateAuthority.create(self.authority.fleet, now)
        trusted_pem = self.trusted_pem + successor.certificate_pem
        replace_file(self.folder / NEXT_KEY, successor.key_pem, mode=SECRET_MODE)
        replace_file(self.folder / TRUSTED, trusted_pem)
        replace_file(self.folder / NEXT, successor.certificate_pem)  # written last: without it, there is no successor
        return replace(self, trusted_pem=trusted_pem, successor=successor)

    def finish_rotation(self, now: datetime) -> AuthorityFolder:
        """Replace the authority by its successor; certificates of the old authority are then no longer accepted.

        Raises:
            RotationError: there is no successor.
            OSError: the folder cannot be written; repeat the call.
        """
        if self.successor is None:
            raise RotationError(
                "the authority is not being replaced: begin with `wattfleet coordinator rotate-authority begin`"
            )
        new = self.successor
        served = self._with_server_of(new, now)
        old = self.authority.fingerprint
        trusted_pem = to_pem(*(each for each in read_certificates(self.trusted_pem) if fingerprint(each) != old))
        replace_file(self.folder / TRUSTED, trusted_pem)
        replace_file(self.folder / AUTHORITY_KEY, new.key_pem, mode=SECRET_MODE)
        finished = replace(served, authority=new, trusted_pem=trusted_pem, successor=None)
        finished._complete_replacement()  # noqa: SLF001 - an instance of this class
        return finished

    def own_identity(self, role: Role, name: str, coordinator: str, lifetime: timedelta, now: datetime) -> Identity:
        """Issue a certificate with a new key for a peer on this machine, such as its operator."""
        key_pem = new_key()
        peer = Peer(self.issuer.fleet, role, name)
        certificate_pem = self.issuer.issue(request_certificate(key_pem), peer, lifetime, now)
        return Identity(key_pem, certificate_pem, self.trusted_pem, coordinator)

    def _with_server_of(self, authority: CertificateAuthority, now: datetime) -> AuthorityFolder:
        key_pem = new_key()
        server_pem = authority.issue_server(key_pem, self._hosts(), SERVER_LIFETIME, now)
        replace_file(self.folder / SERVER_KEY, self.server_key_pem + key_pem, mode=SECRET_MODE)
        replace_file(self.folder / SERVER, server_pem)
        with suppress(OSError):  # the new certificate is in force; the next one removes the old key
            replace_file(self.folder / SERVER_KEY, key_pem, mode=SECRET_MODE)
        return replace(self, server_key_pem=key_pem, server_pem=server_pem)

    def _complete_replacement(self) -> None:
        """Complete an interrupted replacement."""
        replace_file(self.folder / AUTHORITY, self.authority.certificate_pem)
        for name in (NEXT, NEXT_KEY):
            if (self.folder / name).exists():
                remove_file(self.folder / name)

    def _hosts(self) -> list[str]:
        return [host for host in self.server.hosts if host != SERVER_NAME]


def _keys_in(pem: bytes) -> list[bytes]:
    """The private keys in a file, each as PEM; the whole content if there are none."""
    return [each + b"\n" for each in _KEY.findall(pem)] or [pem]


def _successor(folder: Path) -> CertificateAuthority | None:
    """Read the authority that replaces the current one of a folder; None without one."""
    if not (folder / NEXT).exists():
        return None
    require_secret(folder / NEXT_KEY)
    return CertificateAuthority(read_regular_file(folder / NEXT_KEY), read_regular_file(folder / NEXT))


# --- First operator ---------------------------------------------------------------------------------------------------
# The identity of the fleet's first operator. It is created with the authority, because nobody can invite one yet.

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
