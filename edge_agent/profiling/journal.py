"""The journal of a profile: every measured mode on disk before the next one begins.

One JSON object a line. The first line says what is measured; the others are records: modes measured, measurements
that were discarded, what rounds showed, and renewals, before which nothing counts any more. A line counts once it
ends, so what a power cut leaves of the last one is cut off and measured again.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from edge_agent.devices.device import Provenance
from edge_agent.profiling.journal_records import Discarded, ModeRecord, Record, Renewal, RoundRecord, from_line, to_line
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.modes import Measurement, PowerMode, modes_to_array
from wattfleet.prediction import first_minibatch_gcycles
from wattfleet_io.atomic_files import sync_folder

_FORMAT = 1


class JournalError(WattfleetError):
    """A journal cannot be read or written; what it holds so far is safe."""


@dataclass(frozen=True)
class JournalHeader:
    """What a journal's measurements belong to; they mean nothing for anything else.

    Attributes:
        device_id: the device.
        board_kind: its kind of board.
        provenance: where its figures come from.
        workload: name of what is trained.
        minibatch: samples in a minibatch.
    """

    device_id: str
    board_kind: str
    provenance: Provenance
    workload: str
    minibatch: int


class Journal:
    """An open journal; use `open`.

    Args:
        descriptor: of the file, positioned anywhere.
        path: for messages.
        entries: what the file holds.
        size: bytes of complete lines.
        write: how bytes get to a descriptor, `os.write` outside of tests.
    """

    def __init__(
        self, descriptor: int, path: Path, entries: list[Record], size: int, write: Callable[[int, bytes], int]
    ) -> None:
        self._descriptor = descriptor
        self._path = path
        self._entries = entries
        self._size = size
        self._write = write

    @classmethod
    def open(cls, path: Path, header: JournalHeader, write: Callable[[int, bytes], int] = os.write) -> Journal:
        """Begin a journal, or go on with the one that is there.

        Args:
            path: the file; its folder exists.
            header: what is to be measured.
            write: how bytes get to a descriptor.

        Raises:
            InvalidInputError: the file belongs to something else.
            JournalError: the file cannot be opened or written, or is damaged elsewhere than at its end.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JournalError(f"{path}: cannot be opened: {error.strerror}") from None
        try:
            held = path.read_bytes()
            complete = held[: held.rfind(b"\n") + 1]
            lines = _parsed(path, complete)
            journal = cls(descriptor, path, [], len(complete), write)
            if lines:
                _require_same(path, lines[0], header)
                journal._entries += [_record(path, number, line) for number, line in enumerate(lines[1:], start=2)]
                os.ftruncate(descriptor, len(complete))
            else:
                journal._append({"journal": _FORMAT, **asdict(header)})
                sync_folder(path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        return journal

    @property
    def records(self) -> tuple[ModeRecord, ...]:
        """The modes measured so far, in order, since the last renewal."""
        return tuple(entry for entry in self._current if isinstance(entry, ModeRecord))

    @property
    def discarded(self) -> tuple[Discarded, ...]:
        """The measurements given up so far, in order, since the last renewal."""
        return tuple(entry for entry in self._current if isinstance(entry, Discarded))

    @property
    def seconds(self) -> float:
        """What measuring has taken since the last renewal, discarded measurements included, device-clock seconds."""
        return sum(entry.seconds for entry in self._current if isinstance(entry, (ModeRecord, Discarded)))

    def discarded_modes(self, times: int) -> list[PowerMode]:
        """The modes whose measurement was given up so many times or more: the board does not bear them."""
        return _most_common(self.discarded, times)

    def overloaded_modes(self, times: int) -> list[PowerMode]:
        """The modes at which the board got too hot or throttled itself so many times or more."""
        return _most_common((entry for entry in self.discarded if entry.overloaded), times)

    @property
    def renewal(self) -> Renewal | None:
        """Why, and for how many modes, the profile was begun anew; None where it never was."""
        renewals = [entry for entry in self._entries if isinstance(entry, Renewal)]
        return renewals[-1] if renewals else None

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """What is known of each mode, measured or shown by a round; the newest replaces what was known before."""
        known = {
            entry.mode: entry.measurement for entry in self._current if isinstance(entry, (ModeRecord, RoundRecord))
        }
        return tuple(known.values())

    @property
    def first_gcycles(self) -> float:
        """CPU cycles of a training's first minibatch, in units of 1e9; 0 where no current record tells."""
        told = {entry.mode: entry.first_minibatch_ms for entry in self.records if entry.first_minibatch_ms is not None}
        return first_minibatch_gcycles(modes_to_array(told), np.array(list(told.values())))

    def remaining(self, modes: Iterable[PowerMode]) -> list[PowerMode]:
        """Those of `modes` of which nothing is known yet, in order."""
        known = {measurement.mode for measurement in self.measurements}
        return [mode for mode in modes if mode not in known]

    def append(self, record: Record) -> None:
        """Put a record on disk; it is there when this returns.

        Raises:
            JournalError: it could not be written; the journal is as it was before.
        """
        self._append(to_line(record))
        self._entries.append(record)

    @property
    def _current(self) -> list[Record]:
        begins = [at for at, entry in enumerate(self._entries) if isinstance(entry, Renewal)]
        return self._entries[begins[-1] + 1 :] if begins else self._entries

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        try:
            os.ftruncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            left = data
            while left:
                left = left[self._write(self._descriptor, left) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise JournalError(
                f"{self._path}: cannot be written: {error.strerror}; the {len(self._entries)} records it holds are kept"
            ) from None
        self._size += len(data)


def _most_common(given_up: Iterable[Discarded], times: int) -> list[PowerMode]:
    counts = Counter(entry.mode for entry in given_up)
    return [mode for mode, count in counts.items() if count >= times]


def _parsed(path: Path, complete: bytes) -> list[dict[str, Any]]:
    lines = []
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            parsed = json.loads(line)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise JournalError(f"{path}, line {number}: is damaged; move the file away to measure anew")
        lines.append(parsed)
    return lines


def _require_same(path: Path, line: dict[str, Any], header: JournalHeader) -> None:
    wanted = {"journal": _FORMAT, **asdict(header)}
    if line != wanted:
        differing = [
            f"{name} {line.get(name)!r}, not {value!r}" for name, value in wanted.items() if line.get(name) != value
        ]
        raise InvalidInputError(f"{path}: is the journal of {', '.join(differing)}; name another file")


def _record(path: Path, number: int, line: dict[str, Any]) -> Record:
    try:
        return from_line(line)
    except InvalidInputError as error:
        raise JournalError(f"{path}, line {number}: {error}; move the file away to measure anew") from None
    except (KeyError, TypeError):
        raise JournalError(f"{path}, line {number}: is no measurement: {json.dumps(line)[:80]}") from None
