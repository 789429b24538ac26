"""Combines what is known of inference in every power mode with every batch: measured, predicted and live times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from wattfleet.choosing import PROBABILITY, KnownModes
from wattfleet.duties import largest_slowdowns
from wattfleet.modes import ModeArray, PowerMode, Profile
from wattfleet.prediction import Prediction, normal_quantile

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
