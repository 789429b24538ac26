"""The signed metadata of references that the coordinator serves.

The operator signs which keys are trusted (root) and which references exist (targets). The coordinator signs with its
own key which metadata is newest (snapshot, timestamp). Its signature expires after a day, so that nobody can keep
agents on old metadata for longer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import TypeVar

from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import MetaFile, Root, Signed, Snapshot, Targets, Timestamp

from coordinator.errors import UnknownRecordError
from coordinator.key_files import load_key, public_pem, write_key
from coordinator.signed_roles import expiry, next_root, parsed, require_signed, signed_bytes
from wattfleet.errors import InvalidInputError
from wattfleet_io.atomic_files import read_regular_file, replace_file
from wattfleet_proto.signed_references import (
    TIMESTAMP_FILE,
    digests_named,
    is_metadata_name,
    metadata_name,
)

_log = logging.getLogger(__name__)

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
        """Verify targets that the operator has signed; None if they are the known ones.

        Raises:
            InvalidInputError: the targets cannot be used.
        """
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
