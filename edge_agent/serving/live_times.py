"""Keeps recent times of minibatches and inference batches in each power mode, and returns high estimates."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from wattfleet.duties import largest_slowdown
from wattfleet.modes import PowerMode

_KEPT = 64
_QUANTILE = 0.95
_ENOUGH = 8
# Profiling may visit hundreds of modes; beyond this limit, the mode without new times for longest is forgotten.
_MODES = 64

Times = TypeVar("Times")


def _recent() -> deque[float]:
    return deque(maxlen=_KEPT)


@dataclass
class _BatchTimes:
    """Times of batches of similar size, ms: after an inference batch or a pause, and after a minibatch."""

    plain: deque[float] = field(default_factory=_recent)
    after_minibatch: deque[float] = field(default_factory=_recent)
    full: deque[float] = field(default_factory=_recent)
    """All times, each scaled to the largest batch in this size class: upper bounds of that batch's time."""

    @property
    def inference_ms(self) -> float:
        return high_ms(self.plain or self.after_minibatch)

    @property
    def switch_ms(self) -> float:
        if not self.plain or not self.after_minibatch:
            return 0.0
        return max(0.0, high_ms(self.after_minibatch) - high_ms(self.plain))


class LiveTimes:
    """Times as observed by the agent: from a turn's start to the report of its end.

    For a mode without times, the estimate is the slowest that other modes' times and the clocks allow.
    """

    def __init__(self) -> None:
        self._minibatches: dict[PowerMode | None, deque[float]] = {}
        self._first_minibatches: dict[PowerMode | None, deque[float]] = {}
        # Keyed by the binary logarithm of the batch, rounded up.
        self._batches: dict[PowerMode | None, dict[int, _BatchTimes]] = {}
        self._changes = _recent()
        # For all known modes: times by batch size, and the slowdown of the mode queried last.
        self._known_ms: dict[int, list[float]] = {}
        self._slowdowns: tuple[PowerMode | None, list[float]] = (None, [])

    def minibatch_ended(self, mode: PowerMode | None, took_ms: float) -> None:
        """Note the time of a minibatch."""
        _entered(self._minibatches, mode, _recent()).append(took_ms)

    def first_minibatch_ended(self, mode: PowerMode | None, took_ms: float) -> None:
        """Note the time of the first minibatch of a pass. It is used until the time of a later one is known."""
        _entered(self._first_minibatches, mode, _recent()).append(took_ms)

    def forget_minibatches(self, mode: PowerMode | None) -> None:
        """Forget the times of minibatches in a mode, because they have become shorter."""
        self._minibatches.pop(mode, None)
        self._first_minibatches.pop(mode, None)

    def batch_answered(self, mode: PowerMode | None, batch: int, took_ms: float, after_minibatch: bool) -> None:
        """Note the time of an inference batch.

        Args:
            mode: the mode in force.
            batch: number of requests.
            took_ms: the time taken, ms.
            after_minibatch: whether a minibatch used the device just before.
        """
        self._known_ms.clear()
        self._slowdowns = (None, [])
        size = _bucket(batch)
        times = _entered(self._batches, mode, {}).setdefault(size, _BatchTimes())
        (times.after_minibatch if after_minibatch else times.plain).append(took_ms)
        times.full.append(took_ms * 2**size / max(1, batch))

    def mode_changed(self, took_ms: float) -> None:
        """Note the time of a change of the power mode."""
        self._changes.append(took_ms)

    def minibatch_ms(self, mode: PowerMode | None) -> float | None:
        """Return the high estimate of a minibatch's time in a mode, ms; None while nothing is known."""
        return _in_mode(self._minibatches or self._first_minibatches, mode, high_ms)

    def inference_ms(self, mode: PowerMode | None, batch: int) -> float | None:
        """Return the high estimate of an inference batch's time in a mode, ms; None while nothing is known."""
        if mode is None or mode in self._batches:
            return _in_mode(self._batches, mode, lambda times: _of_batch(times, batch))
        bucket = _bucket(batch)
        if bucket not in self._known_ms:
            measured = [times for known, times in self._batches.items() if known is not None]
            self._known_ms[bucket] = [_of_batch(times, batch) for times in measured]
        if mode != self._slowdowns[0]:
            self._slowdowns = (mode, [largest_slowdown(known, mode) for known in self._batches if known is not None])
        return min(map(operator.mul, self._known_ms[bucket], self._slowdowns[1]), default=None)

    def switch_ms(self, mode: PowerMode | None) -> float:
        """Return the additional time of an inference batch after a minibatch, ms; 0 while unknown."""
        times = self._batches.get(mode)
        modes = [times] if times is not None else list(self._batches.values())
        return max((each.switch_ms for one in modes for each in one.values()), default=0.0)

    @property
    def change_ms(self) -> float:
        """The high estimate of the time of a mode change, ms; 0 before the first."""
        return high_ms(self._changes) if self._changes else 0.0

    def full_batches_ms(self) -> dict[PowerMode, dict[int, float]]:
        """Return high estimates for batches of 1, 2, 4, ... requests, ms, if enough of them were answered in a mode."""
        found: dict[PowerMode, dict[int, float]] = {}
        for mode, by_size in self._batches.items():
            known = {2**size: high_ms(times.full) for size, times in by_size.items() if len(times.full) >= _ENOUGH}
            if mode is not None and known:
                found[mode] = known
        return found

    @property
    def knows_inference(self) -> bool:
        """Whether a batch was answered in any mode so far."""
        return bool(self._batches)


def high_ms(times: Sequence[float] | deque[float]) -> float:
    """Return the 95 % quantile of one or more times, ms: the smallest time that at most 5 % of them exceed."""
    ordered = sorted(times)
    return ordered[math.ceil(_QUANTILE * len(ordered)) - 1]


def _bucket(batch: int) -> int:
    return max(0, batch - 1).bit_length()


def _of_batch(times: Mapping[int, _BatchTimes], batch: int) -> float:
    """Return the estimate for a batch: that of the nearest known size at or above it, or else one scaled by size."""
    wanted, largest = _bucket(batch), max(times)
    if wanted <= largest:
        return times[min(bucket for bucket in times if bucket >= wanted)].inference_ms
    return float(times[largest].inference_ms * 2 ** (wanted - largest))


def _in_mode(
    measured: Mapping[PowerMode | None, Times], mode: PowerMode | None, estimate_ms: Callable[[Times], float]
) -> float | None:
    """Return the estimate in a mode: from its own times, or else the lowest bound from other modes' times."""
    if mode in measured:
        return estimate_ms(measured[mode])
    if mode is None:
        return max(map(estimate_ms, measured.values()), default=None)
    bounds = [
        estimate_ms(times) * largest_slowdown(known, mode) for known, times in measured.items() if known is not None
    ]
    return min(bounds, default=None)


def _entered(by_mode: MutableMapping[PowerMode | None, Times], mode: PowerMode | None, none_yet: Times) -> Times:
    times = by_mode[mode] = by_mode.pop(mode, none_yet)
    if len(by_mode) > _MODES:
        del by_mode[next(iter(by_mode))]
    return times
