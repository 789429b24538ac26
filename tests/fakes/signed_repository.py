"""An operator with keys, and a coordinator that serves the signed references: in virtual time, and open to attacks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, MetaFile, Snapshot, TargetFile, Targets, Timestamp

import reference_models
from coordinator.errors import UnknownRecordError
from coordinator.references.metadata import ReferenceMetadata, key_of_pem, load_key, signed_bytes
from coordinator.references.signing_folder import SigningFolder
from edge_agent.session.references import AcceptedReferences, ReferenceStatus, ReferenceTrust, trust_root
from wattfleet.core.prediction import Artefact
from wattfleet_proto.names import target_names
from wattfleet_proto.v1 import session_pb2

_SHIPPED = reference_models.load("agx_orin_resnet18")
BEGIN = datetime(2026, 3, 1, tzinfo=timezone.utc)


class VirtualClock:
    """One clock for all participants."""

    def __init__(self) -> None:
        self.time = BEGIN

    def __call__(self) -> datetime:
        return self.time

    def pass_time(self, **length: float) -> None:
        self.time += timedelta(**length)


class SignedRepository:
    """The folders of an operator and a coordinator, and the coordinator's two RPCs for agents.

    Attributes:
        shipped: the reference that ships with Wattfleet.
        artefacts: the data that FetchReference sends, by digest.
        replaced: the data that FetchMetadata sends in place of the file of this name.
        is_away: whether the coordinator is unreachable.
    """

    def __init__(self, folder: Path, clock: VirtualClock, root_keys: int = 2, threshold: int = 1) -> None:
        self.clock = clock
        self.metadata = ReferenceMetadata(folder / "served", clock)
        online = key_of_pem(self.metadata.online_key)
        self.operator = SigningFolder.create(folder / "keys", online, root_keys, threshold, clock)
        self.shipped = _SHIPPED
        self.artefacts: dict[str, Artefact] = {_SHIPPED.digest: _SHIPPED}
        self.replaced: dict[str, bytes] = {}
        self.is_away = False
        self.clock_ahead_s = 0.0
        self.asked: list[str] = []
        self.sent_bytes = 0

    def publish(self, *artefacts: Artefact, revoked: tuple[str, ...] = ()) -> None:
        """Sign further references, and serve them."""
        self.artefacts |= {each.digest: each for each in artefacts}
        self.operator.sign(artefacts, revoked)
        self.serve()

    def serve(self) -> None:
        """Serve the operator's newest metadata."""
        self.metadata.publish(self.operator.roots, self.operator.signed_targets)

    def files(self) -> dict[str, bytes]:
        """All metadata that is served now."""
        return {path.name: path.read_bytes() for path in self.metadata.folder.glob("*.json")}

    async def FetchMetadata(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchMetadataRequest, timeout: float
    ) -> session_pb2.FetchMetadataResponse:
        self.asked.append(request.name)
        if self.is_away:
            raise error_of(grpc.StatusCode.UNAVAILABLE)
        try:
            content = self.replaced.get(request.name)
            content = self.metadata.file(request.name) if content is None else content
        except UnknownRecordError:
            raise error_of(grpc.StatusCode.NOT_FOUND) from None
        unix_s = self.clock.time.timestamp() + self.clock_ahead_s
        return session_pb2.FetchMetadataResponse(content=content, coordinator_unix_s=unix_s)

    async def FetchReference(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchReferenceRequest, timeout: float
    ) -> AsyncIterator[session_pb2.FetchReferenceResponse]:
        if self.is_away:
            raise error_of(grpc.StatusCode.UNAVAILABLE)
        sent = self.artefacts[request.digest]
        yield session_pb2.FetchReferenceResponse(manifest=sent.manifest, weights_bytes=len(sent.weights))
        for offset in range(0, len(sent.weights), 10_000):
            self.sent_bytes += 10_000
            yield session_pb2.FetchReferenceResponse(weights_chunk=sent.weights[offset : offset + 10_000])


class TrustingDevice:
    """A device that trusts the operator's first root.

    Attributes:
        references: the references that it accepts.
    """

    def __init__(self, state: Path, repository: Any, root: bytes, now: Callable[[], datetime] | None = None) -> None:
        self.state = state
        trust_root(state / "reference-trust", root, BEGIN.timestamp())
        self._repository = repository
        clock = now or repository.clock
        trust = ReferenceTrust(state / "reference-trust", lambda: clock().timestamp())
        self.references = AcceptedReferences(
            state / "references", trust, lambda: nullcontext(self._repository), 5.0, 0.01
        )
        self._trust = trust

    async def take(self, *digests: str) -> list[str]:
        """The digests of the references that it uses once its coordinator names these."""
        return [each.digest for each in await self.references.of(digests)]

    @property
    def status(self) -> ReferenceStatus:
        return self._trust.status

    @property
    def in_force(self) -> tuple[str, ...]:
        return self.status.digests


def error_of(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone", None)


def reference(note: str) -> Artefact:
    """A usable reference that does not ship with the package."""
    content = json.loads(_SHIPPED.manifest)
    content["provenance"]["note"] = note
    return Artefact(json.dumps(content).encode(), _SHIPPED.weights)


# --- Forged metadata --------------------------------------------------------------------------------------------------
# Signed metadata as an attacker creates it, with untrusted or stolen keys.


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
