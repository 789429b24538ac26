"""The folder with a machine's key, its certificate, the authorities that it trusts, and the coordinator's address.

`key.pem` is made on the machine and never leaves it. Certificates of another authority go into a folder of the same
form.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_identity.authority import SERVER_NAME
from wattfleet_identity.certificates import Certificate, matches, read_certificates
from wattfleet_identity.peers import Peer
from wattfleet_io.atomic_files import read_regular_file, replace_file

KEY, CERTIFICATE, TRUSTED, COORDINATOR = "key.pem", "certificate.pem", "trusted.pem", "coordinator.json"
SECRET_MODE, FOLDER_MODE = 0o600, 0o700


class IdentityReplacedError(WattfleetError):
    """The folder has another identity meanwhile, such as after `wattfleet join`; it stays."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a machine proves itself with, and by what it recognizes the coordinator.

    Args:
        key_pem: its private key.
        certificate_pem: its certificate.
        trusted_pem: the certificates of the authorities that it trusts.
        coordinator: the coordinator's host:port, as at enrolment; empty if unknown.
        server_name: the DNS name that the coordinator's certificate must have.
        superlink: host:port of Flower's SuperLink, as at enrolment or renewal; empty if unknown.

    Raises:
        InvalidInputError: a part is unreadable, or the key is not that of the certificate.
    """

    key_pem: bytes = field(repr=False)
    certificate_pem: bytes
    trusted_pem: bytes
    coordinator: str = ""
    server_name: str = SERVER_NAME
    superlink: str = ""

    def __post_init__(self) -> None:
        if not matches(self.key_pem, self.certificate_pem):
            raise InvalidInputError(f"{KEY} is not the key of {CERTIFICATE}: enrol again, or replace both together")
        read_certificates(self.trusted_pem)

    @property
    def certificate(self) -> Certificate:
        """What its certificate says."""
        return Certificate.from_pem(self.certificate_pem)

    @property
    def peer(self) -> Peer:
        """Whom the certificate names.

        Raises:
            UnknownPeerError: it names nobody.
        """
        return self.certificate.peer


def is_complete(folder: Path) -> bool:
    """Whether an identity was written to its end; the certificate comes last."""
    return (folder / CERTIFICATE).exists()


def read_identity(folder: Path) -> Identity | None:
    """Read the identity in a folder; returns None if there is none.

    Raises:
        InvalidInputError: a file is missing or unreadable, or others may read the key.
    """
    try:
        if not is_complete(folder):
            if not (folder / KEY).exists():
                return None
            raise InvalidInputError(
                f"the identity in {folder} has a key and no {CERTIFICATE}, as after an interrupted enrolment: enrol"
                " again, or complete the folder"
            )
        key, certificate, trusted = (read_regular_file(folder / name) for name in (KEY, CERTIFICATE, TRUSTED))
        require_secret(folder / KEY)
        facts = json.loads(read_regular_file(folder / COORDINATOR)) if (folder / COORDINATOR).exists() else {}
        coordinator, server_name = str(facts.get("coordinator", "")), str(facts.get("server_name", SERVER_NAME))
        superlink = str(facts.get("superlink", ""))
    except OSError as error:
        raise InvalidInputError(
            f"the identity in {folder} cannot be read: {error.strerror}: {error.filename}"
        ) from None
    except (AttributeError, ValueError):
        raise InvalidInputError(f"{folder / COORDINATOR} is damaged: enrol again") from None
    return Identity(key, certificate, trusted, coordinator, server_name, superlink)


def write_identity(folder: Path, identity: Identity) -> None:
    """Write an identity, the certificate last: without it there is none.

    Raises:
        OSError: it cannot be written.
    """
    make_private_folder(folder)
    with _locked(folder):
        (folder / CERTIFICATE).unlink(missing_ok=True)
        replace_file(folder / KEY, identity.key_pem, mode=SECRET_MODE)
        replace_file(folder / TRUSTED, identity.trusted_pem)
        _write_addresses(folder, identity)
        replace_file(folder / CERTIFICATE, identity.certificate_pem)


def write_renewed(folder: Path, identity: Identity) -> None:
    """Replace the certificate by one for the same key, the authorities to trust, and the addresses.

    The authorities come first: an old certificate works with new ones, but not the other way round.

    Raises:
        OSError: a file cannot be written; the identity stays usable.
        IdentityReplacedError: the folder has another key meanwhile.
    """
    with _locked(folder):
        if read_regular_file(folder / KEY) != identity.key_pem:
            raise IdentityReplacedError(f"{folder} has another identity meanwhile, which stays")
        replace_file(folder / TRUSTED, identity.trusted_pem)
        _write_addresses(folder, identity)
        replace_file(folder / CERTIFICATE, identity.certificate_pem)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing an identity to a folder at the same time."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_addresses(folder: Path, identity: Identity) -> None:
    facts = {
        "coordinator": identity.coordinator,
        "server_name": identity.server_name,
        "superlink": identity.superlink,
    }
    replace_file(folder / COORDINATOR, json.dumps(facts).encode())


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner may enter.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) != FOLDER_MODE:
        os.chmod(folder, FOLDER_MODE)


def require_secret(file: Path) -> None:
    """Make sure that only its owner may read a file.

    Raises:
        InvalidInputError: others may.
        OSError: there is no such file.
    """
    if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidInputError(f"other users may read the key {file}: run `chmod 600 {file}`")
