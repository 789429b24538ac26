"""The folder with a machine's key, its certificate, the authorities that it trusts, and the coordinator's address.

`key.pem` is created on the machine and never leaves it. Certificates from another authority are stored in the same
layout.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from wattfleet.common.atomic_files import make_state_folder, read_regular_file, replace_file
from wattfleet.common.identity.authority import SERVER_NAME
from wattfleet.common.identity.certificates import (
    Certificate,
    matches,
    read_certificate,
    read_certificates,
    read_key,
    to_pem,
)
from wattfleet.common.identity.peers import Peer
from wattfleet.common.parsing import utc_from
from wattfleet.core.errors import InvalidInputError, WattfleetError

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


# --- Proofs -----------------------------------------------------------------------------------------------------------
# A proof of identity for protocols with bearer tokens but without client certificates, such as Flower's Control API.
#
# It contains the certificate, the audience and the time of expiry, signed with the certificate's key. Whoever has it
# can use it there for some hours, so it must be kept secret.

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
    OverflowError,  # of a number
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
        expires = utc_from(float(facts["expires_unix_s"]))
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
