"""The folder with a machine's key, its certificate, the authorities that it trusts, and the coordinator's address.

`key.pem` is created on the machine and never leaves it. Certificates from another authority are stored in the same
layout.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_identity.authority import SERVER_NAME
from wattfleet_identity.certificates import Certificate, matches, read_certificates
from wattfleet_identity.peers import Peer
from wattfleet_io.atomic_files import make_state_folder, read_regular_file, replace_file

KEY, CERTIFICATE, TRUSTED, COORDINATOR = "key.pem", "certificate.pem", "trusted.pem", "coordinator.json"
SECRET_MODE, FOLDER_MODE = 0o600, 0o700


class IdentityReplacedError(WattfleetError):
    """The folder now has another identity, for example after `wattfleet join`, which stays."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A machine's key and certificate, and what it needs to recognise the coordinator.

    Args:
        key_pem: its private key.
        certificate_pem: its certificate.
        trusted_pem: the certificates of the authorities that it trusts.
        coordinator: the coordinator's host:port, as at enrolment; empty if unknown.
        server_name: the DNS name that the coordinator's certificate must have.
        superlink: host:port of Flower's SuperLink, as at enrolment or renewal; empty if unknown.

    Raises:
        InvalidInputError: a part is unreadable, or the key does not belong to the certificate.
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
        """The contents of its certificate."""
        return Certificate.from_pem(self.certificate_pem)

    @property
    def peer(self) -> Peer:
        """The peer that the certificate names.

        Raises:
            UnknownPeerError: the certificate does not name a peer.
        """
        return self.certificate.peer


def is_complete(folder: Path) -> bool:
    """Whether an identity was written completely; the certificate is written last."""
    return (folder / CERTIFICATE).exists()


def read_identity(folder: Path) -> Identity | None:
    """Read the identity in a folder; None if there is none.

    Raises:
        InvalidInputError: a file is missing or unreadable, or others may read the key.
    """
    try:
        if not is_complete(folder):
            if not (folder / KEY).exists():
                return None
            raise InvalidInputError(
                f"the identity in {folder} has a key but no {CERTIFICATE}, as after an interrupted enrolment: enrol"
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
    """Write an identity, the certificate last: without it, the folder has no identity.

    Raises:
        OSError: a file cannot be written.
    """
    make_private_folder(folder)
    with _locked(folder):
        (folder / CERTIFICATE).unlink(missing_ok=True)
        replace_file(folder / KEY, identity.key_pem, mode=SECRET_MODE)
        replace_file(folder / TRUSTED, identity.trusted_pem)
        _write_addresses(folder, identity)
        replace_file(folder / CERTIFICATE, identity.certificate_pem)


def write_renewed(folder: Path, identity: Identity) -> None:
    """Replace the certificate by one for the same key, and replace the trusted authorities and the addresses.

    The authorities are written first, because an old certificate works with new authorities, but not the other way
    round.

    Raises:
        OSError: a file cannot be written; the identity stays usable.
        IdentityReplacedError: the folder now has another key.
    """
    with _locked(folder):
        if read_regular_file(folder / KEY) != identity.key_pem:
            raise IdentityReplacedError(f"{folder} now has another identity, which is kept")
        replace_file(folder / TRUSTED, identity.trusted_pem)
        _write_addresses(folder, identity)
        replace_file(folder / CERTIFICATE, identity.certificate_pem)


def note_coordinator(folder: Path, address: str) -> None:
    """Replace the coordinator's address in an identity; without an identity, do nothing.

    Raises:
        InvalidInputError: the identity is damaged.
        OSError: the address cannot be written.
    """
    if not is_complete(folder):
        return
    with _locked(folder):
        identity = read_identity(folder)
        if identity is not None and identity.coordinator != address:
            _write_addresses(folder, replace(identity, coordinator=address))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Prevent other processes from writing an identity to a folder at the same time."""
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
    """Create a folder that only its owner may enter; its parents are for its group, too.

    Raises:
        OSError: the folder cannot be created.
    """
    make_state_folder(folder.parent)
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) != FOLDER_MODE:
        os.chmod(folder, FOLDER_MODE)


def require_secret(file: Path) -> None:
    """Check that only its owner may read a file.

    Raises:
        InvalidInputError: others may read it.
        OSError: the file does not exist.
    """
    if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidInputError(f"other users may read the key {file}: run `chmod 600 {file}`")
