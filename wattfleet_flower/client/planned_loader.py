"""The work that the plan has chosen for the device, and a data loader with its batch size."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wattfleet_flower.client.agent_training import CURRENT_TRAINING
from wattfleet_proto.assignment import AssignedWork

if TYPE_CHECKING:
    from torch import Generator
    from torch.utils.data import DataLoader, Dataset


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
