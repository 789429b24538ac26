"""Reference predictors on the device: fetched once, verified by digest, cached by content."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc

from edge_agent.session.connection import Connect
from wattfleet.errors import CorruptReferenceError, WattfleetError
from wattfleet.prediction import Artefact, read_artefact, write_artefact
from wattfleet_io.backoff import Backoff
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)

_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class ReferenceRefusedError(WattfleetError):
    """The coordinator refuses to send the reference that it named."""


async def reference_of_digest(digest: str, cache: Path, connect: Connect, timeout_s: float) -> Artefact:
    """The reference predictor of a digest, from the cache or from the coordinator.

    It is written to the cache only after manifest and weights were verified. While the coordinator is away, the fetch
    is repeated until it succeeds.

    Args:
        digest: sha256 of the manifest, hexadecimal.
        cache: folder with one sub-folder per digest.
        connect: opens a connection to the coordinator.
        timeout_s: limit on one request; the next one continues where it stopped.

    Raises:
        CorruptReferenceError: the received reference does not match the digest.
        ReferenceRefusedError: the coordinator refuses to send it.
    """
    cached = cache / digest
    if cached.is_dir():
        try:
            return _verified(read_artefact(cached), digest)
        except CorruptReferenceError as error:
            _log.warning("%s; fetching it again", error)
    backoff = Backoff()
    manifest, weights = bytearray(), bytearray()
    while True:
        before = len(weights)
        try:
            await _fetch(digest, connect, manifest, weights, timeout_s)
            break
        except grpc.aio.AioRpcError as error:
            if error.code() not in _AWAY:
                raise ReferenceRefusedError(f"the coordinator did not send the reference: {error.details()}") from None
            _log.warning("the coordinator is away (%s); retrying", error.details())
        if len(weights) > before:
            backoff.reset()
        await backoff.pause()
    artefact = _verified(Artefact(bytes(manifest), bytes(weights)), digest)
    write_artefact(artefact, cached)
    return artefact


async def _fetch(digest: str, connect: Connect, manifest: bytearray, weights: bytearray, timeout_s: float) -> None:
    """Fetch the missing part of a reference; the part received before an error is kept."""
    request = session_pb2.FetchReferenceRequest(digest=digest, weights_offset=len(weights))
    async with connect() as stub:
        async for message in stub.FetchReference(request, timeout=timeout_s):
            if message.manifest:
                manifest[:] = message.manifest
                # A coordinator of protocol 1.0 starts from the beginning.
                del weights[message.weights_offset :]
            weights += message.weights_chunk


def _verified(artefact: Artefact, digest: str) -> Artefact:
    """Verify the manifest against its digest; the weights were verified against the manifest already."""
    if artefact.digest != digest:
        raise CorruptReferenceError(f"asked for reference {digest[:12]}..., got {artefact.digest[:12]}...: try again")
    return artefact
