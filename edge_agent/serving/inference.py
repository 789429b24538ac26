"""What is known of inference in every power mode with every batch: measured, predicted and live times."""

from __future__ import annotations

import csv
import io
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_agent.paths import INFERENCE_DIRECTORY
from edge_agent.profiling.stored_profile import folder_name
from wattfleet.common.atomic_files import make_state_folder, read_regular_file, remove_file, replace_file
from wattfleet.core.choosing import PROBABILITY, KnownModes
from wattfleet.core.duties import largest_slowdowns
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Measurement, ModeArray, PowerMode, Profile, Task
from wattfleet.core.prediction import Prediction, normal_quantile

_log = logging.getLogger(__name__)


# --- Known inference --------------------------------------------------------------------------------------------------
# Combines what is known of inference in every power mode with every batch: measured, predicted and live times.


Values = NDArray[np.float64]

LiveBatches = Mapping[PowerMode, Mapping[int, float]]
"""High estimates of the times of inference batches as observed by the agent, ms, by mode and batch."""


def batch_sizes(largest_batch: int) -> tuple[int, ...]:
    """Return the batch sizes to consider: 1, 2, 4, ... and the largest one."""
    return tuple(sorted({2**power for power in range(largest_batch.bit_length())} | {largest_batch}))


def known_inference(
    modes: ModeArray, by_batch: Mapping[int, Prediction], rows: Profile, live: LiveBatches
) -> KnownModes:
    """Return what is known of all modes with all batches.

    Live times correct times only. The board's power during a live batch is not that of inference alone, as trainings
    and pauses overlap with it. For unmeasured power, the prediction's high quantile is used, which is on the safe side.

    Args:
        modes: `[n, 4]` modes of the device.
        by_batch: the prediction of each mode, by batch.
        rows: measured rows of inference; rows of other modes or batches are ignored.
        live: high estimates of the times of answered batches.
    """
    prediction, count = Prediction.joined(list(by_batch.values())), len(by_batch)
    batch = np.repeat(np.array(list(by_batch), dtype=np.int64), len(modes))
    known = KnownModes.of(np.tile(modes, (count, 1)), prediction, rows if len(rows) else None, batch)
    return with_live_times(known, live)


def with_live_times(known: KnownModes, live: LiveBatches) -> KnownModes:
    """Correct the times of modes with batches by the times observed live.

    - An observed mode and batch get their live time.
    - If the median of the observed ones is slower than known, all others are slowed down by the same factor.
    - No other one gets more than the bound that follows from the observed ones, the clocks and the batch sizes.

    Args:
        known: `[n]` modes with their batches.
        live: high estimates of the times of answered batches.
    """
    if not live:
        return known
    batch = known.stated_batch()
    bound_ms, seen = np.full(len(batch), np.inf), np.zeros(len(batch), dtype=bool)
    for mode, times in live.items():
        of_mode = (known.modes == np.array(mode, dtype=np.float64)).all(axis=1)
        is_seen = of_mode & np.isin(batch, list(times))
        allowed_ms = _of_batches(times, batch) * largest_slowdowns(mode, known.modes)
        bound_ms = np.where(is_seen, allowed_ms, np.where(seen, bound_ms, np.minimum(bound_ms, allowed_ms)))
        seen |= is_seen
    slower = max(1.0, float(np.median(bound_ms[seen] / known.minibatch_ms[seen]))) if seen.any() else 1.0
    deviations = normal_quantile(PROBABILITY)
    high_ms = known.minibatch_ms * slower * np.exp(deviations * known.time_log_sd)
    median_ms = np.where(seen, bound_ms, np.minimum(known.minibatch_ms * slower, bound_ms))
    high_ms = np.where(seen, bound_ms, np.minimum(high_ms, bound_ms))
    return replace(known, minibatch_ms=median_ms, time_log_sd=np.log(high_ms / median_ms) / deviations)


def _of_batches(times: Mapping[int, float], batch: NDArray[np.int64]) -> Values:
    """Return the longest time of each batch in the mode of the times, `[n]` ms.

    A batch takes no longer than a larger one, whose time grows at most in proportion to its size.
    """
    sizes = np.array(sorted(times))
    in_order_ms = np.array([times[size] for size in sizes.tolist()])
    at = np.minimum(np.searchsorted(sizes, batch), len(sizes) - 1)
    return np.asarray(in_order_ms[at] * np.maximum(1.0, batch / sizes[at]))


# --- Inference rows ---------------------------------------------------------------------------------------------------
# Stores the inference rows measured on a device: power modes with batches, in one CSV file per workload.

MAX_ROWS = 5_000
"""Maximum of rows per workload; the latest are kept."""

MAX_WORKLOADS = 8
"""Maximum of workloads with rows; beyond it, the workload measured longest ago is removed."""

_MAX_BYTES = 1_000_000
_COLUMNS = (*PowerMode._fields, "batch", "batch_ms", "power_mw")


class InferenceRows:
    """Stores measured inference rows as profiles for `wattfleet.core.modes.read_profile`. For use in any thread.

    Args:
        state_directory: the agent's state directory.

    Attributes:
        revision: increases whenever rows are stored.
    """

    def __init__(self, state_directory: Path) -> None:
        self._folder = state_directory / INFERENCE_DIRECTORY
        self.revision = 0
        self._adding = threading.Lock()

    def read(self, workload: str) -> Profile:
        """Return the rows of a workload; no rows if there is no file.

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
                f"{path}: is damaged: {error}: remove the file, and pass the rows again with `wattfleet agent duty set"
                " --measured`"
            ) from None

    def usable(self, workload: str) -> Profile:
        """Return the rows of a workload; if its file cannot be used, log that and return no rows."""
        try:
            return self.read(workload)
        except InvalidInputError as error:
            _log.error("%s", error)
            return no_rows()

    def add(self, workload: str, rows: Profile) -> None:
        """Store further rows, which replace rows of the same mode and batch. A damaged file is replaced.

        Raises:
            InvalidInputError: the rows are not of inference or have no batches, or the file cannot be written.
        """
        if rows.task is not Task.INFERENCE or (rows.batch is None and len(rows)):
            raise InvalidInputError(
                "the rows are not of inference, or lack their batch: pass measured rows of "
                "inference, each with its batch"
            )
        with self._adding:
            self._add(workload, rows)

    def _add(self, workload: str, rows: Profile) -> None:
        kept = {(each.mode, each.batch): each for each in self.usable(workload).measurements()}
        for each in rows.measurements():
            kept.pop((each.mode, each.batch), None)  # the latest rows are last
            kept[each.mode, each.batch] = each
        merged = Profile.of(list(kept.values())[-MAX_ROWS:], Task.INFERENCE)
        path = self._path(workload)
        try:
            make_state_folder(path.parent)
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
    """Return a profile of inference without rows."""
    return Profile(np.empty((0, 4)), np.empty(0), np.empty(0), np.empty(0, dtype=np.int64), Task.INFERENCE)


# Not with pandas as in `read_profile`: the agent idles for days, and pandas would take 30 MB of memory.
def _content(rows: Profile) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for each in rows.measurements():
        writer.writerow([*map(int, each.mode), each.batch, repr(each.minibatch_ms), repr(each.power_mw)])
    return text.getvalue().encode()


def _parsed(content: bytes) -> Profile:
    """Return the rows of a file."""
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
