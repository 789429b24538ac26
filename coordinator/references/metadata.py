"""The signed metadata of references that the coordinator serves.

The operator signs which keys are trusted (root) and which references exist (targets). The coordinator signs with its
own key which metadata is newest (snapshot, timestamp). Its signature expires after a day, so that nobody can keep
agents on old metadata for longer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import TypeVar

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.signer import CryptoSigner, SSlibKey
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, MetaFile, Root, Signed, Snapshot, Targets, Timestamp

from coordinator.errors import UnknownRecordError
from wattfleet.common.atomic_files import read_regular_file, replace_file, sync_folder
from wattfleet.common.identity.identity_folder import require_secret
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.limits import MAX_METADATA_BYTES
from wattfleet_proto.names import (
    MAX_ROOTS,
    TIMESTAMP_FILE,
    digests_named,
    is_metadata_name,
    metadata_name,
)

_log = logging.getLogger(__name__)


# --- Key files --------------------------------------------------------------------------------------------------------
# Private keys in files that only their owner may read.


SHOWN_DIGITS = 8
"""The number of digits of a key's id that distinguish the keys of one fleet."""


def create_key(folder: Path, name: str) -> CryptoSigner:
    """Create an Ed25519 key in a file `NAME-ID.pem` that only its owner may read, and sync it to disk.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    signer = CryptoSigner.generate_ed25519()
    write_key(key_file(folder, name, signer.public_key.keyid), signer)
    return signer


def key_file(folder: Path, name: str, keyid: str) -> Path:
    """The path of the private key with an id in a folder."""
    return folder / f"{name}-{keyid[:SHOWN_DIGITS]}.pem"


def write_key(path: Path, signer: CryptoSigner) -> None:
    """Write a private key to a new file that only its owner may read.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(signer.private_bytes)
            file.flush()
            os.fsync(descriptor)
        sync_folder(path.parent)
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be written: {error.strerror}") from None


def load_key(path: Path) -> CryptoSigner:
    """Load a private key.

    Raises:
        InvalidInputError: the file cannot be read, is not a private key of a supported kind, or others may read it.
    """
    try:
        require_secret(path)
        return CryptoSigner(load_pem_private_key(read_regular_file(path), None))
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InvalidInputError(f"{path}: is not an unencrypted private key in PEM format") from None


def public_pem(key: SSlibKey) -> str:
    """Encode a public key as PEM."""
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.keyval["public"]))
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def key_of_pem(pem: str) -> SSlibKey:
    """Decode a public key in PEM format.

    Raises:
        InvalidInputError: the text is not a public key.
    """
    try:
        return SSlibKey.from_crypto(load_pem_public_key(pem.encode()))
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidInputError("the coordinator did not send a public key in PEM format: update it") from None


# --- Signed roles -----------------------------------------------------------------------------------------------------
# Signed metadata of references as bytes: signing it, parsing it, and checking its signatures.

Role = TypeVar("Role", Root, Targets, Snapshot, Timestamp)


def signed_bytes(content: Role, signers: Sequence[CryptoSigner]) -> bytes:
    """Sign metadata with keys, and return the bytes of its file."""
    metadata = Metadata(content)
    for signer in signers:
        metadata.sign(signer, append=True)
    return metadata.to_bytes()


def expiry(now: datetime, valid_for: timedelta) -> datetime:
    """When metadata that is signed now expires; TUF counts whole seconds."""
    return (now + valid_for).replace(microsecond=0)


def next_root(before: Root | None, content: bytes, root: Root) -> Root:
    """Parse the root that follows another one.

    Raises:
        InvalidInputError: it is not the next version, or lacks signatures.
    """
    expected = 1 if before is None else before.version + 1
    if root.version != expected:
        raise InvalidInputError(f"the root has version {root.version}, but version {expected} comes next: publish all")
    if root.version > MAX_ROOTS:
        raise InvalidInputError(f"agents follow at most {MAX_ROOTS} versions of a root: start again with new keys")
    if before is not None:
        require_signed(before, content, Root)
    require_signed(root, content, Root)
    return root


def require_signed(by: Root, content: bytes, kind: type[Role]) -> None:
    """Check that parsed metadata is signed with enough of the keys that a root trusts.

    Raises:
        InvalidInputError: signatures are missing.
    """
    metadata = Metadata[Role].from_bytes(content)
    try:
        by.verify_delegate(kind.type, metadata.signed_bytes, metadata.signatures)
    except (RepositoryError, ValueError) as error:
        raise InvalidInputError(f"the signed {kind.type} lacks signatures of the keys that the root trusts") from error


def parsed(content: bytes, kind: type[Role]) -> Role:
    """Parse a file of metadata without checking its signatures.

    Raises:
        InvalidInputError: it is too large, damaged or of another kind.
    """
    if len(content) > MAX_METADATA_BYTES:
        raise InvalidInputError(
            f"the signed {kind.type} has {len(content):,} bytes; the limit is {MAX_METADATA_BYTES:,}"
        )
    try:
        signed = Metadata[Role].from_bytes(content).signed
    except (RepositoryError, RecursionError):
        raise InvalidInputError(f"the signed {kind.type} is damaged") from None
    if not isinstance(signed, kind):
        raise InvalidInputError(f"the signed {kind.type} has another type")
    return signed


# --- Reference metadata -----------------------------------------------------------------------------------------------

ONLINE_KEY_FILE = "online.pem"
SNAPSHOT_VALID_FOR = timedelta(days=7)
TIMESTAMP_VALID_FOR = timedelta(days=1)
RENEWAL_CHECK_S = 600.0
"""Seconds between two checks whether the coordinator's own signatures have to be renewed."""

_WARNED_AHEAD = timedelta(days=30)
_KEPT_VERSIONS = 4
"""The number of old versions of targets and snapshot to keep, for agents that have fetched an older timestamp."""

_Role = TypeVar("_Role", Root, Targets, Snapshot, Timestamp)


def utc_now() -> datetime:
    """The date and time."""
    return datetime.now(timezone.utc)


class ReferenceMetadata:
    """A folder with the metadata and the coordinator's key. Its methods may block for some milliseconds.

    Attributes:
        folder: where the files are.
        root: the newest root; None before the operator has published one.
        targets: the newest targets; None before the operator has published them.
        online_key: the coordinator's public key, PEM.
    """

    def __init__(self, folder: Path, now: Callable[[], datetime] = utc_now) -> None:
        """Open a folder, and create it and the key if they do not exist.

        Raises:
            InvalidInputError: the folder cannot be used, or a file in it is damaged.
        """
        self.folder = folder
        self._now = now
        self._lock = threading.Lock()
        self._warned_on: date | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInputError(f"--reference-metadata {folder}: cannot be created: {error.strerror}") from None
        self._signer = _online_signer(folder / ONLINE_KEY_FILE)
        self.online_key = public_pem(self._signer.public_key)
        self.root = self._newest("root", Root)
        self.targets = self._newest("targets", Targets)
        self.renew()

    @property
    def digests(self) -> list[str]:
        """The digests of the references that the operator has signed."""
        return [] if self.targets is None else digests_named(list(self.targets.targets))

    def file(self, name: str) -> bytes:
        """Read a file of the metadata.

        Raises:
            UnknownRecordError: there is no file of this name.
        """
        try:
            if is_metadata_name(name):
                return read_regular_file(self.folder / name)
        except FileNotFoundError:
            pass
        raise UnknownRecordError(f"there is no signed metadata {name!r}")

    def publish(self, roots: Sequence[bytes], targets: bytes) -> None:
        """Store metadata that the operator has signed, and sign that it is the newest.

        Args:
            roots: versions of the root, in order; known ones are skipped.
            targets: the newest targets; empty leaves them as they are.

        Raises:
            InvalidInputError: the files are not signed with the trusted keys, have expired, are older than the known
                ones, or name another online key.
        """
        with self._lock:
            root, fresh_roots = self.root, []
            for content in roots:
                found = parsed(content, Root)
                if root is not None and found.version <= root.version:
                    if self.file(metadata_name("root", found.version)) != content:
                        raise InvalidInputError(
                            f"a different root of version {found.version} is served: use the operator's folder from "
                            "which it was published"
                        )
                    continue
                root = next_root(root, content, found)
                fresh_roots.append((root.version, content))
            if root is None:
                raise InvalidInputError(
                    "no root has been published yet: publish one with `wattfleet coordinator reference keys`"
                )
            if fresh_roots and self._signer.public_key.keyid not in root.roles[Timestamp.type].keyids:
                raise InvalidInputError(
                    "the root names another online key than this coordinator's: replace it with `wattfleet coordinator"
                    " reference keys rotate --replace online`"
                )
            fresh_targets = self._fresh_targets(root, targets) if targets else None
            if fresh_targets is None and self.targets is not None:
                require_signed(root, self.file(metadata_name("targets", self.targets.version)), Targets)
            # The timestamp, which refers to the others, is replaced last.
            for version, content in fresh_roots:
                self._write(metadata_name("root", version), content)
            self.root = root
            if fresh_targets is not None:
                self._write(metadata_name("targets", fresh_targets.version), targets)
                self.targets = fresh_targets
        self.renew()

    async def keep_renewing(self) -> None:
        """Renew the coordinator's signatures in time, until cancelled; a failure is logged."""
        while True:
            await asyncio.sleep(RENEWAL_CHECK_S)
            try:
                await asyncio.to_thread(self.renew)
            except InvalidInputError as error:
                _log.error("the references' signed metadata cannot be renewed: %s", error)

    def renew(self) -> None:
        """Sign the newest metadata again if it has changed or the coordinator's signature expires soon.

        Raises:
            InvalidInputError: the folder cannot be written.
        """
        with self._lock:
            if self.root is None or self.targets is None:
                return
            if self._signer.public_key.keyid not in self.root.roles[Timestamp.type].keyids:
                _log.error(
                    "the references' root names another online key than %s: replace it with `wattfleet coordinator"
                    " reference keys rotate --replace online`",
                    self.folder / ONLINE_KEY_FILE,
                )
                return
            self._sign()
            self._warn_of_expiry(self.root, self.targets)

    def _warn_of_expiry(self, *signed_by_operator: Root | Targets) -> None:
        """Warn once a day about expiring signatures that only the operator can renew."""
        now = self._now()
        if self._warned_on == now.date():
            return
        self._warned_on = now.date()
        for signed in signed_by_operator:
            if signed.expires - now < _WARNED_AHEAD:
                _log.warning(
                    "the references' signed %s expires on %s: sign it again (docs/references.md)",
                    signed.type,
                    signed.expires.date(),
                )

    def _sign(self) -> None:
        assert self.root is not None and self.targets is not None, "checked by the caller"
        now, meta = self._now(), self._meta_of("targets", self.targets.version)
        snapshot = self._own_of(self._newest_name("snapshot"), Snapshot, self.root)
        if snapshot is None or snapshot.meta != {"targets.json": meta} or _is_due(snapshot, now, SNAPSHOT_VALID_FOR):
            snapshot = Snapshot(
                version=_next_version(snapshot, now),
                expires=expiry(now, SNAPSHOT_VALID_FOR),
                meta={"targets.json": meta},
            )
            self._write(metadata_name("snapshot", snapshot.version), signed_bytes(snapshot, [self._signer]))
        of_snapshot = self._meta_of("snapshot", snapshot.version)
        timestamp = self._own_of(TIMESTAMP_FILE, Timestamp, self.root)
        if timestamp is None or timestamp.snapshot_meta != of_snapshot or _is_due(timestamp, now, TIMESTAMP_VALID_FOR):
            timestamp = Timestamp(
                version=_next_version(timestamp, now),
                expires=expiry(now, TIMESTAMP_VALID_FOR),
                snapshot_meta=of_snapshot,
            )
            self._write(TIMESTAMP_FILE, signed_bytes(timestamp, [self._signer]))
            self._remove_old()

    def _fresh_targets(self, root: Root, content: bytes) -> Targets | None:
        """Verify targets that the operator has signed; None if they are the known ones."""
        targets = parsed(content, Targets)
        require_signed(root, content, Targets)
        if targets.delegations is not None:
            raise InvalidInputError("the signed targets delegate to other keys, which agents do not follow")
        if targets.expires <= self._now():
            raise InvalidInputError(f"the signed targets expired on {targets.expires.date()}: sign them again")
        if self.targets is not None:
            if targets.version < self.targets.version:
                raise InvalidInputError(
                    f"version {targets.version} of the signed targets is older than version {self.targets.version},"
                    " which is served: use the operator's newest folder"
                )
            if targets.version == self.targets.version:
                if self.file(metadata_name("targets", targets.version)) != content:
                    raise InvalidInputError(
                        f"different targets of version {targets.version} are served: use the operator's newest folder"
                    )
                return None
        return targets

    def _meta_of(self, role: str, version: int) -> MetaFile:
        content = self.file(metadata_name(role, version))
        return MetaFile(version, len(content), {"sha256": hashlib.sha256(content).hexdigest()})

    def _own_of(self, name: str | None, kind: type[_Role], root: Root) -> _Role | None:
        """Read metadata that this coordinator has signed; None if there is none that the root trusts."""
        try:
            content = self.file(name or "")
            signed = parsed(content, kind)
            require_signed(root, content, kind)
            return signed
        except (UnknownRecordError, InvalidInputError):
            return None

    def _newest(self, role: str, kind: type[_Role]) -> _Role | None:
        name = self._newest_name(role)
        if name is None:
            return None
        try:
            return parsed(self.file(name), kind)
        except InvalidInputError as error:
            raise InvalidInputError(
                f"{self.folder / name}: {error}; remove it, and publish the signed metadata again"
            ) from None

    def _newest_name(self, role: str) -> str | None:
        versions = self._versions(role)
        return metadata_name(role, versions[-1]) if versions else None

    def _versions(self, role: str) -> list[int]:
        names = (path.name for path in self.folder.glob(f"*.{role}.json"))
        return sorted(int(name.partition(".")[0]) for name in names if is_metadata_name(name))

    def _write(self, name: str, content: bytes) -> None:
        try:
            replace_file(self.folder / name, content)
        except OSError as error:
            raise InvalidInputError(f"{self.folder / name}: cannot be written: {error.strerror}") from None

    def _remove_old(self) -> None:
        for role in ("targets", "snapshot"):
            for version in self._versions(role)[:-_KEPT_VERSIONS]:
                (self.folder / metadata_name(role, version)).unlink(missing_ok=True)


def _online_signer(path: Path) -> CryptoSigner:
    if not path.exists():
        write_key(path, CryptoSigner.generate_ed25519())
    return load_key(path)


def _is_due(signed: Signed, now: datetime, valid_for: timedelta) -> bool:
    """Whether half of the validity has passed, or the date has gone back by more than that."""
    return not valid_for / 2 <= signed.expires - now <= valid_for


def _next_version(before: Signed | None, now: datetime) -> int:
    """The next version number: the seconds since 1970, so that versions still increase after the folder was lost."""
    return max(int(now.timestamp()), 0 if before is None else before.version + 1)
