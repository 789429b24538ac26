"""CSV files of profiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.modes.power_mode import PowerMode
from wattfleet.modes.profile import TIME_COLUMNS, Profile
from wattfleet.modes.workload_facts import LARGEST_COUNT, Task

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


def read_profile(path: Path) -> Profile:
    """Read a profile from a CSV file with the columns `PROFILE_COLUMNS`; columns of other names are ignored.

    The time is in the column `minibatch_ms` (training) or `batch_ms` (inference). A column `batch` states the samples
    in the batch of each row; without it, all rows are of one batch size.

    Raises:
        InvalidInputError: the file is missing, empty or unreadable; it lacks a column, or has both times; a value is
            not finite, not whole where it has to be, or outside its unit's range; or a mode (with its batch) is
            repeated.
    """
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
    """The task and the columns of a profile's file, by the names in its header.

    Raises:
        InvalidInputError: a column is missing, or both times are there.
    """
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
