"""The inference rows that were measured on a device: power modes with batches, in a CSV file for each workload."""

from __future__ import annotations

import csv
import io
import logging
import os
import threading
from pathlib import Path

import numpy as np

from edge_agent.paths import INFERENCE_DIRECTORY
from edge_agent.profiling.workload_folders import folder_name
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, PowerMode, Profile, Task
from wattfleet_io.atomic_files import read_regular_file, remove_file, replace_file

_log = logging.getLogger(__name__)

MAX_ROWS = 5_000
"""Rows of a workload that are kept; the latest stay."""

MAX_WORKLOADS = 8
"""Workloads whose rows are kept; the one that was measured longest ago goes."""

_MAX_BYTES = 1_000_000
_COLUMNS = (*PowerMode._fields, "batch", "batch_ms", "power_mw")


class InferenceRows:
    """Stores measured inference rows, as profiles that `wattfleet.modes.read_profile` reads, too; from any thread.

    Args:
        state_directory: the agent's.

    Attributes:
        revision: rises whenever rows are stored.
    """

    def __init__(self, state_directory: Path) -> None:
        self._folder = state_directory / INFERENCE_DIRECTORY
        self.revision = 0
        self._adding = threading.Lock()

    def read(self, workload: str) -> Profile:
        """The rows of a workload; none if there is no file.

        Raises:
            InvalidInputError: the file cannot be read, or is damaged.
        """
        path = self._path(workload)
        try:
            content = read_regular_file(path)
        except FileNotFoundError:
            return no_rows()
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            return _parsed(content)
        except (InvalidInputError, ValueError, csv.Error) as error:
            raise InvalidInputError(
                f"{path}: is damaged: {error}: remove the file, and state the rows again with `wattfleet agent duty set"
                " --measured`"
            ) from None

    def usable(self, workload: str) -> Profile:
        """The rows of a workload; a file that cannot be used is logged, and counts as none."""
        try:
            return self.read(workload)
        except InvalidInputError as error:
            _log.error("%s", error)
            return no_rows()

    def add(self, workload: str, rows: Profile) -> None:
        """Store further rows; they replace those of the same mode and batch, and a damaged file.

        Raises:
            InvalidInputError: they are not of inference or state no batches, or the file cannot be written.
        """
        if rows.task is not Task.INFERENCE or (rows.batch is None and len(rows)):
            raise InvalidInputError("give measured rows of inference, each with its batch")
        with self._adding:
            self._add(workload, rows)

    def _add(self, workload: str, rows: Profile) -> None:
        kept = {(each.mode, each.batch): each for each in self.usable(workload).measurements()}
        for each in rows.measurements():
            kept.pop((each.mode, each.batch), None)  # the latest are last
            kept[each.mode, each.batch] = each
        merged = Profile.of(list(kept.values())[-MAX_ROWS:], Task.INFERENCE)
        path = self._path(workload)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, _content(merged))
            self._remove_oldest()
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot be written: {error.strerror}") from None
        self.revision += 1

    def _path(self, workload: str) -> Path:
        return self._folder / f"{folder_name(workload)}.csv"

    def _remove_oldest(self) -> None:
        files = sorted(self._folder.glob("*.csv"), key=lambda path: os.lstat(path).st_mtime_ns)
        for path in files[: max(0, len(files) - MAX_WORKLOADS)]:
            remove_file(path)


def no_rows() -> Profile:
    """A profile of inference without any row."""
    return Profile(np.empty((0, 4)), np.empty(0), np.empty(0), np.empty(0, dtype=np.int64), Task.INFERENCE)


# Not with pandas as `read_profile`: the agent idles for days, and pandas takes 30 MB.
def _content(rows: Profile) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for each in rows.measurements():
        writer.writerow([*map(int, each.mode), each.batch, repr(each.minibatch_ms), repr(each.power_mw)])
    return text.getvalue().encode()


def _parsed(content: bytes) -> Profile:
    """The rows of a file.

    Raises:
        InvalidInputError: it is too large, its columns are others, or the values are none of a profile.
        ValueError: a value is no number.
    """
    if len(content) > _MAX_BYTES:
        raise InvalidInputError(f"it has more than {_MAX_BYTES:,} bytes")
    header, *lines = list(csv.reader(io.StringIO(content.decode()))) or [[]]
    if tuple(header) != _COLUMNS:
        raise InvalidInputError(f"its columns are not {', '.join(_COLUMNS)}")
    if any(len(line) != len(_COLUMNS) for line in lines):
        raise InvalidInputError("a row has more or fewer values than the header")
    rows = Profile.of((_measurement(line) for line in lines), Task.INFERENCE)
    return rows if len(rows) else no_rows()


def _measurement(line: list[str]) -> Measurement:
    cores, cpu_khz, gpu_hz, mem_hz, batch = map(int, line[:5])
    return Measurement(PowerMode(cores, cpu_khz, gpu_hz, mem_hz), float(line[5]), float(line[6]), batch)
