"""Reference predictors on the device: fetched once, checked by digest, kept by content."""

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

# One that has stalled is begun anew, and so is one that is slow: it goes on where it stopped.
_FETCHED_WITHIN_S = 30.0
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class ReferenceRefusedError(WattfleetError):
    """The coordinator does not hand out the reference that it named."""


async def reference_of_digest(digest: str, cache: Path, connect: Connect) -> Artefact:
    """The reference predictor of a digest, from the cache or from the coordinator.

    Nothing is written before the manifest has the digest and the weights are what the manifest says.

    Args:
        digest: sha256 of the manifest, hexadecimal.
        cache: folder with one sub-folder per digest.
        connect: opens a connection to the coordinator.

    Raises:
        CorruptReferenceError: what came is not what the digest stands for.
        ReferenceRefusedError: the coordinator does not hand it out.
    """
    kept = cache / digest
    if kept.is_dir():
        try:
            return _checked(read_artefact(kept), digest)
        except CorruptReferenceError as error:
            _log.warning("%s; fetching it anew", error)
    backoff = Backoff()
    manifest, weights = bytearray(), bytearray()
    while True:
        before = len(weights)
        try:
            await _fetch(digest, connect, manifest, weights)
            break
        except grpc.aio.AioRpcError as error:
            if error.code() not in _AWAY:
                raise ReferenceRefusedError(
                    f"the coordinator did not hand out the reference: {error.details()}"
                ) from None
            _log.warning("coordinator away: %s", error.details())
        if len(weights) > before:
            backoff.reset()
        await backoff.pause()
    artefact = _checked(Artefact(bytes(manifest), bytes(weights)), digest)
    write_artefact(artefact, kept)
    return artefact


async def _fetch(digest: str, connect: Connect, manifest: bytearray, weights: bytearray) -> None:
    """Fetch what is not there yet of a reference; what came before a break stays."""
    request = session_pb2.FetchReferenceRequest(digest=digest, weights_offset=len(weights))
    async with connect() as stub:
        async for message in stub.FetchReference(request, timeout=_FETCHED_WITHIN_S):
            if message.manifest:
                manifest[:] = message.manifest
                # A coordinator of protocol 1.0 begins anew.
                del weights[message.weights_offset :]
            weights += message.weights_chunk


def _checked(artefact: Artefact, digest: str) -> Artefact:
    """The weights were checked against the manifest; this checks the manifest against what was asked for."""
    if artefact.digest != digest:
        raise CorruptReferenceError(f"asked for reference {digest[:12]}..., got {artefact.digest[:12]}...: try again")
    return artefact
