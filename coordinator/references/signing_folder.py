"""The operator's folder: the keys that sign references, and the metadata that was signed with them.

It is not needed on the coordinator's machine. Root keys sign which keys are trusted; the targets key signs references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from securesystemslib.signer import SSlibKey
from tuf.api.metadata import Root, Snapshot, TargetFile, Targets, Timestamp

from coordinator.references.metadata import (
    SHOWN_DIGITS,
    create_key,
    expiry,
    load_key,
    next_root,
    parsed,
    require_signed,
    signed_bytes,
    utc_now,
)
from wattfleet.common.atomic_files import read_regular_file, replace_file
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.prediction import Artefact
from wattfleet_proto.names import digests_named, metadata_name, target_names

ROOT_VALID_FOR = timedelta(days=1095)
TARGETS_VALID_FOR = timedelta(days=365)
TARGETS_FILE = "targets.json"

_FIRST_ROOT = metadata_name("root", 1)


class SigningFolder:
    """An operator's folder.

    Attributes:
        folder: its path.
        signers: the private keys, by their id.
        root: the newest root.
        targets: the signed references.
    """

    def __init__(self, folder: Path, further_keys: Sequence[Path] = (), now: Callable[[], datetime] = utc_now) -> None:
        """Open a folder from `create`.

        Args:
            folder: the folder.
            further_keys: private keys that are kept elsewhere.
            now: the date and time.

        Raises:
            InvalidInputError: the folder holds no keys, or a file in it cannot be used.
        """
        self.folder = folder
        self._now = now
        paths = [*sorted(folder.glob("root-*.pem")), *sorted(folder.glob("targets-*.pem")), *further_keys]
        self.signers = {signer.public_key.keyid: signer for signer in map(load_key, paths)}
        self.root = self._verified_root()
        self.targets = self._verified_targets()

    @classmethod
    def create(
        cls,
        folder: Path,
        online_key: SSlibKey,
        root_keys: int = 2,
        threshold: int = 1,
        now: Callable[[], datetime] = utc_now,
    ) -> SigningFolder:
        """Create keys in a new folder, and sign the first metadata.

        Args:
            folder: a folder that does not exist, or is empty.
            online_key: the coordinator's public key.
            root_keys: number of root keys.
            threshold: number of root keys whose signatures are needed together.
            now: the date and time.

        Raises:
            InvalidInputError: the folder cannot be used, or a lost root key could not be replaced.
        """
        if not 1 <= threshold < root_keys:
            raise InvalidInputError(
                f"with {root_keys} root keys, of which {threshold} must sign together, a lost key could not be "
                "replaced: choose --threshold of 1 or more, and --root-keys of at least one more"
            )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if next(folder.iterdir(), None) is not None:
                raise InvalidInputError(f"{folder}: is not empty: name a new folder for the keys")
        except OSError as error:
            raise InvalidInputError(f"{folder}: cannot be created: {error.strerror}") from None
        targets_signer = create_key(folder, "targets")
        root_signers = [create_key(folder, "root") for _ in range(root_keys)]
        root = Root(version=1, expires=expiry(now(), ROOT_VALID_FOR), consistent_snapshot=True)
        for signer in root_signers:
            root.add_key(signer.public_key, Root.type)
        root.roles[Root.type].threshold = threshold
        root.add_key(targets_signer.public_key, Targets.type)
        for role in (Snapshot.type, Timestamp.type):
            root.add_key(online_key, role)
        targets = Targets(version=1, expires=expiry(now(), TARGETS_VALID_FOR))
        _write(folder / TARGETS_FILE, signed_bytes(targets, [targets_signer]))
        # Written last, because the folder can be opened once this file exists.
        _write(folder / _FIRST_ROOT, signed_bytes(root, root_signers))
        return cls(folder, now=now)

    @property
    def roots(self) -> list[bytes]:
        """The contents of all root files, in order of version."""
        return [_content(self.folder / metadata_name("root", k)) for k in range(1, 1 + self.root.version)]

    @property
    def signed_targets(self) -> bytes:
        """The file of the signed references."""
        return _content(self.folder / TARGETS_FILE)

    @property
    def newest_root_file(self) -> Path:
        """The root file that agents have to trust."""
        return self.folder / metadata_name("root", self.root.version)

    @property
    def digests(self) -> list[str]:
        """The digests of the signed references."""
        return digests_named(list(self.targets.targets))

    def keys_of(self, role: str) -> list[tuple[str, bool]]:
        """The ids of a role's keys, in order, each with whether its private key is available."""
        return [(keyid, keyid in self.signers) for keyid in sorted(self.root.roles[role].keyids)]

    def sign(self, artefacts: Sequence[Artefact], revoked: Sequence[str] = (), days: float | None = None) -> None:
        """Sign references in addition to those signed already; without any, only the expiry is renewed.

        Args:
            artefacts: the references.
            revoked: digests, or unique prefixes, of signed references that agents must no longer use.
            days: how long the signature is valid; None for a year.

        Raises:
            InvalidInputError: the targets key is not available, a digest is unknown, or the file cannot be written.
        """
        for digest in [self._signed_digest(prefix) for prefix in revoked]:
            for name in target_names(digest):
                del self.targets.targets[name]
        for artefact in artefacts:
            for name, content in zip(target_names(artefact.digest), (artefact.manifest, artefact.weights), strict=True):
                self.targets.targets[name] = TargetFile.from_data(name, content, ["sha256"])
        self._sign_targets(TARGETS_VALID_FOR if days is None else timedelta(days=days))

    def rotate(
        self, replaced: Sequence[str] = (), online_key: SSlibKey | None = None, days: float | None = None
    ) -> list[Path]:
        """Sign another version of the root: with new keys, or only with a later expiry.

        Args:
            replaced: `targets`, or the first digits of a root key's id, whose private key may be lost.
            online_key: the coordinator's public key that replaces the current one.
            days: how long the root is valid; None for three years.

        Returns:
            The existing files of the keys that are no longer trusted.

        Raises:
            InvalidInputError: too few root keys are available, a key is unknown, or a file cannot be written.
        """
        before = self.root
        require_enough = before.roles[Root.type].threshold
        present = [self.signers[keyid] for keyid, is_here in self.keys_of(Root.type) if is_here]
        if len(present) < require_enough:
            raise InvalidInputError(
                f"{require_enough} of the {len(before.roles[Root.type].keyids)} root keys have to sign "
                f"({len(present)} available): name further ones with --key. If they are lost, start again with new "
                "keys, and let every device trust the new root (docs/references.md)"
            )
        roles = [(Targets.type, keyid) for keyid, _ in self.keys_of(Targets.type) if "targets" in replaced]
        roles += [(Root.type, self._root_key(prefix)) for prefix in replaced if prefix != "targets"]
        root = parsed(self.roots[-1], Root)
        for role, keyid in roles:
            root.revoke_key(keyid, role)
            signer = create_key(self.folder, role)
            self.signers[signer.public_key.keyid] = signer
            root.add_key(signer.public_key, role)
        if online_key is not None:
            for role in (Snapshot.type, Timestamp.type):
                for keyid in list(root.roles[role].keyids):
                    root.revoke_key(keyid, role)
                root.add_key(online_key, role)
        root.version += 1
        root.expires = expiry(self._now(), ROOT_VALID_FOR if days is None else timedelta(days=days))
        trusted = [self.signers[each] for each in root.roles[Root.type].keyids if each in self.signers]
        signers = {signer.public_key.keyid: signer for signer in (*present, *trusted)}
        content = signed_bytes(root, list(signers.values()))
        self.root = next_root(before, content, root)
        _write(self.folder / metadata_name("root", root.version), content)
        if "targets" in replaced:
            self._sign_targets(TARGETS_VALID_FOR)
        return [path for _, keyid in roles for path in self.folder.glob(f"*-{keyid[:SHOWN_DIGITS]}.pem")]

    def _sign_targets(self, valid_for: timedelta) -> None:
        signers = [self.signers[keyid] for keyid, is_here in self.keys_of(Targets.type) if is_here]
        if not signers:
            raise InvalidInputError(
                f"{self.folder}: the private key of the references is missing: name it with --key, or replace it with"
                " `wattfleet coordinator reference keys rotate --replace targets`"
            )
        self.targets.version += 1
        self.targets.expires = expiry(self._now(), valid_for)
        _write(self.folder / TARGETS_FILE, signed_bytes(self.targets, signers))

    def _signed_digest(self, prefix: str) -> str:
        return _only(prefix, self.digests, "a signed reference")

    def _root_key(self, prefix: str) -> str:
        return _only(prefix, self.root.roles[Root.type].keyids, "a root key")

    def _verified_root(self) -> Root:
        if not (self.folder / _FIRST_ROOT).is_file():
            raise InvalidInputError(
                f"{self.folder}: has no keys of references: create them with `wattfleet coordinator reference keys"
                " init`"
            )
        root: Root | None = None
        for path in self._root_files():
            content = _content(path)
            root = next_root(root, content, parsed(content, Root))
        assert root is not None, "there is the first one"
        return root

    def _root_files(self) -> Iterator[Path]:
        version = 1
        while (path := self.folder / metadata_name("root", version)).is_file():
            yield path
            version += 1

    def _verified_targets(self) -> Targets:
        content = self.signed_targets
        targets = parsed(content, Targets)
        try:
            require_signed(self.root, content, Targets)
        except InvalidInputError:
            if not self._is_of_an_earlier_root(content):
                raise
        return targets

    def _is_of_an_earlier_root(self, content: bytes) -> bool:
        """Whether a rotation was interrupted before the references were signed with the new key."""
        if self.root.version == 1:
            return False
        require_signed(parsed(self.roots[-2], Root), content, Targets)
        return True


def _only(prefix: str, known: Sequence[str], what: str) -> str:
    matching = [each for each in known if each.startswith(prefix.lower())]
    if len(matching) != 1 or len(prefix) < 6:
        raise InvalidInputError(
            f"{prefix!r} does not match exactly one id of {what}: give 6 digits or more of {', '.join(known)}"
        )
    return matching[0]


def _content(path: Path) -> bytes:
    try:
        return read_regular_file(path)
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None


def _write(path: Path, content: bytes) -> None:
    try:
        replace_file(path, content)
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be written: {error.strerror}") from None
