"""Fronts of several workloads on one device, for tests."""

from __future__ import annotations

from hypothesis import strategies as st

from coordinator.state.records import DeviceRecord
from coordinator.state.workload_fronts import WorkloadFront
from tests.fakes.fronts import fronts, of_batches
from wattfleet.choosing import Front
from wattfleet.modes import BatchOptions, Processor, Task, Workload, WorkloadFacts


def for_all(front: Front | None) -> tuple[WorkloadFront, ...]:
    """What the coordinator knows of a device whose agent does not know workloads."""
    return () if front is None else (WorkloadFront(front),)


def only_front(record: DeviceRecord) -> Front | None:
    """The front of a device that has at most one."""
    [*known] = record.fronts
    assert len(known) <= 1
    return known[0].front if known else None


def of_workloads(**known: tuple[Front, int | None, int]) -> tuple[WorkloadFront, ...]:
    """Fronts by workload, each with the minibatches in an epoch and the number of measured modes."""
    return tuple(
        WorkloadFront(front, Workload(name), minibatches, modes) for name, (front, minibatches, modes) in known.items()
    )


names = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=20)
facts = st.builds(
    WorkloadFacts,
    task=st.sampled_from(Task),
    batch=st.none() | st.integers(1, 10**6),
    loader_workers=st.none() | st.integers(0, 64),
    processor=st.sampled_from(Processor),
    parameters=st.none() | st.floats(1, 1e12),
    step_flops=st.none() | st.floats(1, 1e15),
    precision=st.none() | st.sampled_from(["float32", "bfloat16"]),
)
options = st.dictionaries(st.integers(1, 10**6), st.floats(0.1, 10.0), min_size=1, max_size=16).map(BatchOptions.of)
workloads = st.builds(Workload, names, facts, st.none() | options)


@st.composite
def fronts_of(draw: st.DrawFn, workload: Workload, power_log_sd: float) -> Front:
    """A front whose points may differ in batch size, if plans choose it."""
    found = draw(fronts(power_log_sd=power_log_sd))
    if workload.batches is None or draw(st.booleans()):
        return found
    return of_batches(found, [draw(st.sampled_from(workload.batches.batches)) for _ in range(len(found))])


@st.composite
def known_fronts(draw: st.DrawFn, most: int = 4, power_log_sd: float = 0.0) -> tuple[WorkloadFront, ...]:
    """The known fronts of a device, for several workloads or for all."""
    found = draw(st.lists(workloads, max_size=most, unique_by=lambda workload: workload.name))
    known = [
        WorkloadFront(
            draw(fronts_of(workload, power_log_sd)),
            workload,
            draw(st.none() | st.integers(1, 2**32 - 1)),
            draw(st.integers(0, 2**32 - 1)),
            draw(st.text("0123456789abcdef", max_size=64)),
        )
        for workload in found
    ]
    if draw(st.booleans()):
        known.append(
            WorkloadFront(draw(fronts(power_log_sd=power_log_sd)), profiled_modes=draw(st.integers(0, 2**32 - 1)))
        )
    return tuple(known)
