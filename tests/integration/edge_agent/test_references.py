"""A reference is fetched once, and only data that matches its digest is kept."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest

import reference_models
from edge_agent.session.certificate_keeper import connects_to
from edge_agent.session.references import reference_of_digest, remove_old_references
from wattfleet.common.identity.channels import Endpoint
from wattfleet.core.errors import CorruptReferenceError
from wattfleet.core.prediction import Artefact
from wattfleet_proto.v1 import session_pb2, session_pb2_grpc

Away = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")


class FakeCoordinator:
    """Sends these bytes, in small chunks."""

    def __init__(self, manifest: bytes, weights: bytes, breaks_after: int | None = None, resumes: bool = True) -> None:
        self.manifest = manifest
        self.weights = weights
        self.breaks_after = breaks_after
        self.resumes = resumes
        self.asked = 0
        self.sent = 0

    async def FetchReference(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchReferenceRequest, timeout: float
    ) -> AsyncIterator[session_pb2.FetchReferenceResponse]:
        self.asked += 1
        offset = request.weights_offset if self.resumes else 0
        yield session_pb2.FetchReferenceResponse(
            manifest=self.manifest, weights_offset=offset, weights_bytes=len(self.weights)
        )
        for start in range(offset, len(self.weights), 1000):
            if self.breaks_after is not None and start >= self.breaks_after:
                self.breaks_after = None
                raise Away
            chunk = self.weights[start : start + 1000]
            self.sent += len(chunk)
            yield session_pb2.FetchReferenceResponse(weights_chunk=chunk)


@pytest.fixture(scope="module")
def shipped() -> Artefact:
    return reference_models.load("agx_orin_resnet18")


def fetch(coordinator: FakeCoordinator, digest: str, cache: Path) -> Artefact:
    return asyncio.run(reference_of_digest(digest, cache, lambda: nullcontext(coordinator), 30.0))  # type: ignore[arg-type]


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


def test_the_newest_references_and_the_used_one_are_kept(tmp_path: Path) -> None:
    for k in range(12):
        (tmp_path / f"digest-{k:02}").mkdir()
        os.utime(tmp_path / f"digest-{k:02}", (k, k))
    remove_old_references(tmp_path, used=["digest-01"])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["digest-01", *(f"digest-{k:02}" for k in range(4, 12))]


def test_a_link_in_the_cache_is_not_followed(tmp_path: Path) -> None:
    cache, other = tmp_path / "cache", tmp_path / "other"
    other.mkdir()
    (other / "precious").touch()
    cache.mkdir()
    for k in range(12):
        (cache / f"digest-{k}").symlink_to(other)
    remove_old_references(cache, used=["digest-1"])
    assert (other / "precious").exists()


def test_a_fetch_that_breaks_off_goes_on_where_it_stopped(shipped: Artefact, tmp_path: Path) -> None:
    coordinator = FakeCoordinator(shipped.manifest, shipped.weights, breaks_after=5000)
    assert fetch(coordinator, shipped.digest, tmp_path) == shipped
    assert (coordinator.asked, coordinator.sent) == (2, len(shipped.weights))


def test_a_coordinator_that_cannot_resume_is_asked_for_everything(shipped: Artefact, tmp_path: Path) -> None:
    coordinator = FakeCoordinator(shipped.manifest, shipped.weights, breaks_after=5000, resumes=False)
    assert fetch(coordinator, shipped.digest, tmp_path) == shipped
    assert coordinator.sent == len(shipped.weights) + 5000


class StallingCoordinator(session_pb2_grpc.SessionServiceServicer):
    """Falls silent after the first half; later calls are answered from the requested offset."""

    def __init__(self, artefact: Artefact) -> None:
        self.artefact = artefact
        self.offsets: list[int] = []

    async def FetchReference(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchReferenceRequest, context: Any
    ) -> AsyncIterator[session_pb2.FetchReferenceResponse]:
        self.offsets.append(request.weights_offset)
        offset, half = request.weights_offset, len(self.artefact.weights) // 2
        yield session_pb2.FetchReferenceResponse(
            manifest=self.artefact.manifest, weights_offset=offset, weights_bytes=len(self.artefact.weights)
        )
        if not offset:
            yield session_pb2.FetchReferenceResponse(weights_chunk=self.artefact.weights[:half])
            await asyncio.Event().wait()
        yield session_pb2.FetchReferenceResponse(weights_chunk=self.artefact.weights[offset:])


async def test_a_fetch_that_stalls_goes_on_where_it_stopped(shipped: Artefact, tmp_path: Path) -> None:
    coordinator = StallingCoordinator(shipped)

    async def body() -> Artefact:
        server = grpc.aio.server()
        session_pb2_grpc.add_SessionServiceServicer_to_server(coordinator, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            fetched = reference_of_digest(shipped.digest, tmp_path, connects_to(Endpoint(f"127.0.0.1:{port}")), 0.5)
            return await asyncio.wait_for(fetched, 20)
        finally:
            await server.stop(None)

    assert (await body()) == shipped
    assert coordinator.offsets == [0, len(shipped.weights) // 2]


class EndlessCoordinator(FakeCoordinator):
    """Announces a length and sends more than that, 1 MB at a time, up to a bound that keeps the test small."""

    def __init__(self, manifest: bytes, announced: int) -> None:
        super().__init__(manifest, b"")
        self.announced = announced

    async def FetchReference(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchReferenceRequest, timeout: float
    ) -> AsyncIterator[session_pb2.FetchReferenceResponse]:
        yield session_pb2.FetchReferenceResponse(manifest=self.manifest, weights_bytes=self.announced)
        for _ in range(100):
            self.sent += 1_000_000
            yield session_pb2.FetchReferenceResponse(weights_chunk=bytes(1_000_000))


@pytest.mark.parametrize("announced", [0, 5000, 2**40])
def test_an_endless_reference_is_refused_after_the_announced_length(
    shipped: Artefact, tmp_path: Path, announced: int
) -> None:
    coordinator = EndlessCoordinator(shipped.manifest, announced)
    with pytest.raises(CorruptReferenceError, match="announce"):
        fetch(coordinator, shipped.digest, tmp_path)
    assert coordinator.sent <= 1_000_000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (session_pb2.FetchReferenceResponse(manifest=b"{}", weights_bytes=10), "asked for"),
        (session_pb2.FetchReferenceResponse(manifest=bytes(2_000_000), weights_bytes=10), "manifest"),
        (session_pb2.FetchReferenceResponse(weights_chunk=b"before the manifest"), "manifest"),
    ],
)
def test_a_reference_that_begins_wrongly_is_refused_before_its_weights(
    shipped: Artefact, tmp_path: Path, message: session_pb2.FetchReferenceResponse, why: str
) -> None:
    class Wrong(FakeCoordinator):
        async def FetchReference(self, request: Any, timeout: float) -> AsyncIterator[Any]:  # noqa: N802
            yield message
            for _ in range(100):
                self.sent += 1_000_000
                yield session_pb2.FetchReferenceResponse(weights_chunk=bytes(1_000_000))

    coordinator = Wrong(shipped.manifest, b"")
    with pytest.raises(CorruptReferenceError, match=why):
        fetch(coordinator, shipped.digest, tmp_path)
    assert coordinator.sent == 0
