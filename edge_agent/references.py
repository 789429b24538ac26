"""Reference predictors on the device: fetched once, checked by digest, kept by content."""

from __future__ import annotations

from pathlib import Path

from wattfleet.artefact import Artefact, read_directory, write_directory
from wattfleet.errors import CorruptReferenceError
from wattfleet_proto.v1 import session_pb2, session_pb2_grpc


async def reference_of_digest(digest: str, cache: Path, stub: session_pb2_grpc.SessionServiceAsyncStub) -> Artefact:
    """The reference predictor of a digest, from the cache or from the coordinator.

    Nothing is written before the manifest has the digest and the weights are what the manifest says.

    Args:
        digest: sha256 of the manifest, hexadecimal.
        cache: folder with one sub-folder per digest.
        stub: the coordinator.

    Raises:
        CorruptReferenceError: what came, or what was kept, is not what the digest stands for.
    """
    kept = cache / digest
    if kept.is_dir():
        return _checked(read_directory(kept), digest)
    manifest, chunks = b"", []
    async for message in stub.FetchReference(session_pb2.FetchReferenceRequest(digest=digest)):
        manifest += message.manifest
        chunks.append(message.weights_chunk)
    artefact = _checked(Artefact(manifest, b"".join(chunks)), digest)
    write_directory(artefact, kept)
    return artefact


def _checked(artefact: Artefact, digest: str) -> Artefact:
    """The weights were checked against the manifest; this checks the manifest against what was asked for."""
    if artefact.digest != digest:
        raise CorruptReferenceError(f"asked for reference {digest[:12]}..., got {artefact.digest[:12]}...: try again")
    return artefact
