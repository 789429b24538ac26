"""Profiling modes with batch sizes under a power limit, in the order of the published work.

The order is that of Ahmed et al., "Accelerated Training on Low-Power Edge Devices" (arXiv:2502.18323, section 4.1).
Power increases with the frequency and with the batch size. Therefore the largest batch is measured first, upwards from
the lowest frequency until the limit is exceeded, and each smaller batch continues at the highest frequency that was
feasible for the larger one. Lower frequencies of the smaller batch are feasible, too, but slower, so they are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import LARGEST_COUNT, ModeArray, ModeSpace, PowerMode, nearest_mode

# --- Budget search ----------------------------------------------------------------------------------------------------
# Binary search for the fastest mode within a budget: halves the values of one knob after the other.
#
# Multi-dimensional binary search, from a 2024 research report of the group behind PowerTrain.


PowerOf = Callable[[PowerMode], float | None]
"""Returns a mode's power, measured or looked up, mW; infinite if the board cannot sustain it. None ends the search."""


def search_within_budgets(modes: ModeArray, budgets_mw: Sequence[float], power_of: PowerOf) -> None:
    """Search for the fastest mode within each budget; each search measures about log2(n) of `n` modes.

    A search measures the middle of the remaining values. If its power is within the budget, the lower half
    of one knob's values is dropped, otherwise the upper half. Budgets in the middle of the range are searched first.
    The same powers give the same search, so an interrupted search can continue from its measurements alone.

    Args:
        modes: `[n, 4]` modes that can be chosen. They need not be all combinations of their knobs' values.
        budgets_mw: the budgets, mW.
        power_of: called for every mode that a search needs; several searches may need the same mode.

    Raises:
        InvalidInputError: there are no modes, or a budget is not finite and above 0.
    """
    if not len(modes):
        raise InvalidInputError("there are no modes to search: give at least one")
    if not all(0 < budget < float("inf") for budget in budgets_mw):
        raise InvalidInputError("budgets must be finite and above zero")
    for budget_mw in _middle_first(sorted(budgets_mw)):
        _search(modes, budget_mw, power_of)


def _search(modes: ModeArray, budget_mw: float, power_of: PowerOf) -> None:
    knobs: list[list[float]] = [np.unique(column).tolist() for column in modes.T]
    turns = itertools.cycle(range(len(knobs)))
    while True:
        # A corpus can lack some combinations of its knobs' values.
        power_mw = power_of(nearest_mode(modes, PowerMode(*(round(values[len(values) // 2]) for values in knobs))))
        if power_mw is None or all(len(values) == 1 for values in knobs):
            return
        turn = next(turn for turn in turns if len(knobs[turn]) > 1)
        half = len(knobs[turn]) // 2
        knobs[turn] = knobs[turn][half:] if power_mw <= budget_mw else knobs[turn][:half]


def _middle_first(values: Sequence[float]) -> Iterable[float]:
    """Yield the middle value, then the middles of both halves, and so on."""
    parts = [list(values)]
    while parts:
        part = parts.pop(0)
        if part:
            middle = len(part) // 2
            yield part[middle]
            parts += [part[:middle], part[middle + 1 :]]


# --- Joint profiling --------------------------------------------------------------------------------------------------


class BatchTooLargeError(InvalidInputError):
    """A batch does not fit into the device's memory: use a smaller one."""


class PowerFigure(str, Enum):
    """The figure of a mode's power that a limit applies to: the median or the peak."""

    MEDIAN = "median"
    PEAK = "peak"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class PowerLimit:
    """A limit on the power while training.

    Attributes:
        power_mw: maximum mW; infinite for no limit.
        figure: the power figure that it applies to; the published work limits the peak.

    Raises:
        InvalidInputError: the limit is not above 0.
    """

    power_mw: float = math.inf
    figure: PowerFigure = PowerFigure.MEDIAN

    def __post_init__(self) -> None:
        if not self.power_mw > 0:
            raise InvalidInputError(f"the power limit must be above 0 mW, not {self.power_mw:g}")


@dataclass(frozen=True)
class JointMeasurement:
    """Measured time and power of one mode with one batch size.

    Attributes:
        mode: the power mode.
        batch: samples in the batch.
        minibatch_ms: time of a minibatch, ms.
        power_mw: median board power, mW.
        peak_mw: highest board power, mW; None if it was not recorded.

    Raises:
        InvalidInputError: the batch is not a whole number of at least 1, or a value is not finite and above 0.
    """

    mode: PowerMode
    batch: int
    minibatch_ms: float
    power_mw: float
    peak_mw: float | None = None

    def __post_init__(self) -> None:
        _require_batches([self.batch])
        values = [self.minibatch_ms, self.power_mw, *([] if self.peak_mw is None else [self.peak_mw])]
        if not all(0 < value < math.inf for value in values):
            raise InvalidInputError(
                f"{self.mode.label()} with batch {self.batch}: times and powers must be finite and above 0: {values}"
            )

    def keeps(self, limit: PowerLimit) -> bool:
        """Whether the measured power keeps a limit.

        Raises:
            InvalidInputError: the limit applies to the peak, which was not recorded.
        """
        power_mw = self.power_mw if limit.figure is PowerFigure.MEDIAN else self.peak_mw
        if power_mw is None:
            raise InvalidInputError(
                f"{self.mode.label()} with batch {self.batch}: has no peak power: record it, or limit the median"
            )
        return power_mw <= limit.power_mw


Measure = Callable[[PowerMode, int], JointMeasurement]
"""Measures a mode with a batch size; raises `BatchTooLargeError` if the batch does not fit into memory."""


@dataclass(frozen=True)
class JointProfile:
    """The lookup tables of time and power.

    Attributes:
        rows: the measurements in the order in which they were made, including those that exceed the limit.
        refused: batch sizes that do not fit into memory, ascending.
    """

    rows: tuple[JointMeasurement, ...]
    refused: tuple[int, ...]


def gpu_frequencies(space: ModeSpace) -> tuple[PowerMode, ...]:
    """The modes that differ in the GPU frequency only, ascending, with every other knob at its maximum."""
    return tuple(space.highest._replace(gpu_hz=gpu_hz) for gpu_hz in space.gpu_hz)


def profile_jointly(
    modes: Sequence[PowerMode],
    batches: Collection[int],
    limit: PowerLimit,
    measure: Measure,
    refused: Collection[int] = (),
) -> JointProfile:
    """Measure the modes and batch sizes that can be the fastest within a limit, starting with the largest batch.

    If time decreases with the frequency, and power increases with it and with the batch, then the fastest mode of each
    batch within the limit is among the rows. The mode with the least energy may be missing, because it can be a slower
    one. If noise makes a smaller batch exceed the limit in a mode in which a larger batch kept it, lower modes are
    measured until one keeps the limit.

    Args:
        modes: distinct modes in ascending order: no knob is lower than in the previous mode.
        batches: distinct batch sizes, in any order.
        limit: the power limit.
        measure: measures one mode with one batch size. Its errors other than `BatchTooLargeError` end the profile.
        refused: batch sizes already known not to fit into memory; neither they nor larger ones are tried.

    Raises:
        InvalidInputError: the modes are not ascending, a batch size is wrong or repeated, there are none of either, the
            limit applies to the peak and a measurement has none, or another mode or batch was measured.
        BatchTooLargeError: no batch size fits into memory.
    """
    _require_ascending(modes)
    if not batches:
        raise InvalidInputError("there are no batch sizes to profile: state one or more")
    _require_batches(batches)
    _require_batches(refused)
    least_refused = min(refused, default=math.inf)
    too_large = set(refused) | {batch for batch in batches if batch > least_refused}
    rows: list[JointMeasurement] = []
    start = 0
    for batch in sorted(set(batches) - too_large, reverse=True):
        try:
            of_batch = _rows_of_batch(modes, batch, start, limit, measure)
        except BatchTooLargeError:
            # Training with this batch can fail at any time, so its rows, if there are any, cannot be used.
            too_large.add(batch)
            continue
        rows += of_batch
        start = max((modes.index(row.mode) for row in of_batch if row.keeps(limit)), default=0)
    if not rows:
        raise BatchTooLargeError(
            f"no batch size fits into memory, not even {min(batches)} samples: state smaller batch sizes"
        )
    return JointProfile(tuple(rows), tuple(sorted(too_large)))


def _rows_of_batch(
    modes: Sequence[PowerMode], batch: int, start: int, limit: PowerLimit, measure: Measure
) -> list[JointMeasurement]:
    """Measure one batch size upwards until the limit is exceeded, or downwards until it is kept."""
    rows = [_measured(modes[start], batch, measure)]
    if rows[0].keeps(limit):
        for mode in modes[start + 1 :]:
            rows.append(_measured(mode, batch, measure))
            if not rows[-1].keeps(limit):
                break
    else:
        for mode in reversed(modes[:start]):
            rows.append(_measured(mode, batch, measure))
            if rows[-1].keeps(limit):
                break
    return rows


def _measured(mode: PowerMode, batch: int, measure: Measure) -> JointMeasurement:
    row = measure(mode, batch)
    if (row.mode, row.batch) != (mode, batch):
        raise InvalidInputError(
            f"{mode.label()} with batch {batch} was requested, but {row.mode.label()} with batch {row.batch} was"
            " measured"
        )
    return row


def _require_ascending(modes: Sequence[PowerMode]) -> None:
    if not modes:
        raise InvalidInputError("there are no modes to profile: state one or more")
    for lower, higher in zip(modes, modes[1:], strict=False):
        if lower == higher or any(low > high for low, high in zip(lower, higher, strict=True)):
            raise InvalidInputError(
                f"the modes must be distinct and ascend in every knob, but {higher.label()} follows {lower.label()}"
            )


def _require_batches(batches: Collection[int]) -> None:
    if any(type(batch) is not int or not 1 <= batch <= LARGEST_COUNT for batch in batches):
        raise InvalidInputError(f"a batch must be a whole number from 1 to {LARGEST_COUNT:,}, not {list(batches)}")
    if len(set(batches)) != len(batches):
        raise InvalidInputError(f"the batch sizes must be distinct, not {list(batches)}")
