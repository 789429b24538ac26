"""What a data loader says of itself: the batch size, its workers and its length."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral

from wattfleet_io.wrapped_loader import length_of
from wattfleet_proto.loader_limits import LARGEST_COUNT, MAX_MINIBATCHES_PER_EPOCH
from wattfleet_proto.v1 import local_pb2


def facts_of(loader: Iterable[object]) -> local_pb2.LoaderSeen:
    """Return what a loader says of itself; absent where it says nothing, or more than the agent accepts.

    Args:
        loader: torch's DataLoader, or any iterable; one with the same attributes is understood as well.
    """
    batch = getattr(loader, "batch_size", None)
    if batch is None:  # of a DataLoader with a sampler of whole batches
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
