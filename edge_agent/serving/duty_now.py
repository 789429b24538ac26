"""A duty as it is at one moment, with all that decides which modes keep it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edge_agent.serving.known_inference import LiveBatches
from wattfleet.duties import Demand, Duty

LEAST_ARRIVALS_PER_S = 0.1
"""A duty without any request counts with this rate, requests per second."""

_RATE_CHANGE = 0.1
_WINDOW_S = 30.0
_DEVIATIONS = 3.0
_TIME_CHANGE = 0.25


@dataclass(frozen=True)
class DutyNow:
    """A duty, and what the device has seen of its requests.

    Attributes:
        duty: the duty.
        arrivals_per_s: the larger of the expected and the measured rate, requests per second.
        largest_batch: requests that the connected servers take at once; None without a server.
        switch_ms: how much longer a batch takes after a minibatch, ms.
        live: high estimates of the batches that were answered.
    """

    duty: Duty
    arrivals_per_s: float
    largest_batch: int | None
    switch_ms: float
    live: LiveBatches

    def demand(self) -> Demand:
        """The requests to plan with. The rate is rounded up to two digits: reasons stay the same for a while."""
        per_s = max(self.arrivals_per_s, LEAST_ARRIVALS_PER_S)
        digit = 10.0 ** (math.floor(math.log10(per_s)) - 1)
        # A rounding error must not count as another digit.
        rounded = math.ceil(per_s / digit - 1e-9) * digit
        return Demand(float(f"{rounded:.2g}"), self.duty.latency_ms, self.duty.quantile)

    def differs_from(self, other: DutyNow) -> bool:
        """Whether other modes may keep the duty now than then: more than a chance change of rate or times."""
        if (self.duty, self.largest_batch) != (other.duty, other.largest_batch) or _keys(self) != _keys(other):
            return True
        rates = max(self.arrivals_per_s, LEAST_ARRIVALS_PER_S), max(other.arrivals_per_s, LEAST_ARRIVALS_PER_S)
        # Requests at random vary from one half minute, in which they are counted, to the next.
        by_chance = _DEVIATIONS * math.sqrt(2 / (min(rates) * _WINDOW_S))
        if max(rates) / min(rates) - 1 > max(_RATE_CHANGE, by_chance):
            return True
        pairs = [(took_ms, other.live[mode][batch]) for mode, of in self.live.items() for batch, took_ms in of.items()]
        return any(max(pair) > math.exp(_TIME_CHANGE) * min(pair) for pair in pairs)


def _keys(now: DutyNow) -> set[tuple[object, int]]:
    return {(mode, batch) for mode, of_mode in now.live.items() for batch in of_mode}
