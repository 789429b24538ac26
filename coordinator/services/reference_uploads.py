"""Receives reference predictors from operators, with limits on size, duration and number."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from coordinator.errors import QuotaExceededError, UploadTimeoutError
from coordinator.services.peer_quotas import host_of
from wattfleet.errors import InvalidInputError
from wattfleet_proto.message_sizes import MAX_MANIFEST_BYTES, MAX_WEIGHTS_BYTES
from wattfleet_proto.v1 import operator_pb2

UPLOAD_S = 60.0
"""The longest duration of an upload, in seconds."""

MAX_UPLOADS = 4
"""The most simultaneous uploads; they are kept in memory."""

MAX_UPLOADS_OF_HOST = 1


class ReferenceUploads:
    """The uploads in progress."""

    def __init__(self) -> None:
        """Start without any upload."""
        self._of_host: Counter[str] = Counter()

    @contextmanager
    def admitted(self, peer: str) -> Iterator[None]:
        """Count an upload while it is received and checked.

        Raises:
            QuotaExceededError: too many uploads are in progress.
        """
        host = host_of(peer)
        if self._of_host[host] >= MAX_UPLOADS_OF_HOST or self._of_host.total() >= MAX_UPLOADS:
            raise QuotaExceededError(
                f"another upload of a reference predictor is in progress: try again within {UPLOAD_S:g} s"
            )
        self._of_host[host] += 1
        try:
            yield
        finally:
            self._of_host[host] -= 1
            self._of_host += Counter()  # drops the hosts without an upload

    async def receive(self, parts: AsyncIterator[operator_pb2.PublishReferenceRequest]) -> tuple[bytes, bytes]:
        """Receive a manifest and weights.

        Raises:
            InvalidInputError: the files are too large.
            UploadTimeoutError: the files do not arrive in time.
        """
        manifest, weights = b"", bytearray()
        try:
            async with asyncio.timeout(UPLOAD_S):
                async for part in parts:
                    manifest = manifest or part.manifest
                    weights += part.weights_chunk
                    if len(weights) > MAX_WEIGHTS_BYTES:
                        raise InvalidInputError(
                            f"the weights of a reference must not exceed {MAX_WEIGHTS_BYTES // 2**20} MiB"
                        )
                    if len(manifest) > MAX_MANIFEST_BYTES:
                        raise InvalidInputError(
                            f"the manifest of a reference must not exceed {MAX_MANIFEST_BYTES // 1024} KiB"
                        )
        except TimeoutError:
            raise UploadTimeoutError(
                f"the reference did not arrive within {UPLOAD_S:g} s: publish it over a faster connection"
            ) from None
        return manifest, bytes(weights)
