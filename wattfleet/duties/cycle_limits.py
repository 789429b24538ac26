"""The longest cycles with which a shared board keeps a duty.

In a longer cycle, more requests wait and each of them waits longer, so each batch size has a longest cycle. Measured in
cycles, a wait depends only on the batch size and the utilization. It is tabulated once, and computed for a single board
only where the table is not accurate enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from wattfleet.duties.queueing import MAX_UTILIZATION, Demand, latency_at_quantile_ms, share_in_time

Values = NDArray[np.float64]
Counts = NDArray[np.int64]

_LOADS = np.linspace(0, MAX_UTILIZATION, 513)[1:]
# Tolerance of `latency_at_quantile_ms`, in cycles: its result is up to this much too long.
_TOLERANCE = 1e-3
# The search for the longest inference divides its range into this many parts, and repeats that for the part found.
_ROUNDS, _PARTS = 5, 64


@dataclass(frozen=True)
class CycleLimits:
    """The longest inference and the longest cycles with one batch size that keep a duty of random requests.

    Attributes:
        demand: the duty.
        batch: maximum number of requests in a batch.
        inference_ms: the longest inference that keeps the duty while nothing is trained, ms; 0 if none does.
        cycle_ms: `[k]` lengths of cycles, ascending, ms.
        wait_ms: `[k]` how long a request waits for its inference in each of these cycles, at the demand's quantile, ms.
    """

    demand: Demand
    batch: int
    inference_ms: float
    cycle_ms: Values
    wait_ms: Values

    @classmethod
    def of(cls, demand: Demand, batch: int) -> CycleLimits:
        """Compute the limits of a duty with a batch size."""
        (collect_ms,) = demand.collect_ms(np.array([batch]))
        cycle_ms = _LOADS * collect_ms
        return cls(
            demand,
            batch,
            _longest_inference_ms(demand, batch, min(MAX_UTILIZATION * collect_ms, demand.latency_ms)),
            cycle_ms,
            _wait_cycles(batch, demand.quantile) * cycle_ms,
        )

    def max_steps(self, inference_ms: Values, fixed_ms: Values, step_ms: Values) -> Counts:
        """The maximum number of training steps in a cycle with which the duty is kept, `[n]`.

        Args:
            inference_ms: `[n]` ms of inference.
            fixed_ms: `[n]` ms of a cycle without steps, at least `inference_ms`.
            step_ms: `[n]` ms of a step.
        """
        wait_ms = self.demand.latency_ms - inference_ms
        # The waits in the table are too long by up to `_TOLERANCE` cycles.
        certain = np.searchsorted(self.wait_ms, wait_ms, side="right")
        impossible = np.searchsorted(self.wait_ms - _TOLERANCE * self.cycle_ms, wait_ms, side="right")
        kept_ms = np.concatenate([[0.0], self.cycle_ms])[certain]
        broken_ms = np.concatenate([self.cycle_ms, [np.nextafter(self.cycle_ms[-1], np.inf)]])[impossible]
        kept = np.maximum(np.floor((kept_ms - fixed_ms) / step_ms), 0).astype(np.int64)
        broken = np.maximum(np.ceil((broken_ms - fixed_ms) / step_ms), 1).astype(np.int64)
        broken = np.maximum(broken, kept + 1)
        while len(rows := np.flatnonzero(broken - kept > 1)):
            middle = (kept[rows] + broken[rows]) // 2
            cycle_ms = fixed_ms[rows] + middle * step_ms[rows]
            is_kept = self._share(inference_ms[rows], cycle_ms) >= self.demand.quantile
            kept[rows] = np.where(is_kept, middle, kept[rows])
            broken[rows] = np.where(is_kept, broken[rows], middle)
        return kept

    def _share(self, inference_ms: Values, cycle_ms: Values) -> Values:
        batch = np.full(len(cycle_ms), self.batch)
        return share_in_time(batch, inference_ms, cycle_ms, self.demand.arrival_per_s, self.demand.latency_ms)


def _longest_inference_ms(demand: Demand, batch: int, max_ms: float) -> float:
    """The longest inference, up to a maximum, that keeps a duty without training; accurate to 1e-9 of `max_ms`."""
    low_ms, high_ms = 0.0, max_ms
    for _ in range(_ROUNDS):
        tried_ms = np.linspace(low_ms, high_ms, _PARTS + 1)
        every = np.full(len(tried_ms) - 1, batch)
        share = share_in_time(every, tried_ms[1:], tried_ms[1:], demand.arrival_per_s, demand.latency_ms)
        kept = int((share >= demand.quantile).sum())
        if kept == _PARTS:
            return high_ms
        low_ms, high_ms = float(tried_ms[kept]), float(tried_ms[kept + 1])
    return low_ms


@lru_cache(maxsize=64)
def _wait_cycles(batch: int, quantile: float) -> Values:
    """The quantile of a request's wait for its inference at each utilization in `_LOADS`, in cycles, `[k]`."""
    cycle_ms = _LOADS * batch
    no_inference = np.zeros(len(_LOADS))
    wait_ms = latency_at_quantile_ms(np.full(len(_LOADS), batch), no_inference, cycle_ms, 1e3, quantile)
    wait_cycles = np.asarray(wait_ms / cycle_ms)
    wait_cycles.setflags(write=False)
    return wait_cycles
