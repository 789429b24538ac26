"""What the coordinator last asked of this device, kept so that the agent can begin while the coordinator is away."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

from google.protobuf import json_format

from wattfleet_io.atomic_files import replace_file
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)

# It becomes the name of a folder.
_DIGEST = re.compile(r"[0-9a-f]{64}")


class WelcomeFile:
    """Where the last Welcome survives a restart, as one JSON object.

    Args:
        path: the file; its folder is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> session_pb2.Welcome | None:
        """What an earlier process was told; None where that is not known, which is said in the log if it should be."""
        try:
            return _parsed(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        except ValueError as error:
            problem = f"is damaged ({error})"
        _log.error("%s: %s; waiting for the coordinator, which makes it anew", self._path, problem)
        return None

    def store(self, welcome: session_pb2.Welcome) -> None:
        """Hold this one and no other. Where that fails, the agent goes on and says so."""
        try:
            if self._path.exists() and _parsed(self._path.read_bytes()) == welcome:
                return
        except (OSError, ValueError):
            pass  # it is to be replaced
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, json_format.MessageToJson(welcome, preserving_proto_field_name=True).encode())
        except OSError as error:
            _log.error(
                "%s: cannot be written: %s; an agent that starts while the coordinator is away will wait for it",
                self._path,
                error.strerror,
            )


def _parsed(content: bytes) -> session_pb2.Welcome:
    """The Welcome in a file.

    Raises:
        ValueError: there is none; the text says why.
    """
    try:
        welcome = json_format.Parse(content, session_pb2.Welcome())
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not _DIGEST.fullmatch(welcome.reference_digest):
        raise ValueError("it names no reference")
    if welcome.profile_modes < 1:
        raise ValueError("it has no modes measured")
    return welcome


class Welcomes:
    """The Welcomes of a run of the agent, the newest of which counts.

    Args:
        file: where the last one survives a restart.
    """

    def __init__(self, file: WelcomeFile) -> None:
        self._file = file
        self._newest: session_pb2.Welcome | None = None
        self._came = asyncio.Condition()

    async def came(self, welcome: session_pb2.Welcome) -> None:
        """The coordinator has answered a Hello."""
        async with self._came:
            self._newest = welcome
            self._came.notify_all()

    async def first(self, away: asyncio.Event) -> session_pb2.Welcome:
        """The one to begin with: the coordinator's, or while it is away that of an earlier process.

        Args:
            away: set once the coordinator was found to be away.
        """
        came = asyncio.create_task(self.other_than(None))
        missed = asyncio.create_task(away.wait())
        try:
            await asyncio.wait([came, missed], return_when=asyncio.FIRST_COMPLETED)
            if not came.done() and (kept := self._file.load()) is not None:
                _log.warning("beginning without the coordinator, with what it asked for when it was last there")
                return kept
            return await came
        finally:
            came.cancel()
            missed.cancel()

    async def other_than(self, welcome: session_pb2.Welcome | None) -> session_pb2.Welcome:
        """Wait for one that asks for something else: another reference, or another number of modes.

        Args:
            welcome: what is asked for so far; None waits for any.
        """
        asked = welcome and _asked(welcome)
        async with self._came:
            await self._came.wait_for(lambda: self._newest is not None and _asked(self._newest) != asked)
            assert self._newest is not None, "it was waited for"
            return self._newest

    def keep(self, welcome: session_pb2.Welcome) -> None:
        """Begin with this one, too, where the coordinator is away; its reference has to be on disk."""
        self._file.store(welcome)


def _asked(welcome: session_pb2.Welcome) -> tuple[str, int]:
    return welcome.reference_digest, welcome.profile_modes
