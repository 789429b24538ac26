"""The folder with the keys of the fleet's authority and of the coordinator's own server.

`authority.key` and `authority.pem` sign; `trusted.pem` has every authority whose certificates are accepted, which are
two while the authority is being replaced. `server.key` and `server.pem` are the coordinator's.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from wattfleet.errors import InvalidInputError
from wattfleet_identity.authority import SERVER_NAME, CertificateAuthority
from wattfleet_identity.certificates import Certificate, matches, new_key, read_certificates, request_certificate
from wattfleet_identity.identity_folder import SECRET_MODE, Identity, make_private_folder, require_secret
from wattfleet_identity.peers import Peer, Role
from wattfleet_io.atomic_files import read_regular_file, replace_file

AUTHORITY_KEY, AUTHORITY, TRUSTED = "authority.key", "authority.pem", "trusted.pem"
SERVER_KEY, SERVER = "server.key", "server.pem"

SERVER_LIFETIME = timedelta(days=90)


@dataclass(frozen=True)
class AuthorityFolder:
    """The authority and the server's certificate, as read from a folder.

    Attributes:
        folder: where they are.
        authority: signs new certificates.
        trusted_pem: the authorities whose certificates are accepted.
        server_key_pem: the server's key.
        server_pem: the server's certificate.
    """

    folder: Path
    authority: CertificateAuthority
    trusted_pem: bytes
    server_key_pem: bytes = field(repr=False)
    server_pem: bytes

    @classmethod
    def exists(cls, folder: Path) -> bool:
        """Whether an authority was made in a folder."""
        return (folder / AUTHORITY).exists()

    @classmethod
    def create(cls, folder: Path, hosts: Sequence[str], now: datetime, fleet: str | None = None) -> AuthorityFolder:
        """Make an authority and a server's certificate.

        Args:
            folder: where; made if absent.
            hosts: names and addresses of this machine, for clients that check them, such as Prometheus.
            now: the time.
            fleet: the fleet's name; None for a random one.

        Raises:
            InvalidInputError: there is an authority already, the folder cannot be written, or a host is no DNS name and
                no IP address.
        """
        if cls.exists(folder):
            raise InvalidInputError(
                f"{folder} has an authority already: every machine that it enrolled would have to enrol again with"
                " another one. To replace it without a gap, use `wattfleet coordinator rotate-authority`"
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
            # Last: without it, the folder has no authority.
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
        except OSError as error:
            raise InvalidInputError(
                f"cannot read {error.filename}: {error.strerror}. Restore the folder {folder} from a backup, or make a"
                " new authority with `wattfleet coordinator init`; then every machine has to enrol again"
            ) from None
        read_certificates(trusted)
        if not matches(server_key, server):
            raise InvalidInputError(f"{folder / SERVER_KEY} is not the key of {folder / SERVER}: restore both")
        return cls(folder, CertificateAuthority(key, certificate), trusted, server_key, server)

    @property
    def server(self) -> Certificate:
        """What the server's certificate says."""
        return Certificate.from_pem(self.server_pem)

    def with_new_server(self, now: datetime) -> AuthorityFolder:
        """Issue the server's next certificate, for the same hosts and with a new key.

        Raises:
            OSError: it cannot be written; the current one stays.
        """
        key_pem = new_key()
        server_pem = self.authority.issue_server(key_pem, self._hosts(), SERVER_LIFETIME, now)
        replace_file(self.folder / SERVER_KEY, key_pem, mode=SECRET_MODE)
        replace_file(self.folder / SERVER, server_pem)
        return AuthorityFolder(self.folder, self.authority, self.trusted_pem, key_pem, server_pem)

    def own_identity(self, role: Role, name: str, coordinator: str, lifetime: timedelta, now: datetime) -> Identity:
        """Issue a certificate with a new key for a peer on this machine, such as its operator."""
        key_pem = new_key()
        peer = Peer(self.authority.fleet, role, name)
        certificate_pem = self.authority.issue(request_certificate(key_pem), peer, lifetime, now)
        return Identity(key_pem, certificate_pem, self.trusted_pem, coordinator)

    def _hosts(self) -> list[str]:
        return [host for host in self.server.hosts if host != SERVER_NAME]
