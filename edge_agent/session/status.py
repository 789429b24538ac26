"""Reports the state of the session with the coordinator: in the log, and for `wattfleet agent status`."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format

from edge_agent.paths import SESSION_FILE
from edge_agent.session.outbox import UnusableAnswerError, require_usable
from wattfleet.common.atomic_files import make_state_folder, read_regular_file, replace_file
from wattfleet.common.console import duration_text, plain_text
from wattfleet.common.logs import fields
from wattfleet.common.parsing import parse_json
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)


# --- Latest welcome ---------------------------------------------------------------------------------------------------
# The coordinator's latest Welcome, saved so that the agent can start while the coordinator is unreachable.


_MAX_SHOWN = 200
"""Maximum of characters of a damaged file in the log."""


class WelcomeFile:
    """Stores the last Welcome across restarts, as one JSON object.

    Args:
        path: the file; its folder is created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> session_pb2.Welcome | None:
        """Return the Welcome of an earlier process.

        If there is none, or it is damaged, which is logged, return None.
        """
        try:
            return _parsed(read_regular_file(self._path))
        except FileNotFoundError:
            return None
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        except ValueError as error:
            problem = f"is damaged ({error})"
        _log.error("%s: %s; the agent waits for the coordinator, and then writes the file again", self._path, problem)
        return None

    def store(self, welcome: session_pb2.Welcome) -> None:
        """Replace the stored Welcome; a failure is logged."""
        try:
            if self._path.exists() and _parsed(read_regular_file(self._path)) == welcome:
                return
        except (OSError, ValueError):
            pass  # it is replaced below
        try:
            make_state_folder(self._path.parent)
            replace_file(self._path, json_format.MessageToJson(welcome, preserving_proto_field_name=True).encode())
        except OSError as error:
            _log.error(
                "%s: cannot be written: %s; after a restart the agent has to wait for the coordinator",
                self._path,
                error.strerror,
            )


def _parsed(content: bytes) -> session_pb2.Welcome:
    """Parse the content of a file."""
    try:
        welcome = json_format.Parse(content, session_pb2.Welcome())
    except (json_format.ParseError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(plain_text(str(error), _MAX_SHOWN)) from None
    try:
        require_usable(welcome)
    except UnusableAnswerError as error:
        raise ValueError(str(error)) from None
    return welcome


class LatestWelcome:
    """Holds the latest Welcome, and lets tasks wait for a new one.

    Args:
        file: stores it across restarts.
    """

    def __init__(self, file: WelcomeFile) -> None:
        self._file = file
        self._latest: session_pb2.Welcome | None = None
        self._stored: session_pb2.Welcome | None = None
        self._changed = asyncio.Condition()

    @property
    def refuses_unplanned(self) -> bool:
        """Whether the site does not allow trainings without a plan, as the coordinator said last."""
        if self._latest is None and self._stored is None:
            self._stored = self._file.load()
        known = self._latest or self._stored
        return known is not None and known.refuses_unplanned

    async def receive(self, welcome: session_pb2.Welcome) -> None:
        """Take the coordinator's answer; what it says of unplanned trainings is stored for the next start."""
        stored = self._file.load()
        if stored is not None and stored.refuses_unplanned != welcome.refuses_unplanned:
            stored.refuses_unplanned = welcome.refuses_unplanned
            self._file.store(stored)
        async with self._changed:
            self._latest = welcome
            self._changed.notify_all()

    async def first(self, attempted: asyncio.Event) -> session_pb2.Welcome:
        """Return the Welcome to start with: the coordinator's, or the stored one while the coordinator is unreachable.

        Args:
            attempted: set once an attempt to reach the coordinator has ended.
        """
        received = asyncio.create_task(self.changed_from(None))
        missed = asyncio.create_task(attempted.wait())
        try:
            await asyncio.wait([received, missed], return_when=asyncio.FIRST_COMPLETED)
            if not received.done() and (stored := self._file.load()) is not None:
                _log.warning("the coordinator cannot be reached: starting with its last Welcome")
                return stored
            return await received
        finally:
            received.cancel()
            missed.cancel()

    async def changed_from(self, welcome: session_pb2.Welcome | None) -> session_pb2.Welcome:
        """Wait for a Welcome with other references or other numbers of modes.

        Args:
            welcome: the current one; None waits for any.
        """
        current = welcome and _request_of(welcome)
        async with self._changed:
            await self._changed.wait_for(lambda: self._latest is not None and _request_of(self._latest) != current)
            assert self._latest is not None, "it was waited for"
            return self._latest

    def store(self, welcome: session_pb2.Welcome) -> None:
        """Store the Welcome for the next start. Its reference has to be on disk already."""
        self._file.store(welcome)


def references_of(welcome: session_pb2.Welcome) -> tuple[str, ...]:
    """Return the digests of the references to transfer from, the most important first."""
    return (welcome.reference_digest, *welcome.further_reference_digests)


def _request_of(welcome: session_pb2.Welcome) -> tuple[tuple[str, ...], int, int]:
    return references_of(welcome), welcome.profile_modes, welcome.share_modes


# --- Status -----------------------------------------------------------------------------------------------------------

_REPEAT_S = 3600.0
"""A problem that stays the same is logged again after this time."""

_LINES_PER_MINUTE = 6
"""Problems that keep changing are logged at most this often."""


@dataclass(frozen=True)
class SessionStatus:
    """The state of the session after its last change.

    Attributes:
        address: the coordinator's host:port.
        problem: why there is no session; None during a session.
        unix_s: the time of the change, seconds since 1970.
        is_exposed: whether the connection leaves the machine in plaintext.
    """

    address: str
    problem: str | None
    unix_s: float
    is_exposed: bool = False


class SessionNews:
    """Records every change of a session.

    Args:
        address: the coordinator's host:port.
        path: the file for the record; None for no file. Its folder exists once the agent runs.
        now_s: a monotonic clock.
        is_exposed: whether the connection leaves the machine in plaintext.
    """

    def __init__(
        self,
        address: str = "",
        path: Path | None = None,
        now_s: Callable[[], float] = time.monotonic,
        is_exposed: bool = False,
    ) -> None:
        self._address = address
        self._is_exposed = is_exposed
        self._path = path
        self._now_s = now_s
        self._logged_s: deque[float] = deque(maxlen=_LINES_PER_MINUTE)
        self._shown: str | None = None
        self._cause: str | None = None
        self._failed_s = 0.0
        self._noted = False

    def connected(self) -> None:
        """Note that the coordinator has welcomed this device."""
        if self._shown is not None:
            lasted_s = self._now_s() - self._failed_s
            _log.info(
                "the coordinator at %s can be reached again after %s",
                self._address,
                duration_text(lasted_s),
                extra=fields(coordinator=self._address, outage_s=round(lasted_s, 1)),
            )
            self._cause = None
        if self._shown is not None or not self._noted:
            self._shown = None
            self._note()

    def failed(self, problem: str, cause: str | None = None) -> None:
        """Note why there is no session.

        Args:
            problem: the problem and what the agent does about it, as plain text.
            cause: the same value for all attempts that fail for one reason, although their texts differ; None uses the
                text.
        """
        now_s, cause = self._now_s(), cause or problem
        if self._cause is None:
            self._failed_s = now_s
        changed = cause != self._cause
        if len(self._logged_s) == _LINES_PER_MINUTE and now_s - self._logged_s[0] < 60:
            return
        if not changed and now_s - self._logged_s[-1] < _REPEAT_S:
            return
        self._logged_s.append(now_s)
        _log.warning("%s", problem, extra=fields(coordinator=self._address))
        self._cause, self._shown = cause, problem
        if changed:
            self._note()

    def _note(self) -> None:
        self._noted = True
        if self._path is None:
            return
        content = {"address": self._address, "problem": self._shown, "is_exposed": self._is_exposed}
        try:
            make_state_folder(self._path.parent)
            replace_file(self._path, json.dumps(content).encode() + b"\n")
        except OSError as error:
            _log.debug("%s: cannot be written: %s", self._path, error.strerror)


def read_session_status(state_directory: Path) -> SessionStatus | None:
    """Return the recorded state of the agent's session; None if it never began.

    Raises:
        InvalidInputError: the file cannot be read, or is damaged.
    """
    path = state_directory / SESSION_FILE
    try:
        content = parse_json(read_regular_file(path))
        address, problem, is_exposed = content["address"], content["problem"], content["is_exposed"]
        if not (isinstance(address, str) and isinstance(problem, str | None) and isinstance(is_exposed, bool)):
            raise ValueError
        return SessionStatus(address, problem, path.stat().st_mtime, is_exposed)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidInputError(f"{path}: is damaged; the agent writes it again when it connects") from None
