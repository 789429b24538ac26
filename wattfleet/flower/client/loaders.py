"""Wrappers of an app's data loader: stop at the round's deadline, measure power modes during training."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from wattfleet.common.wrapped_loader import BatchTimes, WrappedLoader, innermost, shares_device, timed_batches
from wattfleet.core.errors import InvalidInputError
from wattfleet.flower.client.agent_training import CURRENT_TRAINING, AgentTraining, MeasuredError
from wattfleet_proto.assignment import AssignedWork
from wattfleet_proto.v1 import local_pb2

if TYPE_CHECKING:
    from torch import Generator
    from torch.utils.data import DataLoader, Dataset

Batch = TypeVar("Batch")

# The training waits for the agent's answer to every report, about a millisecond.
_REPORT_INTERVAL_S = 0.5


def until_deadline(loader: Iterable[Batch], *, app_weighs: bool = False) -> Iterable[Batch]:
    """Yield the batches of `loader` until the round's deadline; at least one.

    The reply states how much of the assigned work was done, and the server scales the reply's weight (`num-examples`,
    for example) by it. Without a deadline, and outside a planned training, every batch is yielded.

    Args:
        loader: yields minibatches. To know how much was done, it has to yield one epoch.
        app_weighs: whether the app's own weight counts only what was done; the server then leaves it unchanged.
    """

    def bounded(batches: Iterable[Batch]) -> Iterator[Batch]:
        training = CURRENT_TRAINING.get()
        if training is None:
            return iter(batches)
        training.deadline.app_weighs |= app_weighs
        training.report_loader(innermost(batches))
        return training.deadline.bounded(batches)

    return WrappedLoader(loader, bounded)


def profiled(loader: Iterable[Batch]) -> Iterable[Batch]:
    """Yield the batches of `loader`, and let the agent measure other power modes while the app trains on them.

    Outside a planned training, and once every mode is measured, the batches are only passed on.

    Raises:
        InvalidInputError: the loader comes from `share_device`. The mode cannot change during its minibatches.
        grpc.RpcError: the agent is gone or could not apply a mode; the mod translates it.
    """
    if shares_device(loader):
        raise InvalidInputError("profiled must be applied before share_device: write share_device(profiled(loader))")
    return WrappedLoader(loader, _profiled)


def _profiled(loader: Iterable[Batch]) -> Iterator[Batch]:
    training = CURRENT_TRAINING.get()
    if training is None:
        yield from loader
        return
    training.report_loader(innermost(loader))
    yield from measured(loader, training)


def measured(loader: Iterable[Batch], training: AgentTraining) -> Iterator[Batch]:
    """Yield the batches of a loader, and report their times as long as the agent wants them.

    Args:
        loader: yields minibatches. If another loader is being measured already, the batches are only passed on.
        training: the training that this is part of.

    Raises:
        grpc.RpcError: the agent is gone or could not apply a mode.
        MeasuredError: the training is run in order to measure, and nothing is left to measure.
    """
    with training.profiling() as is_first:
        if is_first and not training.report([], paused=False):
            if training.measures:
                raise MeasuredError
            is_first = False
        if not is_first:
            yield from loader
            return
        times: list[local_pb2.MinibatchTimes] = []
        measuring, reported_s = True, time.perf_counter()

        def report(batch: BatchTimes) -> None:
            nonlocal measuring, reported_s
            times.append(local_pb2.MinibatchTimes(fetch_stall_ms=batch.fetch_stall_ms, compute_ms=batch.compute_ms))
            if batch.ended_s - reported_s >= _REPORT_INTERVAL_S:
                measuring = training.report(times, paused=False)
                times.clear()
                reported_s = time.perf_counter()
                if training.measures and not measuring:
                    raise MeasuredError

        is_pass_over = False
        try:
            yield from timed_batches(loader, lambda: measuring, report)
            is_pass_over = True
        finally:
            if measuring:
                training.report(times, paused=True, is_pass_over=is_pass_over)


# --- Planned loader ---------------------------------------------------------------------------------------------------
# The work that the plan has chosen for the device, and a data loader with its batch size.


@dataclass(frozen=True)
class PlannedWork:
    """The work of one training.

    Attributes:
        batch: samples in a minibatch.
        lr_scale: factor of the app's learning rate.
        passes: passes over the data in an epoch (see `planned_loader`).
        epochs: local epochs.
    """

    batch: int
    lr_scale: float
    passes: float
    epochs: int


def planned_work(batch_size: int, epochs: int | None = None) -> PlannedWork:
    """The work that the plan has chosen for this training.

    Args:
        batch_size: the app's own batch size, used where no plan has chosen one.
        epochs: the app's own local epochs, used where no plan has chosen them; None if the app does not use the
            returned epochs. The server then learns that the app does not follow the plan's.

    Raises:
        InvalidInputError: the batch size or the number of epochs is not valid.
    """
    own = AssignedWork(batch_size, epochs=epochs)
    training = CURRENT_TRAINING.get()
    chosen = AssignedWork() if training is None or training.work is None else training.work
    with_batch = own if chosen.batch is None else chosen
    work = PlannedWork(
        with_batch.batch or batch_size, with_batch.lr_scale, with_batch.passes, chosen.epochs or own.epochs or 1
    )
    if training is not None:
        training.taken_batch = work.batch
        training.has_taken_epochs |= epochs is not None
    return work


def planned_loader(
    dataset: Dataset[Any], batch_size: int, *, generator: Generator | None = None, **options: Any
) -> DataLoader[Any]:
    """A torch DataLoader over one epoch of shuffled samples, with the batch size that the plan has chosen.

    An epoch makes the progress of one pass over the data with the app's own batch size. A batch size that needs more
    samples for that repeats some samples; one that needs fewer skips some. Multiply the learning rate by
    `planned_work(batch_size).lr_scale`.

    Without a planned training, or if the plan has chosen no batch, this is `DataLoader(dataset, batch_size,
    shuffle=True)`.

    Args:
        dataset: the device's own samples; it needs a length.
        batch_size: the app's own batch size.
        generator: random generator for the order of the samples; None for torch's default.
        options: passed on to `DataLoader`; not `shuffle`, `sampler` or `batch_sampler`.

    Raises:
        InvalidInputError: the batch size is not valid.
        ValueError: the data set is empty.
    """
    from torch.utils.data import DataLoader, RandomSampler

    work = planned_work(batch_size)
    assert isinstance(dataset, Sized), "a data set with indices has a length"
    if not len(dataset):
        raise ValueError("the data set is empty: a device without samples cannot train")
    samples = max(1, round(work.passes * len(dataset)))
    order = RandomSampler(dataset, num_samples=samples, generator=generator)
    return DataLoader(dataset, work.batch, sampler=order, generator=generator, **options)
