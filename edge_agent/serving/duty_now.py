"""A snapshot of a duty, with everything that determines which modes keep it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edge_agent.serving.known_inference import LiveBatches
from wattfleet.duties import Demand, Duty

LEAST_ARRIVALS_PER_S = 0.1
"""The rate assumed for a duty without requests, requests per second."""

_RATE_CHANGE = 0.1
_WINDOW_S = 30.0
_DEVIATIONS = 3.0
_TIME_CHANGE = 0.25


@dataclass(frozen=True)
class DutyNow:
    """A duty, and what the device has observed of its requests.

    Attributes:
        duty: the duty.
        arrivals_per_s: the larger of the expected and the measured rate, requests per second.
        largest_batch: maximum number of requests that the connected servers accept at once; None without a server.
        switch_ms: additional time of a batch after a minibatch, ms.
        live: high estimates of the times of answered batches.
    """

    duty: Duty
    arrivals_per_s: float
    largest_batch: int | None
    switch_ms: float
    live: LiveBatches

    def demand(self) -> Demand:
        """The demand to plan for.

        Its rate is rounded up to two digits, so that texts with it do not change all the time.
        """
        per_s = max(self.arrivals_per_s, LEAST_ARRIVALS_PER_S)
        digit = 10.0 ** (math.floor(math.log10(per_s)) - 1)
        # Keeps a rounding error from counting as another digit.
        rounded = math.ceil(per_s / digit - 1e-9) * digit
        return Demand(float(f"{rounded:.2g}"), self.duty.latency_ms, self.duty.quantile)

    def differs_from(self, other: DutyNow) -> bool:
        """Return whether rate or times differ by more than chance, so that other modes may keep the duty."""
        if (self.duty, self.largest_batch) != (other.duty, other.largest_batch) or _keys(self) != _keys(other):
            return True
        rates = max(self.arrivals_per_s, LEAST_ARRIVALS_PER_S), max(other.arrivals_per_s, LEAST_ARRIVALS_PER_S)
        # The counts of random requests vary from one half minute to the next.
        by_chance = _DEVIATIONS * math.sqrt(2 / (min(rates) * _WINDOW_S))
        if max(rates) / min(rates) - 1 > max(_RATE_CHANGE, by_chance):
            return True
        pairs = [(took_ms, other.live[mode][batch]) for mode, of in self.live.items() for batch, took_ms in of.items()]
        return any(max(pair) > math.exp(_TIME_CHANGE) * min(pair) for pair in pairs)


def _keys(now: DutyNow) -> set[tuple[object, int]]:
    return {(mode, batch) for mode, of_mode in now.live.items() for batch in of_mode}
