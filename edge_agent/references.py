"""Reference predictors on the device: fetched once, checked by digest, kept by content."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path

import grpc

from wattfleet.artefact import Artefact, read_directory, write_directory
from wattfleet.errors import CorruptReferenceError, WattfleetError
from wattfleet_proto.v1 import session_pb2, session_pb2_grpc

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 30.0


class ReferenceRefusedError(WattfleetError):
    """The coordinator does not hand out the reference that it named."""


async def reference_of_digest(digest: str, cache: Path, stub: session_pb2_grpc.SessionServiceAsyncStub) -> Artefact:
    """The reference predictor of a digest, from the cache or from the coordinator.

    Nothing is written before the manifest has the digest and the weights are what the manifest says.

    Args:
        digest: sha256 of the manifest, hexadecimal.
        cache: folder with one sub-folder per digest.
        stub: the coordinator.

    Raises:
        CorruptReferenceError: what came is not what the digest stands for.
        ReferenceRefusedError: the coordinator does not hand it out.
    """
    kept = cache / digest
    if kept.is_dir():
        try:
            return _checked(read_directory(kept), digest)
        except CorruptReferenceError as error:
            _log.warning("%s; fetching it anew", error)
    backoff_s = _FIRST_BACKOFF_S
    manifest, weights = bytearray(), bytearray()
    while True:
        try:
            await _fetch(digest, stub, manifest, weights)
            break
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise ReferenceRefusedError(
                    f"the coordinator did not hand out the reference: {error.details()}"
                ) from None
            _log.warning("coordinator away: %s", error.details())
        await asyncio.sleep(random.uniform(0, backoff_s))
        backoff_s = min(_LONGEST_BACKOFF_S, 2 * backoff_s)
    artefact = _checked(Artefact(bytes(manifest), bytes(weights)), digest)
    write_directory(artefact, kept)
    return artefact


async def _fetch(
    digest: str, stub: session_pb2_grpc.SessionServiceAsyncStub, manifest: bytearray, weights: bytearray
) -> None:
    """Fetch what is not there yet of a reference; what came before a break stays."""
    request = session_pb2.FetchReferenceRequest(digest=digest, weights_offset=len(weights))
    async for message in stub.FetchReference(request):
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
