"""Gives the tasks and threads of the agent their turns of the device."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator
from concurrent.futures import TimeoutError as NotDoneError
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from edge_agent.devices.device import DutyNotKeptError
from edge_agent.devices.virtual.served_duty import ServedDuty
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.serving.duty_figures import (
    DutyFigures,
    DutyModes,
    DutyNow,
    MeasuredDutyModes,
    highest_mode,
    lowest_keeping,
)
from edge_agent.serving.turns import Batching, LiveTimes, TurnPurpose, Turns
from wattfleet.common.clock import utc_now
from wattfleet.core.duties import Duty, KeptDuty
from wattfleet.core.modes import ModeArray, PowerMode, array_to_modes

# --- Served spans -----------------------------------------------------------------------------------------------------
# What a simulated board served and trained, span by span.


@dataclass(frozen=True)
class ServedSpan:
    """A period in which a board served requests in one power mode. All times are seconds of the board's clock.

    Attributes:
        begin_s: the start.
        end_s: the end.
        mode: the power mode.
        batch: largest number of requests in a batch.
        is_training: whether minibatches were trained between the requests.
        power_mw: mean power, mW.
        arrival_s: when each answered request arrived.
        latency_ms: time from the arrival to the answer, ms.
        minibatch_end_s: when each minibatch ended.
    """

    begin_s: float
    end_s: float
    mode: PowerMode
    batch: int
    is_training: bool
    power_mw: float
    arrival_s: list[float]
    latency_ms: list[float]
    minibatch_end_s: list[float]

    @classmethod
    def of(cls, run: ServedDuty, mode: PowerMode, batch: int, is_training: bool) -> ServedSpan:
        """Make the span of a period of service."""
        return cls(
            begin_s=run.begin_s,
            end_s=run.begin_s + run.duration_s,
            mode=mode,
            batch=batch,
            is_training=is_training,
            power_mw=run.power_mw,
            arrival_s=run.arrival_s.round(4).tolist(),
            latency_ms=run.latency_ms.round(3).tolist(),
            minibatch_end_s=run.minibatch_end_s.round(4).tolist(),
        )


# --- Device turns -----------------------------------------------------------------------------------------------------

Result = TypeVar("Result")

_STOP_CHECK_S = 0.2
_RESTING_MODES = 300
_RATE_S = 1.0
"""Time between two checks of the request rate while a turn is awaited, s: nothing reports that requests have ceased."""

JudgeModes = Callable[[Duty, LiveTimes, int, float, PowerMode | None], DutyModes]
"""Makes the `DutyModes` from a duty, live times, the largest batch, requests per second and the mode in force."""


class DeviceTurns:
    """The turns of one device. Methods must be called on the event loop's thread unless they say otherwise.

    Args:
        now_s: a monotonic clock.
        judge: decides which modes keep the duty; the default uses measured times only.
        utc_now: returns the time of day, for schedules of arrivals.
        switch_ms: additional time of a batch after a minibatch, ms, until a longer one is measured.

    Attributes:
        figures: counts how the duty is kept.
        judge: the given judge.
        changed: set when the duty, the servers or the figures have changed.
        plan_batching: returns how servers gather requests in a mode; may be called in any thread.
        batching: how servers gather requests now.
        batching_changed: called when the batching or the duty has changed.
    """

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        judge: JudgeModes = MeasuredDutyModes,
        utc_now: Callable[[], datetime] = utc_now,
        switch_ms: float = 0.0,
    ) -> None:
        self._now_s = now_s
        self._utc_now = utc_now
        self._switch_ms = switch_ms
        self.judge = judge
        self._turns = Turns(LiveTimes())
        self.figures = DutyFigures()
        self._rest: PowerMode | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: int | None = None
        self._begun: dict[int, asyncio.Future[None]] = {}
        self._check: asyncio.TimerHandle | None = None
        self._rate_s = 0.0
        self._servers: dict[int, int] = {}
        self._server_numbers = itertools.count(1)
        self.changed = asyncio.Event()
        self._measuring_ends = threading.Event()
        self._choosing = threading.Lock()
        self.plan_batching: Callable[[PowerMode | None], Batching] = lambda mode: Batching()
        self.batching = Batching()
        self.batching_changed: Callable[[], None] = lambda: None

    def begin_measuring(self) -> threading.Event:
        """Begin the agent's own measurements; the returned event, once set, ends those that wait for a turn."""
        self._measuring_ends = threading.Event()
        return self._measuring_ends

    @property
    def measuring_has_ended(self) -> bool:
        """Whether the agent's own measurements have to end."""
        return self._measuring_ends.is_set()

    def serve_here(self) -> None:
        """Start to give turns on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def stop(self) -> None:
        """Stop giving turns: all waiting work continues without one."""
        self._loop = None
        if self._check is not None:
            self._check.cancel()
        for begun in self._begun.values():
            if not begun.done():
                begun.set_result(None)

    @property
    def duty(self) -> Duty | None:
        """The duty in force; None without one."""
        return self._turns.duty

    @duty.setter
    def duty(self, duty: Duty | None) -> None:
        self._turns.duty = duty
        self.figures.restart()
        self.batching = self.plan_batching(self._turns.mode)
        self.batching_changed()
        self._advance()
        self._notify()

    def choose_batching(self) -> None:
        """Make servers gather requests as planned for the mode in force. May be called in any thread."""
        with self._choosing:  # so that the latest choice is applied last
            chosen = self.plan_batching(self._turns.mode)
            self._later(partial(self._take_batching, chosen))

    def _take_batching(self, chosen: Batching) -> None:
        if chosen != self.batching:
            self.batching = chosen
            self.batching_changed()

    def plan_changed(self) -> None:
        """Note that the planned modes or batches of the duty may have changed. May be called in any thread."""
        self.choose_batching()
        self._later(self._notify)

    def duty_now(self) -> DutyNow | None:
        """Return the duty and what was observed of its requests; None without a duty. May be called in any thread."""
        return None if self.duty is None else self._on_loop(self._duty_now)

    def _duty_now(self) -> DutyNow | None:
        duty, times = self.duty, self._turns.times
        if duty is None:
            return None
        measured_per_s = self.figures.arrivals_per_s(self._now_s())
        arrivals_per_s = max(duty.arrivals_per_s(self._utc_now(), measured_per_s), measured_per_s or 0.0)
        largest_batch = self._turns.largest_batch if self._servers else None
        switch_ms = max(self._switch_ms, times.switch_ms(None))
        return DutyNow(duty, arrivals_per_s, largest_batch, switch_ms, times.full_batches_ms())

    @property
    def is_shared(self) -> bool:
        """Whether anything but trainings may need the device."""
        return self._loop is not None and (self._turns.duty is not None or bool(self._servers))

    @property
    def sharing(self) -> Hashable:
        """Identifies what trainings share the device with: a value that differs between duties; None if nothing."""
        return (self._turns.duty, bool(self._servers)) if self.is_shared else None

    @property
    def servers(self) -> int:
        """Number of connected inference servers."""
        return len(self._servers)

    def server_connected(self, largest_batch: int) -> int:
        """Note a new inference server, and return its number."""
        server = next(self._server_numbers)
        self._servers[server] = largest_batch
        self._turns.largest_batch = max(self._servers.values())
        self._notify()
        return server

    def server_gone(self, server: int) -> None:
        """Note that an inference server has disconnected."""
        self._servers.pop(server, None)
        self._turns.largest_batch = max(self._servers.values(), default=1)
        self._turns.requests_waiting(server, 0, None)
        self._advance()

    def requests_waiting(self, server: int, count: int, oldest_ms: float) -> None:
        """Note the requests that wait at a server.

        Args:
            server: the server's number.
            count: waiting requests.
            oldest_ms: how long the first of them has waited, ms.
        """
        now_s = self._now_s()
        oldest_s = now_s - oldest_ms / 1e3 if count else None
        self._turns.requests_waiting(server, count, oldest_s, now_s)
        self._advance()

    def batch_answered(self, arrived: int, latencies_ms: list[float], failed: int) -> None:
        """Note requests that a server has answered."""
        now_s, duty = self._now_s(), self.duty
        self.figures.arrived(arrived, now_s)
        self.figures.answered(latencies_ms, failed, None if duty is None else duty.latency_ms)
        self._note_rate(now_s)
        self._notify()

    def served(self, run: ServedDuty) -> None:
        """Note requests that a simulated board has served in its own time. May be called in any thread."""
        self._on_loop(partial(self._note_served, run))

    def _note_served(self, run: ServedDuty) -> None:
        limit_ms = None if self.duty is None else self.duty.latency_ms
        if run.batches:
            for end_s, latencies_ms in zip(run.batch_end_s.tolist(), run.latencies_by_batch_ms, strict=True):
                self.figures.arrived(len(latencies_ms), end_s)
                self.figures.answered(latencies_ms.tolist(), 0, limit_ms)
        for end_s, took_s in zip(run.minibatch_end_s.tolist(), run.minibatch_s.tolist(), strict=True):
            self.figures.trained(took_s, end_s)
        self._note_rate(self._now_s())
        self._notify()

    def keeps_duty(self, mode: PowerMode) -> bool:
        """Return whether requests are answered in time in a mode; True if there are none to answer.

        Before the first batch is measured, this is known only of modes at least as high as the one in force.
        """
        duty = self.duty
        if duty is None or not self._servers:
            return True
        return self._judge_of(duty).keeps_duty(mode)

    def _judge_of(self, duty: Duty) -> DutyModes:
        turns = self._turns
        return self.judge(duty, turns.times, turns.largest_batch, self._arrivals_per_s(), turns.mode)

    def require_kept(self, mode: PowerMode) -> None:
        """Check that a mode keeps the duty or, if no mode is known to keep it, is the resting mode. For any thread.

        Raises:
            DutyNotKeptError: the mode is not known to keep the duty.
        """
        duty = self.duty
        if duty is not None and mode != self._rest and not self._on_loop(partial(self.keeps_duty, mode)):
            raise DutyNotKeptError(
                f"{mode.label()} is not known to answer the requests of {duty.workload!r} within {duty.latency_ms:g} ms"
            )

    @property
    def times(self) -> LiveTimes:
        """Live estimates of all times."""
        return self._turns.times

    @property
    def mode(self) -> PowerMode | None:
        """The mode in force; None while it is unknown."""
        return self._turns.mode

    def in_mode(self, mode: PowerMode | None) -> None:
        """Note the mode in force, None if it is unknown. May be called in any thread."""
        self._turns.mode = mode
        self.choose_batching()

    def resting_mode(self, parked: PowerMode, modes: ModeArray) -> PowerMode:
        """Return the mode to rest in while nothing is trained. May be called in any thread.

        Without a duty, it is the parking mode. With a duty, it is the mode that keeps it with the least power or, while
        too little is known of the power, the lowest mode that keeps it. Until the first batch has shown how long one
        takes, it is the highest mode: in a low mode, the first batch could take many times the latency limit.

        Args:
            parked: the mode without a duty.
            modes: `[n, 4]` modes that the device offers.
        """
        self._rest = self._on_loop(partial(self._resting_mode, parked, modes))
        return self._rest

    def _resting_mode(self, parked: PowerMode, modes: ModeArray) -> PowerMode:
        if (planned := self._planned_rest()) is not None:
            return planned
        if self._awaits_first_batch:
            return highest_mode(modes)
        if self.keeps_duty(parked):
            return parked
        spread = array_to_modes(modes[:: max(1, len(modes) // _RESTING_MODES)])
        return lowest_keeping([*spread, highest_mode(modes)], self.keeps_duty)

    @property
    def _awaits_first_batch(self) -> bool:
        """Return whether requests have to be answered whose time is still unknown."""
        return self.duty is not None and not self._turns.times.knows_inference

    def _planned_rest(self) -> PowerMode | None:
        """Return the mode that answers requests with the least power; None without requests or enough measurements."""
        duty = self.duty
        return None if duty is None or not self._servers else self._judge_of(duty).rest

    def is_rested(self, parked: PowerMode, modes: ModeArray) -> bool:
        """Return whether the device may stay in the mode in force while it rests.

        It may if this is the resting mode or, while the mode with the least power is unknown, if this mode keeps the
        duty.

        Args:
            parked: the resting mode without a duty.
            modes: `[n, 4]` modes that the device offers.
        """
        mode, planned = self._turns.mode, self._planned_rest()
        if mode is None or planned is not None:
            return mode in (None, planned)
        if self._awaits_first_batch:
            return mode == highest_mode(modes)
        return self.keeps_duty(mode) or self.resting_mode(parked, modes) == mode

    def allow_trial(self) -> None:
        """Let a waiting minibatch begin while no request waits, even if it does not fit."""
        self._turns.allow_trial()
        self._advance()

    def why_training_waits(self) -> str | None:
        """Return why a minibatch waits for its turn, for people; None if none waits."""
        return self._turns.why_training_waits(self._now_s())

    def kept_duty(self) -> KeptDuty | None:
        """Return how the duty in force is kept; None without a duty."""
        duty = self.duty
        if duty is None:
            return None
        return self.figures.kept(duty, self._now_s(), self.servers, self.why_training_waits())

    async def take(
        self, kind: TurnPurpose, is_first: bool = False, server: int | None = None, work_ms: float | None = None
    ) -> int:
        """Wait for a turn, and return its ticket for `give_back`. Cancelling the call withdraws the request."""
        ticket = self._turns.request(kind, self._now_s(), is_first, server, work_ms)
        begun = self._begun[ticket] = asyncio.get_running_loop().create_future()
        self._advance()
        try:
            await begun
        except asyncio.CancelledError:
            self.give_back(ticket, is_complete=False)
            raise
        finally:
            del self._begun[ticket]
        return ticket

    def give_back(self, ticket: int, batch: int = 1, is_complete: bool = True, trained: bool = False) -> None:
        """End a turn.

        Args:
            ticket: the turn's ticket.
            batch: number of requests in an inference batch.
            is_complete: whether its work was done.
            trained: whether the work was a minibatch of a training.
        """
        now_s = self._now_s()
        if trained and (begun_s := self._turns.begun_s(ticket)) is not None:
            self.figures.trained(now_s - begun_s, now_s)
        self._turns.end(ticket, now_s, batch, is_complete)
        self._advance()

    @contextmanager
    def from_thread(self, kind: TurnPurpose) -> Iterator[None]:
        """Hold a turn within this context, in a thread of the agent; if nothing else waits, it begins at once.

        Args:
            kind: the purpose of the turn.

        Raises:
            StoppedError: the agent's measurements ended while a minibatch waited.
        """
        loop = self._loop
        if loop is None or not self.is_shared or threading.get_ident() == self._thread:
            yield
            return
        ticket = self._taken(loop, kind)
        if ticket is None:
            yield
            return
        is_complete = False
        try:
            yield
            is_complete = True
        finally:
            if self._loop is not None:
                loop.call_soon_threadsafe(
                    lambda: self.give_back(ticket, is_complete=is_complete, trained=kind is TurnPurpose.MINIBATCH)
                )

    def measured(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run a measurement's coroutine on the event loop, and wait for its result in a thread of the agent.

        Raises:
            StoppedError: the agent's measurements ended meanwhile, or no more turns are given.
        """
        loop = self._loop
        if loop is None:
            raise StoppedError
        working = asyncio.run_coroutine_threadsafe(work(), loop)
        while not wait([working], _STOP_CHECK_S).done:
            if self._loop is None or self.measuring_has_ended:
                working.cancel()
                raise StoppedError
        return working.result()

    def _later(self, work: Callable[[], None]) -> None:
        """Do some work on the event loop's thread: at once if this is that thread, otherwise soon."""
        loop = self._loop
        if loop is None or threading.get_ident() == self._thread:
            work()
        else:
            loop.call_soon_threadsafe(work)

    def _on_loop(self, work: Callable[[], Result]) -> Result:
        """Do some work on the event loop's thread, from any thread."""
        loop = self._loop
        if loop is None or not self.is_shared or threading.get_ident() == self._thread:
            return work()

        async def working() -> Result:
            return work()

        return asyncio.run_coroutine_threadsafe(working(), loop).result()

    def _taken(self, loop: asyncio.AbstractEventLoop, kind: TurnPurpose) -> int | None:
        """Wait for a turn, and return its ticket; None if the request came after turns had stopped."""
        taken = asyncio.run_coroutine_threadsafe(self.take(kind), loop)
        while True:
            try:
                return taken.result(_STOP_CHECK_S)
            except NotDoneError:
                if self._loop is None:
                    taken.cancel()
                    return None
                if kind is TurnPurpose.MINIBATCH and self.measuring_has_ended:
                    taken.cancel()
                    raise StoppedError from None

    def _arrivals_per_s(self) -> float:
        measured_per_s = self.figures.arrivals_per_s(self._now_s())
        if measured_per_s is not None or self.duty is None:
            return measured_per_s or 0.0
        return self.duty.arrivals_per_s(self._utc_now())

    def _notify(self) -> None:
        """Notify those who watch the duty of a change."""
        self.changed.set()

    def _advance(self) -> None:
        """Start all turns that may begin, and schedule a check for when the next may begin without a further event."""
        now_s = self._now_s()
        if now_s >= self._rate_s + _RATE_S:
            self._note_rate(now_s)
        for ticket in self._turns.granted(now_s):
            begun = self._begun.get(ticket)
            if begun is not None and not begun.done():
                begun.set_result(None)
        if self._check is not None:
            self._check.cancel()
            self._check = None
        next_s = self._turns.next_check_s(now_s)
        if self._turns.arrivals_per_s and any(not begun.done() for begun in self._begun.values()):
            next_s = min(self._rate_s + _RATE_S, math.inf if next_s is None else next_s)
        if next_s is not None and self._loop is not None:
            self._check = self._loop.call_later(max(0.0, next_s - now_s), self._advance)

    def _note_rate(self, now_s: float) -> None:
        self._rate_s = now_s
        self._turns.arrivals_per_s = self._arrivals_per_s()
