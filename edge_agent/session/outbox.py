"""Keeps reports to the coordinator until it has acknowledged them."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format

from wattfleet.common.atomic_files import make_state_folder, read_regular_file, replace_file
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet_proto.convert import front_from_message, workload_from_message
from wattfleet_proto.limits import (
    LEASE_S,
    MAX_RECONNECT_S,
    MAX_REFERENCES_IN_FORCE,
    MAX_SHARED_MODES,
    PROFILE_MODES,
    is_flower_run,
)
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)


# --- Answers ----------------------------------------------------------------------------------------------------------
# Checks a coordinator's answers, since the coordinator may be broken or belong to someone else.


# The digest becomes the name of a folder.
_DIGEST = re.compile(r"[0-9a-f]{64}")


class UnusableAnswerError(WattfleetError):
    """The coordinator's answer cannot be used: the agent reports this to its owner, and reconnects after a pause."""


@dataclass(frozen=True)
class SessionPace:
    """The accepted intervals of a session.

    Attributes:
        lease_s: longest time between two messages from this agent, seconds; 0 before the first Welcome.
        reconnect_s: a lost session is opened again at a random moment within this time, seconds.
    """

    lease_s: float = 0.0
    reconnect_s: float = 0.0

    def after(self, answer: session_pb2.Welcome | session_pb2.Ack) -> SessionPace:
        """Return the intervals after an answer; an interval of 0 in it leaves the current one unchanged.

        Intervals beyond the limits are replaced by the nearest limit.

        Raises:
            UnusableAnswerError: an interval is negative or not finite, or a Welcome has no lease.
        """
        for name, value in (("lease_s", answer.lease_s), ("reconnect_s", answer.reconnect_s)):
            if not 0 <= value < math.inf:
                raise UnusableAnswerError(f"{name} must be finite and at least 0, not {value:g}")
        lease_s = answer.lease_s or self.lease_s
        if not lease_s:
            raise UnusableAnswerError("its Welcome has no lease_s")
        shortest_s, longest_s = LEASE_S
        return SessionPace(
            min(max(lease_s, shortest_s), longest_s), min(answer.reconnect_s or self.reconnect_s, MAX_RECONNECT_S)
        )


def require_usable(welcome: session_pb2.Welcome) -> None:
    """Check what a Welcome requests.

    Raises:
        UnusableAnswerError: it names no reference or too many, or too few or too many modes.
    """
    digests = (welcome.reference_digest, *welcome.further_reference_digests)
    if not all(_DIGEST.fullmatch(digest) for digest in digests[: MAX_REFERENCES_IN_FORCE + 1]):
        raise UnusableAnswerError("its Welcome names no reference")
    if len(digests) > MAX_REFERENCES_IN_FORCE:
        raise UnusableAnswerError(
            f"its Welcome names {len(digests):,} references; the limit is {MAX_REFERENCES_IN_FORCE}"
        )
    fewest, most = PROFILE_MODES
    if not fewest <= welcome.profile_modes <= most:
        raise UnusableAnswerError(f"profile_modes must be {fewest} to {most:,}, not {welcome.profile_modes:,}")
    if welcome.share_modes > MAX_SHARED_MODES:
        raise UnusableAnswerError(f"share_modes must be 0 to {MAX_SHARED_MODES}, not {welcome.share_modes:,}")


# --- Outbox -----------------------------------------------------------------------------------------------------------


class OutboxFile:
    """Stores unacknowledged reports across restarts, as one JSON object per line.

    States are not stored, since the state of an earlier process does not apply to this one.

    Args:
        path: the file; its folder is created.
        write: writes bytes to a file descriptor; tests replace `os.write`.
    """

    def __init__(self, path: Path, write: Callable[[int, bytes], int] = os.write) -> None:
        self._path = path
        self._write = write
        self._writable = True

    def load(self) -> list[session_pb2.SessionRequest]:
        """Return the reports that an earlier process could not deliver, in order; move damaged lines aside."""
        try:
            content = read_regular_file(self._path)
        except FileNotFoundError:
            return []
        except OSError as error:
            _log.error("%s: cannot be read: %s; the reports in it are not delivered", self._path, error.strerror)
            return []
        loaded = [_parsed(line) for line in content.splitlines()]
        sound = [request for request in loaded if request is not None]
        if len(sound) < len(loaded):
            self._keep_aside(content, len(loaded) - len(sound))
            self.store(sound)
        return sound

    def store(self, requests: list[session_pb2.SessionRequest]) -> None:
        """Replace the stored reports. If that fails, log it once and keep the reports in memory only."""
        content = b"".join(_line(request) for request in requests if not request.HasField("state"))
        try:
            make_state_folder(self._path.parent)
            replace_file(self._path, content, self._write)
        except OSError as error:
            if self._writable:
                _log.error(
                    "%s: cannot be written: %s; reports are kept in memory only, and lost if the agent stops before"
                    " they are delivered",
                    self._path,
                    error.strerror,
                )
            self._writable = False
            return
        if not self._writable:
            _log.info("%s: can be written again", self._path)
        self._writable = True

    def _keep_aside(self, content: bytes, damaged: int) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged")
        _log.error("%s: skipped damaged lines: %d; the whole file is kept as %s", self._path, damaged, aside)
        try:
            replace_file(aside, content, self._write)
        except OSError as error:
            _log.error("%s: cannot be written: %s", aside, error.strerror)


MAX_OBSERVATIONS = 1000
"""Observations and energies that are kept while the coordinator is unreachable; beyond them, the oldest are dropped."""


class Outbox:
    """Numbers reports, and keeps them until they are acknowledged.

    Args:
        file: stores them across restarts.
    """

    def __init__(self, file: OutboxFile) -> None:
        self._file = file
        self._latest: dict[str, session_pb2.SessionRequest] = {}
        self._unacknowledged: dict[int, session_pb2.SessionRequest] = {}
        self.last_sequence = 0
        self.dropped = 0
        for request in file.load():
            self._put(request)

    def add(self, request: session_pb2.SessionRequest) -> None:
        """Number and keep a report of any kind except a lease."""
        self._put(request)
        if not request.HasField("state"):
            self._store()

    def acknowledge(self, sequence: int) -> None:
        """Remove a report that the coordinator has stored."""
        request = self._unacknowledged.pop(sequence, None)
        if request is None or request.HasField("state"):
            return
        # Write only after the last of many: every write is synced, and a repeated report counts only once.
        if all(waiting.HasField("state") for waiting in self._unacknowledged.values()):
            self._store()

    def has_any_up_to(self, sequence: int) -> bool:
        """Return whether any report up to this number is unacknowledged."""
        return any(sent <= sequence for sent in self._unacknowledged)

    @property
    def waiting(self) -> int:
        """Number of reports that are not acknowledged."""
        return len(self._unacknowledged)

    def after(self, sequence: int) -> list[session_pb2.SessionRequest]:
        """Return the unacknowledged reports after this number, in order."""
        return [request for number, request in self._unacknowledged.items() if number > sequence]

    def requeue_latest(self) -> None:
        """Send the latest state and fronts again, in the order in which they were reported."""
        for request in self._latest.values():
            self._unacknowledged[request.sequence] = request
        self._unacknowledged = dict(sorted(self._unacknowledged.items()))

    def _put(self, request: session_pb2.SessionRequest) -> None:
        self.last_sequence += 1
        request.sequence = self.last_sequence
        if request.HasField("removed"):
            self._replace(_front_of(request.removed.workload))
        elif (subject := _subject(request)) is not None:
            self._replace(subject)
            self._latest[subject] = request
        self._unacknowledged[request.sequence] = request
        self._drop_oldest()

    def _replace(self, subject: str) -> None:
        older = self._latest.pop(subject, None)
        if older is not None:
            self._unacknowledged.pop(older.sequence, None)

    def _drop_oldest(self) -> None:
        waiting = [
            number
            for number, request in self._unacknowledged.items()
            if request.HasField("observation") or request.HasField("energy")
        ]
        for number in waiting[: max(0, len(waiting) - MAX_OBSERVATIONS)]:
            self.dropped += 1
            request = self._unacknowledged.pop(number)
            report = request.energy if request.HasField("energy") else request.observation
            what = "energy" if request.HasField("energy") else "observation"
            _log.warning("the %s of %s is dropped, %d so far: the outbox is full", what, report.plan_id, self.dropped)

    def _store(self) -> None:
        self._file.store(list(self._unacknowledged.values()))


def _subject(request: session_pb2.SessionRequest) -> str | None:
    """Return the subject of a report that replaces the previous one: the state, or the front of a workload."""
    if request.HasField("state"):
        return "state"
    return _front_of(request.front.workload.name) if request.HasField("front") else None


def _front_of(workload: str) -> str:
    return f"front of {workload}"


def _line(request: session_pb2.SessionRequest) -> bytes:
    body = json_format.MessageToDict(request, preserving_proto_field_name=True)
    body.pop("sequence", None)
    return json.dumps(body).encode() + b"\n"


def _parsed(line: bytes) -> session_pb2.SessionRequest | None:
    """Return the report in a line; None if the coordinator would refuse it and end the session."""
    try:
        request = json_format.Parse(line, session_pb2.SessionRequest())
        if request.HasField("front"):
            if not request.front.no_front:
                front_from_message(request.front.front)
            if request.front.HasField("workload"):
                workload_from_message(request.front.workload)
            return request if math.isfinite(request.front.idle_w) and request.front.idle_w >= 0 else None
    except (json_format.ParseError, InvalidInputError, ValueError, OverflowError, RecursionError):
        return None
    if request.HasField("removed"):
        return request if request.removed.workload else None
    if request.HasField("unplanned"):
        return request if is_flower_run(request.unplanned.run_id) else None
    if request.HasField("energy"):
        drawn = (request.energy.energy_j, request.energy.lasted_s)
        return request if all(0 <= value < math.inf for value in drawn) else None
    seen = request.observation
    sound = request.HasField("observation") and all(0 < value < math.inf for value in (seen.epoch_s, seen.power_w))
    return request if sound else None
