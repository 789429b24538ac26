"""Checks the references' signed metadata with The Update Framework's client, over the coordinator's own service."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from tuf.api import exceptions
from tuf.api.metadata import TargetFile
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from edge_agent.session.reference_trust import CoordinatorAwayError, ReferenceUntrustedError, Refusal
from wattfleet_io.atomic_files import make_state_folder
from wattfleet_io.console import plain_text
from wattfleet_io.tasks import run_uncancelled
from wattfleet_proto.message_sizes import MAX_METADATA_BYTES, MAX_REASON_LENGTH
from wattfleet_proto.signed_references import MAX_ROOTS, TIMESTAMP_FILE, target_names
from wattfleet_proto.v1 import session_pb2

_CONFIG = UpdaterConfig(
    max_root_rotations=MAX_ROOTS,
    max_delegations=0,
    root_max_length=MAX_METADATA_BYTES,
    timestamp_max_length=MAX_METADATA_BYTES,
    snapshot_max_length=MAX_METADATA_BYTES,
    targets_max_length=MAX_METADATA_BYTES,
)
_BASE = "metadata:/"
_NO_SUCH_FILE = 404
_TOO_LARGE = "larger than max"
"""From gRPC's error text, since the coordinator uses the same status while it is busy."""

_LATEST = datetime.max.replace(tzinfo=timezone.utc)


class _AwayError(exceptions.DownloadError):
    """The coordinator does not answer."""


class NamedTargets:
    """The reference files that the signed metadata names.

    Args:
        updater: the updater that has fetched and checked all metadata.
        checked_at: the time against which expiry was checked.
    """

    def __init__(self, updater: Updater, checked_at: datetime) -> None:
        self._updater = updater
        self.checked_at = checked_at

    def names(self, digest: str) -> bool:
        """Return whether the metadata names a reference."""
        return all(self._updater.get_targetinfo(name) is not None for name in target_names(digest))

    def of_digest(self, digest: str) -> SignedReference:
        """Return the signed metadata of a reference.

        Raises:
            ReferenceUntrustedError: the metadata does not name the reference.
        """
        found = [self._updater.get_targetinfo(name) for name in target_names(digest)]
        manifest, weights = found
        if manifest is None or weights is None:
            raise ReferenceUntrustedError(
                f"the signed metadata does not name the reference {digest[:12]}...: sign it with `wattfleet coordinator"
                " reference sign`",
                Refusal.NOT_NAMED,
            )
        return SignedReference(manifest, weights)


class SignedReference:
    """The signed lengths and digests of one reference.

    Args:
        manifest: those of its manifest.
        weights: those of its weights.
    """

    def __init__(self, manifest: TargetFile, weights: TargetFile) -> None:
        self._manifest = manifest
        self._weights = weights

    def require_length(self, weights_bytes: int) -> None:
        """Check the announced length of the weights.

        Raises:
            ReferenceUntrustedError: it differs from what was signed.
        """
        if weights_bytes != self._weights.length:
            raise ReferenceUntrustedError(
                f"the weights of the reference have {weights_bytes:,} bytes, but the signed length is "
                f"{self._weights.length:,}: publish the reference again",
                Refusal.TAMPERED,
            )

    def require_manifest(self, content: bytes) -> None:
        """Check a manifest's length and digest.

        Raises:
            ReferenceUntrustedError: it differs from what was signed.
        """
        _require_same(self._manifest, content, "manifest")

    def require_weights(self, content: bytes) -> None:
        """Check the weights' length and digest.

        Raises:
            ReferenceUntrustedError: they differ from what was signed.
        """
        _require_same(self._weights, content, "weights")


def _require_same(signed: TargetFile, content: bytes, what: str) -> None:
    try:
        signed.verify_length_and_hashes(content)
    except exceptions.LengthOrHashMismatchError:
        raise ReferenceUntrustedError(
            f"the {what} of the reference differ from what was signed: publish the reference again", Refusal.TAMPERED
        ) from None


class _UpdaterAt(Updater):
    """An updater that checks expiry against a given time; the library itself always uses the system's clock."""

    def __init__(self, folder: Path, root: bytes, fetcher: FetcherInterface, at: datetime) -> None:
        super().__init__(str(folder), _BASE, fetcher=fetcher, config=_CONFIG, bootstrap=root)
        self._trusted_set.reference_time = at


async def checked_targets(folder: Path, root: bytes, stub: Any, timeout_s: float, now: datetime) -> NamedTargets:
    """Fetch and check all metadata of references.

    Args:
        folder: the folder for the newest metadata.
        root: the root that the device trusts.
        stub: the stub of the coordinator's service.
        timeout_s: limit on each request.
        now: a lower bound of the current time. The coordinator's clock is used if it is later: it can make metadata
            expire earlier, but never later.

    Raises:
        ReferenceUntrustedError: the metadata cannot be trusted; `refusal` gives the reason.
        CoordinatorAwayError: the coordinator does not answer.
        OSError: the folder cannot be written.
    """
    fetcher = _CoordinatorFetcher(stub, timeout_s, asyncio.get_running_loop())
    refreshing = asyncio.ensure_future(asyncio.to_thread(_refreshed, folder, root, fetcher, now))
    try:
        return await asyncio.shield(refreshing)
    except asyncio.CancelledError:
        # Only one client may use the folder at a time.
        fetcher.stop()
        with suppress(Exception):
            await run_uncancelled(_ended(refreshing))
        raise


async def _ended(work: asyncio.Future[NamedTargets]) -> NamedTargets:
    return await work


def _refreshed(folder: Path, root: bytes, fetcher: _CoordinatorFetcher, now: datetime) -> NamedTargets:
    with _named_errors():
        fetcher.download_bytes(_BASE + TIMESTAMP_FILE, MAX_METADATA_BYTES)
        at = max(now, fetcher.coordinator_time)
        make_state_folder(folder)
        updater = _UpdaterAt(folder, root, fetcher, at)
        updater.refresh()
    return NamedTargets(updater, at)


_NAMES: Mapping[type[Exception], tuple[Refusal, str]] = {
    exceptions.UnsignedMetadataError: (Refusal.UNSIGNED, "lacks signatures by the keys that this device trusts"),
    exceptions.ExpiredMetadataError: (Refusal.EXPIRED, "has expired, so that newer references may be held back"),
    exceptions.BadVersionNumberError: (Refusal.ROLLED_BACK, "is older than what this device has seen"),
    exceptions.LengthOrHashMismatchError: (Refusal.MIXED, "was changed, or its files do not belong together"),
    exceptions.DownloadLengthMismatchError: (Refusal.TOO_LONG, "is longer than allowed"),
    exceptions.RepositoryError: (Refusal.DAMAGED, "is damaged"),
}
"""Why metadata is refused, by the library's error class; subclasses come before their base classes."""


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except _AwayError as error:
        raise CoordinatorAwayError(f"the coordinator cannot be reached ({error})") from error
    except exceptions.DownloadHTTPError as error:
        raise ReferenceUntrustedError(
            "the coordinator has no signed metadata of references: publish it (docs/references.md)", Refusal.UNSIGNED
        ) from error
    except (exceptions.RepositoryError, exceptions.DownloadLengthMismatchError) as error:
        refusal, text = next(found for kind, found in _NAMES.items() if isinstance(error, kind))
        details = plain_text(str(error), MAX_REASON_LENGTH)
        raise ReferenceUntrustedError(f"the references' signed metadata {text} ({details})", refusal) from error
    except (exceptions.DownloadError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReferenceUntrustedError(
            "the references' signed metadata cannot be read: publish it again", Refusal.DAMAGED
        ) from error


class _CoordinatorFetcher(FetcherInterface):
    """Fetches metadata files for a thread other than the event loop's.

    Args:
        stub: the stub of the coordinator's service.
        timeout_s: limit on one request.
        loop: the stub's event loop.

    Attributes:
        coordinator_time: the coordinator's clock, as of the last answer.
    """

    def __init__(self, stub: Any, timeout_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._stub = stub
        self._timeout_s = timeout_s
        self._loop = loop
        self._is_stopped = False
        self._request: concurrent.futures.Future[bytes] | None = None
        self.coordinator_time = datetime.min.replace(tzinfo=timezone.utc)

    def stop(self) -> None:
        """Cancel the request in progress, and refuse all later ones."""
        self._is_stopped = True
        if self._request is not None:
            self._request.cancel()

    def _fetch(self, url: str) -> Iterator[bytes]:
        self._request = asyncio.run_coroutine_threadsafe(self._asked(unquote(url.removeprefix(_BASE))), self._loop)
        if self._is_stopped:
            self._request.cancel()
        return iter([self._request.result()])

    async def _asked(self, name: str) -> bytes:
        try:
            answer = await self._stub.FetchMetadata(
                session_pb2.FetchMetadataRequest(name=name), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
                raise exceptions.DownloadHTTPError(f"there is no {name}", _NO_SUCH_FILE) from None
            details = plain_text(error.details() or error.code().name, MAX_REASON_LENGTH)
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
                raise exceptions.DownloadLengthMismatchError(f"{name} is longer than the limit on a message") from None
            raise _AwayError(details) from None
        if answer is None:  # gRPC's status for bytes that cannot be parsed as the message
            raise exceptions.RepositoryError("the coordinator sent a damaged message")
        self.coordinator_time = _time_of(answer.coordinator_unix_s)
        return bytes(answer.content)


def _time_of(unix_s: float) -> datetime:
    """Convert a time stated by another machine; times too late to represent become the latest possible one."""
    if not math.isfinite(unix_s) or unix_s < 0:
        unix_s = 0.0
    try:
        return datetime.fromtimestamp(unix_s, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return _LATEST
