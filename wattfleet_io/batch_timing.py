"""Times a training's minibatches from inside its loop over the batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, TypeVar

from wattfleet_io.gpu import wait_for_gpu

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
