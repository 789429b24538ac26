"""Signed metadata as an attacker creates it, with untrusted or stolen keys."""

from __future__ import annotations

from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, MetaFile, Snapshot, TargetFile, Targets, Timestamp

from coordinator.reference_metadata import load_key, signed_bytes
from tests.fakes.signed_repository import SignedRepository
from wattfleet.prediction import Artefact
from wattfleet_proto.names import target_names


def stranger() -> CryptoSigner:
    """A key that nobody trusts."""
    return CryptoSigner.generate_ed25519()


def forged(
    repository: SignedRepository, named: Artefact, targets_signer: CryptoSigner, online_signer: CryptoSigner
) -> dict[str, bytes]:
    """Metadata that names a reference, with the next version numbers."""
    files = repository.files()
    targets = Metadata[Targets].from_bytes(repository.operator.signed_targets).signed
    targets.version += 1
    for name, content in zip(target_names(named.digest), (named.manifest, named.weights), strict=True):
        targets.targets[name] = TargetFile.from_data(name, content, ["sha256"])
    timestamp = Metadata[Timestamp].from_bytes(files["timestamp.json"]).signed
    return signed_chain(
        targets, timestamp.snapshot_meta.version + 1, timestamp.version + 1, targets_signer, online_signer
    )


def signed_chain(
    targets: Targets, snapshot_version: int, timestamp_version: int, targets_signer: CryptoSigner, online: CryptoSigner
) -> dict[str, bytes]:
    """The target files, and the snapshot and timestamp that refer to them."""
    of_targets = signed_bytes(targets, [targets_signer])
    snapshot = Snapshot(
        version=snapshot_version,
        expires=targets.expires,
        meta={"targets.json": MetaFile.from_data(targets.version, of_targets, ["sha256"])},
    )
    of_snapshot = signed_bytes(snapshot, [online])
    timestamp = Timestamp(
        version=timestamp_version,
        expires=targets.expires,
        snapshot_meta=MetaFile.from_data(snapshot_version, of_snapshot, ["sha256"]),
    )
    return {
        f"{targets.version}.targets.json": of_targets,
        f"{snapshot_version}.snapshot.json": of_snapshot,
        "timestamp.json": signed_bytes(timestamp, [online]),
    }


def online_key(repository: SignedRepository) -> CryptoSigner:
    """The coordinator's private key, stolen."""
    return load_key(repository.metadata.folder / "online.pem")
