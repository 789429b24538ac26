"""Wraps the iteration of a data loader, and otherwise leaves it unchanged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from wattfleet.common.version import wait_for_gpu

# --- Batch timing -----------------------------------------------------------------------------------------------------
# Times a training's minibatches from inside its loop over the batches.


Batch = TypeVar("Batch")


class BatchTimes(NamedTuple):
    """The parts of one minibatch's time.

    Attributes:
        fetch_stall_ms: time that the training waited for the batch, ms.
        compute_ms: time that it then computed, ms.
        ended_s: end of the minibatch, seconds of the given clock.
    """

    fetch_stall_ms: float
    compute_ms: float
    ended_s: float


class _Waits(threading.local):
    """The time that this thread has waited within minibatches, s."""

    seconds = 0.0


_waits = _Waits()


def note_wait(seconds: float) -> None:
    """Exclude a wait of this thread from its minibatches' times, since it was for other users of the device.

    Args:
        seconds: the time waited, s.
    """
    _waits.seconds += seconds


def timed_batches(
    loader: Iterable[Batch],
    is_timed: Callable[[], bool],
    report: Callable[[BatchTimes], object],
    finish_step: Callable[[], None] = wait_for_gpu,
    now_s: Callable[[], float] = time.perf_counter,
) -> Generator[Batch, None, None]:
    """Yield the batches of `loader`, and report the times of each after the caller has trained on it.

    Args:
        loader: yields minibatches.
        is_timed: returns whether to time the minibatch that just ended.
        report: called with its times.
        finish_step: waits until the work that the caller started is done.
        now_s: the clock, s.
    """
    batches = iter(loader)

    def working_s() -> float:
        return now_s() - _waits.seconds

    while True:
        asked_s = working_s()
        try:
            batch = next(batches)
        except StopIteration:
            return
        fetched_s = working_s()
        yield batch
        if is_timed():
            finish_step()
            ended_s = working_s()
            report(BatchTimes((fetched_s - asked_s) * 1e3, (ended_s - fetched_s) * 1e3, now_s()))


# --- Wrapped loader ---------------------------------------------------------------------------------------------------


class WrappedLoader(Generic[Batch]):
    """A loader with wrapped iterations, and with the length and attributes of the original loader.

    Attributes:
        loader: the wrapped loader.
        shares_device: whether its minibatches hold the device, so that they must not wait for the agent.
    """

    shares_device = False

    def __init__(self, loader: Iterable[Batch], wrap: Callable[[Iterable[Batch]], Iterator[Batch]]) -> None:
        """Wrap a loader.

        Args:
            loader: yields minibatches.
            wrap: returns an iterator over the loader.
        """
        self.loader = loader
        self._wrap = wrap

    def __iter__(self) -> Iterator[Batch]:
        return self._wrap(self.loader)

    def __len__(self) -> int:
        length = length_of(self.loader)
        if length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":  # of this class itself, such as during unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)


def innermost(loader: Iterable[Batch]) -> Iterable[Batch]:
    """Return the app's own loader inside any wrappers."""
    while isinstance(loader, WrappedLoader):
        loader = loader.loader
    return loader


def shares_device(loader: Iterable[object]) -> bool:
    """Return whether a loader, or one that it wraps, holds the device while a minibatch is trained."""
    while isinstance(loader, WrappedLoader):
        if loader.shares_device:
            return True
        loader = loader.loader
    return False


def length_of(loader: Iterable[object]) -> int | None:
    """Return the number of minibatches of a loader; None if it has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]  # this checks whether it has a length
    except (TypeError, NotImplementedError):  # torch's iterable datasets may raise the latter
        return None
