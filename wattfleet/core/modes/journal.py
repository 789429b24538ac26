"""The journal of a profile: the records in the file in which an agent stores its measured modes.

Each line is a JSON object (`docs/profiling.md`). The first states the device and the workload. The others are records:
measured modes, discarded measurements, observations of rounds, renewals, and the methods that select the modes. A
renewal invalidates all records before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes.power_mode import PowerMode
from wattfleet.core.modes.profile import PROFILE_COLUMNS, Measurement, Profile, read_csv_profile

JOURNAL_SUFFIX = ".jsonl"
"""The end of a journal's name."""

JOURNAL_FORMAT = 1
"""The number in a journal's first line."""


class JournalKind(StrEnum):
    """What a line of a journal is. A line without a kind is a measured mode."""

    DISCARDED = "discarded"
    ROUND = "round"
    RENEWAL = "renewal"
    METHOD = "method"


class ProfilingMethod(str, Enum):
    """A way to select the modes to measure, and to fit the predictor."""

    TRANSFER = "transfer"
    SCRATCH = "scratch"
    BINARY_SEARCH = "binary-search"
    GRID = "grid"
    BRUTE_FORCE = "brute-force"

    def __str__(self) -> str:
        return self.value


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
        peak_mw: highest of the power samples, mW; None in journals that do not record it.

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
    peak_mw: float | None = None

    def __post_init__(self) -> None:
        require_batch(self.batch)
        require_above_zero(minibatch_ms=self.minibatch_ms, power_mw=self.power_mw)
        if self.peak_mw is not None:
            require_above_zero(peak_mw=self.peak_mw)
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
MEASURED = ModeRecord, JournalledRound

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


Provenance = Literal["simulated", "replayed", "hardware", "stated"]
"""The source of a figure; every report states it. With `stated`, times are measured, and an owner states the watts."""


@dataclass(frozen=True)
class JournalHeader:
    """The device and workload that a journal's measurements are valid for.

    Attributes:
        device_id: the device.
        board_kind: its kind of board.
        provenance: the source of its figures.
        workload: name of the trained workload.
        minibatch: samples in a minibatch, for records that do not state their batch.
        basis: what the figures depend on apart from the mode, such as the meter; empty if nothing.
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
        if header.provenance not in get_args(Provenance):
            raise TypeError(f"provenance must be one of {', '.join(get_args(Provenance))}, not {header.provenance!r}")
        texts = (header.device_id, header.board_kind, header.workload, header.basis)
        if type(header.minibatch) is not int or header.minibatch < 1 or not all(isinstance(it, str) for it in texts):
            raise TypeError("a field has another type")
        return header


# --- Reader -----------------------------------------------------------------------------------------------------------


def newest_measurements(records: Iterable[Record], minibatch: int) -> dict[tuple[PowerMode, int], Measurement]:
    """Return the newest value of each mode and batch, from a measurement or a round, of records since the last renewal.

    Args:
        records: the records.
        minibatch: samples in a minibatch, for records that do not state their batch.
    """
    measured = (each for each in records if isinstance(each, MEASURED))
    return {(each.mode, each.batch or minibatch): each.measurement for each in measured}


def read_journal(path: Path) -> tuple[JournalHeader, Profile]:
    """Read what an agent's journal states, and its newest value of each mode since the last renewal.

    Rows state their batch if any differs from the journal's minibatch. An incomplete last line, which the agent may
    just be writing, is left out.

    Raises:
        InvalidInputError: the file is missing, unreadable or damaged, is not a journal or of another format, or holds
            no measured mode.
    """
    try:
        complete = path.read_bytes().rpartition(b"\n")[0]
    except FileNotFoundError:
        raise InvalidInputError(f"{path}: no such file") from None
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None
    records: list[Record] = []
    try:
        first, *lines = complete.splitlines()
        stated = json.loads(first)
        if stated.get("journal") != JOURNAL_FORMAT:
            found = repr(stated.get("journal"))
            raise ValueError(f"its format is {found:.20}, but this version of Wattfleet reads {JOURNAL_FORMAT}")
        header = JournalHeader.from_line(stated)
        for number, line in enumerate(lines, start=2):
            record = _record_in(line, number)
            if isinstance(record, Renewal):
                records.clear()
            else:
                records.append(record)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInputError(
            f"{path}: is not a whole journal of an agent ({error}): give the file profile.jsonl of a workload, or a CSV"
            f" file with the columns {', '.join(PROFILE_COLUMNS)}"
        ) from None
    newest = newest_measurements(records, header.minibatch)
    if not newest:
        raise InvalidInputError(f"{path}: holds no measured mode; run `wattfleet agent profile` first")
    profile = Profile.of(replace(measured, batch=batch) for (_, batch), measured in newest.items())
    return header, replace(profile, batch=None) if profile.batches == (header.minibatch,) else profile


def read_profile(path: Path) -> Profile:
    """Read a profile from an agent's journal, whose name ends with `.jsonl`, or from a CSV file.

    A CSV file has the columns `PROFILE_COLUMNS`; columns of other names are ignored. The time is in the column
    `minibatch_ms` (training) or `batch_ms` (inference). A column `batch` states the samples in the batch of each row;
    without it, all rows are of one batch size.

    Raises:
        InvalidInputError: the file is missing, empty or unreadable; it lacks a column, or has both times; a value is
            not finite, not whole where it has to be, or outside its unit's range; or a mode (with its batch) is
            repeated. For a journal, see `read_journal`.
    """
    return read_journal(path)[1] if path.suffix == JOURNAL_SUFFIX else read_csv_profile(path)


def _record_in(line: bytes, number: int) -> Record:
    """Read a record; a line that holds none is a `ValueError` with its number."""
    try:
        return from_line(json.loads(line))
    except KeyError as error:
        raise ValueError(f"line {number}: unknown or missing {error}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, InvalidInputError) as error:
        raise ValueError(f"line {number}: {error}") from None
