"""How a device keeps its duty, as a message and as the core's type."""

from __future__ import annotations

from collections.abc import Sequence

from wattfleet.duties import KeptDuty
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, Profile, Task
from wattfleet_proto.convert.modes import mode_from_message, mode_to_message
from wattfleet_proto.v1 import duty_pb2

MAX_MEASURED_BATCHES = 5_000
"""Rows of inference that are stated at once."""


def batches_to_messages(rows: Profile) -> list[duty_pb2.MeasuredBatch]:
    """Convert measured rows of inference, with their batches, into messages.

    Raises:
        InvalidInputError: they are of training, state no batches, or are too many.
    """
    if rows.task is not Task.INFERENCE or rows.batch is None:
        raise InvalidInputError("give measured rows of inference: with the columns batch and batch_ms")
    _require_few(len(rows))
    return [
        duty_pb2.MeasuredBatch(
            mode=mode_to_message(each.mode), batch=each.batch or 0, batch_ms=each.minibatch_ms, power_mw=each.power_mw
        )
        for each in rows.measurements()
    ]


def batches_from_messages(messages: Sequence[duty_pb2.MeasuredBatch]) -> Profile:
    """Read measured rows of inference.

    Raises:
        InvalidInputError: there are too many, a mode is repeated with the same batch, or a value is missing or out of
            range.
    """
    _require_few(len(messages))
    return Profile.of(
        (Measurement(mode_from_message(each.mode), each.batch_ms, each.power_mw, each.batch) for each in messages),
        Task.INFERENCE,
    )


def _require_few(rows: int) -> None:
    if rows > MAX_MEASURED_BATCHES:
        raise InvalidInputError(f"state at most {MAX_MEASURED_BATCHES:,} measured rows of inference, not {rows:,}")


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
