"""Profiles: measured power modes of one workload on one device, and their CSV files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.modes.power_mode import ModeArray, PowerMode, array_to_modes

PROFILE_COLUMNS = ("cores", "cpu_khz", "gpu_hz", "mem_hz", "minibatch_ms", "power_mw")

# Plausible ranges of values in the right unit; a file in MHz or in watts falls far outside.
_PLAUSIBLE = {
    "cores": (1, 256, "a number of cores"),
    "cpu_khz": (50_000, 10_000_000, "kHz"),
    "gpu_hz": (50_000_000, 10_000_000_000, "Hz"),
    "mem_hz": (50_000_000, 20_000_000_000, "Hz"),
    "minibatch_ms": (0.01, 10_000_000, "milliseconds"),
    "power_mw": (200, 2_000_000, "milliwatts"),
}


@dataclass(frozen=True)
class Measurement:
    """Measured time and power of one mode.

    Attributes:
        mode: the power mode, read back from the device.
        minibatch_ms: median time of a minibatch including data loading, ms; the first minibatch is left out.
        power_mw: median board power while training, mW, after the power has settled.
    """

    mode: PowerMode
    minibatch_ms: float
    power_mw: float


@dataclass(frozen=True)
class Profile:
    """Measured modes as columns, with one row per mode.

    Attributes:
        modes: `[n, 4]` power modes.
        minibatch_ms: `[n]` milliseconds per minibatch.
        power_mw: `[n]` milliwatts.

    Raises:
        InvalidInputError: shapes differ, a mode is repeated, or a value is not finite and positive.
    """

    modes: ModeArray
    minibatch_ms: NDArray[np.float64]
    power_mw: NDArray[np.float64]

    def __post_init__(self) -> None:
        n = len(self.modes)
        if self.modes.shape != (n, 4) or self.minibatch_ms.shape != (n,) or self.power_mw.shape != (n,):
            raise InvalidInputError("a profile needs [n, 4] modes and n times and powers")
        if len(np.unique(self.modes, axis=0)) != n:
            raise InvalidInputError("a profile must hold each mode once; merge repeated measurements first")
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
    def of(cls, measurements: Iterable[Measurement]) -> Profile:
        """Collect single measurements into a profile."""
        rows = np.array([[*m.mode, m.minibatch_ms, m.power_mw] for m in measurements], dtype=np.float64)
        rows = rows.reshape(-1, 6)
        return cls(rows[:, :4], rows[:, 4], rows[:, 5])

    def rows(self, index: NDArray[np.int_] | NDArray[np.bool_]) -> Profile:
        """A profile of the selected rows only."""
        return Profile(self.modes[index], self.minibatch_ms[index], self.power_mw[index])

    def canonical_rows(self) -> list[str]:
        """The rows as sorted text, equal for all files of the same measurements whatever their order and format."""
        rows = np.column_stack([self.modes, self.minibatch_ms, self.power_mw]).tolist()
        return sorted(",".join(f"{value:.12g}" for value in row) for row in rows)

    def sha256(self) -> str:
        """The SHA-256 of the canonical rows, in hexadecimal."""
        return hashlib.sha256("\n".join(self.canonical_rows()).encode()).hexdigest()

    def measurements(self) -> list[Measurement]:
        """The rows as single measurements."""
        return [
            Measurement(mode, float(t), float(p))
            for mode, t, p in zip(array_to_modes(self.modes), self.minibatch_ms, self.power_mw, strict=True)
        ]


def read_profile(path: Path) -> Profile:
    """Read a profile from a CSV file with the columns `PROFILE_COLUMNS`; other columns are ignored.

    Raises:
        InvalidInputError: the file is missing, empty or unreadable; it lacks a column; a value is not finite, not
            whole where it has to be, or outside its unit's range; or a mode is repeated.
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
    missing = [name for name in PROFILE_COLUMNS if name not in table.columns]
    if missing:
        raise InvalidInputError(
            f"{path}: missing columns {', '.join(missing)}; needed are {', '.join(PROFILE_COLUMNS)}"
        )
    if table.empty:
        raise InvalidInputError(f"{path}: no rows found; a profile needs at least one measured mode")
    cells = table.loc[:, list(PROFILE_COLUMNS)]
    table = cells.apply(pd.to_numeric, errors="coerce")
    line = table.index.to_numpy() + 2  # line 1 is the header
    for name, (low, high, unit) in _PLAUSIBLE.items():
        column = table[name].to_numpy(np.float64)
        bad = np.flatnonzero(~((column >= low) & (column <= high)))
        if len(bad):
            value, cell = column[bad[0]], cells[name].iloc[bad[0]]
            text = cell if np.isnan(value) else f"{value:g}"
            raise InvalidInputError(
                f"{path}, line {line[bad[0]]}: {name} is {text}, expected {unit} between {low:g} and"
                f" {high:g} ({len(bad)} such rows); correct the value or its unit"
            )
        broken = np.flatnonzero(column % 1) if name in PowerMode._fields else bad
        if len(broken):
            raise InvalidInputError(
                f"{path}, line {line[broken[0]]}: {name} is {cells[name].iloc[broken[0]]}, expected a whole number"
                f" ({len(broken)} such rows); correct the value or its unit"
            )
    repeated = np.flatnonzero(table.duplicated(list(PowerMode._fields)).to_numpy())
    if len(repeated):
        raise InvalidInputError(
            f"{path}, line {line[repeated[0]]}: this mode is repeated ({len(repeated)} such rows);"
            " keep one row per mode"
        )
    values = table.to_numpy(np.float64)
    return Profile(values[:, :4].copy(), values[:, 4].copy(), values[:, 5].copy())


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as a CSV file with the columns `PROFILE_COLUMNS`."""
    import pandas as pd

    table = pd.DataFrame(profile.modes.astype(np.int64), columns=list(PROFILE_COLUMNS[:4]))
    table["minibatch_ms"] = profile.minibatch_ms
    table["power_mw"] = profile.power_mw
    table.to_csv(path, index=False)
