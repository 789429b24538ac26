"""Workloads as messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from wattfleet.errors import InvalidInputError
from wattfleet.modes import MAX_BATCH_OPTIONS, BatchOptions, Processor, Task, Workload, WorkloadFacts
from wattfleet_proto.v1 import power_pb2

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
