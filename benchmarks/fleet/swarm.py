"""All simulated agents of a server, which connect, are disconnected, and reconnect together."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable

from benchmarks.fleet import requests
from benchmarks.fleet.agent import Agent
from benchmarks.fleet.connection import Connection
from coordinator.state.leases import Pace

_TICK_S = 0.01


class Swarm:
    """The simulated agents of one server.

    Args:
        count: number of agents.
        connect: opens the connection of the agent with a given number.
        pace: the server's lease and reconnection times; None if the server states them.
        workloads: number of fronts that each agent reports.

    Attributes:
        latencies_s: seconds from sending a lease to its acknowledgement, since `reset_measurements`.
        ended: number of sessions and attempts that ended, by reason.
    """

    def __init__(
        self,
        count: int,
        connect: Callable[[int], Awaitable[Connection]],
        pace: Pace | None = None,
        workloads: int = 1,
    ) -> None:
        fronts = requests.fronts(workloads)
        self._agents = [Agent(number, connect, pace, self, fronts) for number in range(count)]
        self._unsettled = count
        self._all_settled = asyncio.Event()
        self.latencies_s = array("d")
        self.ended: Counter[str] = Counter()

    @property
    def settled(self) -> int:
        """Number of agents that were welcomed and had a lease acknowledged since they connected."""
        return len(self._agents) - self._unsettled

    def reset_measurements(self) -> None:
        """Discard the measurements so far."""
        self.latencies_s = array("d")

    async def ramp(self, rate_per_s: float, limit_s: float) -> float | None:
        """Let all agents connect, evenly spread over time.

        Args:
            rate_per_s: agents per second.
            limit_s: maximum wait after the last one, s.

        Returns:
            Seconds until all agents were settled; None if that took longer than the limit.
        """
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        waiting = iter(self._agents)
        started = 0
        while started < len(self._agents):
            due = min(len(self._agents), 1 + int((loop.time() - begun_s) * rate_per_s))
            for _ in range(due - started):
                next(waiting).start()
            started = due
            await asyncio.sleep(_TICK_S)
        ramped_s = loop.time() - begun_s
        settled_s = await self.settle(limit_s)
        return None if settled_s is None else ramped_s + settled_s

    def cut(self) -> None:
        """Cut all connections. Every agent reconnects after its backoff."""
        self.reset_settled()
        for agent in self._agents:
            agent.come_back()

    def reset_settled(self) -> None:
        """Count every agent as settled again only after its next acknowledged lease."""
        for agent in self._agents:
            agent.settled = False
        self._unsettled = len(self._agents)
        self._all_settled.clear()

    async def settle(self, limit_s: float) -> float | None:
        """Wait until all agents are settled; return the seconds, or None if that took longer than the limit."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            await asyncio.wait_for(self._all_settled.wait(), limit_s)
        except asyncio.TimeoutError:
            return None
        return loop.time() - begun_s

    def leave(self) -> None:
        """Disconnect all agents for good."""
        for agent in self._agents:
            agent.stop()

    def leased(self, agent: Agent, latency_s: float) -> None:
        """A lease was acknowledged."""
        self.latencies_s.append(latency_s)
        if not agent.settled:
            agent.settled = True
            self._unsettled -= 1
            if not self._unsettled:
                self._all_settled.set()

    def ended_by_itself(self, agent: Agent, reason: str) -> None:
        """A session ended, or could not be opened, although this side did not cut it."""
        # With device ids and ports, every reason would be different.
        self.ended[re.sub(r"\d{2,}", "N", reason)] += 1
        if agent.settled:
            self._unsettled += 1
            self._all_settled.clear()
