"""Workloads as messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from wattfleet.core.duties import KeptDuty
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    MAX_BATCH_OPTIONS,
    BatchOptions,
    Measurement,
    PowerMode,
    Processor,
    Profile,
    Task,
    Workload,
    WorkloadFacts,
)
from wattfleet_proto.convert.by_name import message_of, values_of
from wattfleet_proto.limits import MAX_SHARED_MODES
from wattfleet_proto.v1 import duty_pb2, power_pb2, session_pb2

# --- Modes ------------------------------------------------------------------------------------------------------------
# Power modes as messages.


_MAX_KNOB = 10**12
"""1 THz, hundreds of times any board's clock rate."""


def mode_to_message(mode: PowerMode) -> power_pb2.PowerMode:
    """Convert a power mode into its message."""
    return power_pb2.PowerMode(cores=mode.cores, cpu_khz=mode.cpu_khz, gpu_hz=mode.gpu_hz, mem_hz=mode.mem_hz)


def mode_from_message(message: power_pb2.PowerMode) -> PowerMode:
    """Read a power mode from its message.

    Raises:
        InvalidInputError: a knob is unset or implausibly high.
    """
    mode = PowerMode(message.cores, message.cpu_khz, message.gpu_hz, message.mem_hz)
    if min(mode) <= 0:
        raise InvalidInputError(f"a power mode needs all four knobs, got {tuple(mode)}")
    # Fronts store knobs as doubles: a larger number could not be written back into a message exactly.
    if max(mode) >= _MAX_KNOB:
        raise InvalidInputError(f"a power mode's clocks run at less than 1 THz, got {tuple(mode)}")
    return mode


# --- Measured modes ---------------------------------------------------------------------------------------------------
# Measured modes as messages.


def measured_to_message(measured: Measurement) -> session_pb2.MeasuredMode:
    """Convert a measured mode into its message."""
    return session_pb2.MeasuredMode(
        mode=mode_to_message(measured.mode),
        minibatch_ms=measured.minibatch_ms,
        power_mw=measured.power_mw,
        batch=measured.batch or 0,
    )


def measured_from_messages(messages: Iterable[session_pb2.MeasuredMode]) -> tuple[Measurement, ...]:
    """Read what one device has measured of a workload.

    Raises:
        InvalidInputError: there are too many modes, one is measured twice with the same batch, or a value is missing or
            out of range.
    """
    found = tuple(
        Measurement(mode_from_message(each.mode), each.minibatch_ms, each.power_mw, each.batch) for each in messages
    )
    if len(found) > MAX_SHARED_MODES:
        raise InvalidInputError(f"a device shares at most {MAX_SHARED_MODES} measured modes, not {len(found):,}")
    Profile.of(found)  # checks the values
    return found


# --- Workloads --------------------------------------------------------------------------------------------------------

_TASKS = {Task.TRAINING: power_pb2.TASK_TRAINING, Task.INFERENCE: power_pb2.TASK_INFERENCE}
_PROCESSORS = {Processor.GPU: power_pb2.PROCESSOR_GPU, Processor.CPU: power_pb2.PROCESSOR_CPU}
_COUNTS = ("batch", "loader_workers", "parameters", "step_flops", "precision")

_Member = TypeVar("_Member", Task, Processor)


def workload_to_message(workload: Workload) -> power_pb2.Workload:
    """Convert a workload into its message."""
    facts, batches = workload.facts, workload.batches
    options = () if batches is None else zip(batches.batches, batches.relative_samples, strict=True)
    return power_pb2.Workload(
        name=workload.name,
        task=_TASKS[facts.task],
        processor=_PROCESSORS[facts.processor],
        batches=[power_pb2.BatchOption(batch=batch, relative_samples=samples) for batch, samples in options],
        **{name: known for name in _COUNTS if (known := getattr(facts, name)) is not None},
    )


def workload_from_message(message: power_pb2.Workload) -> Workload:
    """Read a workload from its message.

    Raises:
        InvalidInputError: the name or the batches are not valid, a fact is out of range, or the task or processor is
            unknown.
    """
    facts = WorkloadFacts(
        task=_member(_TASKS, message.task or power_pb2.TASK_TRAINING, "task"),
        batch=message.batch if message.HasField("batch") else None,
        loader_workers=message.loader_workers if message.HasField("loader_workers") else None,
        processor=_member(_PROCESSORS, message.processor or power_pb2.PROCESSOR_GPU, "processor"),
        parameters=message.parameters if message.HasField("parameters") else None,
        step_flops=message.step_flops if message.HasField("step_flops") else None,
        precision=message.precision if message.HasField("precision") else None,
    )
    return Workload(message.name, facts, _batches(message))


def _batches(message: power_pb2.Workload) -> BatchOptions | None:
    if not message.batches:
        return None
    options = message.batches[: MAX_BATCH_OPTIONS + 1]  # more are refused, whatever they are
    return BatchOptions(tuple(each.batch for each in options), tuple(each.relative_samples for each in options))


def _member(members: Mapping[_Member, int], value: int, what: str) -> _Member:
    for member, number in members.items():
        if number == value:
            return member
    raise InvalidInputError(f"unknown {what} {value} of a workload: update the older of the two sides")


# --- Provenance -------------------------------------------------------------------------------------------------------
# The provenance of figures as a message.

_NAMES = {
    power_pb2.PROVENANCE_SIMULATED: "simulated",
    power_pb2.PROVENANCE_REPLAYED: "replayed",
    power_pb2.PROVENANCE_HARDWARE: "hardware",
    power_pb2.PROVENANCE_STATED: "stated",
}
_VALUES = {name: value for value, name in _NAMES.items()}


def provenance_to_message(provenance: str) -> power_pb2.Provenance.ValueType:
    """Convert `simulated`, `replayed`, `hardware` or `stated` into its enum value."""
    return _VALUES[provenance]


def provenance_from_message(message: power_pb2.Provenance.ValueType) -> str:
    """Read the provenance from its enum value.

    Raises:
        InvalidInputError: it is unset or unknown.
    """
    if message not in _NAMES:
        raise InvalidInputError(
            "the provenance is missing: a device's figures are simulated, replayed, hardware or stated"
        )
    return _NAMES[message]


# --- Duties -----------------------------------------------------------------------------------------------------------
# How a device keeps its duty, as a message and as the core's type.

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
    return message_of(duty_pb2.DutyFigures, kept)


def kept_duty_from_message(message: duty_pb2.DutyFigures) -> KeptDuty:
    """Convert from a message.

    Raises:
        InvalidInputError: a figure is one that no device can have.
    """
    return KeptDuty(**{**values_of(message), "latency_counts": tuple(message.latency_counts)})
