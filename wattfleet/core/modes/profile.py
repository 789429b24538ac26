"""Profiles: measured power modes of one workload on one device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes.power_mode import ModeArray, PowerMode, array_to_modes
from wattfleet.core.modes.workload import LARGEST_COUNT, Task, WorkloadFacts

BatchArray = NDArray[np.int64]
"""`[n]` numbers of samples in a batch."""

TIME_COLUMNS = {Task.TRAINING: "minibatch_ms", Task.INFERENCE: "batch_ms"}
"""The column of the time in CSV files, for each task."""


@dataclass(frozen=True)
class Measurement:
    """Measured time and power of one mode.

    Attributes:
        mode: the power mode, read back from the device.
        minibatch_ms: median time of a minibatch including data loading, ms; the first minibatch is left out. For
            inference, the median time of a batch.
        power_mw: median board power while working, mW, after the power has settled.
        batch: samples in the batch; None if it is not stated.
    """

    mode: PowerMode
    minibatch_ms: float
    power_mw: float
    batch: int | None = None


class MeasuredUnit(NamedTuple):
    """What another device has measured of a workload.

    Attributes:
        board: its kind of board; empty for the same kind as the device that learns from it.
        measured: its measurements.
    """

    board: str
    measured: tuple[Measurement, ...]


@dataclass(frozen=True, eq=False)
class Profile:
    """Measured modes as columns, with one row per mode, or per mode and batch. Compared by identity.

    Attributes:
        modes: `[n, 4]` power modes.
        minibatch_ms: `[n]` milliseconds per minibatch; for inference, milliseconds per batch.
        power_mw: `[n]` milliwatts.
        batch: `[n]` samples in the batch of each row; None if all rows are of one batch size that is not stated.
        task: what was measured.

    Raises:
        InvalidInputError: shapes differ, a mode (with its batch) is repeated, a value is not finite and positive, or a
            batch is not a whole number of at least 1.
    """

    modes: ModeArray
    minibatch_ms: NDArray[np.float64]
    power_mw: NDArray[np.float64]
    batch: BatchArray | None = None
    task: Task = Task.TRAINING

    def __post_init__(self) -> None:
        n = len(self.modes)
        if self.modes.shape != (n, 4) or self.minibatch_ms.shape != (n,) or self.power_mw.shape != (n,):
            raise InvalidInputError("a profile needs [n, 4] modes and n times and powers")
        if self.batch is not None:
            object.__setattr__(self, "batch", whole_batches(self.batch, n))
        keys = self.modes if self.batch is None else np.column_stack([self.modes, self.batch])
        if len(np.unique(keys, axis=0)) != n:
            if self.batch is None:
                raise InvalidInputError(
                    "a profile without batch sizes must hold each mode once; merge repeated measurements, or state the"
                    " batch of each row"
                )
            raise InvalidInputError("a profile must hold each mode and batch once; merge repeated measurements first")
        for name, values in (
            ("modes", self.modes),
            ("minibatch_ms", self.minibatch_ms),
            ("power_mw", self.power_mw),
        ):
            if not (np.isfinite(values).all() and (values > 0).all()):
                raise InvalidInputError(f"{name}: every value must be finite and above zero")

    def __len__(self) -> int:
        return len(self.modes)

    @classmethod
    def of(cls, measurements: Iterable[Measurement], task: Task = Task.TRAINING) -> Profile:
        """Collect single measurements into a profile.

        Raises:
            InvalidInputError: some state their batch and others do not, or as for the class.
        """
        collected = list(measurements)
        rows = np.array([[*m.mode, m.minibatch_ms, m.power_mw] for m in collected], dtype=np.float64)
        rows = rows.reshape(-1, 6)
        stated = [m.batch for m in collected if m.batch is not None]
        if stated and len(stated) != len(collected):
            raise InvalidInputError(
                f"{len(stated)} of {len(collected)} measurements state their batch: state it for all, or for none"
            )
        return cls(rows[:, :4], rows[:, 4], rows[:, 5], np.array(stated) if stated else None, task)

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that occur, ascending; empty if they are not stated."""
        return () if self.batch is None else tuple(np.unique(self.batch).tolist())

    def rows(self, index: NDArray[np.int_] | NDArray[np.bool_]) -> Profile:
        """A profile of the selected rows only."""
        batch = None if self.batch is None else self.batch[index]
        return Profile(self.modes[index], self.minibatch_ms[index], self.power_mw[index], batch, self.task)

    def canonical_rows(self) -> list[str]:
        """The rows as sorted text, equal for all files of the same measurements regardless of their order and format.

        A row ends with its batch, if it is stated, and with the task, if it is not training.
        """
        rows = np.column_stack([self.modes, self.minibatch_ms, self.power_mw]).tolist()
        texts = [",".join(f"{value:.12g}" for value in row) for row in rows]
        if self.batch is not None:
            texts = [f"{text},batch={batch}" for text, batch in zip(texts, self.batch.tolist(), strict=True)]
        if self.task is not Task.TRAINING:
            texts = [f"{text},{self.task}" for text in texts]
        return sorted(texts)

    def sha256(self) -> str:
        """The SHA-256 of the canonical rows, in hexadecimal."""
        return hashlib.sha256("\n".join(self.canonical_rows()).encode()).hexdigest()

    def measurements(self) -> list[Measurement]:
        """The rows as single measurements."""
        batches = [None] * len(self) if self.batch is None else self.batch.tolist()
        return [
            Measurement(mode, float(t), float(p), batch)
            for mode, t, p, batch in zip(
                array_to_modes(self.modes), self.minibatch_ms, self.power_mw, batches, strict=True
            )
        ]


def whole_batches(batch: NDArray[np.generic], n: int) -> BatchArray:
    """Check `[n]` batch sizes, and convert them to integers.

    Raises:
        InvalidInputError: they are not `n` whole numbers from 1 to `LARGEST_COUNT`.
    """
    values = np.asarray(batch)
    if values.shape != (n,):
        raise InvalidInputError(f"{n} modes need {n} batch sizes, not an array of shape {list(values.shape)}")
    numbers = values.astype(np.float64)
    if not ((numbers >= 1) & (numbers <= LARGEST_COUNT) & (numbers % 1 == 0)).all():
        raise InvalidInputError(f"batch: every value must be a whole number of samples, from 1 to {LARGEST_COUNT:,}")
    return numbers.astype(np.int64)


def require_same_task(source: str, profile: Profile, reference: str, task: Task) -> None:
    """Check that a profile is of the task of the reference that it is used with.

    Args:
        source: where the profile comes from, for the error.
        profile: the profile.
        reference: the reference, for the error.
        task: the task of the reference.

    Raises:
        InvalidInputError: the tasks differ.
    """
    if profile.task is not task:
        raise InvalidInputError(
            f"{source}: has times of {profile.task} ({TIME_COLUMNS[profile.task]}), but {reference} is of {task}: give"
            f" rows of {task} ({TIME_COLUMNS[task]}), or a reference of {profile.task}"
        )


def stated_facts(
    source: str,
    profile: Profile,
    task: Task | None = None,
    batch: int | None = None,
    loader_workers: int | None = None,
) -> WorkloadFacts:
    """Combine the facts that a profile shows of its workload with those that the user states.

    Args:
        source: where the profile comes from, for errors.
        profile: measured modes. They determine the task, and the batch if all rows state the same.
        task: the task that the user states; None if it is not stated.
        batch: samples in a batch, likewise.
        loader_workers: processes that load data, likewise.

    Raises:
        InvalidInputError: a stated value contradicts the profile, or is out of range.
    """
    if task is not None and task is not profile.task:
        raise InvalidInputError(
            f"{source}: has times of {profile.task} ({TIME_COLUMNS[profile.task]}), not of {task}: give rows of {task}"
            f" ({TIME_COLUMNS[task]}), or the task {profile.task}"
        )
    if batch is not None and len(profile.batches) == 1 and profile.batches != (batch,):
        (stated,) = profile.batches
        raise InvalidInputError(
            f"{source}: has rows of the batch {stated}, not of {batch}: give {stated}, or other rows"
        )
    if batch is not None and len(profile.batches) > 1:
        raise InvalidInputError(
            f"{source}: has rows of the batches {', '.join(map(str, profile.batches))}, not only of {batch}: leave the"
            " batch out, since the file states it, or keep the rows of that batch"
        )
    if len(profile.batches) == 1:
        (batch,) = profile.batches
    return WorkloadFacts(profile.task, batch, loader_workers)


def require_one_training(source: str, profile: Profile) -> None:
    """Check that a profile has training times of one batch size, so that a mode has one time.

    Raises:
        InvalidInputError: it has times of inference, or several batch sizes.
    """
    if profile.task is not Task.TRAINING:
        raise InvalidInputError(
            f"{source}: has times of {profile.task} ({TIME_COLUMNS[profile.task]}), not of training: give rows with"
            f" {TIME_COLUMNS[Task.TRAINING]}"
        )
    if len(profile.batches) > 1:
        raise InvalidInputError(
            f"{source}: has rows of the batches {', '.join(map(str, profile.batches))}: keep the rows of one"
        )


# --- Profile CSV ------------------------------------------------------------------------------------------------------
# CSV files of profiles.

PROFILE_COLUMNS = ("cores", "cpu_khz", "gpu_hz", "mem_hz", "minibatch_ms", "power_mw")
"""Columns of a training profile's CSV file. `batch` may be added. For inference, `batch_ms` replaces `minibatch_ms`."""

_BATCH = "batch"

# Plausible ranges of values in the right unit; a file in MHz or in watts falls far outside.
_PLAUSIBLE = {
    "cores": (1, 256, "a number of cores"),
    "cpu_khz": (50_000, 10_000_000, "kHz"),
    "gpu_hz": (50_000_000, 10_000_000_000, "Hz"),
    "mem_hz": (50_000_000, 20_000_000_000, "Hz"),
    "batch": (1, LARGEST_COUNT, "a number of samples"),
    "minibatch_ms": (0.01, 10_000_000, "milliseconds"),
    "batch_ms": (0.01, 10_000_000, "milliseconds"),
    "power_mw": (200, 2_000_000, "milliwatts"),
}
_WHOLE = (*PowerMode._fields, _BATCH)


def read_csv_profile(path: Path) -> Profile:
    """Read a profile from a CSV file; see `read_profile`, which also reads journals."""
    # Imported only where files are read, because pandas takes 30 MB and agents on small boards mostly idle.
    import pandas as pd

    try:
        # Blank lines are read too, so that a row's index gives its line number.
        table = pd.read_csv(path, skip_blank_lines=False)
    except FileNotFoundError:
        raise InvalidInputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise InvalidInputError(f"{path}: cannot be read as CSV: {str(error).strip()}") from None
    if not table.index.equals(pd.RangeIndex(len(table))):  # pandas used the first column as row names
        raise InvalidInputError(
            f"{path}: rows hold more values than the header has columns; use a decimal point, and no comma at the end"
            " of a line"
        )
    table = table.dropna(how="all")
    task, columns = _columns(path, [str(name) for name in table.columns])
    if table.empty:
        raise InvalidInputError(f"{path}: no rows found; a profile needs at least one measured mode")
    cells = table.loc[:, columns]
    try:
        table = cells.apply(pd.to_numeric, errors="coerce")
    except OverflowError:  # a whole number that is larger than any float
        table = cells.astype(str).apply(pd.to_numeric, errors="coerce")
    line = table.index.to_numpy() + 2  # line 1 is the header
    for name in columns:
        low, high, unit = _PLAUSIBLE[name]
        column = table[name].to_numpy(np.float64)
        bad = np.flatnonzero(~((column >= low) & (column <= high)))
        if len(bad):
            value, cell = column[bad[0]], cells[name].iloc[bad[0]]
            text = cell if np.isnan(value) else f"{value:g}"
            raise InvalidInputError(
                f"{path}, line {line[bad[0]]}: {name} is {text}, expected {unit} between {low:,} and"
                f" {high:,} ({len(bad)} such rows); correct the value or its unit"
            )
        broken = np.flatnonzero(column % 1) if name in _WHOLE else bad
        if len(broken):
            raise InvalidInputError(
                f"{path}, line {line[broken[0]]}: {name} is {cells[name].iloc[broken[0]]}, expected a whole number"
                f" ({len(broken)} such rows); correct the value or its unit"
            )
    keys = [name for name in columns if name in _WHOLE]
    repeated = np.flatnonzero(table.duplicated(keys).to_numpy())
    if len(repeated):
        at = f"{path}, line {line[repeated[0]]}"
        if _BATCH in keys:
            raise InvalidInputError(
                f"{at}: this mode and batch are repeated ({len(repeated)} such rows); keep one row per mode and batch"
            )
        raise InvalidInputError(
            f"{at}: this mode is repeated ({len(repeated)} such rows); keep one row per mode, or add a column"
            f" {_BATCH!r} if the rows are of several batch sizes"
        )
    modes = table[list(PowerMode._fields)].to_numpy(np.float64)
    batch = table[_BATCH].to_numpy(np.int64) if _BATCH in keys else None
    time, power = (table[name].to_numpy(np.float64).copy() for name in (TIME_COLUMNS[task], "power_mw"))
    return Profile(modes.copy(), time, power, batch, task)


def _columns(path: Path, present: Sequence[str]) -> tuple[Task, list[str]]:
    """The task and the columns of a profile's file, by the names in its header."""
    training, inference = TIME_COLUMNS[Task.TRAINING], TIME_COLUMNS[Task.INFERENCE]
    if training in present and inference in present:
        raise InvalidInputError(
            f"{path}: has both {training} (training) and {inference} (inference): keep one of the two columns"
        )
    task = Task.INFERENCE if inference in present else Task.TRAINING
    needed = _column_names(task, batch=_BATCH in present)
    missing = [name for name in needed if name not in present]
    if missing:
        raise InvalidInputError(
            f"{path}: missing columns {', '.join(missing)}; needed are {', '.join(PROFILE_COLUMNS)}; for inference,"
            f" {inference} replaces {training}"
        )
    return task, needed


def _column_names(task: Task, batch: bool) -> list[str]:
    return [*PowerMode._fields, *([_BATCH] if batch else []), TIME_COLUMNS[task], "power_mw"]


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as a CSV file that `read_profile` reads: its task names the time's column."""
    import pandas as pd

    knobs = profile.modes.astype(np.int64).T
    columns: dict[str, NDArray[np.generic]] = dict(zip(PowerMode._fields, knobs, strict=True))
    if profile.batch is not None:
        columns[_BATCH] = profile.batch
    columns[TIME_COLUMNS[profile.task]] = profile.minibatch_ms
    columns["power_mw"] = profile.power_mw
    pd.DataFrame(columns).to_csv(path, index=False)
