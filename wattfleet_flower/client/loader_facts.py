"""Reads the batch size, the number of workers and the length of an app's data loader."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral

from wattfleet_io.wrapped_loader import length_of
from wattfleet_proto.loader_limits import LARGEST_COUNT, MAX_MINIBATCHES_PER_EPOCH
from wattfleet_proto.v1 import local_pb2


def facts_of(loader: Iterable[object]) -> local_pb2.LoaderSeen:
    """Return a loader's batch size, workers and length; unset where unknown or above the agent's limits.

    Args:
        loader: torch's DataLoader, or any iterable. The attributes of a DataLoader are read wherever they exist.
    """
    batch = getattr(loader, "batch_size", None)
    if batch is None:  # a DataLoader with a batch sampler
        batch = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return local_pb2.LoaderSeen(
        batch=_count(batch, 1, LARGEST_COUNT),
        loader_workers=_count(getattr(loader, "num_workers", None), 0, LARGEST_COUNT),
        minibatches_per_epoch=_count(length_of(loader), 1, MAX_MINIBATCHES_PER_EPOCH),
    )


def _count(value: object, least: int, most: int) -> int | None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        return None
    count = int(value)
    return count if least <= count <= most else None
