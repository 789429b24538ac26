"""Serves HTTP or HTTPS within limits, so that connections cannot use up a process's file descriptors or its memory.

All of Wattfleet's HTTP addresses are served here: the page, and `/metrics` of the coordinator and of an agent. uvicorn
parses requests and runs the application, but it would accept any number of connections, and wait for each as long as
the peer likes. Therefore, connections are accepted here, counted, and closed if their peers keep them waiting.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from traceback import clear_frames
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from wattfleet.common.identity.http_access import HttpAccess
from wattfleet.common.identity.peers import Role
from wattfleet.common.tasks import background_task
from wattfleet.core.errors import InvalidInputError, WattfleetError

_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]
"""An ASGI application."""

_CALLER = "wattfleet.caller"
"""The key of a request's scope with its caller."""

_SHARE_OF_DESCRIPTORS = 8
"""Each address uses at most this part, one in so many, of the file descriptors that the process may open."""

_BACKLOG = 128
"""Connections that wait to be accepted, which use no file descriptor of this process."""

_ROOM_WITHIN_S = 1.0
"""How long to wait until a connection that is closed to make room has ended, s."""

_ACCEPT_PAUSE_S = 0.1
"""The pause after a connection could not be accepted, such as without a free file descriptor."""

_TICK_S = 1.0
"""The date in answers is updated this often, s."""

_GRACE_S = 1.0
"""How long requests may take to finish when the server stops, s."""

_STOP_S = 3.0
"""How long to wait for the end of the server's thread, s."""


@dataclass(frozen=True)
class HttpLimits:
    """The limits of one address.

    Attributes:
        connections: maximum of open connections; half of them for one peer. A further connection closes one that has
            not sent a whole request.
        timeout_s: a connection is closed if its peer takes longer than this for the TLS handshake, for the next whole
            request, or to accept what is sent to it. A request ends with its headers, since one with a body is refused.
    """

    connections: int = 128
    timeout_s: float = 10.0

    @property
    def of_peer(self) -> int:
        """Maximum of open connections of one peer."""
        return max(1, self.connections // 2)

    def within_descriptors(self) -> HttpLimits:
        """The limits of a process that may open few files, so that most of these remain for its other connections."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most == resource.RLIM_INFINITY:
            return self
        return HttpLimits(min(self.connections, max(2, most // _SHARE_OF_DESCRIPTORS)), self.timeout_s)


@dataclass(frozen=True)
class HttpCaller:
    """Who sent a request, and whether the server still serves.

    Attributes:
        role: returns the caller's role, or None if callers need no certificate; raises a `WattfleetError` if the caller
            may no longer read.
        is_stopping: returns whether the server is about to stop, so that answers without an end have to end.
    """

    role: Callable[[], Role | None]
    is_stopping: Callable[[], bool]


def caller_of(scope: Scope) -> HttpCaller:
    """The caller of a request that `serving_http` has passed to its application."""
    caller: HttpCaller = scope[_CALLER]
    return caller


class _Connection(H11Protocol):
    """One connection, from its acceptance to its end.

    A timer runs whenever the peer is to act: while it has to complete the handshake or a request, and while it does not
    accept what is sent to it.
    """

    def __init__(self, server: _Server, accepted: socket.socket, peer: str) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self.peer = peer
        self._answers = 0  # that are being given: one may still be tidied up when the next has begun
        self.ended = asyncio.Event()
        self._server = server
        self._accepted = accepted
        self._application = self.app
        self.app = self._answer
        self._timer: asyncio.TimerHandle | None = None
        self._await_peer()

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        return self._answers > 0

    def close(self) -> None:
        """Close the connection, whatever its state; the transport notices it at once."""
        with suppress(OSError):
            self._accepted.shutdown(socket.SHUT_RDWR)

    def _await_peer(self) -> None:
        self._stop_waiting()
        if not self.ended.is_set():
            self._timer = self.loop.call_later(self._server.limits.timeout_s, self.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_peer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.is_answering:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended.set()

    def release(self) -> None:
        """Free what the connection holds, after its end or a failed handshake."""
        self._stop_waiting()
        self._accepted.close()
        self.app = self._application  # no cycle of references may hold the buffers until a garbage collection

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request if its caller may still read.

        No page reads a body. An application that waited for one would wait for its peer, without a timer.
        """
        self._answers += 1
        self._stop_waiting()
        try:
            caller = HttpCaller(self._role, lambda: self._server.should_exit)
            try:
                caller.role()
            except WattfleetError as error:
                _log.debug("a request of %s was refused: %s", self.peer, error)
                await _refuse(send, 403, f"You may not read this: {error}")
                return
            if _has_body(scope):
                await _refuse(send, 413, "A request must not have a body.")
                return
            await self._application({**scope, _CALLER: caller}, receive, send)
        finally:
            self._answers -= 1
            if not self.is_answering:
                self._await_peer()

    def _role(self) -> Role | None:
        access = self._server.access
        return None if access is None else access.require_viewer(self.transport.get_extra_info("ssl_object"))


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


async def _refuse(send: Any, status: int, reason: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{reason}\n".encode()})


class _Server(uvicorn.Server):
    """uvicorn's server, with connections that are accepted here."""

    def __init__(
        self, config: uvicorn.Config, listening: socket.socket, limits: HttpLimits, access: HttpAccess | None
    ) -> None:
        super().__init__(config)
        self.limits = limits
        self.access = access
        self.loop: Future[asyncio.AbstractEventLoop] = Future()
        """The event loop, once the server accepts connections."""
        self._listening = listening
        self._open: dict[_Connection, asyncio.Task[None]] = {}  # the oldest first
        self._stop = asyncio.Event()

    def run_in_thread(self) -> None:
        """Serve until `stop`."""
        try:
            asyncio.run(self.serve())
        except Exception as error:
            if self.loop.done():
                raise
            self.loop.set_exception(error)
        finally:
            self._listening.close()

    def stop(self) -> None:
        """Stop serving; called from any thread."""
        self.should_exit = True
        with suppress(RuntimeError):  # the server has failed
            self.loop.result().call_soon_threadsafe(self._stop.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then accept connections."""
        await super().startup(sockets=[])
        if not self.started:
            raise RuntimeError("the application could not start")
        self._accepting = background_task("accept HTTP connections", self._accept())
        self.loop.set_result(asyncio.get_running_loop())

    async def main_loop(self) -> None:
        """Wait for the stop, and update the date for answers each second."""
        while not await self.on_tick(0):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, let requests finish for a moment, and close all connections."""
        self._listening.shutdown(socket.SHUT_RDWR)  # ends `_accept`; a cancellation could lose a connection
        await self._accepting
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_GRACE_S)
        for connection in self._open:
            connection.close()
        if self._open:
            await asyncio.wait(self._open.values(), timeout=_ROOM_WITHIN_S)
        await self.lifespan.shutdown()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.should_exit:
            try:
                accepted, address = await loop.sock_accept(self._listening)
            except OSError as error:
                if self.should_exit:
                    return
                _log.warning("a connection cannot be accepted: %s", error.strerror)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            peer = _peer_of(address[0])
            if await self._has_room(peer):
                connection = _Connection(self, accepted, peer)
                self._open[connection] = background_task("HTTP connection", self._hold(connection, accepted))
            else:
                accepted.close()
            await asyncio.sleep(0)  # others go on even while there is always one more connection to accept

    async def _has_room(self, peer: str) -> bool:
        """Whether a peer may open one more connection, after closing another one if necessary.

        Of the connections without a request, the oldest one of the peer with the most connections is closed, so that
        nobody closes those of others by opening many.
        """
        of_peers = Counter(each.peer for each in self._open)
        crowded: Iterable[_Connection] = self._open
        if of_peers[peer] >= self.limits.of_peer:
            crowded = (each for each in self._open if each.peer == peer)
        elif len(self._open) < self.limits.connections:
            return True
        idle = [each for each in crowded if not each.is_answering]
        if not idle:
            return False
        closed = max(idle, key=lambda each: of_peers[each.peer])
        closed.close()
        done, _ = await asyncio.wait([self._open[closed]], timeout=_ROOM_WITHIN_S)
        return bool(done)

    async def _hold(self, connection: _Connection, accepted: socket.socket) -> None:
        """Serve a connection until it ends."""
        loop = asyncio.get_running_loop()
        try:
            # The system ends a connection whose peer acknowledges nothing, such as after a power cut.
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1e3 * self.limits.timeout_s))
            if self.access is None:
                await loop.connect_accepted_socket(lambda: connection, accepted)
            else:
                await loop.connect_accepted_socket(lambda: connection, accepted, ssl=self.access.context())
            await connection.ended.wait()
        except OSError as error:  # TLS's errors, too
            _log.debug("the connection of %s failed: %s", connection.peer, error)
            clear_frames(error.__traceback__)  # they refer to each other, and to the buffers of TLS
            await asyncio.sleep(0)  # its transport closes in the loop's next step
        finally:
            connection.release()
            del self._open[connection]


def _peer_of(host: str) -> str:
    """The peer at an address, whose connections are counted together; one machine has a whole /64 of IPv6."""
    address = ip_address(host.partition("%")[0])
    if not isinstance(address, IPv6Address):
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else str(IPv6Address(int(address) >> 64 << 64))


@asynccontextmanager
async def serving_http(
    application: Application,
    name: str,
    host: str,
    port: int,
    limits: HttpLimits,
    access: HttpAccess | None = None,
) -> AsyncIterator[int]:
    """Serve an ASGI application in this context, from a thread with its own event loop; yield the port.

    The application's lifespan runs in that event loop, too.

    Args:
        application: the application.
        name: its name, for errors and for the thread.
        host: the address to listen on.
        port: the port; 0 uses a free one.
        limits: limits on connections.
        access: who may read over HTTPS, checked at each request; None lets everybody read over HTTP.

    Raises:
        InvalidInputError: the address is in use or does not exist.
    """
    listening = _listening(name, host, port)
    config = uvicorn.Config(
        application,
        http="h11",
        ws="none",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    config.load()
    bound: int = listening.getsockname()[1]
    server = _Server(config, listening, limits.within_descriptors(), access)
    thread = threading.Thread(target=server.run_in_thread, name=name, daemon=True)
    thread.start()
    try:
        await asyncio.shield(asyncio.wrap_future(server.loop))
        yield bound
    finally:
        server.stop()
        await asyncio.to_thread(thread.join, _STOP_S)


def _listening(name: str, host: str, port: int) -> socket.socket:
    listening: socket.socket | None = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listening = socket.socket(family)
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except OSError as error:
        if listening is not None:
            listening.close()
        raise InvalidInputError(
            f"cannot serve {name} on {host}:{port}: {error.strerror}; choose another port"
        ) from None
    return listening
