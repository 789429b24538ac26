"""A device's trust in its operator's references, and the references in force.

The folder is `reference-trust` in the state directory. Without it, a device accepts all references that its coordinator
names, as on a single machine.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wattfleet.errors import CorruptReferenceError, InvalidInputError, WattfleetError
from wattfleet_io.atomic_files import make_state_folder, read_regular_file, replace_file
from wattfleet_io.clock import unix_now_s
from wattfleet_io.parsing import parse_json_object
from wattfleet_proto.message_sizes import MAX_METADATA_BYTES

if TYPE_CHECKING:
    from edge_agent.session.signed_metadata import NamedTargets

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
        from edge_agent.session.signed_metadata import checked_targets

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
        and 0 <= checked_unix_s < 2**40
    ):
        raise ValueError
    return ReferenceStatus(tuple(digests), refused, float(checked_unix_s))
