"""Records what a virtual board did, span by span, in a file for reports."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from edge_agent.devices.virtual.virtual_board import VirtualBoard, WorkSpan
from wattfleet.modes import PowerMode
from wattfleet_io.clock import unix_now_s

_log = logging.getLogger(__name__)

MAX_BYTES = 256_000_000
"""Maximum size of a file; it holds about ten million requests."""


class Span(Protocol):
    """A dataclass that describes a period in one power mode."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def mode(self) -> PowerMode:
        """The power mode."""
        ...


_S = TypeVar("_S", bound=Span)


class SpanFile(Generic[_S]):
    """Appends spans to a file, which is emptied when the agent starts.

    Args:
        path: the file.
        kind: the class of the spans.
    """

    def __init__(self, path: Path, kind: type[_S]) -> None:
        self._path = path
        self._kind = kind
        self._bytes = 0

    def append(self, span: _S) -> None:
        """Write a span. If that fails, log it and write no more spans."""
        if self._bytes >= MAX_BYTES:
            return
        line = json.dumps(asdict(span), separators=(",", ":")) + "\n"
        try:
            with self._path.open("a" if self._bytes else "w", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            _log.error("%s: cannot be written: %s; nothing more is recorded", self._path, error.strerror)
            self._bytes = MAX_BYTES
        self._bytes += len(line)

    def read(self) -> Iterator[_S]:
        """Return all spans in the file; none if there is no file."""
        if self._path.exists():
            with self._path.open(encoding="utf-8") as file:
                for line in file:
                    content = json.loads(line)
                    yield self._kind(**{**content, "mode": PowerMode(*content["mode"])})


@dataclass(frozen=True)
class DatedWork(WorkSpan):
    """A period of work, with its date.

    Attributes:
        ended_unix_s: when it was known to have ended, in this machine's time, seconds since 1970.
    """

    ended_unix_s: float


def record_work(board: VirtualBoard, path: Path, unix_now_s: Callable[[], float] = unix_now_s) -> None:
    """Record every period of a board's work in a file, from now on.

    Args:
        board: the board.
        path: the file.
        unix_now_s: returns the seconds since 1970.
    """
    file = SpanFile(path, DatedWork)
    board.on_work = lambda work: file.append(
        DatedWork(work.begin_s, work.end_s, work.mode, work.energy_j, unix_now_s())
    )
