"""Measures the throughput of new sessions, reports and reference downloads on the coordinator and on a bare server."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.fleet import requests
from benchmarks.fleet.connection import OK, UNAVAILABLE, Connection, request_headers
from benchmarks.fleet.load import Load
from benchmarks.fleet.servers import Server
from wattfleet_proto.v1 import session_pb2

_SESSION = request_headers(f"{requests.SERVICE}/Session")
_FETCH = request_headers(f"{requests.SERVICE}/FetchReference")
_BEGINS_WITHIN_S = 30.0
_QUIET_WITHIN_S = 10.0
_POLL_S = 0.01


class CallEndedError(Exception):
    """A server ended a call that should have continued."""


@dataclass
class Tally:
    """The counts of all connections in one turn.

    Attributes:
        taken: number of answers, or their bytes.
        failure: why a call ended; empty if none did.
    """

    taken: int = 0
    failure: str | None = None

    def ended(self, status: int, text: str) -> None:
        """Record that a call ended that should have continued."""
        self.failure = f"status {status}: {text}"


class Worker(Protocol):
    """An agent that repeats its work until it is stopped."""

    def drop(self) -> None:
        """Stop, and cut the connection."""


class Beginner:
    """An agent that begins a session, cuts its connection once it is welcomed, and starts over.

    Args:
        server: the server.
        number: number of the agent.
        tally: counts sessions.
    """

    def __init__(self, server: Server, number: int, tally: Tally) -> None:
        self._server = server
        self._hello = requests.hello(number)
        self._number = number
        self._tally = tally
        self._connection: Connection | None = None
        self._attempt = asyncio.get_running_loop().create_task(self._begin())

    def drop(self) -> None:
        """Stop, and cut the connection."""
        self._attempt.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    async def _begin(self) -> None:
        try:
            self._connection = await self._server.connect(self._number)
        except OSError as error:
            return self._tally.ended(UNAVAILABLE, str(error))
        self._connection.call(_SESSION, self._welcomed, self._ended).send(self._hello)

    def _welcomed(self, response: bytes) -> None:
        self._tally.taken += 1
        self.drop()
        self._attempt = asyncio.get_running_loop().create_task(self._begin())

    def _ended(self, status: int, text: str) -> None:
        if self._connection is not None:  # otherwise this side ended the session
            self._tally.ended(status, text)


class Reporter:
    """An agent that reports its state again as soon as the last report is acknowledged.

    Args:
        connection: the agent's connection.
        number: number of the agent.
        tally: counts acknowledgements.
    """

    def __init__(self, connection: Connection, number: int, tally: Tally) -> None:
        self.drop = connection.drop
        self._tally = tally
        self._sequence = 0
        self._call = connection.call(_SESSION, self._answered, tally.ended)
        self._call.send(requests.hello(number))

    def _answered(self, response: bytes) -> None:
        self._tally.taken += 1
        self._sequence += 1
        self._call.send(requests.state(self._sequence))


class Downloader:
    """An agent that downloads the reference repeatedly.

    Args:
        connection: the agent's connection.
        request: request for the reference.
        tally: counts bytes.
    """

    def __init__(self, connection: Connection, request: bytes, tally: Tally) -> None:
        self.drop = connection.drop
        self._connection = connection
        self._request = request
        self._tally = tally
        self._fetch()

    def _fetch(self) -> None:
        self._connection.call(_FETCH, self._arrived, self._over).send(self._request, last=True)

    def _arrived(self, response: bytes) -> None:
        self._tally.taken += len(response)

    def _over(self, status: int, text: str) -> None:
        if status == OK:
            self._fetch()
        else:
            self._tally.ended(status, text)


@dataclass(frozen=True)
class Contest:
    """One kind of load that is applied to two servers alternately.

    Attributes:
        begin: starts the work of the agent with a given number.
        connections: number of concurrent connections.
        window_s: how long each turn is measured, s.
        repeats: turns of each server.
    """

    begin: Callable[[Server, int, Tally], Awaitable[Worker]]
    connections: int
    window_s: float
    repeats: int

    async def run(self, ours: Server, bare: Server) -> dict[str, float]:
        """Run all turns; return both servers' median rates per second, and the cores that servers and generator used.

        Raises:
            CallEndedError: a server ended a call.
        """
        turns: dict[Server, list[tuple[float, float, float]]] = {ours: [], bare: []}
        for _ in range(self.repeats):
            for server in random.sample([ours, bare], 2):
                turns[server].append(await self._turn(server))
        medians = {
            server: [statistics.median(column) for column in zip(*turns[server], strict=True)] for server in turns
        }
        rate, cores, generator_cores = medians[ours]
        bare_rate, bare_cores, bare_generator_cores = medians[bare]
        return {
            "rate": rate,
            "bare_rate": bare_rate,
            "ratio": rate / bare_rate,
            "cores": cores,
            "bare_cores": bare_cores,
            "generator_cores": generator_cores,
            "bare_generator_cores": bare_generator_cores,
        }

    async def _turn(self, server: Server) -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        tally = Tally()
        opened: list[Worker] = []
        try:
            for number in range(self.connections):
                opened.append(await self.begin(server, number, tally))
            give_up_s = loop.time() + _BEGINS_WITHIN_S
            while tally.taken < self.connections and not tally.failure and loop.time() < give_up_s:
                await asyncio.sleep(_POLL_S)
            with Load(server) as load:
                before, begun_s = tally.taken, loop.time()
                await asyncio.sleep(self.window_s)
                rate = (tally.taken - before) / (loop.time() - begun_s)
            if tally.failure or not rate:
                raise CallEndedError(f"{server.name}: {tally.failure or 'nothing came'}")
        finally:
            for worker in opened:
                worker.drop()
        # The coordinator also stores the ends of sessions. The next turn must not measure that.
        await server.quiet(_QUIET_WITHIN_S)
        return rate, load.server_cores, load.generator_cores


def sessions(agents: int, window_s: float, repeats: int) -> Contest:
    """Return the contest of sessions begun per second, each on a new connection, one at a time per agent."""

    async def begin(server: Server, number: int, tally: Tally) -> Worker:
        return Beginner(server, number, tally)

    return Contest(begin, agents, window_s, repeats)


def reports(connections: int, window_s: float, repeats: int) -> Contest:
    """Return the contest of acknowledged state reports per second, one at a time on every connection."""

    async def begin(server: Server, number: int, tally: Tally) -> Worker:
        return Reporter(await server.connect(number), number, tally)

    return Contest(begin, connections, window_s, repeats)


def downloads(digest: str, connections: int, window_s: float, repeats: int) -> Contest:
    """Return the contest of downloaded bytes per second, one download at a time on every connection.

    Args:
        digest: digest of the reference.
        connections: number of concurrent downloads.
        window_s: how long each turn is measured, s.
        repeats: turns of each server.
    """
    request = session_pb2.FetchReferenceRequest(digest=digest).SerializeToString()

    async def begin(server: Server, number: int, tally: Tally) -> Worker:
        return Downloader(await server.connect(number), request, tally)

    return Contest(begin, connections, window_s, repeats)
