"""What a simulated board served and trained, span by span."""

from __future__ import annotations

from dataclasses import dataclass

from edge_agent.devices.virtual.served_duty import ServedDuty
from wattfleet.modes import PowerMode


@dataclass(frozen=True)
class ServedSpan:
    """A period in which a board served requests in one power mode. All times are seconds of the board's clock.

    Attributes:
        begin_s: the start.
        end_s: the end.
        mode: the power mode.
        batch: largest number of requests in a batch.
        is_training: whether minibatches were trained between the requests.
        power_mw: mean power, mW.
        arrival_s: when each answered request arrived.
        latency_ms: time from the arrival to the answer, ms.
        minibatch_end_s: when each minibatch ended.
    """

    begin_s: float
    end_s: float
    mode: PowerMode
    batch: int
    is_training: bool
    power_mw: float
    arrival_s: list[float]
    latency_ms: list[float]
    minibatch_end_s: list[float]

    @classmethod
    def of(cls, run: ServedDuty, mode: PowerMode, batch: int, is_training: bool) -> ServedSpan:
        """Make the span of a period of service."""
        return cls(
            begin_s=run.begin_s,
            end_s=run.begin_s + run.duration_s,
            mode=mode,
            batch=batch,
            is_training=is_training,
            power_mw=run.power_mw,
            arrival_s=run.arrival_s.round(4).tolist(),
            latency_ms=run.latency_ms.round(3).tolist(),
            minibatch_end_s=run.minibatch_end_s.round(4).tolist(),
        )
