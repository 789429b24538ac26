"""One simulated agent: sends the messages of `edge_agent.session.coordinator_session` without a device."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from benchmarks.fleet import requests
from benchmarks.fleet.connection import Connection, request_headers
from coordinator.state.leases import Pace
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import session_pb2

FIRST_BACKOFF_S, MAX_BACKOFF_S, MAX_BACKOFF_OF_A_SMALL_FLEET_S = 0.2, 30.0, 5.0
WELCOME_TIMEOUT_S = 60.0
SILENCE_TIMEOUT_S = 15.0
SILENT_LEASES = 3
"""As in `edge_agent.session.coordinator_session`, `edge_agent.settings` and `wattfleet.common.tasks`."""

_HEADERS = request_headers(f"{requests.SERVICE}/Session")
_STATE = requests.state(1)
_LEASE_SHARES = (0.5, 0.8)
TRAINS_WITHIN_S = 5.0
"""A granted training begins at a random time within this limit, and ends at once."""


class Observer(Protocol):
    """Receives the events of agents."""

    def leased(self, agent: Agent, latency_s: float) -> None:
        """A lease was acknowledged."""

    def ended_by_itself(self, agent: Agent, reason: str) -> None:
        """A session ended, or could not be opened, although this side did not cut it."""


class Agent:
    """One agent with its own connection. It reconnects with the real agent's backoff until it is stopped.

    Args:
        number: number of the agent.
        connect: opens the agent's connection.
        pace: the server's lease and reconnection times; None if the server states them.
        observer: receives the agent's events.
        fronts: the messages that report its fronts.

    Attributes:
        settled: whether the current session was welcomed and one of its leases acknowledged; set by the observer.
    """

    __slots__ = (
        "_attempt", "_backoff_s", "_connect", "_connection", "_fronts", "_grant", "_received_s", "_hello", "_leases",
        "_loop", "_number", "_observer", "_pace", "_phase", "_send", "_sent", "_stated_pace", "_timer", "_training",
        "_welcomed", "settled",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        connect: Callable[[int], Awaitable[Connection]],
        pace: Pace | None,
        observer: Observer,
        fronts: Sequence[bytes] = requests.fronts(1),
    ) -> None:
        self._number = number
        self._connect = connect
        self._fronts = fronts
        self._hello = requests.hello(number)
        self._stated_pace = pace
        self._pace = Pace(0.0, 0.0)
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._sent: deque[tuple[float, bool]] = deque()
        self._leases = 0
        self._grant: session_pb2.Grant | None = None
        self._phase = GrantPhase.OVER
        self._training: asyncio.TimerHandle | None = None
        self._backoff_s = FIRST_BACKOFF_S
        self._received_s = 0.0
        self._welcomed = False
        self.settled = False
        self._connection: Connection | None = None
        self._send: Callable[[bytes], None] | None = None
        self._attempt: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Open a connection, and a session on it."""
        self._timer = self._loop.call_later(WELCOME_TIMEOUT_S, self._fail, "no answer")
        self._attempt = self._loop.create_task(self._open())

    def stop(self) -> None:
        """Disconnect without a message, and do not reconnect."""
        for timer in (self._timer, self._training):
            if timer is not None:
                timer.cancel()
        self._phase = GrantPhase.OVER
        if self._attempt is not None:
            self._attempt.cancel()
        connection, self._connection, self._send = self._connection, None, None
        if connection is not None:
            connection.drop()
        self._sent.clear()
        self._welcomed = self.settled = False

    def come_back(self) -> None:
        """Drop the connection now, and reconnect after a backoff."""
        self.stop()
        # full jitter, like the agent
        self._timer = self._loop.call_later(random.uniform(0, self._backoff_s), self.start)
        longest_s = MAX_BACKOFF_OF_A_SMALL_FLEET_S if self._pace.reconnect_s else MAX_BACKOFF_S
        self._backoff_s = max(self._pace.reconnect_s, min(longest_s, 2 * self._backoff_s))

    async def _open(self) -> None:
        try:
            connection = await self._connect(self._number)
        except TimeoutError:
            return self._fail("no connection in time")
        except OSError as error:
            return self._fail(error.strerror or "no connection")
        self._connection = connection
        call = connection.call(_HEADERS, self._receive, self._end)
        self._send = call.send
        call.send(self._hello)

    def _receive(self, response: bytes) -> None:
        self._received_s = self._loop.time()
        # the bare server's echo contains no pace
        reaction = self._stated_pace or requests.reaction_to(response)
        if isinstance(reaction, session_pb2.Grant):
            return self._granted(reaction)
        if reaction is None:
            return
        self._pace = reaction
        if not self._welcomed:
            self._welcomed = True
            self._send_lease()
            self._report(_STATE)
            for front in self._fronts:
                self._report(front)
            self._next_lease()
            return
        sent_s, is_lease = self._sent.popleft()
        self._backoff_s = max(FIRST_BACKOFF_S, self._pace.reconnect_s)
        if is_lease:
            self._observer.leased(self, self._received_s - sent_s)

    def _granted(self, grant: session_pb2.Grant) -> None:
        """Confirm a grant at once; its training follows later."""
        is_trained = self._grant is not None and self._grant.plan_id == grant.plan_id and self._phase is GrantPhase.OVER
        self._grant = grant
        if self._training is not None:
            self._training.cancel()
        self._phase = GrantPhase.OVER if is_trained or not grant.HasField("mode") else GrantPhase.WAITING
        self._send_lease()
        if self._phase is GrantPhase.WAITING:
            self._training = self._loop.call_later(random.uniform(0, TRAINS_WITHIN_S), self._train)

    def _train(self) -> None:
        for phase in (GrantPhase.TRAINING, GrantPhase.OVER):
            self._phase = phase
            self._send_lease()

    def _end(self, status: int, text: str) -> None:
        if self._connection is not None:  # otherwise this side ended the session
            self._fail(f"status {status}: {text}")

    def _fail(self, reason: str) -> None:
        self._observer.ended_by_itself(self, reason)
        self.come_back()

    def _report(self, message: bytes, is_lease: bool = False) -> None:
        assert self._send is not None
        self._sent.append((self._loop.time(), is_lease))
        self._send(message)

    def _send_lease(self) -> None:
        self._leases += 1
        self._report(requests.lease(self._leases, self._grant, self._phase), is_lease=True)

    def _next_lease(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        every_s = self._pace.lease_s * random.uniform(*_LEASE_SHARES)
        self._timer = self._loop.call_later(every_s, self._lease)

    def _lease(self) -> None:
        if self._loop.time() - self._received_s > max(SILENCE_TIMEOUT_S, SILENT_LEASES * self._pace.lease_s):
            return self._fail("no answer any more")
        self._send_lease()
        self._next_lease()
