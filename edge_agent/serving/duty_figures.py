"""Figures of how a duty is kept: rate, latencies, misses, and the share of time that training has the device."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from edge_agent.paths import DUTY_FILE
from edge_agent.serving.inference import LiveBatches
from edge_agent.serving.turns import LiveTimes
from wattfleet.common.atomic_files import make_state_folder, read_regular_file, remove_file, replace_file
from wattfleet.core.duties import LATENCY_LIMITS_MS, Demand, Duty, KeptDuty
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import ModeArray, PowerMode, array_to_modes

# --- Duty modes -------------------------------------------------------------------------------------------------------
# Decides which power modes keep a duty.


class DutyModes(Protocol):
    """Knows which power modes keep a duty.

    Attributes:
        rest: the mode that draws the least power while nothing is trained; None if too little is known.
    """

    @property
    def rest(self) -> PowerMode | None:
        """See the attribute."""
        ...

    def keeps_duty(self, mode: PowerMode) -> bool:
        """Return whether a mode is known to answer requests in time while nothing is trained."""
        ...


class MeasuredDutyModes:
    """Decides from the measured times of batches and the modes' clocks only.

    Args:
        duty: the duty to keep.
        times: live estimates.
        largest_batch: maximum number of requests that the model accepts at once.
        arrivals_per_s: rate of requests.
        in_force: the mode in force; None if unknown. Until a batch is measured, this mode and higher ones count as
            keeping the duty; if it is unknown, all modes do.

    Attributes:
        rest: None, as no power was measured.
    """

    rest: PowerMode | None = None

    def __init__(
        self, duty: Duty, times: LiveTimes, largest_batch: int, arrivals_per_s: float, in_force: PowerMode | None
    ) -> None:
        self._duty = duty
        self._times = times
        self._largest_batch = largest_batch
        self._arrivals_per_s = arrivals_per_s
        self._in_force = in_force

    def keeps_duty(self, mode: PowerMode) -> bool:
        """Return whether some batch size answers requests within the limit, and as fast as they arrive."""
        if not self._times.knows_inference:
            return self._in_force is None or all(knob >= now for knob, now in zip(mode, self._in_force, strict=True))
        batch = 1
        while True:
            answer_ms = self._times.inference_ms(mode, batch)
            if answer_ms is None:
                return False
            # Requests gather while the previous batch is answered.
            gathers_ms = max(answer_ms, (batch - 1) / self._arrivals_per_s * 1e3) if self._arrivals_per_s else 0.0
            keeps_up = self._arrivals_per_s * answer_ms / 1e3 <= batch
            if keeps_up and gathers_ms + answer_ms <= self._duty.latency_ms:
                return True
            if batch >= self._largest_batch:
                return False
            batch = min(2 * batch, self._largest_batch)


class KnownDutyModes:
    """Decides from predictions where they exist, and otherwise from measured times.

    Args:
        known: the predicted modes.
        keeping: those predicted modes that keep the duty.
        measured: decides for all other modes.
        rest: the mode that keeps the duty with the least power; None if no mode keeps it.

    Attributes:
        rest: the given mode.
    """

    def __init__(
        self, known: Set[PowerMode], keeping: Set[PowerMode], measured: DutyModes, rest: PowerMode | None
    ) -> None:
        self.rest = rest
        self._known = known
        self._keeping = keeping
        self._measured = measured

    def keeps_duty(self, mode: PowerMode) -> bool:
        """See `DutyModes.keeps_duty`."""
        return mode in self._keeping if mode in self._known else self._measured.keeps_duty(mode)


def highest_mode(modes: ModeArray) -> PowerMode:
    """Return the highest of `[n, 4]` modes, compared by GPU clock, then CPU clock, memory clock and cores."""
    (highest,) = array_to_modes(modes[[int(np.lexsort((modes[:, 0], modes[:, 3], modes[:, 1], modes[:, 2]))[-1])]])
    return highest


def lowest_keeping(modes: Sequence[PowerMode], keeps_duty: Callable[[PowerMode], bool]) -> PowerMode:
    """Return the resting mode while power is unknown: the lowest mode that keeps the duty, or else the highest mode.

    Args:
        modes: the modes that the device offers.
        keeps_duty: returns whether requests are answered in time in a mode.
    """
    ordered = sorted(modes, key=lambda mode: (mode.gpu_hz, mode.cpu_khz, mode.mem_hz, mode.cores))
    return next((mode for mode in ordered if keeps_duty(mode)), ordered[-1])


# --- Duty file --------------------------------------------------------------------------------------------------------
# Stores the duty in force in a file of the agent's state directory.

_MAX_BYTES = 100_000


class DutyFile:
    """Stores one duty.

    Args:
        state_directory: the agent's state directory.
    """

    def __init__(self, state_directory: Path) -> None:
        self._path = state_directory / DUTY_FILE

    def read(self) -> Duty | None:
        """Return the stored duty; None if there is none.

        Raises:
            InvalidInputError: the file cannot be read, or is damaged.
        """
        try:
            content = read_regular_file(self._path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidInputError(f"{self._path}: cannot be read: {error.strerror}") from None
        try:
            return Duty.from_json(content[:_MAX_BYTES].decode())
        except (InvalidInputError, UnicodeDecodeError) as error:
            raise InvalidInputError(
                f"{self._path}: {error}: remove the file, and set the duty again with `wattfleet agent duty set`"
            ) from None

    def write(self, duty: Duty | None) -> None:
        """Store a duty; None removes the stored one.

        Raises:
            InvalidInputError: the file cannot be written; the stored duty is unchanged.
        """
        try:
            if duty is not None:
                make_state_folder(self._path.parent)
                replace_file(self._path, duty.to_json().encode() + b"\n")
            else:
                remove_file(self._path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise InvalidInputError(f"{self._path}: cannot be written: {error.strerror}") from None


# --- Duty now ---------------------------------------------------------------------------------------------------------
# A snapshot of a duty, with everything that determines which modes keep it.

LEAST_ARRIVALS_PER_S = 0.1
"""The rate assumed for a duty without requests, requests per second."""

_RATE_CHANGE = 0.1
_WINDOW_S = 30.0
_DEVIATIONS = 3.0
_TIME_CHANGE = 0.25


@dataclass(frozen=True)
class DutyNow:
    """A duty, and what the device has observed of its requests.

    Attributes:
        duty: the duty.
        arrivals_per_s: the larger of the expected and the measured rate, requests per second.
        largest_batch: maximum number of requests that the connected servers accept at once; None without a server.
        switch_ms: additional time of a batch after a minibatch, ms.
        live: high estimates of the times of answered batches.
    """

    duty: Duty
    arrivals_per_s: float
    largest_batch: int | None
    switch_ms: float
    live: LiveBatches

    def demand(self) -> Demand:
        """The demand to plan for.

        Its rate is rounded up to two digits, so that texts with it do not change all the time.
        """
        per_s = max(self.arrivals_per_s, LEAST_ARRIVALS_PER_S)
        digit = 10.0 ** (math.floor(math.log10(per_s)) - 1)
        # Keeps a rounding error from counting as another digit.
        rounded = math.ceil(per_s / digit - 1e-9) * digit
        return Demand(float(f"{rounded:.2g}"), self.duty.latency_ms, self.duty.quantile)

    def differs_from(self, other: DutyNow) -> bool:
        """Return whether rate or times differ by more than chance, so that other modes may keep the duty."""
        if (self.duty, self.largest_batch) != (other.duty, other.largest_batch) or _keys(self) != _keys(other):
            return True
        rates = max(self.arrivals_per_s, LEAST_ARRIVALS_PER_S), max(other.arrivals_per_s, LEAST_ARRIVALS_PER_S)
        # The counts of random requests vary from one half minute to the next.
        by_chance = _DEVIATIONS * math.sqrt(2 / (min(rates) * _WINDOW_S))
        if max(rates) / min(rates) - 1 > max(_RATE_CHANGE, by_chance):
            return True
        pairs = [(took_ms, other.live[mode][batch]) for mode, of in self.live.items() for batch, took_ms in of.items()]
        return any(max(pair) > math.exp(_TIME_CHANGE) * min(pair) for pair in pairs)


def _keys(now: DutyNow) -> set[tuple[object, int]]:
    return {(mode, batch) for mode, of_mode in now.live.items() for batch in of_mode}


# --- Duty figures -----------------------------------------------------------------------------------------------------

_LATEST = 1000


class DutyFigures:
    """Counts what inference servers report; another duty resets the counters."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[float, int]] = deque()
        self._trained: deque[tuple[float, float]] = deque()
        self._since_s: float | None = None
        self.restart()

    def restart(self) -> None:
        """Reset the counters for another duty."""
        self._counts = [0] * (len(LATENCY_LIMITS_MS) + 1)
        self._sum_ms = 0.0
        self._latest_ms: deque[float] = deque(maxlen=_LATEST)
        self._requests = self._missed = self._batch = 0

    def arrived(self, count: int, now_s: float) -> None:
        """Count arrived requests."""
        if self._since_s is None:
            self._since_s = now_s
        self._arrived.append((now_s, count))

    def answered(self, latencies_ms: Sequence[float], failed: int, limit_ms: float | None) -> None:
        """Count a batch of answered requests.

        Args:
            latencies_ms: latencies of the requests with an answer, ms.
            failed: number of requests with an error.
            limit_ms: the duty's latency limit; None without a duty.
        """
        self._batch = len(latencies_ms) + failed
        self._requests += len(latencies_ms) + failed
        self._missed += failed
        for latency_ms in latencies_ms:
            self._counts[bisect_left(LATENCY_LIMITS_MS, latency_ms)] += 1
            self._sum_ms += latency_ms
            self._missed += limit_ms is not None and latency_ms > limit_ms
        self._latest_ms.extend(latencies_ms)

    def trained(self, seconds: float, now_s: float) -> None:
        """Note that a minibatch used the device for some seconds until now."""
        self._trained.append((now_s, seconds))

    def arrivals_per_s(self, now_s: float) -> float | None:
        """Return the request rate of the last half minute, requests per second; None until one second was observed."""
        _forget(self._arrived, now_s)
        if self._since_s is None or now_s - self._since_s < 1.0:
            return None
        return sum(count for _, count in self._arrived) / min(_WINDOW_S, now_s - self._since_s)

    def training_share(self, now_s: float) -> float:
        """Return the share of the last half minute in which minibatches used the device, 0 to 1."""
        _forget(self._trained, now_s)
        return min(1.0, sum(seconds for _, seconds in self._trained) / _WINDOW_S)

    def latency_at(self, quantile: float) -> float | None:
        """Return a quantile of the latest 1,000 latencies, ms; None before the first."""
        ordered = sorted(self._latest_ms)
        return ordered[math.ceil(quantile * len(ordered)) - 1] if ordered else None

    def kept(self, duty: Duty, now_s: float, servers: int, waits: str | None) -> KeptDuty:
        """Return all figures.

        Args:
            duty: the duty in force.
            now_s: the time.
            servers: number of connected inference servers.
            waits: why a training waits; None if none is waiting.
        """
        return KeptDuty(
            workload=duty.workload,
            latency_ms=duty.latency_ms,
            quantile=duty.quantile,
            arrivals_per_s=self.arrivals_per_s(now_s) or 0.0,
            requests=self._requests,
            missed=self._missed,
            latency_counts=tuple(self._counts),
            latency_sum_ms=self._sum_ms,
            latency_at_quantile_ms=self.latency_at(duty.quantile),
            batch=self._batch,
            training_share=self.training_share(now_s),
            servers=servers,
            waits=waits or "",
        )


def _forget(events: deque[tuple[float, int]] | deque[tuple[float, float]], now_s: float) -> None:
    while events and events[0][0] < now_s - _WINDOW_S:
        events.popleft()
