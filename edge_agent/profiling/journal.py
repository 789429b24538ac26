"""The journal of a profile: every measured mode is on disk before the next one begins.

Each line is a JSON object. The first states the device and the workload. The others are records: measured modes,
discarded measurements, observations of rounds, renewals, and the methods that select the modes. A renewal invalidates
all records before it. An incomplete last line, as after a power cut, is dropped, and its mode is measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, get_args, get_type_hints

import numpy as np

from edge_agent.devices.device import Provenance
from edge_agent.paths import PREDICTOR_DIRECTORY
from wattfleet.common.atomic_files import open_regular_file, read_regular_file, require_own_folder, sync_folder
from wattfleet.common.console import plain_text
from wattfleet.common.parsing import parse_json, parse_json_object
from wattfleet.core.choosing import ProfilingMethod
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import JOURNAL_FORMAT, JournalKind, Measurement, PowerMode, modes_to_array
from wattfleet.core.prediction import first_minibatch_gcycles

_log = logging.getLogger(__name__)

# --- Journal records --------------------------------------------------------------------------------------------------
# The kinds of records in a journal.


def require_batch(batch: int | None) -> None:
    """Check a batch size; None means that it is not stated.

    Raises:
        InvalidInputError: the batch size is below 1.
    """
    if batch is not None and batch < 1:
        raise InvalidInputError(f"batch must be a whole number of samples, at least 1, not {batch}")


def require_above_zero(**figures: float) -> None:
    """Check that figures are finite and above 0.

    Raises:
        InvalidInputError: a figure is not finite, or not above 0.
    """
    for name, value in figures.items():
        if not 0 < value < float("inf"):
            raise InvalidInputError(f"{name} must be finite and above 0, not {value}")


@dataclass(frozen=True)
class ModeRecord:
    """A measured mode.

    Attributes:
        mode: the power mode, read back from the device.
        minibatch_ms: median time of a minibatch without the first one, ms.
        power_mw: median board power during training, after it has settled, mW.
        minibatch_spread: robust standard deviation of a single minibatch's time, as a share.
        power_spread: the same for a single power sample.
        minibatches: number of minibatches used for `minibatch_ms`.
        power_samples: number of samples used for `power_mw`.
        seconds: time spent measuring, device-clock seconds.
        fetch_stall_ms: median time that a minibatch waited for its data, ms; None if unknown.
        compute_ms: median time that it computed, ms; None if unknown.
        first_minibatch_ms: time of a training's first minibatch, ms; None if it was not measured.
        batch: samples in a minibatch; None for the header's number.

    Raises:
        InvalidInputError: the time or the power is not finite and above 0, or another figure is not finite and at least
            0.
    """

    mode: PowerMode
    minibatch_ms: float
    power_mw: float
    minibatch_spread: float
    power_spread: float
    minibatches: int
    power_samples: int
    seconds: float
    fetch_stall_ms: float | None = None
    compute_ms: float | None = None
    first_minibatch_ms: float | None = None
    batch: int | None = None

    def __post_init__(self) -> None:
        require_batch(self.batch)
        require_above_zero(minibatch_ms=self.minibatch_ms, power_mw=self.power_mw)
        for name in (
            "minibatch_spread",
            "power_spread",
            "seconds",
            "fetch_stall_ms",
            "compute_ms",
            "first_minibatch_ms",
        ):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidInputError(f"{name} must be finite and at least 0, not {value}")

    @property
    def measurement(self) -> Measurement:
        """The record as a row of a profile."""
        return Measurement(self.mode, self.minibatch_ms, self.power_mw, self.batch)


@dataclass(frozen=True)
class Discarded:
    """A disturbed measurement, which no fit uses.

    Attributes:
        mode: the power mode.
        reason: what disturbed it.
        minibatches: minibatches that were trained for it.
        seconds: time spent on it, device-clock seconds.
        overloaded: whether the board got too hot or throttled.
        unreached: the knob that stood at another value, a field of `PowerMode`; None for any other reason.

    Raises:
        InvalidInputError: there is no such knob.
    """

    mode: PowerMode
    reason: str
    minibatches: int
    seconds: float
    overloaded: bool = False
    unreached: str | None = None

    def __post_init__(self) -> None:
        if self.unreached is not None and self.unreached not in PowerMode._fields:
            raise InvalidInputError(f"unreached must be one of {', '.join(PowerMode._fields)}, not {self.unreached!r}")

    @property
    def unreached_value(self) -> tuple[str, int] | None:
        """The knob that stood at another value, and the value that it did not reach; None for any other reason."""
        return None if self.unreached is None else (self.unreached, getattr(self.mode, self.unreached))


@dataclass(frozen=True)
class JournalledRound:
    """Time and power of a mode observed in a round.

    Attributes:
        mode: the power mode.
        minibatch_ms: mean time of a minibatch, ms, without the first.
        power_mw: mean board power while training, mW.
        batch: samples in a minibatch; None for the header's number.
        first_minibatch_ms: time until the training's first minibatch had ended, ms; None if the app has not reported
            it.

    Raises:
        InvalidInputError: a time or the power is not finite and above 0.
    """

    mode: PowerMode
    minibatch_ms: float
    power_mw: float
    batch: int | None = None
    first_minibatch_ms: float | None = None

    def __post_init__(self) -> None:
        require_batch(self.batch)
        require_above_zero(minibatch_ms=self.minibatch_ms, power_mw=self.power_mw)
        if self.first_minibatch_ms is not None and not 0 <= self.first_minibatch_ms < float("inf"):
            raise InvalidInputError(f"first_minibatch_ms must be finite and at least 0, not {self.first_minibatch_ms}")

    @property
    def measurement(self) -> Measurement:
        """The record as a row of a profile."""
        return Measurement(self.mode, self.minibatch_ms, self.power_mw, self.batch)


@dataclass(frozen=True)
class Renewal:
    """The board or its workload has changed, so earlier records are no longer valid.

    Attributes:
        reason: how the change was noticed.
        modes: maximum number of modes to measure again.
    """

    reason: str
    modes: int


@dataclass(frozen=True)
class MethodRecord:
    """The method that selects the modes of the following records.

    Attributes:
        method: a value of `ProfilingMethod`.

    Raises:
        InvalidInputError: the method is unknown.
    """

    method: str

    def __post_init__(self) -> None:
        known = [str(method) for method in ProfilingMethod]
        if self.method not in known:
            raise InvalidInputError(f"the method must be one of {', '.join(known)}, not {self.method!r}")


Record = ModeRecord | Discarded | JournalledRound | Renewal | MethodRecord
_MEASURED = ModeRecord, JournalledRound

# A line without a kind is a ModeRecord.
_KINDS: Mapping[JournalKind, type[Record]] = {
    JournalKind.DISCARDED: Discarded,
    JournalKind.ROUND: JournalledRound,
    JournalKind.RENEWAL: Renewal,
    JournalKind.METHOD: MethodRecord,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_line(record: Record) -> dict[str, Any]:
    """Return the record as a JSON object."""
    name = _NAMES.get(type(record))
    return asdict(record) if name is None else {"kind": name, **asdict(record)}


def from_line(line: Mapping[str, Any]) -> Record:
    """Read a line that `to_line` wrote.

    Raises:
        KeyError: the kind is unknown, or the mode is missing.
        TypeError: a field is missing or unknown, or has another type.
        InvalidInputError: a figure is out of range.
    """
    values = dict(line)
    kind = _KINDS[values.pop("kind")] if "kind" in values else ModeRecord
    accepted = _ACCEPTED[kind]
    if kind not in (Renewal, MethodRecord):
        values["mode"] = _mode(values["mode"])
    for name, value in values.items():
        if type(value) not in accepted[name]:
            raise TypeError(f"{name} has another type")
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise InvalidInputError(f"{name} must be finite and at least 0, not {value}")
    return kind(**values)


def _mode(knobs: Any) -> PowerMode:
    """Read a mode from a JSON list."""
    if not isinstance(knobs, list) or any(type(knob) is not int for knob in knobs):
        raise TypeError("a mode is a list of integers")
    mode = PowerMode(*knobs)
    if min(mode) < 0:
        raise InvalidInputError(f"mode must be at least 0, not {min(mode)}")
    return mode


def _accepted(hint: Any) -> frozenset[type]:
    """Return the types that a field's values may have; JSON may contain an integer for a float."""
    types = frozenset(get_args(hint) or (hint,))
    return types | {int} if float in types else types


_ACCEPTED: Mapping[type[Record], Mapping[str, frozenset[type]]] = {
    kind: {name: _accepted(hint) for name, hint in get_type_hints(kind).items()} for kind in (ModeRecord, *_NAMES)
}


# --- Journal ----------------------------------------------------------------------------------------------------------

_CLOSED = -1
"""Stands for a closed file: the number of a closed descriptor may already belong to another file."""
_MAX_SHOWN = 80
"""Maximum of characters of a value from a file in an error."""


class JournalError(WattfleetError):
    """A journal cannot be read or written; its existing lines are intact."""


@dataclass(frozen=True)
class JournalHeader:
    """The device and workload that a journal's measurements are valid for.

    Attributes:
        device_id: the device.
        board_kind: its kind of board.
        provenance: the source of its figures.
        workload: name of the trained workload.
        minibatch: samples in a minibatch, for records that do not state their batch.
        basis: what the figures depend on apart from the mode, as for `Device.basis`.
    """

    device_id: str
    board_kind: str
    provenance: Provenance
    workload: str
    minibatch: int
    basis: str = ""

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> JournalHeader:
        """Read a journal's first line.

        Raises:
            TypeError: a field is missing or unknown, or has another type.
        """
        header = cls(**{name: value for name, value in line.items() if name != "journal"})
        texts = (header.device_id, header.board_kind, header.provenance, header.workload, header.basis)
        if type(header.minibatch) is not int or header.minibatch < 1 or not all(isinstance(it, str) for it in texts):
            raise TypeError("a field has another type")
        return header


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
        measured = [entry.mode._asdict().items() for entry in self._current if isinstance(entry, _MEASURED)]
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
        entries = [entry for entry in self._current if isinstance(entry, _MEASURED)]
        known = {(entry.mode, entry.batch or self.header.minibatch): entry.measurement for entry in entries}
        if self.batch == self.header.minibatch and all(entry.batch is None for entry in entries):
            return tuple(known.values())
        return tuple(replace(measured, batch=batch) for (_, batch), measured in known.items())

    @property
    def first_gcycles(self) -> float:
        """CPU cycles of a training's first minibatch, in units of 1e9; 0 if no current record states them."""
        first_ms = {
            entry.mode: entry.first_minibatch_ms
            for entry in self._current
            if isinstance(entry, _MEASURED) and entry.first_minibatch_ms is not None
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
