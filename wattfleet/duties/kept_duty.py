"""The figures that a device reports about how it keeps its duty."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wattfleet.errors import InvalidInputError
from wattfleet.modes import require_workload_name

LATENCY_LIMITS_MS = (5.0, 10.0, 20.0, 35.0, 50.0, 75.0, 100.0, 150.0, 200.0, 350.0, 500.0, 750.0, 1e3, 2e3, 5e3, 1e4)
"""Upper limits of the histogram of latencies, ms, ascending; one further count is for all later answers."""

_MAX_REASON = 500


@dataclass(frozen=True)
class KeptDuty:
    """A duty and how well it is kept. Counters start at 0 when the agent starts or the duty changes.

    Attributes:
        workload: name of the inference workload.
        latency_ms: the duty's limit, ms.
        quantile: the share of requests that have to be answered within the limit.
        arrivals_per_s: requests per second in the last half minute.
        requests: number of requests that got an answer or an error.
        missed: number of requests that were answered later than the limit, or got an error.
        latency_counts: histogram of the answers' latencies over `LATENCY_LIMITS_MS`; the last count is for all later
            answers.
        latency_sum_ms: sum of the latencies of all answers, ms.
        latency_at_quantile_ms: latency of the latest answers at the duty's quantile, ms; None before the first answer.
        batch: requests in the latest batch; 0 before the first.
        training_share: the share of the last half minute in which minibatches had the device, 0 to 1.
        servers: inference servers that are connected.
        waits: why a training waits, as text for people; empty if none does.

    Raises:
        InvalidInputError: a figure is one that no device can have.
    """

    workload: str
    latency_ms: float
    quantile: float
    arrivals_per_s: float
    requests: int
    missed: int
    latency_counts: tuple[int, ...]
    latency_sum_ms: float
    latency_at_quantile_ms: float | None
    batch: int
    training_share: float
    servers: int
    waits: str = ""

    def __post_init__(self) -> None:
        require_workload_name(self.workload)
        figures = (self.latency_ms, self.arrivals_per_s, self.latency_sum_ms, self.latency_at_quantile_ms or 0.0)
        is_plausible = (
            all(0 <= each < math.inf for each in figures)
            and 0 < self.quantile < 1
            and 0 <= self.training_share <= 1
            and min(self.requests, self.missed, self.batch, self.servers, *self.latency_counts) >= 0
            and len(self.latency_counts) == len(LATENCY_LIMITS_MS) + 1
            and len(self.waits) <= _MAX_REASON
        )
        if not is_plausible:
            raise InvalidInputError(f"the figures of the duty {self.workload!r} are not plausible")

    @property
    def missed_share(self) -> float:
        """The share of requests that missed the limit, 0 to 1; 0 before the first."""
        return min(1.0, self.missed / max(1, self.requests))

    def lines(self) -> dict[str, str]:
        """The figures as text, by their labels."""
        limit = f"{self.workload}: {100 * self.quantile:g}% of requests within {self.latency_ms:g} ms"
        if not self.servers:
            return {"duty": limit, "requests": "no inference server is connected"}
        latency = self.latency_at_quantile_ms
        answers = "none answered yet" if latency is None else f"{100 * self.quantile:g}% within {latency:.0f} ms"
        lines = {
            "duty": limit,
            "requests": f"{self.arrivals_per_s:.1f} per second, in batches of {self.batch or '?'}; {answers}",
            "missed": f"{self.missed:,} of {self.requests:,} ({self.missed_share:.1%})",
            "training": f"{self.training_share:.0%} of the last half minute",
        }
        if self.waits:
            lines["training"] += f"; it waits: {self.waits}"
        return lines
