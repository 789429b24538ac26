"""How a device keeps its duty, as a message and as the core's type."""

from __future__ import annotations

from wattfleet.duties import KeptDuty
from wattfleet_proto.v1 import duty_pb2


def kept_duty_to_message(kept: KeptDuty) -> duty_pb2.DutyFigures:
    """Convert to a message."""
    return duty_pb2.DutyFigures(
        workload=kept.workload,
        latency_ms=kept.latency_ms,
        quantile=kept.quantile,
        arrivals_per_s=kept.arrivals_per_s,
        requests=kept.requests,
        missed=kept.missed,
        latency_counts=kept.latency_counts,
        latency_sum_ms=kept.latency_sum_ms,
        latency_at_quantile_ms=kept.latency_at_quantile_ms,
        batch=kept.batch,
        training_share=kept.training_share,
        servers=kept.servers,
        waits=kept.waits,
    )


def kept_duty_from_message(message: duty_pb2.DutyFigures) -> KeptDuty:
    """Convert from a message.

    Raises:
        InvalidInputError: a figure is one that no device can have.
    """
    return KeptDuty(
        workload=message.workload,
        latency_ms=message.latency_ms,
        quantile=message.quantile,
        arrivals_per_s=message.arrivals_per_s,
        requests=message.requests,
        missed=message.missed,
        latency_counts=tuple(message.latency_counts),
        latency_sum_ms=message.latency_sum_ms,
        latency_at_quantile_ms=message.latency_at_quantile_ms if message.HasField("latency_at_quantile_ms") else None,
        batch=message.batch,
        training_share=message.training_share,
        servers=message.servers,
        waits=message.waits,
    )
