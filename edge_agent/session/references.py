"""Fetches reference predictors to the device once, verifies them by digest, and caches them by content.

Since a coordinator may be broken or belong to someone else, its transfer is limited to the announced length, and by a
maximum.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import json
import logging
import math
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from tuf.api import exceptions
from tuf.api.metadata import TargetFile
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from edge_agent.session.certificate_keeper import Connect
from reference_models import load, shipped
from wattfleet.common.atomic_files import make_state_folder, read_regular_file, replace_file
from wattfleet.common.clock import unix_now_s
from wattfleet.common.console import plain_text
from wattfleet.common.parsing import parse_json_object, utc_from
from wattfleet.common.tasks import Backoff, run_uncancelled
from wattfleet.core.errors import CorruptReferenceError, InvalidInputError, WattfleetError
from wattfleet.core.prediction import MANIFEST_FILE, WEIGHTS_FILE, Artefact, write_artefact
from wattfleet_proto.limits import MAX_MANIFEST_BYTES, MAX_METADATA_BYTES, MAX_REASON_LENGTH, MAX_WEIGHTS_BYTES
from wattfleet_proto.names import MAX_ROOTS, TIMESTAMP_FILE, target_names
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)


# --- Reference trust --------------------------------------------------------------------------------------------------
# A device's trust in its operator's references, and the references in force.
#
# The folder is `reference-trust` in the state directory. Without it, a device accepts all references that its
# coordinator names, as on a single machine.


_ROOT_FILE = "root.json"
_METADATA_FOLDER = "metadata"
_STATUS_FILE = "in-force.json"


class Refusal(str, Enum):
    """Why a reference or its signed metadata is refused."""

    UNSIGNED = "unsigned"
    ROLLED_BACK = "rolled back"
    EXPIRED = "expired"
    MIXED = "mixed"
    TOO_LONG = "too long"
    DAMAGED = "damaged"
    TAMPERED = "tampered"
    NOT_NAMED = "not named"


class ReferenceUntrustedError(CorruptReferenceError):
    """A reference or its metadata differs from what the operator signed; the text gives the reason.

    Attributes:
        refusal: the kind of problem.
    """

    def __init__(self, text: str, refusal: Refusal = Refusal.DAMAGED) -> None:
        super().__init__(f"{refusal.value}: {text}")
        self.refusal = refusal


class CoordinatorAwayError(WattfleetError):
    """The coordinator does not answer a request for signed metadata: try again."""


@dataclass(frozen=True)
class ReferenceStatus:
    """The references accepted last.

    Attributes:
        digests: digests of the references in force.
        refused: why references named by the coordinator are refused; empty if none is.
        checked_unix_s: the latest time at which metadata was trusted, seconds since 1970; 0 if never.
    """

    digests: tuple[str, ...] = ()
    refused: str = ""
    checked_unix_s: float = 0.0


class ReferenceTrust:
    """A device's trust in references.

    Args:
        folder: `reference-trust` in the state directory; it may be absent.
        now_s: returns the date and time, seconds since 1970.
    """

    def __init__(self, folder: Path, now_s: Callable[[], float] = unix_now_s) -> None:
        self._folder = folder
        self._now_s = now_s

    @property
    def is_required(self) -> bool:
        """Whether references have to be signed, even if the folder has lost its root."""
        return self._folder.exists()

    @property
    def status(self) -> ReferenceStatus:
        """The references in force.

        Raises:
            InvalidInputError: the file cannot be read, or is damaged.
        """
        path = self._folder / _STATUS_FILE
        try:
            return _status_of(parse_json_object(read_regular_file(path)))
        except FileNotFoundError:
            return ReferenceStatus()
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise InvalidInputError(f"{path}: is damaged; the agent writes it again") from None

    def note(self, status: ReferenceStatus) -> None:
        """Replace the status.

        Raises:
            OSError: it cannot be written.
        """
        content = {
            "digests": list(status.digests),
            "refused": status.refused,
            "checked_unix_s": status.checked_unix_s,
        }
        replace_file(self._folder / _STATUS_FILE, json.dumps(content).encode() + b"\n")

    async def targets(self, stub: Any, timeout_s: float, checked_unix_s: float) -> NamedTargets:
        """Fetch the signed metadata from the coordinator, check it and return it.

        Args:
            stub: the stub of the coordinator's service.
            timeout_s: limit on each request.
            checked_unix_s: a time that has certainly passed, for boards whose clock restarts at boot; seconds since
                1970.

        Raises:
            ReferenceUntrustedError: the metadata cannot be trusted.
            CoordinatorAwayError: the coordinator does not answer.
            OSError: the folder cannot be read or written.
        """
        root = read_regular_file(self._folder / _ROOT_FILE)
        now = datetime.fromtimestamp(max(self._now_s(), checked_unix_s), timezone.utc)
        return await checked_targets(self._folder / _METADATA_FOLDER, root, stub, timeout_s, now)


def trust_root(folder: Path, root: bytes, now_s: float) -> str:
    """Make a device trust only references signed by a root's keys.

    This replaces an earlier root, and references accepted under that root are forgotten.

    Args:
        folder: `reference-trust` in the state directory; it is created.
        root: the content of a root file.
        now_s: a time that has passed, seconds since 1970; expiry is never checked against an earlier time.

    Returns:
        The root's hexadecimal digest, for people to compare.

    Raises:
        InvalidInputError: the root is not signed by its own keys, or the folder cannot be written.
    """
    from tuf.api.exceptions import RepositoryError
    from tuf.api.metadata import Metadata, Root

    try:
        if len(root) > MAX_METADATA_BYTES:
            raise ValueError
        metadata = Metadata[Root].from_bytes(root)
        if not isinstance(metadata.signed, Root):
            raise ValueError
        metadata.signed.verify_delegate(Root.type, metadata.signed_bytes, metadata.signatures)
    except (RepositoryError, ValueError, RecursionError):
        raise InvalidInputError(
            "this is not a root of signed references: pass the newest N.root.json from the operator's folder"
        ) from None
    try:
        make_state_folder(folder)
        path = folder / _ROOT_FILE
        if not path.exists() or read_regular_file(path) != root:
            (folder / _STATUS_FILE).unlink(missing_ok=True)
            shutil.rmtree(folder / _METADATA_FOLDER, ignore_errors=True)
            ReferenceTrust(folder).note(ReferenceStatus(checked_unix_s=now_s))
            replace_file(path, root)
    except OSError as error:
        raise InvalidInputError(f"{folder}: cannot be written: {error.strerror}") from None
    return hashlib.sha256(root).hexdigest()


def _status_of(content: dict[str, Any]) -> ReferenceStatus:
    digests, refused, checked_unix_s = content["digests"], content["refused"], content["checked_unix_s"]
    if not (
        isinstance(digests, list)
        and all(isinstance(each, str) for each in digests)
        and isinstance(refused, str)
        and isinstance(checked_unix_s, int | float)
        and checked_unix_s >= 0
    ):
        raise ValueError
    utc_from(checked_unix_s)
    return ReferenceStatus(tuple(digests), refused, float(checked_unix_s))


# --- Signed metadata --------------------------------------------------------------------------------------------------
# Checks the references' signed metadata with The Update Framework's client, over the coordinator's own service.

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
            if error.code() is grpc.StatusCode.NOT_FOUND:
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
        return utc_from(unix_s)
    except ValueError:
        return _LATEST


# --- References -------------------------------------------------------------------------------------------------------

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
        """Process the first message of a request."""
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
        """Append the next part of the weights."""
        if len(self.weights) + len(chunk) > (self._announced_bytes or 0):
            raise CorruptReferenceError(
                f"the coordinator sent more weights than the {self._announced_bytes:,} bytes announced"
            )
        self.weights += chunk

    def artefact(self) -> Artefact:
        """Return the verified reference."""
        weights = bytes(self.weights)
        if self._signed is not None:
            self._signed.require_weights(weights)
        return _parsed(self._manifest, weights)


def _cached(folder: Path, digest: str, signed: SignedReference | None) -> Artefact:
    """Return a reference from the cache, checked like a received one: before any of it is parsed."""
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


# --- Accepted references ----------------------------------------------------------------------------------------------
# Decides which references a device uses: those named by its coordinator and, with a trusted root, also signed.
#
# While a reference is refused, the previously accepted ones stay in force.

REQUEST_TIMEOUT_S = 30.0
"""Time limit of one request for a reference, s; the next request continues where it stopped."""

_UNUSABLE = (CorruptReferenceError, ReferenceRefusedError)


class AcceptedReferences:
    """Fetches and checks references.

    Args:
        cache: folder with one sub-folder per digest.
        trust: what the device trusts.
        connect: opens a connection to the coordinator.
        timeout_s: limit on one request.
        retry_s: refused references are checked again after about this time, seconds.

    Attributes:
        refused: why references named by the coordinator are not used; empty while all are used.
    """

    def __init__(self, cache: Path, trust: ReferenceTrust, connect: Connect, timeout_s: float, retry_s: float) -> None:
        self._cache = cache
        self._trust = trust
        self._connect = connect
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._is_any_refused = asyncio.Event()
        self.refused = ""

    async def of(self, digests: Sequence[str]) -> list[Artefact]:
        """Return the references to transfer from, the most important first.

        If the first is refused, the references in force stay in use. Another one that cannot be used is left out. While
        the coordinator is unreachable, this waits for it, unless the references were accepted before.

        Args:
            digests: digests of the references that the coordinator names.

        Raises:
            CorruptReferenceError: the first cannot be used, and no reference was accepted before.
            ReferenceRefusedError: the coordinator refuses to send it, and no reference was accepted before.
            InvalidInputError: a reference cannot be written to the cache.
        """
        self._is_any_refused.clear()
        self.refused = ""
        if not self._trust.is_required:
            return await self._usable(digests, lambda _: None)
        try:
            return await self._checked(digests)
        except _UNUSABLE as error:
            return await self._in_force_instead(error)
        finally:
            if self.refused:
                self._is_any_refused.set()

    async def wait_until_accepted(self, digests: Sequence[str]) -> None:
        """Wait until all refused references are accepted.

        Args:
            digests: digests of the references that the coordinator names.
        """
        while True:
            await self._is_any_refused.wait()
            await asyncio.sleep(random.uniform(0.5, 1.0) * self._retry_s)
            in_force = self._status().digests
            with suppress(InvalidInputError, *_UNUSABLE):
                if _digests(await self._checked(digests)) != in_force:
                    return

    async def _checked(self, digests: Sequence[str]) -> list[Artefact]:
        """Return those references named by the coordinator that are signed, and put them in force."""
        before = self._status()
        if all(map(_is_shipped, digests)):
            references, checked_unix_s = await self._usable(digests, lambda _: None), before.checked_unix_s
        elif (targets := await self._targets(digests, before)) is None:
            return await self._usable(digests, lambda _: None)
        else:
            checked_unix_s = targets.checked_at.timestamp()
            # References that the operator no longer signs do not stay in force, either.
            named = tuple(each for each in before.digests if _is_shipped(each) or targets.names(each))
            self._note(ReferenceStatus(named, before.refused, checked_unix_s))
            references = await self._usable(
                digests, lambda digest: None if _is_shipped(digest) else targets.of_digest(digest)
            )
        self._note(ReferenceStatus(_digests(references), self.refused, checked_unix_s))
        return references

    async def _targets(self, digests: Sequence[str], before: ReferenceStatus) -> NamedTargets | None:
        """Return what is signed; None while the coordinator is unreachable, if the references were accepted before."""
        backoff, is_told = Backoff(), False
        while True:
            try:
                async with self._connect() as stub:
                    return await self._trust.targets(stub, self._timeout_s, before.checked_unix_s)
            except OSError as error:
                raise ReferenceUntrustedError(
                    f"{error.filename}: cannot be used: {error.strerror}", Refusal.DAMAGED
                ) from None
            except CoordinatorAwayError as error:
                if set(digests) <= set(before.digests):
                    return None
                if not is_told:
                    _log.warning("%s; retrying until it answers", error)
                    is_told = True
            await backoff.pause()

    async def _usable(
        self, digests: Sequence[str], signed_of: Callable[[str], SignedReference | None]
    ) -> list[Artefact]:
        """Fetch references; leave out one that cannot be used, unless it is the first."""
        references, problems = [], []
        for digest in digests:
            try:
                signed = signed_of(digest)
                references.append(
                    await reference_of_digest(digest, self._cache, self._connect, self._timeout_s, signed)
                )
            except _UNUSABLE as error:
                if not references:
                    raise
                problems.append(f"the reference {digest[:12]} is not used: {_shown(error)}")
                _log.error("%s", problems[-1])
        self.refused = "; ".join(problems)
        return references

    async def _in_force_instead(self, error: WattfleetError) -> list[Artefact]:
        """Return the references in force, to use instead of refused ones."""
        before, references = self._status(), []
        for digest in before.digests:
            with suppress(*_UNUSABLE):
                references.append(await reference_of_digest(digest, self._cache, self._connect, self._timeout_s))
        self.refused = f"the coordinator's reference is refused: {_shown(error)}"
        self._note(ReferenceStatus(before.digests, self.refused, before.checked_unix_s))
        if not references:
            raise error
        _log.error("%s; the reference %s stays in force", self.refused, references[0].digest[:12])
        return references

    def _status(self) -> ReferenceStatus:
        try:
            return self._trust.status
        except InvalidInputError as error:
            _log.error("%s", error)
            return ReferenceStatus()

    def _note(self, status: ReferenceStatus) -> None:
        try:
            self._trust.note(status)
        except OSError as error:
            _log.error("the references in force cannot be stored: %s", error)


@cache
def _is_shipped(digest: str) -> bool:
    """Return whether a reference ships with this package; such references are trusted."""
    return any(load(name).digest == digest for name in shipped())


def _digests(references: Sequence[Artefact]) -> tuple[str, ...]:
    return tuple(each.digest for each in references)


def _shown(error: Exception) -> str:
    return plain_text(str(error), MAX_REASON_LENGTH)
