"""Fetches reference predictors to the device once, verifies them by digest, and caches them by content.

Since a coordinator may be broken or belong to someone else, its transfer is limited to the announced length, and by a
maximum.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from edge_agent.session.connection import Connect
from wattfleet.errors import CorruptReferenceError, InvalidInputError, WattfleetError
from wattfleet.prediction import MANIFEST_FILE, WEIGHTS_FILE, Artefact, write_artefact
from wattfleet_io.backoff import Backoff
from wattfleet_io.console import plain_text
from wattfleet_proto.message_sizes import MAX_MANIFEST_BYTES, MAX_REASON_LENGTH, MAX_WEIGHTS_BYTES
from wattfleet_proto.v1 import session_pb2

if TYPE_CHECKING:
    from edge_agent.session.signed_metadata import SignedReference

_log = logging.getLogger(__name__)

_MAX_FRUITLESS = 3
"""A reference counts as truncated after this many requests that the coordinator ends early without sending a byte."""

_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class ReferenceRefusedError(WattfleetError):
    """The coordinator refuses to send a reference that it named."""


async def reference_of_digest(
    digest: str, cache: Path, connect: Connect, timeout_s: float, signed: SignedReference | None = None
) -> Artefact:
    """Return the reference predictor with a digest, from the cache or from the coordinator.

    It is written to the cache only after its manifest and weights are verified, and is built from exactly the verified
    bytes. While the coordinator is unreachable, the fetch is repeated until it succeeds.

    Args:
        digest: sha256 of the manifest, hexadecimal.
        cache: folder with one sub-folder per digest.
        connect: opens a connection to the coordinator.
        timeout_s: limit on one request; the next one continues where it stopped.
        signed: the reference's signed metadata; None checks only its digest.

    Raises:
        CorruptReferenceError: the received reference does not match the digest or what was signed, or is longer or
            shorter than announced.
        ReferenceRefusedError: the coordinator refuses to send it.
        InvalidInputError: it cannot be written to the cache.
    """
    cached = cache / digest
    if cached.is_dir():
        try:
            return _cached(cached, digest, signed)
        except CorruptReferenceError as error:
            _log.warning("%s; fetching it again", error)
    backoff, fruitless, is_told = Backoff(), 0, False
    transfer = _Transfer(digest, signed)
    while True:
        before = len(transfer.weights)
        try:
            await _fetch(transfer, connect, timeout_s)
            if transfer.is_complete:
                break
            fruitless = 0 if len(transfer.weights) > before else fruitless + 1
            if fruitless == _MAX_FRUITLESS:
                raise CorruptReferenceError(
                    f"the coordinator sends only {len(transfer.weights):,} bytes of the reference's weights: publish "
                    f"the reference again"
                )
            problem = "the coordinator ended the reference early"
        except grpc.aio.AioRpcError as error:
            details = plain_text(error.details() or error.code().name, MAX_REASON_LENGTH)
            if error.code() not in _AWAY:
                raise ReferenceRefusedError(f"the coordinator did not send the reference: {details}") from None
            problem = f"the coordinator cannot be reached ({details})"
        if len(transfer.weights) > before:
            backoff.reset()
        if not is_told:
            _log.warning("the reference %s could not be fetched yet: %s; retrying", digest[:12], problem)
            is_told = True
        await backoff.pause()
    artefact = transfer.artefact()
    write_artefact(artefact, cached)
    if is_told:
        _log.info("fetched the reference %s", digest[:12])
    return artefact


def remove_old_references(cache: Path, used: Sequence[str], keep: int = 8) -> None:
    """Remove all references from the cache except the newest ones and those in use; log a failure.

    Args:
        cache: folder with one sub-folder per digest.
        used: digests of the references in use.
        keep: number of newest references to keep.
    """
    try:
        newest_first = sorted(cache.iterdir(), key=lambda each: each.lstat().st_mtime, reverse=True)
        for old in newest_first[keep:]:
            if old.name not in used and old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
    except OSError as error:
        _log.warning("%s: old references cannot be removed: %s", cache, error.strerror)


async def _fetch(transfer: _Transfer, connect: Connect, timeout_s: float) -> None:
    """Fetch the missing part of a reference; after an error, keep the part already received."""
    request = session_pb2.FetchReferenceRequest(digest=transfer.digest, weights_offset=len(transfer.weights))
    async with connect() as stub:
        has_begun = False
        async for message in stub.FetchReference(request, timeout=timeout_s):
            if message is None:  # gRPC's status for bytes that cannot be parsed as the message
                raise CorruptReferenceError("the coordinator sent a damaged message instead of a reference: try again")
            if not has_begun:
                transfer.begin(message)
                has_begun = True
            transfer.take(message.weights_chunk)


class _Transfer:
    """The transfer of a reference, over one or more requests.

    Args:
        digest: sha256 of the manifest, hexadecimal.
        signed: the reference's signed metadata; None checks only its digest.
    """

    def __init__(self, digest: str, signed: SignedReference | None) -> None:
        self.digest = digest
        self._signed = signed
        self.weights = bytearray()
        self._manifest = b""
        self._announced_bytes: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the announced weights have arrived."""
        return len(self.weights) == self._announced_bytes

    def begin(self, first: session_pb2.FetchReferenceResponse) -> None:
        """Process the first message of a request.

        Raises:
            CorruptReferenceError: the manifest is not the requested or signed one, or a length is out of range.
        """
        if not 0 < len(first.manifest) <= MAX_MANIFEST_BYTES:
            raise CorruptReferenceError(
                f"the coordinator sent a manifest of {len(first.manifest):,} bytes; 1 to {MAX_MANIFEST_BYTES:,} are"
                " accepted"
            )
        _require_digest(first.manifest, self.digest)
        if not 0 < first.weights_bytes <= MAX_WEIGHTS_BYTES:
            raise CorruptReferenceError(
                f"the coordinator announced weights of {first.weights_bytes:,} bytes; 1 to {MAX_WEIGHTS_BYTES:,} are"
                " accepted"
            )
        if self._signed is not None:
            self._signed.require_manifest(first.manifest)
            self._signed.require_length(first.weights_bytes)
        if first.weights_offset > len(self.weights):
            raise CorruptReferenceError(f"the coordinator left out bytes before {first.weights_offset:,}: try again")
        self._manifest, self._announced_bytes = first.manifest, first.weights_bytes
        # A coordinator that cannot resume starts from the beginning.
        del self.weights[first.weights_offset :]

    def take(self, chunk: bytes) -> None:
        """Append the next part of the weights.

        Raises:
            CorruptReferenceError: more bytes arrived than were announced.
        """
        if len(self.weights) + len(chunk) > (self._announced_bytes or 0):
            raise CorruptReferenceError(
                f"the coordinator sent more weights than the {self._announced_bytes:,} bytes announced"
            )
        self.weights += chunk

    def artefact(self) -> Artefact:
        """Return the verified reference.

        Raises:
            CorruptReferenceError: the weights do not match the manifest or what was signed, or this version does not
                know its format.
        """
        weights = bytes(self.weights)
        if self._signed is not None:
            self._signed.require_weights(weights)
        return _parsed(self._manifest, weights)


def _cached(folder: Path, digest: str, signed: SignedReference | None) -> Artefact:
    """Return a reference from the cache, checked like a received one: before any of it is parsed.

    Raises:
        CorruptReferenceError: it cannot be read, or does not match the digest or the signed metadata.
    """
    manifest = _content(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    weights = _content(folder / WEIGHTS_FILE, MAX_WEIGHTS_BYTES)
    _require_digest(manifest, digest)
    if signed is not None:
        signed.require_manifest(manifest)
        signed.require_weights(weights)
    return _parsed(manifest, weights)


def _content(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(1 + max_bytes)
    except OSError as error:
        raise CorruptReferenceError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise CorruptReferenceError(f"{path}: is longer than {max_bytes:,} bytes")
    return content


def _parsed(manifest: bytes, weights: bytes) -> Artefact:
    try:
        return Artefact(manifest, weights)
    except InvalidInputError as error:
        raise CorruptReferenceError(str(error)) from None


def _require_digest(manifest: bytes, digest: str) -> None:
    """Verify a manifest against its digest; the weights are verified against the manifest."""
    found = hashlib.sha256(manifest).hexdigest()
    if found != digest:
        raise CorruptReferenceError(f"asked for reference {digest[:12]}..., got {found[:12]}...: try again")
