"""Fronts for tests, built from a few numbers instead of a fitted predictor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from wattfleet.choosing import Front


def front(
    *points: tuple[float, float],
    epoch_log_sd: float | Sequence[float] = 0.0,
    power_log_sd: float = 0.0,
    warmup_s: float | Sequence[float] = 0.0,
) -> Front:
    """A front of (seconds per epoch, median watts) points; with no spread, the planned power equals the median.

    All points share one spread of the times and one start-up time.
    """
    k = len(points)
    modes = np.array([[4, 1_500_000 - step, 600_000_000, 2_133_000_000] for step in range(k)], dtype=np.float64)
    return Front(
        modes=modes.reshape(-1, 4),
        epoch_s=np.array([seconds for seconds, _ in points], dtype=np.float64),
        power_w=np.array([watts for _, watts in points], dtype=np.float64),
        epoch_log_sd=np.full(k, epoch_log_sd, dtype=np.float64),
        power_log_sd=np.full(k, power_log_sd),
        warmup_s=np.full(k, warmup_s, dtype=np.float64),
    )


def of_batches(front: Front, batches: Sequence[int]) -> Front:
    """The same front with a batch size for each point."""
    return Front(**columns_of(front), batch=np.array(batches))


def columns_of(front: Front) -> dict[str, Any]:
    """All fields of a front except its batches, as arrays by argument name."""
    names = ("modes", "epoch_s", "power_w", "epoch_log_sd", "power_log_sd", "warmup_s")
    return {name: getattr(front, name) for name in names}


@st.composite
def fronts(draw: st.DrawFn, most: int = 4, power_log_sd: float = 0.0) -> Front:
    """Fronts of whole seconds and whole watts, so that sums of watts are exact and ties are frequent."""
    k = draw(st.integers(1, most))
    seconds, starts_s = zip(*draw(seconds_and_starts(k)), strict=True)
    watts = draw(st.lists(st.integers(3, 20), min_size=k, max_size=k, unique=True))
    points = zip(seconds, sorted(watts, reverse=True), strict=True)
    return front(*points, power_log_sd=power_log_sd, warmup_s=starts_s)


@st.composite
def seconds_and_starts(draw: st.DrawFn, k: int) -> list[tuple[int, int]]:
    """Seconds per epoch and start-up seconds of some points in order; the epochs alone need not increase."""
    one_epoch_s = sorted(draw(st.lists(st.integers(1, 12), min_size=k, max_size=k, unique=True)))
    starts_s = [draw(st.integers(0, seconds - 1)) for seconds in one_epoch_s]
    return [(seconds - warmup_s, warmup_s) for seconds, warmup_s in zip(one_epoch_s, starts_s, strict=True)]
