"""The coordinator's latest Welcome, saved so that the agent can start while the coordinator is unreachable."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from google.protobuf import json_format

from edge_agent.session.answers import UnusableAnswerError, require_usable
from wattfleet_io.atomic_files import make_state_folder, read_regular_file, replace_file
from wattfleet_io.console import plain_text
from wattfleet_proto.v1 import session_pb2
from wattfleet_proto.version import common_version

_log = logging.getLogger(__name__)

_ANNOUNCING_MINOR = 1
_DUTIES_MINOR = 5
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
    """Parse the content of a file.

    Raises:
        ValueError: it holds no usable Welcome; the text gives the reason.
    """
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
        self._changed = asyncio.Condition()

    async def receive(self, welcome: session_pb2.Welcome) -> None:
        """Store the coordinator's answer to a Hello."""
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
        """Wait for a Welcome with other references, another number of modes or another protocol version.

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


def announces_workloads(welcome: session_pb2.Welcome) -> bool:
    """Return whether the coordinator announces the workloads of its runs, as it does from protocol 2.1 on."""
    return common_version(welcome.protocol).minor >= _ANNOUNCING_MINOR


def takes_no_front(welcome: session_pb2.Welcome) -> bool:
    """Return whether the coordinator accepts the reason why a device has no front, as it does from protocol 2.5 on."""
    return common_version(welcome.protocol).minor >= _DUTIES_MINOR


def references_of(welcome: session_pb2.Welcome) -> tuple[str, ...]:
    """Return the digests of the references to transfer from, the most important first."""
    return (welcome.reference_digest, *welcome.further_reference_digests)


def _request_of(welcome: session_pb2.Welcome) -> tuple[tuple[str, ...], int, bool, int]:
    return references_of(welcome), welcome.profile_modes, announces_workloads(welcome), welcome.share_modes
