"""A reference is fetched once, and nothing that is not what its digest says is ever kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import reference_models
from edge_agent.references import reference_of_digest
from wattfleet.artefact import Artefact
from wattfleet.errors import CorruptReferenceError
from wattfleet_proto.v1 import session_pb2


class FakeCoordinator:
    """Sends these bytes, in small chunks."""

    def __init__(self, manifest: bytes, weights: bytes) -> None:
        self.manifest = manifest
        self.weights = weights
        self.asked = 0

    async def FetchReference(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchReferenceRequest
    ) -> AsyncIterator[session_pb2.FetchReferenceResponse]:
        self.asked += 1
        yield session_pb2.FetchReferenceResponse(manifest=self.manifest)
        for start in range(0, len(self.weights), 1000):
            yield session_pb2.FetchReferenceResponse(weights_chunk=self.weights[start : start + 1000])


@pytest.fixture(scope="module")
def shipped() -> Artefact:
    return reference_models.load("agx_orin_resnet18")


def fetch(coordinator: FakeCoordinator, digest: str, cache: Path) -> Artefact:
    return asyncio.run(reference_of_digest(digest, cache, coordinator))  # type: ignore[arg-type]


def test_fetched_once_and_kept(shipped: Artefact, tmp_path: Path) -> None:
    coordinator = FakeCoordinator(shipped.manifest, shipped.weights)
    assert fetch(coordinator, shipped.digest, tmp_path) == shipped
    assert fetch(coordinator, shipped.digest, tmp_path) == shipped
    assert coordinator.asked == 1


def test_flipped_weights_are_refused_and_not_kept(shipped: Artefact, tmp_path: Path) -> None:
    damaged = bytearray(shipped.weights)
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(CorruptReferenceError, match="weights"):
        fetch(FakeCoordinator(shipped.manifest, bytes(damaged)), shipped.digest, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_reference_is_refused_and_not_kept(shipped: Artefact, tmp_path: Path) -> None:
    with pytest.raises(CorruptReferenceError, match="asked for"):
        fetch(FakeCoordinator(shipped.manifest, shipped.weights), "0" * 64, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_cache_is_fetched_anew(shipped: Artefact, tmp_path: Path) -> None:
    coordinator = FakeCoordinator(shipped.manifest, shipped.weights)
    fetch(coordinator, shipped.digest, tmp_path)
    kept = tmp_path / shipped.digest / "weights.safetensors"
    kept.write_bytes(kept.read_bytes()[:-1])
    assert fetch(coordinator, shipped.digest, tmp_path) == shipped
    assert coordinator.asked == 2
    assert kept.read_bytes() == shipped.weights
