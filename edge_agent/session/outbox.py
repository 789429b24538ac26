"""Reports on their way to the coordinator, kept until it has acknowledged them."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

from google.protobuf import json_format

from wattfleet.errors import InvalidInputError
from wattfleet_io.atomic_files import replace_file
from wattfleet_proto.convert import front_from_message
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)

OBSERVATIONS_KEPT = 1000
"""Rounds that a device may train while the coordinator is away, before the oldest are forgotten."""

_ONE_STANDS = ("state", "front")
"""Of these the newest replaces what was there before."""


class OutboxFile:
    """Where unacknowledged reports survive a restart: one JSON object a line.

    The state is left out: what an earlier process was doing says nothing of this one.

    Args:
        path: the file; its folder is made.
        write: how bytes get to a descriptor, `os.write` outside of tests.
    """

    def __init__(self, path: Path, write: Callable[[int, bytes], int] = os.write) -> None:
        self._path = path
        self._write = write
        self._stored = True

    def load(self) -> list[session_pb2.SessionRequest]:
        """What an earlier process could not deliver, in order. Of a damaged file the sound lines count, and remain."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            _log.error("%s: cannot be read: %s; what it holds is not delivered", self._path, error.strerror)
            return []
        loaded = [_parsed(line) for line in content.splitlines()]
        sound = [request for request in loaded if request is not None]
        if len(sound) < len(loaded):
            self._keep_aside(content, len(loaded) - len(sound))
            self.store(sound)
        return sound

    def store(self, requests: list[session_pb2.SessionRequest]) -> None:
        """Hold these and no others. Where that fails the agent goes on in memory, and says so once."""
        content = b"".join(_line(request) for request in requests if not request.HasField("state"))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, content, self._write)
        except OSError as error:
            if self._stored:
                _log.error(
                    "%s: cannot be written: %s; reports are kept in memory, and lost if the agent ends before the"
                    " coordinator has them",
                    self._path,
                    error.strerror,
                )
            self._stored = False
            return
        if not self._stored:
            _log.info("%s: can be written again", self._path)
        self._stored = True

    def _keep_aside(self, content: bytes, damaged: int) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged")
        _log.error(
            "%s: %d of its lines are damaged and not delivered; all of it is kept in %s", self._path, damaged, aside
        )
        try:
            replace_file(aside, content, self._write)
        except OSError as error:
            _log.error("%s: cannot be written: %s", aside, error.strerror)


class Outbox:
    """Numbers reports, and knows which of them have yet to be acknowledged.

    Args:
        file: where they survive a restart.
        most: observations to keep; beyond these the oldest are forgotten.
    """

    def __init__(self, file: OutboxFile, most: int = OBSERVATIONS_KEPT) -> None:
        self._file = file
        self._most = most
        self._standing: dict[str, session_pb2.SessionRequest] = {}
        self._unacknowledged: dict[int, session_pb2.SessionRequest] = {}
        self.last_sequence = 0
        self.forgotten = 0
        for request in file.load():
            self._put(request)

    def add(self, request: session_pb2.SessionRequest) -> None:
        """Take a report of any kind but a lease; it gets its sequence number."""
        self._put(request)
        if not request.HasField("state"):
            self._store()

    def acknowledged(self, sequence: int) -> None:
        """The coordinator has stored a report."""
        request = self._unacknowledged.pop(sequence, None)
        if request is None or request.HasField("state"):
            return
        # Of many the last one only: a report that is repeated after a restart counts once, and every write is synced.
        if all(waiting.HasField("state") for waiting in self._unacknowledged.values()):
            self._store()

    def has_up_to(self, sequence: int) -> bool:
        """Whether anything up to this number is unacknowledged."""
        return any(sent <= sequence for sent in self._unacknowledged)

    def after(self, sequence: int) -> list[session_pb2.SessionRequest]:
        """What is unacknowledged after this number, in order."""
        return [request for number, request in self._unacknowledged.items() if number > sequence]

    def take_up_again(self) -> None:
        """What stands has to be told anew, in the order in which it was reported."""
        for request in self._standing.values():
            self._unacknowledged[request.sequence] = request
        self._unacknowledged = dict(sorted(self._unacknowledged.items()))

    def _put(self, request: session_pb2.SessionRequest) -> None:
        self.last_sequence += 1
        request.sequence = self.last_sequence
        body = str(request.WhichOneof("body"))
        if body in _ONE_STANDS:
            older = self._standing.get(body)
            if older:
                self._unacknowledged.pop(older.sequence, None)
            self._standing[body] = request
        self._unacknowledged[request.sequence] = request
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        waiting = [number for number, request in self._unacknowledged.items() if request.HasField("observation")]
        for number in waiting[: max(0, len(waiting) - self._most)]:
            self.forgotten += 1
            plan_id = self._unacknowledged.pop(number).observation.plan_id
            _log.warning("the observation of %s is forgotten: %d so far, more than fit", plan_id, self.forgotten)

    def _store(self) -> None:
        self._file.store(list(self._unacknowledged.values()))


def _line(request: session_pb2.SessionRequest) -> bytes:
    body = json_format.MessageToDict(request, preserving_proto_field_name=True)
    body.pop("sequence", None)
    return json.dumps(body).encode() + b"\n"


def _parsed(line: bytes) -> session_pb2.SessionRequest | None:
    """The report in a line; None where the coordinator would refuse it, and with it this device."""
    try:
        request = json_format.Parse(line, session_pb2.SessionRequest())
        if request.HasField("front"):
            front_from_message(request.front.front)
            return request if math.isfinite(request.front.idle_w) and request.front.idle_w >= 0 else None
    except (json_format.ParseError, UnicodeDecodeError, InvalidInputError, ValueError):
        return None
    seen = request.observation
    sound = request.HasField("observation") and all(0 < value < math.inf for value in (seen.epoch_s, seen.power_w))
    return request if sound else None
