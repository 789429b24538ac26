"""The waiting time of requests on a board that answers them in batches, and trains between two batches.

The board works in cycles of a fixed length: one inference of up to a batch of waiting requests, then some training.
With random arrivals (a Poisson process), the numbers of requests that are left over when an inference begins form a
Markov chain: the bulk-service queue of Bailey ("On queueing processes with bulk service", J. R. Stat. Soc. B 16, 1954).
Its stationary distribution is found by a Wiener-Hopf factorization on a circle. All requests are answered in the order
of their arrival, so the distribution of their latency follows exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BatchArray

MAX_UTILIZATION = 0.99
"""Utilization above which a board counts as overloaded: its queue is long and hardly ever empties."""

Values = NDArray[np.float64]
Rows = NDArray[np.intp]

# Probability that a truncated distribution may leave out, by Kingman's exponential bound on the queue.
_LOG_LEFT_OUT = math.log(1e-12)
# Points on the circle for each request of a batch: enough to follow the phase of its powers.
_POINTS_OF_A_REQUEST = 16
_MIN_POINTS = 128
_MAX_LOG_RADIUS = 1.0
# Points of all boards that are computed at once: bounds the memory to about 100 MB.
_MAX_POINTS = 1 << 20


class ArrivalPattern(str, Enum):
    """How the arrivals of requests are distributed over time.

    Random requests arrive independently of each other (a Poisson process), like those of many users. Regular requests
    arrive at a constant interval, like the frames of a camera; a batch is then answered as soon as it is full.
    """

    RANDOM = "random"
    REGULAR = "regular"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Demand:
    """The requests that a board has to answer, and within what time.

    Attributes:
        arrival_per_s: requests that arrive each second, on average.
        latency_ms: the limit from the arrival of a request to the end of its batch, ms.
        quantile: share of the requests that have to be answered within the limit.
        pattern: how the arrivals are distributed. Either all regular requests are answered within the limit or none.

    Raises:
        InvalidInputError: a number is not finite and above 0, or the quantile is not between 0 and 1.
    """

    arrival_per_s: float
    latency_ms: float
    quantile: float = 0.95
    pattern: ArrivalPattern = ArrivalPattern.RANDOM

    def __post_init__(self) -> None:
        for name, value, unit in (
            ("latency", self.latency_ms, "ms"),
            ("arrival rate", self.arrival_per_s, "requests a second"),
        ):
            if not 0 < value < math.inf:
                raise InvalidInputError(f"the {name} must be finite and above 0 {unit}, not {value:g}")
        if not 0 < self.quantile < 1:
            raise InvalidInputError(f"the quantile must be between 0 and 1, not {self.quantile:g}")

    def collect_ms(self, batch: BatchArray) -> Values:
        """The mean time in which `[n]` batches of requests arrive, `[n]` ms."""
        return np.asarray(1e3 * batch / self.arrival_per_s)

    def __str__(self) -> str:
        many = "all" if self.pattern is ArrivalPattern.REGULAR else f"{100 * self.quantile:g} %"
        return f"{many} of {self.arrival_per_s:g} requests a second within {self.latency_ms:g} ms"


def utilization(batch: BatchArray, cycle_ms: Values, arrival_per_s: float) -> Values:
    """The requests that arrive in a cycle relative to those that it can answer, `[n]`; from 1 on, the queue grows.

    Args:
        batch: `[n]` maximum number of requests in a batch.
        cycle_ms: `[n]` ms from the start of an inference to that of the next.
        arrival_per_s: requests that arrive each second.
    """
    return np.asarray(cycle_ms * arrival_per_s / 1e3 / batch)


def share_in_time(
    batch: BatchArray, inference_ms: Values, cycle_ms: Values, arrival_per_s: float, latency_ms: float | Values
) -> Values:
    """The share of random requests that are answered within a latency, `[n]`; 0 on an overloaded board.

    Exact for cycles of constant length. A board that does not train waits until a request arrives, and then begins
    immediately. This is assumed where a cycle is not longer than its inference.

    Args:
        batch: `[n]` maximum number of requests in a batch.
        inference_ms: `[n]` ms of the inference of a full batch, which each inference is assumed to take.
        cycle_ms: `[n]` ms from the start of an inference to that of the next.
        arrival_per_s: requests that arrive each second.
        latency_ms: ms from the arrival of a request to the end of its batch; one number or `[n]`.
    """
    wait_cycles = (latency_ms - inference_ms) / cycle_ms
    load = utilization(batch, cycle_ms, arrival_per_s)
    share = np.zeros(len(batch))
    possible = (wait_cycles >= 0) & (load <= MAX_UTILIZATION)
    for size, points, rows in _groups(batch, load, possible):
        queue = LeftoverQueue.of(size, load[rows] * size, points)
        on_demand = cycle_ms[rows] <= inference_ms[rows]
        share[rows] = queue.share_begun_within(wait_cycles[rows], on_demand)
    return share


def latency_at_quantile_ms(
    batch: BatchArray, inference_ms: Values, cycle_ms: Values, arrival_per_s: float, quantile: float
) -> Values:
    """The latency within which a share of random requests is answered, `[n]` ms; infinite on an overloaded board.

    Accurate to 0.1 % of a cycle. See `share_in_time` for the arguments.

    Args:
        batch: `[n]` maximum number of requests in a batch.
        inference_ms: `[n]` ms of the inference of a full batch.
        cycle_ms: `[n]` ms from the start of an inference to that of the next.
        arrival_per_s: requests that arrive each second.
        quantile: share of the requests, between 0 and 1.
    """
    load = utilization(batch, cycle_ms, arrival_per_s)
    latency_ms = np.full(len(batch), np.inf)
    for size, points, rows in _groups(batch, load, load <= MAX_UTILIZATION):
        queue = LeftoverQueue.of(size, load[rows] * size, points)
        on_demand = cycle_ms[rows] <= inference_ms[rows]
        latency_ms[rows] = inference_ms[rows] + queue.wait_cycles(quantile, on_demand) * cycle_ms[rows]
    return latency_ms


def _groups(batch: BatchArray, load: Values, chosen: NDArray[np.bool_]) -> Iterator[tuple[int, int, Rows]]:
    """Group the chosen rows by batch size and by the points of their distribution, in groups of bounded size."""
    points = points_needed(batch, np.where(chosen, load, 0.5))
    for size, count in np.unique(np.column_stack([batch, points])[chosen], axis=0).tolist():
        rows = np.flatnonzero(chosen & (batch == size) & (points == count))
        for part in np.array_split(rows, math.ceil(len(rows) * count / _MAX_POINTS)):
            yield size, count, part


def decay_rate(load: Values) -> Values:
    """The rate at which a long leftover queue becomes less likely, `[n]`, per request.

    The probability of at least r leftover requests is at most exp(-theta r), where theta > 0 solves
    load * (exp(theta) - 1) = theta (Kingman, "A martingale inequality in the theory of queues", 1964).

    Args:
        load: `[n]` utilization, above 0 and below 1.
    """
    theta = 2 * np.log(1 / load) + 2  # above the solution, so that Newton's iterations decrease towards it
    for _ in range(40):
        rise = load * np.exp(theta)
        theta = theta - (rise - load - theta) / (rise - 1)
    return theta


def points_needed(batch: BatchArray, load: Values) -> NDArray[np.int64]:
    """The number of points of a leftover queue's truncated distribution, `[n]`, a power of 2.

    The truncated part has a probability below 1e-12.

    Args:
        batch: `[n]` maximum number of requests in a batch.
        load: `[n]` utilization, above 0 and below 1.
    """
    needed = np.maximum(-_LOG_LEFT_OUT / _log_radius(load), _POINTS_OF_A_REQUEST * batch)
    return np.asarray(2 ** np.ceil(np.log2(np.maximum(needed, _MIN_POINTS)))).astype(np.int64)


def _log_radius(load: Values) -> Values:
    """The logarithm of the radius of a circle that is well away from all zeros, which lie below 1 or beyond theta."""
    return np.minimum(decay_rate(load) / 2, _MAX_LOG_RADIUS)


@dataclass(frozen=True)
class LeftoverQueue:
    """The requests that are left over whenever an inference begins, for `n` boards with one batch size.

    Attributes:
        batch: maximum number of requests in a batch.
        offered: `[n]` mean number of requests that arrive in a cycle.
        probability: `[n, p]` probabilities of 0, 1, ... leftover requests.
    """

    batch: int
    offered: Values
    probability: Values

    @classmethod
    def of(cls, batch: int, offered: Values, points: int) -> LeftoverQueue:
        """Compute the stationary distribution.

        With A(z) the generating function of the arrivals in a cycle, (z^b - A(z)) / ((z - 1) z^(b - 1)) has b - 1
        zeros inside of the unit circle, as many poles, and all other zeros outside of a larger circle. The factor of
        the outer zeros is the inverse of the leftover queue's generating function. The positive powers in the series of
        the logarithm on a circle between them give it.

        Args:
            batch: maximum number of requests in a batch, b.
            offered: `[n]` mean number of requests that arrive in a cycle, below b.
            points: on the circle; see `points_needed`.
        """
        log_radius = _log_radius(offered / batch)[:, None]
        angle = -2 * np.pi * np.arange(points // 2 + 1) / points  # the sign of the Fourier transform
        z = np.exp(log_radius + 1j * angle)
        arrivals = offered[:, None] * (z - 1) - (batch - 1) * (log_radius + 1j * angle)
        ratio = (z - np.exp(arrivals)) / (z - 1)
        logarithm = np.log(np.abs(ratio)) + 1j * np.unwrap(np.angle(ratio), axis=1)
        series = np.fft.irfft(logarithm, points, axis=1)
        series[:, 0] = 0.0
        series[:, points // 2 :] = 0.0
        scaled = np.fft.irfft(np.exp(-np.fft.rfft(series, axis=1)), points, axis=1)
        probability = np.maximum(scaled * np.exp(-log_radius * np.arange(points)), 0.0)
        return cls(batch, offered, probability / probability.sum(axis=1, keepdims=True))

    def share_begun_within(self, wait_cycles: Values, on_demand: NDArray[np.bool_]) -> Values:
        """The share of requests whose inference begins within a time, `[n]`.

        A request arrives at a fraction v of a cycle, behind r leftover requests and a Poisson number of earlier
        arrivals in this cycle. Its place in the queue determines the batch that answers it; v is uniformly distributed.
        The integral of the Poisson distribution over v is a sum of its tails.

        Args:
            wait_cycles: `[n]` times from a request's arrival, at least 0, in cycles.
            on_demand: `[n]` whether a board without requests waits for the next one and begins immediately.
        """
        most = math.ceil(self.probability.shape[1] + self.offered.max() + 12 * math.sqrt(self.offered.max() + 4))
        wait = np.minimum(wait_cycles, most // self.batch + 1)
        whole = np.floor(wait).astype(np.int64)
        until = 1 - (wait - whole)  # requests that arrive before this fraction of a cycle miss the last inference
        places = int(whole.max() + 1) * self.batch
        early, full = self._mean_below(until, places), self._mean_below(np.ones_like(until), places)
        left = self.probability[:, :places]
        # For each number of leftover requests: how many further places the batches before the last one have, and the
        # last one.
        index = (whole * self.batch)[:, None] - np.arange(left.shape[1])
        before_last = np.take_along_axis(early, np.maximum(index, 0), axis=1)
        last = np.maximum(index + self.batch, 0)
        in_last = np.take_along_axis(full, last, axis=1) - np.take_along_axis(early, last, axis=1)
        share = (left * (before_last + in_last)).sum(axis=1)
        none_waits = self.probability[:, 0] * np.exp(-self.offered)
        alone = (none_waits + self.offered * share) / (none_waits + self.offered)
        return np.asarray(np.clip(np.where(on_demand, alone, share), 0.0, 1.0))

    def _mean_below(self, until: Values, places: int) -> Values:
        """The integral over v of the probability that below 0, 1, ... requests arrived, `[n, places + 1]`.

        Args:
            until: `[n]` upper ends of the integral over v, which begins at 0.
            places: the largest number of requests.
        """
        mean = (self.offered * until)[:, None]
        count = np.arange(places)
        log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, places)))])
        with np.errstate(divide="ignore", invalid="ignore"):
            log_mean = np.where(mean > 0, np.log(mean), -np.inf)
            weight = np.where(count == 0, np.exp(-mean), np.exp(count * log_mean - mean - log_factorial))
        more = np.maximum(1 - np.cumsum(weight, axis=1), 0.0)
        sums = np.cumsum(more, axis=1) / self.offered[:, None]
        return np.concatenate([np.zeros((len(until), 1)), sums], axis=1)

    def wait_cycles(self, quantile: float, on_demand: NDArray[np.bool_]) -> Values:
        """The time from a request's arrival within which the inference of a share of requests begins, `[n]` cycles.

        Args:
            quantile: the share.
            on_demand: as for `share_begun_within`.

        Returns:
            `[n]` cycles, too long by at most 0.001.
        """
        low, high = np.zeros(len(self.offered)), np.ones(len(self.offered))
        while (short := self.share_begun_within(high, on_demand) < quantile).any():
            low, high = np.where(short, high, low), np.where(short, 2 * high, high)
        high = np.where(self.share_begun_within(np.zeros_like(high), on_demand) >= quantile, 0.0, high)
        while (high - low > 1e-3).any():
            middle = (low + high) / 2
            short = self.share_begun_within(middle, on_demand) < quantile
            low, high = np.where(short, middle, low), np.where(short, high, middle)
        return high


# --- Cycle limits -----------------------------------------------------------------------------------------------------
# The longest cycles with which a shared board keeps a duty.
#
# In a longer cycle, more requests wait and each of them waits longer, so each batch size has a longest cycle.
# Measured in cycles, a wait depends only on the batch size and the utilization. It is tabulated once, and computed
# for a single board only where the table is not accurate enough.

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
