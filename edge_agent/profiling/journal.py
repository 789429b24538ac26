"""The journal of a profile: every measured mode is on disk before the next one begins.

Each line is a JSON object. The first states the device and the workload. The others are records: measured modes,
discarded measurements, observations of rounds, renewals, and the methods that select the modes. A renewal invalidates
all records before it. An incomplete last line, as after a power cut, is dropped, and its mode is measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from edge_agent.paths import PREDICTOR_DIRECTORY
from wattfleet.common.atomic_files import open_regular_file, read_regular_file, require_own_folder, sync_folder
from wattfleet.common.console import plain_text
from wattfleet.common.parsing import parse_json, parse_json_object
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import (
    JOURNAL_FORMAT,
    MEASURED,
    Discarded,
    JournalHeader,
    JournalledRound,
    Measurement,
    MethodRecord,
    ModeRecord,
    PowerMode,
    ProfilingMethod,
    Record,
    Renewal,
    from_line,
    modes_to_array,
    newest_measurements,
    to_line,
)
from wattfleet.core.prediction import first_minibatch_gcycles

_log = logging.getLogger(__name__)

# --- Journal ----------------------------------------------------------------------------------------------------------

_CLOSED = -1
"""Stands for a closed file: the number of a closed descriptor may already belong to another file."""
_MAX_SHOWN = 80
"""Maximum of characters of a value from a file in an error."""


class JournalError(WattfleetError):
    """A journal cannot be read or written; its existing lines are intact."""


class Journal:
    """An open journal; use `open`.

    Args:
        descriptor: the file's descriptor, at any position.
        path: for messages.
        header: the first line.
        entries: the records in the file.
        size: total bytes of the complete lines.
        write: writes bytes to a file descriptor; tests replace `os.write`.

    Attributes:
        header: the device and workload.
        batch: current batch size, samples: of added records, and of the records that the methods return.
    """

    def __init__(
        self,
        descriptor: int,
        path: Path,
        header: JournalHeader,
        entries: list[Record],
        size: int,
        write: Callable[[int, bytes], int],
    ) -> None:
        self._descriptor = descriptor
        self.header = header
        self.batch = header.minibatch
        self._path = path
        self._entries = entries
        self._size = size
        self._write = write

    @classmethod
    def open(cls, path: Path, header: JournalHeader, write: Callable[[int, bytes], int] = os.write) -> Journal:
        """Start a journal, or continue an existing one.

        Args:
            path: the file; its folder exists.
            header: the device and the workload. An existing journal keeps its own minibatch, which may differ.
            write: writes bytes to a descriptor.

        Raises:
            InvalidInputError: the file belongs to another device.
            JournalError: the file cannot be opened or written, or is damaged before its last line.
        """
        try:
            require_own_folder(path.parent)
            descriptor = open_regular_file(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise JournalError(f"{path}: cannot be opened: {error.strerror}") from None
        return cls.on(descriptor, path, header, write)

    @classmethod
    def on(
        cls, descriptor: int, path: Path, header: JournalHeader, write: Callable[[int, bytes], int] = os.write
    ) -> Journal:
        """Start or continue a journal in an open file, which the journal closes; see `open`."""
        try:
            held = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            complete = held[: held.rfind(b"\n") + 1]
            lines = _parsed(path, complete)
            stored = _stored_header(path, lines[0], header) if lines else header
            journal = cls(descriptor, path, stored, [], len(complete), write)
            if lines:
                journal._entries += [_record(path, number, line) for number, line in enumerate(lines[1:], start=2)]
                os.ftruncate(descriptor, len(complete))
            else:
                journal._append({"journal": JOURNAL_FORMAT, **asdict(header)})
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
        """The discarded measurements, in order, since the last renewal."""
        return tuple(entry for entry in self._current if isinstance(entry, Discarded))

    @property
    def seconds(self) -> float:
        """Time spent measuring since the last renewal, discarded measurements included, device-clock seconds."""
        return sum(entry.seconds for entry in self._current if isinstance(entry, (ModeRecord, Discarded)))

    def discarded_modes(self, times: int) -> list[PowerMode]:
        """The modes whose measurements were discarded at least this many times."""
        return _repeated(self.discarded, times)

    def unreached_values(self, times: int) -> list[tuple[str, int]]:
        """The values, with their knobs, that a knob did not reach this many times, and in no mode that was measured."""
        counts = Counter(filter(None, (entry.unreached_value for entry in self.discarded)))
        measured = [entry.mode._asdict().items() for entry in self._current if isinstance(entry, MEASURED)]
        return [each for each, count in counts.items() if count >= times and not any(each in mode for mode in measured)]

    def overloaded_modes(self, times: int) -> list[PowerMode]:
        """The modes that overloaded the board at least this many times."""
        return _repeated((entry for entry in self.discarded if entry.overloaded), times)

    @property
    def renewal(self) -> Renewal | None:
        """The last renewal; None if there was none."""
        renewals = [entry for entry in self._entries if isinstance(entry, Renewal)]
        return renewals[-1] if renewals else None

    @property
    def method(self) -> ProfilingMethod:
        """The method that selects the modes since the last renewal: the last one stated, or else `transfer`."""
        stated = [entry.method for entry in self._current if isinstance(entry, MethodRecord)]
        return ProfilingMethod(stated[-1]) if stated else ProfilingMethod.TRANSFER

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Return the newest value of each mode, or of each mode and batch, from a measurement or a round.

        If any record states its batch, or the current batch differs, all measurements state their batch.
        """
        known = newest_measurements(self._current, self.header.minibatch)
        if self.batch == self.header.minibatch and all(each.batch is None for each in known.values()):
            return tuple(known.values())
        return tuple(replace(measured, batch=batch) for (_, batch), measured in known.items())

    @property
    def first_gcycles(self) -> float:
        """CPU cycles of a training's first minibatch, in units of 1e9; 0 if no current record states them."""
        first_ms = {
            entry.mode: entry.first_minibatch_ms
            for entry in self._current
            if isinstance(entry, MEASURED) and entry.first_minibatch_ms is not None
        }
        return first_minibatch_gcycles(modes_to_array(first_ms), np.array(list(first_ms.values())))

    def remaining(self, modes: Iterable[PowerMode]) -> list[PowerMode]:
        """Return those modes that have no measurement with the current batch, in order."""
        known = {measurement.mode for measurement in self.measurements if measurement.batch in (None, self.batch)}
        return [mode for mode in modes if mode not in known]

    def append(self, record: Record) -> None:
        """Write a record; it is on disk when this returns. A measured mode must have the current batch.

        Raises:
            JournalError: the record could not be written; the journal is unchanged.
        """
        if isinstance(record, ModeRecord | JournalledRound) and self.batch != self.header.minibatch:
            record = replace(record, batch=record.batch or self.batch)
        self._append(to_line(record))
        self._entries.append(record)

    @property
    def _current(self) -> list[Record]:
        begins = [at for at, entry in enumerate(self._entries) if isinstance(entry, Renewal)]
        return self._entries[begins[-1] + 1 :] if begins else self._entries

    def close(self) -> None:
        """Close the file; further records are refused."""
        descriptor, self._descriptor = self._descriptor, _CLOSED
        if descriptor != _CLOSED:
            os.close(descriptor)

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
                f"{self._path}: cannot be written: {error.strerror}; its {len(self._entries)} records are intact"
            ) from None
        self._size += len(data)


def _repeated(discarded: Iterable[Discarded], times: int) -> list[PowerMode]:
    counts = Counter(entry.mode for entry in discarded)
    return [mode for mode, count in counts.items() if count >= times]


def _parsed(path: Path, complete: bytes) -> list[dict[str, Any]]:
    lines = []
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            lines.append(parse_json_object(line))
        except ValueError:
            raise JournalError(f"{path}, line {number}: is damaged; move the file away to measure again") from None
    return lines


def read_header(path: Path) -> JournalHeader | None:
    """Return the header of a journal; None if there is no journal, or its first line is incomplete.

    Raises:
        JournalError: it cannot be read, or its first line is damaged.
    """
    try:
        first, ended, _ = read_regular_file(path).partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from None
    if not ended:
        return None
    try:
        return JournalHeader.from_line(parse_json(first))
    except (ValueError, TypeError, AttributeError):
        raise JournalError(f"{path}, line 1: is damaged; move the file away to measure again") from None


def require_same_device(path: Path, header: JournalHeader) -> None:
    """Check that a journal, if there is one, was written on this device.

    Args:
        path: the journal.
        header: describes this device.

    Raises:
        InvalidInputError: it belongs to another device.
        JournalError: it cannot be read, or its first line is damaged.
    """
    stored = read_header(path)
    if stored is not None:
        _stored_header(path, {"journal": JOURNAL_FORMAT, **asdict(stored)}, header)


def keep_apart(path: Path, header: JournalHeader) -> None:
    """Set a device's journal aside if its figures are of another basis than this device's.

    A journal of this basis that was set aside before comes back.

    Args:
        path: the journal.
        header: describes this device and its workload.

    Raises:
        JournalError: a journal cannot be read or moved, or its first line is damaged.
    """
    stored = read_header(path)
    if stored is None and not path.exists() and (back := _aside(path, header.basis)).exists():
        try:
            back.rename(path)  # the agent was killed between the two renames below
        except OSError as error:
            raise JournalError(f"{path}: cannot be brought back: {error.strerror}") from None
        return
    if stored is None or replace(stored, minibatch=header.minibatch, basis=header.basis) != header:
        return
    if stored.basis == header.basis:
        return
    try:
        aside = _aside(path, stored.basis)
        path.rename(aside)
        if (back := _aside(path, header.basis)).exists():
            back.rename(path)
        # The predictor is fitted again from the journal.
        shutil.rmtree(path.parent / PREDICTOR_DIRECTORY, ignore_errors=True)
        sync_folder(path.parent)
    except OSError as error:
        raise JournalError(f"{path}: cannot be set aside: {error.strerror}") from None
    _log.warning(
        "%s: its figures are of %s, but this device's are of %s, so they are kept apart in %s",
        path,
        stored.basis or "an earlier meter",
        header.basis or "another meter",
        aside.name,
    )


def _aside(path: Path, basis: str) -> Path:
    """Return the file of a journal whose basis is not in force."""
    return path.with_name(f"{path.stem}-{hashlib.sha256(basis.encode()).hexdigest()[:12]}{path.suffix}")


def _stored_header(path: Path, line: Mapping[str, Any], header: JournalHeader) -> JournalHeader:
    """Return the header of an existing journal, which has to belong to the same device."""
    expected = {"journal": JOURNAL_FORMAT, **asdict(header)}
    for free in ("workload", "minibatch"):
        expected.pop(free)
    differing = [
        f"{name} {plain_text(repr(line.get(name)), _MAX_SHOWN)}, not {value!r}"
        for name, value in expected.items()
        if line.get(name) != value
    ]
    if differing:
        raise InvalidInputError(
            f"{path}: belongs to {', '.join(differing)}; use another --state-dir, or move the file away"
        )
    try:
        return JournalHeader.from_line(line)
    except TypeError:
        raise JournalError(f"{path}, line 1: is damaged; move the file away to measure again") from None


def _record(path: Path, number: int, line: dict[str, Any]) -> Record:
    try:
        return from_line(line)
    except InvalidInputError as error:
        raise JournalError(f"{path}, line {number}: {error}; move the file away to measure again") from None
    except (KeyError, TypeError):
        raise JournalError(
            f"{path}, line {number}: is not a valid record: {plain_text(json.dumps(line), _MAX_SHOWN)}; move the file"
            " away to measure again"
        ) from None
