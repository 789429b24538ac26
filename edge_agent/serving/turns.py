"""Decides who may use the device next: inference before training, and a minibatch only if the duty is still kept.

It has no input, output or clock of its own: callers pass the time, and carry out the decisions.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

from edge_agent.devices.device import Device
from edge_agent.devices.virtual.simulated import LiveSimulatedDevice
from wattfleet.core.duties import Duty, largest_slowdown
from wattfleet.core.modes import PowerMode
from wattfleet_proto.v1 import duty_pb2

# --- Batching ---------------------------------------------------------------------------------------------------------
# How inference servers gather requests into batches.


@dataclass(frozen=True)
class Batching:
    """How inference servers gather requests; by default, each server decides.

    Attributes:
        batch: maximum number of requests in a batch, and the number to wait for; 0 for the server's own limit.
        wait_ms: longest time that a request waits for its batch to fill; then the batch is answered as it is.
    """

    batch: int = 0
    wait_ms: float = 0.0


# --- Turn pace --------------------------------------------------------------------------------------------------------
# The minimum time of a turn's work on a simulated board in real time.


class TurnPace:
    """Makes the messages that begin turns, and informs a simulated board of the work that uses the device.

    Args:
        device: the board. If it is not simulated in real time, turns have no minimum time.
    """

    def __init__(self, device: Device) -> None:
        self._board = device if isinstance(device, LiveSimulatedDevice) else None

    def minibatch(self) -> duty_pb2.Turn:
        """Return the message for a minibatch's turn that begins now."""
        return duty_pb2.Turn(least_ms=[] if self._board is None else [self._board.begin_minibatch()])

    def batch(self, number: int, workload: str | None, waiting: int, largest_batch: int) -> duty_pb2.Turn:
        """Return the message for a turn of a batch of requests that begins now.

        Args:
            number: the number of the server's request for a turn.
            workload: the served workload; None without a duty, when its time is unknown.
            waiting: number of waiting requests.
            largest_batch: maximum number of requests that the server answers at once.
        """
        if self._board is None or workload is None:
            return duty_pb2.Turn(number=number)
        return duty_pb2.Turn(number=number, least_ms=self._board.begin_inference(workload, waiting, largest_batch))

    def end(self) -> None:
        """Note that a turn has ended."""
        if self._board is not None:
            self._board.rest()


# --- Live times -------------------------------------------------------------------------------------------------------
# Keeps recent times of minibatches and inference batches in each power mode, and returns high estimates.

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


# --- Turns ------------------------------------------------------------------------------------------------------------

_CHANGE_WITHIN_S = 1.0
"""Longest time that a mode change waits for a gap between requests, s: the power may have to fall."""

_TRIAL_SHARE = 0.1
"""Minibatches may be tried although they may not fit, using this share of the requests that may miss the limit."""

_OVERDUE = 3.0
"""A turn longer than its estimate times this factor counts as paused or hung, and others may begin."""

_LEAST_OVERDUE_S = 1.0

_MOST_OVERDUE_S = 30.0
"""Upper limit for a batch of requests, s, since its estimate depends on the batch size that the app states.

A mode change waits no longer than this for a minibatch, either: long minibatches must not keep the power high.
"""

_SILENT_LIMITS = 5.0
"""Requests of a server that is silent for this many latency limits, and at least for a second, are ignored."""


class TurnPurpose(Enum):
    """The purpose of a turn."""

    INFERENCE = auto()
    """A batch of requests."""
    MINIBATCH = auto()
    """A minibatch of a training, or of the agent's own measurements."""
    CHANGE = auto()
    """A change of the power mode, during which nothing else may begin."""


@dataclass
class _Turn:
    kind: TurnPurpose
    requested_s: float
    begun_s: float | None = None
    after_minibatch: bool = False
    is_alone: bool = True
    is_first: bool = False
    is_trial: bool = False
    server: int | None = None
    work_ms: float | None = None


@dataclass(frozen=True)
class _Waiting:
    """Requests that wait at an inference server, as reported at `heard_s`."""

    count: int
    oldest_s: float
    heard_s: float


class Turns:
    """The turns of one device.

    A ticket stands for one turn, from the request for it to its end. After every call that may allow a turn to begin,
    call `granted` for the tickets whose turn begins now, and call it again at `next_check_s`.

    Attributes:
        duty: the duty to keep. Without one (None), inference still comes first, but minibatches are not held back.
        mode: the power mode in force; None if unknown.
        times: live estimates of all times.
        arrivals_per_s: the rate of requests, for estimating the next batch.
        largest_batch: maximum number of requests that the model accepts at once.
    """

    def __init__(self, times: LiveTimes) -> None:
        """Start with a free device.

        Args:
            times: receives the times of the turns.
        """
        self.duty: Duty | None = None
        self.mode: PowerMode | None = None
        self.times = times
        self.arrivals_per_s = 0.0
        self.largest_batch = 1
        self._numbers = itertools.count(1)
        self._turns: dict[int, _Turn] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._last: TurnPurpose | None = None
        self._tried_s: float | None = None
        self._ran_over: set[TurnPurpose] = set()

    def requests_waiting(self, server: int, count: int, oldest_s: float | None, heard_s: float | None = None) -> None:
        """Note the requests that wait at an inference server.

        Args:
            server: the server's number.
            count: number of waiting requests.
            oldest_s: arrival time of the first of them, s; None if none waits.
            heard_s: time of the server's report, s; None for the arrival time of the first request.
        """
        if oldest_s is None:
            self._waiting.pop(server, None)
        else:
            self._waiting[server] = _Waiting(count, oldest_s, oldest_s if heard_s is None else heard_s)

    def request(
        self,
        kind: TurnPurpose,
        now_s: float,
        is_first: bool = False,
        server: int | None = None,
        work_ms: float | None = None,
    ) -> int:
        """Request a turn, and return its ticket.

        Args:
            kind: the purpose of the turn.
            now_s: the time.
            is_first: whether this is the first turn of its process, which takes longer than later ones. For a
                minibatch, its time is used until others are known; for a batch, it is ignored.
            server: the number of the requesting inference server, if any.
            work_ms: longest expected time of a minibatch, ms; None uses the recent ones.
        """
        ticket = next(self._numbers)
        self._turns[ticket] = _Turn(kind, now_s, is_first=is_first, server=server, work_ms=work_ms)
        return ticket

    def end(self, ticket: int, now_s: float, batch: int = 1, is_complete: bool = True) -> None:
        """End a turn, or withdraw the request for it; an unknown ticket is ignored.

        Args:
            ticket: the turn's ticket.
            now_s: the time.
            batch: number of requests in an inference batch.
            is_complete: whether its work was done; otherwise its time is ignored.
        """
        turn = self._turns.pop(ticket, None)
        if turn is None or turn.begun_s is None:
            return
        if turn.kind is not TurnPurpose.CHANGE:
            self._last = turn.kind
        if not (is_complete and turn.is_alone) or (not turn.is_first and self._is_pause(turn, now_s)):
            return
        took_ms = (now_s - turn.begun_s) * 1e3
        if turn.kind is TurnPurpose.MINIBATCH:
            self._minibatch_ended(turn, took_ms, now_s)
        elif turn.is_first:
            return
        elif turn.kind is TurnPurpose.INFERENCE:
            self.times.batch_answered(self.mode, batch, took_ms, turn.after_minibatch)
        else:
            self.times.mode_changed(took_ms)

    def _minibatch_ended(self, turn: _Turn, took_ms: float, now_s: float) -> None:
        fits_again = turn.is_trial and self._refusal_reason(took_ms, now_s, pending=False) is None
        if fits_again:
            # The cause of the long minibatches, such as a pause, is over.
            self.times.forget_minibatches(self.mode)
        if turn.is_first and not fits_again:
            self.times.first_minibatch_ended(self.mode, took_ms)
        else:
            self.times.minibatch_ended(self.mode, took_ms)

    def begun_s(self, ticket: int) -> float | None:
        """Return when a turn began, s; None if it has not begun or has ended."""
        turn = self._turns.get(ticket)
        return None if turn is None else turn.begun_s

    def allow_trial(self) -> None:
        """Let the next minibatch that does not fit be tried while no request waits, however recent the last trial."""
        self._tried_s = None

    def granted(self, now_s: float) -> list[int]:
        """Return the tickets whose turn begins now, the most urgent first."""
        begun = []
        while (ticket := self._next(now_s)) is not None:
            self._begin(self._turns[ticket], now_s)
            begun.append(ticket)
        return begun

    def next_check_s(self, now_s: float) -> float | None:
        """Return when a waiting turn may begin without a further event, s; None if none can."""
        if all(turn.begun_s is not None for turn in self._turns.values()):
            return None
        times = [self._overdue_s(turn) for turn in self._held()]
        if changes := self._requested(TurnPurpose.CHANGE).values():
            times += [turn.requested_s + _CHANGE_WITHIN_S for turn in changes]
            times += [self._blocks_change_until_s(turn) for turn in self._held()]
        times += [self._silent_s(server) for server in self._waiting]
        if (latest_s := self._latest_start_s(now_s)) is not None and self._requested(TurnPurpose.INFERENCE):
            times.append(max([latest_s, *map(self._expected_end_s, self._held())]))
        if self._requested(TurnPurpose.MINIBATCH):
            times.append(self._next_trial_s())
        return min((each for each in times if math.isfinite(each) and each > now_s), default=None)

    def why_training_waits(self, now_s: float) -> str | None:
        """Return why a minibatch waits for its turn, for people; None if no minibatch waits."""
        if not self._requested(TurnPurpose.MINIBATCH):
            return None
        without_requests = self._refusal_reason(self._minibatch_ms, now_s, pending=False)
        if without_requests is not None:
            return without_requests
        return "requests are answered first"

    def _next(self, now_s: float) -> int | None:
        """Return the ticket whose turn begins now; None if no turn begins."""
        busy = {turn.kind for turn in self._held() if now_s < self._overdue_s(turn)}
        change, inference = self._first(TurnPurpose.CHANGE), self._first(TurnPurpose.INFERENCE)
        if change is not None and self._may_change(self._turns[change], now_s):
            if all(now_s >= self._blocks_change_until_s(turn) for turn in self._held()):
                return change
        if TurnPurpose.CHANGE in busy or TurnPurpose.INFERENCE in busy:
            return None
        if inference is not None:
            return inference if TurnPurpose.MINIBATCH not in busy or self._must_answer(now_s) else None
        minibatch = self._first(TurnPurpose.MINIBATCH)
        if change is not None or minibatch is None or busy:
            return None
        if self._refusal_reason(self._work_ms(self._turns[minibatch]), now_s) is None:
            return minibatch
        if not self._pending_requests(now_s) and now_s >= self._next_trial_s():
            self._tried_s = now_s
            self._turns[minibatch].is_trial = True
            return minibatch
        return None

    def _begin(self, turn: _Turn, now_s: float) -> None:
        others = self._held()
        turn.begun_s = now_s
        turn.after_minibatch = self._last is TurnPurpose.MINIBATCH
        turn.is_alone = not others
        for other in others:
            other.is_alone = False

    def _may_change(self, turn: _Turn, now_s: float) -> bool:
        return self._is_forced(turn, now_s) or (
            not self._requested(TurnPurpose.INFERENCE) and self._refusal_reason(self.times.change_ms, now_s) is None
        )

    def _is_forced(self, turn: _Turn, now_s: float) -> bool:
        return now_s >= turn.requested_s + _CHANGE_WITHIN_S

    def _refusal_reason(self, work_ms: float | None, now_s: float, pending: bool = True) -> str | None:
        """Return why some work must not begin now; None if it keeps the duty.

        Args:
            work_ms: its estimated time, ms. If it is unknown (None), the work may begin while no request waits.
            now_s: the time.
            pending: whether to consider the waiting requests.
        """
        if self.duty is None:
            return None
        waiting = self._pending_requests(now_s) if pending else []
        if work_ms is None:
            return "the time of its minibatches is not known yet, and requests are waiting" if waiting else None
        inference_ms = self._inference_ms(work_ms, sum(each.count for each in waiting))
        if inference_ms is None:
            return "the time of the inference is not known yet, and requests are waiting" if waiting else None
        after_ms = self.times.switch_ms(self.mode) + inference_ms
        left_ms = self.duty.latency_ms
        if waiting:
            left_ms -= (now_s - min(each.oldest_s for each in waiting)) * 1e3
        if work_ms + after_ms <= left_ms:
            return None
        return (
            f"a minibatch of {work_ms:.0f} ms followed by a batch of requests of {after_ms:.0f} ms does not fit into"
            f" {left_ms:.0f} ms"
        )

    @property
    def _minibatch_ms(self) -> float | None:
        return self.times.minibatch_ms(self.mode)

    def _inference_ms(self, work_ms: float, waiting: int) -> float | None:
        """Return the estimated time of the batch after some work, with the requests waiting now or by then, ms."""
        batch = waiting + math.ceil(self.arrivals_per_s * work_ms / 1e3)
        return self.times.inference_ms(self.mode, max(1, min(batch, self.largest_batch)))

    def _pending_requests(self, now_s: float) -> list[_Waiting]:
        """Return the waiting requests of all inference servers that are not silent."""
        return [each for server, each in self._waiting.items() if now_s < self._silent_s(server)]

    def _silent_s(self, server: int) -> float:
        """Return when a server counts as hung, so that its requests are ignored, unless it sends a message before."""
        heard_s = self._waiting[server].heard_s
        limit_s = 0.0 if self.duty is None else self.duty.latency_ms / 1e3
        overdue_s = [self._overdue_s(turn) for turn in self._held() if turn.server == server]
        silent_s = heard_s + max(_LEAST_OVERDUE_S, _SILENT_LIMITS * limit_s)
        return min([silent_s, *(each for each in overdue_s if each > heard_s)])

    def _latest_start_s(self, now_s: float) -> float | None:
        """Return the latest start of the waiting requests for an answer in time, s; None if none waits."""
        waiting = self._pending_requests(now_s)
        if self.duty is None or not waiting:
            return None
        count = min(self.largest_batch, sum(each.count for each in waiting))
        inference_ms = self.times.inference_ms(self.mode, max(1, count)) or 0.0
        oldest_s = min(each.oldest_s for each in waiting)
        return oldest_s + (self.duty.latency_ms - inference_ms) / 1e3

    def _must_answer(self, now_s: float) -> bool:
        """Return whether requests cannot wait for a minibatch's end, although both are slower at the same time.

        Requests wait for a minibatch within its expected time: it was begun because it fits, or as a trial.
        """
        latest_s = self._latest_start_s(now_s)
        ends_s = max((self._expected_end_s(turn) for turn in self._held()), default=now_s)
        return latest_s is not None and now_s >= latest_s and now_s >= ends_s

    def _next_trial_s(self) -> float:
        """Return when to try a minibatch that does not fit by the estimates, which may be out of date."""
        if self._tried_s is None or self.duty is None:
            return -math.inf
        spent_ms = (self._minibatch_ms or 0.0) + self.duty.latency_ms
        return self._tried_s + spent_ms / 1e3 / (_TRIAL_SHARE * (1 - self.duty.quantile))

    def _expected_end_s(self, turn: _Turn) -> float:
        assert turn.begun_s is not None, "a held turn has begun"
        return turn.begun_s + (self._work_ms(turn) or 0.0) / 1e3

    def _work_ms(self, minibatch: _Turn) -> float | None:
        return self._minibatch_ms if minibatch.work_ms is None else minibatch.work_ms

    def _is_pause(self, turn: _Turn, now_s: float) -> bool:
        """Return whether a pause has prolonged a turn that ends now, so that its time has to be ignored.

        Of several overlong turns in succession, only the first counts as paused: the others may be normal.
        """
        if not self._estimate_ms(turn.kind) or now_s < self._overdue_s(turn):
            self._ran_over.discard(turn.kind)
            return False
        ran_over_before = turn.kind in self._ran_over
        self._ran_over.add(turn.kind)
        return not ran_over_before

    def _estimate_ms(self, kind: TurnPurpose) -> float | None:
        """Return the estimated time of a turn, ms; None or 0 if nothing is known."""
        if kind is TurnPurpose.MINIBATCH:
            return self._minibatch_ms
        if kind is TurnPurpose.INFERENCE:
            return self.times.inference_ms(self.mode, self.largest_batch)
        return self.times.change_ms

    def _overdue_s(self, turn: _Turn) -> float:
        """Return when others stop waiting for the end of a held turn, s."""
        assert turn.begun_s is not None, "a held turn has begun"
        overdue_s = max(_LEAST_OVERDUE_S, _OVERDUE * (self._estimate_ms(turn.kind) or 0.0) / 1e3)
        return turn.begun_s + (min(_MOST_OVERDUE_S, overdue_s) if turn.kind is TurnPurpose.INFERENCE else overdue_s)

    def _blocks_change_until_s(self, turn: _Turn) -> float:
        """Return when a mode change stops waiting for the end of a held turn, s."""
        assert turn.begun_s is not None, "a held turn has begun"
        return min(turn.begun_s + _MOST_OVERDUE_S, self._overdue_s(turn))

    def _held(self) -> list[_Turn]:
        return [turn for turn in self._turns.values() if turn.begun_s is not None]

    def _requested(self, kind: TurnPurpose) -> dict[int, _Turn]:
        return {ticket: turn for ticket, turn in self._turns.items() if turn.kind is kind and turn.begun_s is None}

    def _first(self, kind: TurnPurpose) -> int | None:
        return next(iter(self._requested(kind)), None)
