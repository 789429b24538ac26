"""Virtual time: time-outs, actions in the order of their times, and streams that deliver messages late or never."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# --- Timeouts ---------------------------------------------------------------------------------------------------------
# The time-outs of all worlds. Events prefer the moments just before, at and just after them.


TICK_S = 1.0
"""Between two looks of the coordinator at what devices may draw."""

CONFIRM_TIMEOUT_S = 8.0
"""For a connected device to confirm a new limit."""

LEASE_S = 5.0
"""Between two messages of a device."""

MISSED_LEASES = 3
"""A session ends after this many leases without a message; an agent ends it after as many without an answer."""

GRANT_TIMEOUT_S = 10.0
"""For which an app waits for its grant."""

RETURN_GRACE_S = 20.0
"""For which a restarted coordinator waits for its devices before it plans without them."""

LIFETIMES_S = (20.0, 30.0)
"""For which a device may act on its grant without contact."""

MARGIN_S = 5.0
"""For a device to park once its grant has lapsed."""

DRIFT = 0.01
"""Relative error of a device's clock that the coordinator allows for."""

_ALL_S = (
    TICK_S,
    CONFIRM_TIMEOUT_S,
    LEASE_S,
    MISSED_LEASES * LEASE_S,
    GRANT_TIMEOUT_S,
    RETURN_GRACE_S,
    *LIFETIMES_S,
    *(lifetime_s * (1 + DRIFT) + MARGIN_S for lifetime_s in LIFETIMES_S),
)
_NEAR_S = (-0.3, -0.1, -0.01, 0.0, 0.01, 0.1, 0.3)


def near_timeout_s(rng: random.Random) -> float:
    """Seconds of a random time-out, or slightly fewer or more."""
    return rng.choice(_ALL_S) + near_s(rng)


def near_s(rng: random.Random) -> float:
    """A little time before or after a moment, or none."""
    return rng.choice(_NEAR_S)


# --- Timeline ---------------------------------------------------------------------------------------------------------
# Virtual time: actions in the order of their times, and streams that deliver messages late, in bursts or never.

Action = Callable[[], None]


class Timeline:
    """Runs actions in the order of their times.

    Attributes:
        now_s: the true time, which no device's clock shows exactly.
    """

    def __init__(self, after_each: Action) -> None:
        """Start at zero.

        Args:
            after_each: called after every action.
        """
        self.now_s = 0.0
        self._after_each = after_each
        self._due: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, when_s: float, action: Action) -> None:
        """Run an action at a time."""
        self._count += 1
        heapq.heappush(self._due, (max(when_s, self.now_s), self._count, action))

    def after(self, seconds: float, action: Action) -> None:
        """Run an action after some seconds."""
        self.at(self.now_s + seconds, action)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        until_s = self.now_s + seconds
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._due)
            action()
            self._after_each()
        self.now_s = until_s


@dataclass(eq=False)
class Direction:
    """One direction of a session: messages arrive in order, late, or never.

    Attributes:
        deliver: handles each message.
        slowest_s: the longest time that a message takes, in seconds.
        is_lost: whether no message arrives any more.
        lost_after: the direction is lost after this many messages; None for never.
        stalled_until_s: no message arrives before this time.
        on_their_way: messages in transit, with the times of their arrival.
    """

    timeline: Timeline
    rng: random.Random
    deliver: Callable[[Any], None]
    slowest_s: float
    is_lost: bool = False
    lost_after: int | None = None
    stalled_until_s: float = 0.0
    on_their_way: deque[tuple[float, Any]] = field(default_factory=deque)

    def send(self, message: Any) -> None:
        """Send a message; a lost direction drops it silently."""
        if self.is_lost:
            return
        arrives_s = self.timeline.now_s + self.rng.random() * self.slowest_s
        if self.on_their_way:
            arrives_s = max(arrives_s, self.on_their_way[-1][0])
        self.on_their_way.append((arrives_s, message))
        self.timeline.at(arrives_s, self._arrive)

    def lose(self) -> None:
        """Lose all messages in transit and all later ones; neither end is told."""
        self.is_lost = True
        self.on_their_way.clear()

    def stall(self, seconds: float) -> None:
        """Deliver nothing for some seconds, and then everything."""
        self.stalled_until_s = max(self.stalled_until_s, self.timeline.now_s + seconds)

    def _arrive(self) -> None:
        now_s = self.timeline.now_s
        if self.stalled_until_s > now_s:
            self.timeline.at(self.stalled_until_s, self._arrive)
            return
        if self.on_their_way and self.on_their_way[0][0] <= now_s:
            message = self.on_their_way.popleft()[1]
            if self.lost_after is not None:
                self.lost_after -= 1
                if self.lost_after < 0:
                    self.lose()
                    return
            self.deliver(message)


CLOSED = object()
"""The last message of a stream that its other end has closed."""


class Stream:
    """A session's connection between one agent and the coordinator.

    Attributes:
        up: from the agent to the coordinator.
        down: from the coordinator to the agent.
        began_s: when it was opened.
    """

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        at_coordinator: Callable[[Stream, Any], None],
        at_agent: Callable[[Stream, Any], None],
        slowest_s: float,
    ) -> None:
        """Connect two ends."""
        self.began_s = timeline.now_s
        self._is_open_here = {"agent": True, "coordinator": True}
        self.up = Direction(
            timeline, rng, lambda message: self._deliver("coordinator", at_coordinator, message), slowest_s
        )
        self.down = Direction(timeline, rng, lambda message: self._deliver("agent", at_agent, message), slowest_s)

    @property
    def is_sound(self) -> bool:
        """Whether both ends have it open, and nothing is lost or stalled."""
        now_s = self.up.timeline.now_s
        return all(self._is_open_here.values()) and not any(
            each.is_lost or each.lost_after is not None or each.stalled_until_s > now_s for each in (self.up, self.down)
        )

    def is_open(self, end: str) -> bool:
        """Whether an end has it open."""
        return self._is_open_here[end]

    def close(self, end: str) -> None:
        """Close one end; the other end is told unless messages are lost."""
        if self._is_open_here[end]:
            self._is_open_here[end] = False
            (self.up if end == "agent" else self.down).send(CLOSED)

    def _deliver(self, end: str, receive: Callable[[Stream, Any], None], message: Any) -> None:
        if not self._is_open_here[end]:
            return
        if message is CLOSED:
            self._is_open_here[end] = False
        receive(self, message)
