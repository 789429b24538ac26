"""How long the cycles of a shared board may be, so that it keeps a duty.

A longer cycle lets more requests wait and each of them wait longer, so that each batch has a longest cycle. In cycles,
a wait depends on the batch and on its utilization alone. It is tabulated once, and a board is computed by itself only
where the table cannot decide.
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
# What a latency at a quantile may be too long by, in cycles.
_ROUNDING = 1e-3
# The longest inference is searched by dividing its range so often into so many parts.
_ROUNDS, _PARTS = 5, 64


@dataclass(frozen=True)
class CycleLimits:
    """The longest inference and the longest cycles with one batch size that keep a duty of random requests.

    Attributes:
        demand: the duty.
        batch: most requests in a batch.
        inference_ms: the longest inference that keeps it while nothing is trained, ms; 0 if none does.
        cycle_ms: `[k]` ascending cycles.
        wait_ms: `[k]` how long a request waits for its inference in each of these, at the demand's quantile.
    """

    demand: Demand
    batch: int
    inference_ms: float
    cycle_ms: Values
    wait_ms: Values

    @classmethod
    def of(cls, demand: Demand, batch: int) -> CycleLimits:
        """The limits of a duty with a batch size."""
        (collect_ms,) = demand.collect_ms(np.array([batch]))
        cycle_ms = _LOADS * collect_ms
        return cls(
            demand,
            batch,
            _longest_inference_ms(demand, batch, min(MAX_UTILIZATION * collect_ms, demand.latency_ms)),
            cycle_ms,
            _wait_cycles(batch, demand.quantile) * cycle_ms,
        )

    def most_steps(self, inference_ms: Values, fixed_ms: Values, step_ms: Values) -> Counts:
        """The most steps that a cycle may have besides its fixed part, `[n]`.

        Args:
            inference_ms: `[n]` ms of inference.
            fixed_ms: `[n]` ms of a cycle without steps, at least those of inference.
            step_ms: `[n]` ms of a step.
        """
        wait_ms = self.demand.latency_ms - inference_ms
        # The table has the waits and up to a thousandth of a cycle more.
        surely = np.searchsorted(self.wait_ms, wait_ms, side="right")
        never = np.searchsorted(self.wait_ms - _ROUNDING * self.cycle_ms, wait_ms, side="right")
        kept_ms = np.concatenate([[0.0], self.cycle_ms])[surely]
        broken_ms = np.concatenate([self.cycle_ms, [np.nextafter(self.cycle_ms[-1], np.inf)]])[never]
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


def _longest_inference_ms(demand: Demand, batch: int, most_ms: float) -> float:
    """The longest inference that keeps a duty while nothing is trained, up to a most; to 1e-9 of it."""
    low_ms, high_ms = 0.0, most_ms
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
    """How long a request waits for its inference at a quantile and each of `_LOADS`, in cycles, `[k]`."""
    cycle_ms = _LOADS * batch
    no_inference = np.zeros(len(_LOADS))
    wait_ms = latency_at_quantile_ms(np.full(len(_LOADS), batch), no_inference, cycle_ms, 1e3, quantile)
    wait_cycles = np.asarray(wait_ms / cycle_ms)
    wait_cycles.setflags(write=False)
    return wait_cycles
