"""Pareto fronts of time and power: no mode on a front is both slower and more power-hungry than another."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.errors import ImplausibleError, InvalidInputError
from wattfleet.core.modes import BatchArray, ModeArray, PowerMode, array_to_modes
from wattfleet.core.prediction import Prediction, normal_quantile, warmup_s

MAX_FRONT_POINTS = 64
"""Maximum number of points of a front."""

POWER_QUANTILE = 0.95
"""Quantile of the predicted power that a plan sets aside: a mode exceeds it with a probability of 5 %."""

MIN_EPOCH_S, MAX_EPOCH_S = 1e-6, 1e7
"""Range of plausible seconds per epoch. The maximum also applies to a warm-up."""

MAX_POWER_W = 1e5
"""Largest plausible watts of any machine. The coordinator's limits for each kind of board are far lower."""

MAX_LOG_SD = 2.0
"""Largest plausible standard deviation of a logarithm; a less certain prediction is useless."""

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]


def pareto_front(time: Values, power: Values) -> NDArray[np.intp]:
    """Indices of the points that no other point dominates.

    Args:
        time: `[n]` times, any unit.
        power: `[n]` powers, any unit.

    Returns:
        `[k]` indices by ascending time and strictly descending power; the first of equal points.
    """
    order = np.lexsort((power, time))
    lowest_before = np.minimum.accumulate(np.concatenate(([np.inf], power[order][:-1])))
    return np.asarray(order[power[order] < lowest_before])


class Front:
    """The predicted Pareto-optimal modes of one device, by ascending time and descending planned watts.

    Points are ordered by the time of one epoch including warm-up; the epoch time alone need not rise.

    Values are stored compactly, because a coordinator keeps the fronts of ten thousand devices.
    """

    __slots__ = ("_batch", "_columns", "_settings", "_setting_indices")

    def __init__(
        self,
        modes: ModeArray,
        epoch_s: Values,
        power_w: Values,
        epoch_log_sd: Values,
        power_log_sd: Values,
        warmup_s: Values,
        batch: BatchArray | None = None,
    ) -> None:
        """Create a front from its points.

        Args:
            modes: `[k, 4]` power modes.
            epoch_s: `[k]` median seconds per epoch.
            power_w: `[k]` median watts while training.
            epoch_log_sd: `[k]` standard deviation of the logarithm of the time.
            power_log_sd: `[k]` standard deviation of the logarithm of the power.
            warmup_s: `[k]` seconds of warm-up, once per training; 0 if unknown.
            batch: `[k]` samples in a batch, if it differs between points; None if all points use the workload's batch
                size.

        Raises:
            InvalidInputError: there are no or too many points, their order is wrong, or a value is not finite and
                positive.
            ImplausibleError: a value is outside of what any device can have.
        """
        k = len(modes)
        if not 1 <= k <= MAX_FRONT_POINTS:
            raise InvalidInputError(f"a front holds 1 to {MAX_FRONT_POINTS} points, not {k}")
        columns = (epoch_s, power_w, epoch_log_sd, power_log_sd, warmup_s)
        if modes.shape != (k, 4) or any(column.shape != (k,) for column in columns):
            raise InvalidInputError("a front needs [k, 4] modes and k values in every column")
        if not all(np.isfinite(values).all() and (values > 0).all() for values in (modes, *columns[:2])):
            raise InvalidInputError("a front's modes, times and watts must be finite and above zero")
        if not all(np.isfinite(values).all() and (values >= 0).all() for values in columns[2:]):
            raise InvalidInputError("a front's standard deviations and warm-ups must be finite and not negative")
        _require_plausible(*columns)
        if batch is not None and (batch.shape != (k,) or not (batch >= 1).all()):
            raise InvalidInputError("a front's batches must be one for each point, at least 1 sample each")
        self._batch = batch
        self._columns = np.array(columns, dtype=np.float64)
        # A knob has few settings: each is stored once, and modes refer to them by one-byte indices.
        self._settings, indices = np.unique(np.asarray(modes, dtype=np.float64), return_inverse=True)
        self._setting_indices = indices.reshape(k, 4).astype(np.uint8)
        self._columns.setflags(write=False)
        if (np.diff(self.one_epoch_s) <= 0).any() or (np.diff(self.planned_w) >= 0).any():
            raise InvalidInputError("a front's times must rise and its planned watts fall from point to point")

    def __len__(self) -> int:
        return len(self._setting_indices)

    @property
    def modes(self) -> ModeArray:
        """`[k, 4]` power modes."""
        return np.asarray(self._settings[self._setting_indices])

    @property
    def epoch_s(self) -> Values:
        """`[k]` median seconds per epoch."""
        return self._column(0)

    @property
    def power_w(self) -> Values:
        """`[k]` median watts while training."""
        return self._column(1)

    @property
    def epoch_log_sd(self) -> Values:
        """`[k]` standard deviation of the logarithm of the time."""
        return self._column(2)

    @property
    def power_log_sd(self) -> Values:
        """`[k]` standard deviation of the logarithm of the power."""
        return self._column(3)

    @property
    def warmup_s(self) -> Values:
        """`[k]` seconds of warm-up, once per training; 0 if unknown."""
        return self._column(4)

    @property
    def one_epoch_s(self) -> Values:
        """`[k]` median seconds of one epoch including warm-up, by which the points are ordered."""
        return self.warmup_s + self.epoch_s

    @property
    def planned_w(self) -> Values:
        """`[k]` watts that a plan sets aside: the `POWER_QUANTILE` of the predicted power."""
        return np.asarray(self.power_w * np.exp(normal_quantile(POWER_QUANTILE) * self.power_log_sd))

    @property
    def max_planned_w(self) -> float:
        """Watts that a plan sets aside in the fastest mode, which draws the most."""
        return float(self._columns[1, 0] * math.exp(normal_quantile(POWER_QUANTILE) * self._columns[3, 0]))

    @property
    def batch(self) -> BatchArray | None:
        """`[k]` samples in a batch; None if all points use the workload's batch size."""
        return self._batch

    def _column(self, number: int) -> Values:
        column: Values = self._columns[number]
        return column

    def equals(self, other: Front) -> bool:
        """Whether another front has the same values at every point."""
        if (self._batch is None) is not (other._batch is None):
            return False
        same_batch = self._batch is None or np.array_equal(self._batch, np.asarray(other._batch))
        return same_batch and np.array_equal(self._columns, other._columns) and np.array_equal(self.modes, other.modes)

    def scaled(self, factor: float) -> Front:
        """The front for an epoch of more or fewer minibatches; warm-ups stay as they are.

        Points that are no longer on the front, or whose epochs are no longer plausible, are left out.

        Args:
            factor: number of minibatches in the scaled epoch, divided by that of this front's epoch.

        Raises:
            InvalidInputError: the factor is not finite and above 0.
            ImplausibleError: no epoch is plausible.
        """
        if not 0 < factor < math.inf:
            raise InvalidInputError(f"a front is scaled by a finite factor above 0, not {factor}")
        columns = self._columns.copy()
        columns[0] *= factor
        time_s = columns[0] + columns[4]
        if (time_s[1:] > time_s[:-1]).all() and MIN_EPOCH_S <= columns[0].min() and columns[0].max() <= MAX_EPOCH_S:
            # No check is needed again: plans scale the fronts of ten thousand devices.
            scaled = object.__new__(Front)
            scaled._batch, scaled._columns = self._batch, columns
            scaled._settings, scaled._setting_indices = self._settings, self._setting_indices
            columns.setflags(write=False)
            return scaled
        kept = np.flatnonzero(_plausible(*columns)[0][1])
        if not len(kept):
            _require_plausible(*columns)
        return self._points(kept[pareto_front(time_s[kept], self.planned_w[kept])], columns)

    def _points(self, kept: NDArray[np.intp], columns: Values | None = None) -> Front:
        """Create a front from some of the points; given columns replace the current ones."""
        columns = self._columns if columns is None else columns
        epoch_s, power_w, epoch_log_sd, power_log_sd, warmup_s = columns[:, kept]
        batch = None if self._batch is None else self._batch[kept]
        return Front(self.modes[kept], epoch_s, power_w, epoch_log_sd, power_log_sd, warmup_s, batch)

    def of_batch(self, batch: int) -> Front | None:
        """The points with a batch size; None if there are none."""
        if self._batch is None:
            return None
        kept = np.flatnonzero(self._batch == batch)
        return self._points(kept) if len(kept) else None

    def mode(self, index: int) -> PowerMode:
        """The power mode of one point."""
        return array_to_modes(self._settings[self._setting_indices[index]][None])[0]


def _plausible(
    epoch_s: Values, power_w: Values, epoch_log_sd: Values, power_log_sd: Values, warmup_s: Values
) -> list[tuple[str, Mask]]:
    """For each plausible range, its text and whether each point is within it. NaN is never within a range."""
    return [
        (
            f"an epoch takes {MIN_EPOCH_S:g} to {MAX_EPOCH_S:,.0f} s",
            (epoch_s >= MIN_EPOCH_S) & (epoch_s <= MAX_EPOCH_S),
        ),
        (f"a training draws up to {MAX_POWER_W:,.0f} W", power_w <= MAX_POWER_W),
        (
            f"the standard deviation of a logarithm is at most {MAX_LOG_SD:g}",
            (epoch_log_sd <= MAX_LOG_SD) & (power_log_sd <= MAX_LOG_SD),
        ),
        (f"a warm-up takes up to {MAX_EPOCH_S:,.0f} s", warmup_s <= MAX_EPOCH_S),
    ]


def _require_plausible(*columns: Values) -> None:
    """Check a front's columns."""
    for text, is_plausible in _plausible(*columns):
        if not is_plausible.all():
            raise ImplausibleError(f"a front has values that no device can have: {text}")


def predicted_front(
    modes: ModeArray,
    prediction: Prediction,
    minibatches_per_epoch: float | Values,
    first_gcycles: float = 0.0,
    batch: BatchArray | None = None,
) -> Front:
    """The front of a whole mode space, thinned to `MAX_FRONT_POINTS` points that are evenly spread over its watts.

    Modes are compared by the two quantities that a round plan trades off: planned watts, and the median time of one
    epoch including warm-up.

    Modes whose prediction is not plausible are left out.

    Args:
        modes: `[n, 4]` modes.
        prediction: the prediction for each of them.
        minibatches_per_epoch: minibatches in an epoch on the device; `[n]` if they differ with the batch.
        first_gcycles: CPU cycles of a training's first minibatch, in units of 1e9; 0 if unknown.
        batch: `[n]` samples in a batch at each of the modes, if they differ.

    Raises:
        ImplausibleError: the prediction is not plausible for any mode.
    """
    warm_s = warmup_s(modes, prediction.minibatch_ms, first_gcycles)
    epoch_s = prediction.minibatch_ms * minibatches_per_epoch / 1e3
    columns = (epoch_s, prediction.power_mw / 1e3, prediction.time_log_sd, prediction.power_log_sd, warm_s)
    kept = np.logical_and.reduce([is_ for _, is_ in _plausible(*columns)])
    if not kept.all():
        if not kept.any():
            _require_plausible(*columns)
        per_epoch = minibatches_per_epoch
        return predicted_front(
            modes[kept],
            prediction.among(kept),
            per_epoch[kept] if isinstance(per_epoch, np.ndarray) else per_epoch,
            first_gcycles,
            None if batch is None else batch[kept],
        )
    planned_mw = prediction.power_mw_quantile(POWER_QUANTILE)
    front = pareto_front(warm_s + epoch_s, planned_mw)
    if len(front) > MAX_FRONT_POINTS:
        wanted_mw = np.linspace(planned_mw[front[0]], planned_mw[front[-1]], MAX_FRONT_POINTS)
        nearest = np.abs(planned_mw[front][:, None] - wanted_mw[None, :]).argmin(axis=0)
        front = front[np.unique(nearest)]
    return Front(
        modes=modes[front],
        epoch_s=epoch_s[front],
        power_w=prediction.power_mw[front] / 1e3,
        epoch_log_sd=prediction.time_log_sd[front],
        power_log_sd=prediction.power_log_sd[front],
        warmup_s=warm_s[front],
        batch=None if batch is None else batch[front],
    )
