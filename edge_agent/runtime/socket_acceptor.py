"""Accepts the connections of the agent's sockets, notes who opened each, and passes their bytes on to gRPC.

gRPC does not say which process has opened a connection of a unix socket. Therefore each connection is accepted here and
passed on to gRPC's own socket, which nobody else can open. There, each connection gets a secret name, which gRPC
reports as the peer of every call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent.runtime.peer_credentials import PeerCredentials
from wattfleet_io.tasks import stop_tasks

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 192
"""Maximum of simultaneous connections. Each takes three file descriptors of the agent, and the usual limit is 1,024."""

_MAX_OF_USER = 64
"""Maximum of simultaneous connections per user."""

_OF_OWNER = 16
"""Connections reserved for root and the agent's own user."""

_URI = "unix-abstract:"


@dataclass(frozen=True)
class Accepted:
    """An accepted connection.

    Attributes:
        peer: the process that opened it.
        is_owners: whether it came over the owner's socket.
    """

    peer: PeerCredentials
    is_owners: bool


class SocketAcceptor:
    """Listens on the sockets that others connect to.

    Attributes:
        inner: gRPC's socket, to which connections are passed on.
    """

    def __init__(self, inner: Path, is_owner: Callable[[PeerCredentials], bool]) -> None:
        """Prepare to accept connections; call `listen` to start.

        Args:
            inner: gRPC's socket.
            is_owner: returns whether a peer is root or the agent's own user.
        """
        self.inner = inner
        self._is_owner = is_owner
        self._accepted: dict[str, Accepted] = {}
        self._of_user: Counter[int] = Counter()
        self._servers: list[tuple[asyncio.Server, Path]] = []
        self._transports: set[asyncio.Transport] = set()
        self._opening: set[asyncio.Task[None]] = set()

    async def listen(self, path: Path, mode: int, gid: int | None = None, is_owners: bool = False) -> None:
        """Listen on a socket. Nobody can connect before its file has the right mode.

        Args:
            path: the socket's path.
            mode: the mode of its file.
            gid: the group of its file; None for this process's group.
            is_owners: whether it is the owner's socket.

        Raises:
            OSError: it cannot be created, or this process may not give it to the group.
        """
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(str(path))
            os.chmod(path, mode)
            if gid is not None:
                os.chown(path, -1, gid)
            server = await asyncio.get_running_loop().create_unix_server(
                lambda: _Outer(self, is_owners), sock=listening
            )
        except BaseException:
            listening.close()
            raise
        self._servers.append((server, path))

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        for server, path in self._servers:
            server.close()
            path.unlink(missing_ok=True)
        await stop_tasks(*self._opening)
        for transport in list(self._transports):
            transport.abort()
        # The transports close their sockets in the loop's next step.
        await asyncio.sleep(0)

    def accepted(self, context: Any) -> Accepted | None:
        """Return the connection of a call; None if it was not accepted here.

        Args:
            context: gRPC's context of the call.
        """
        uri: str = context.peer()
        return self._accepted.get(uri.removeprefix(_URI)) if uri.startswith(_URI) else None

    def begin(self, outer: _Outer, transport: asyncio.Transport, is_owners: bool) -> None:
        """Start to serve a new connection, or close it if there are too many."""
        self._transports.add(transport)
        peer = outer.peer = PeerCredentials.of(transport.get_extra_info("socket"))
        has_room = self._has_room(peer)
        self._of_user.update([peer.uid])
        if not has_room:
            own, others = self._of_user[peer.uid] - 1, self._of_user.total() - self._of_user[peer.uid]
            _log.warning("%s: connection closed, as the user already has %d open, and others %d", peer, own, others)
            transport.abort()
            return
        outer.name = f"wattfleet-{secrets.token_hex(16)}"
        upstream = socket.socket(socket.AF_UNIX)
        upstream.setblocking(False)
        try:
            upstream.bind(f"\0{outer.name}")
            upstream.connect(str(self.inner))
        except OSError as error:
            upstream.close()
            _log.warning("%s: connection closed: %s", peer, error.strerror)
            transport.abort()
            return
        self._accepted[outer.name] = Accepted(peer, is_owners)
        opening = asyncio.create_task(self._open(outer, upstream), name="connection of an app")
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    def _has_room(self, peer: PeerCredentials) -> bool:
        """Return whether a peer may open one more connection.

        No user may have more connections than are left for all others, so that a few users cannot take them all.
        """
        own, left = self._of_user[peer.uid], _MAX_CONNECTIONS - self._of_user.total()
        if self._is_owner(peer):
            return own < _MAX_OF_USER and left > 0
        return own < min(_MAX_OF_USER, left - _OF_OWNER)

    async def _open(self, outer: _Outer, upstream: socket.socket) -> None:
        try:
            _, inner = await asyncio.get_running_loop().create_unix_connection(lambda: _Side(outer), sock=upstream)
        except OSError as error:
            upstream.close()
            outer.transport.abort()
            _log.warning("%s: connection closed: %s", outer.peer, error.strerror or error)
            return
        except BaseException:
            upstream.close()
            outer.transport.abort()
            raise
        self._transports.add(inner.transport)
        inner.on_lost = lambda: self._transports.discard(inner.transport)
        outer.pass_on_to(inner)

    def end(self, outer: _Outer) -> None:
        """Forget a connection that has ended."""
        self._transports.discard(outer.transport)
        self._accepted.pop(outer.name, None)
        self._of_user.subtract([outer.peer.uid])


class _Side(asyncio.Protocol):
    """One side of a connection, which passes what it receives on to the other side."""

    transport: asyncio.Transport

    def __init__(self, other: _Side | None = None) -> None:
        self.other = other
        self.on_lost: Any = lambda: None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        elif not self.other.transport.is_closing():
            self.other.transport.write(data)

    def pass_on_to(self, other: _Side) -> None:
        """Pass all data received so far, and from then on, to another side."""
        self.other = other
        if self.transport.is_closing():
            other.transport.close()
            return
        for data in self._early:
            other.transport.write(data)
        self._early.clear()
        self.transport.resume_reading()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.on_lost()
        if self.other is not None:
            self.other.transport.close()  # after all its data was sent


class _Outer(_Side):
    """The side of the connected process."""

    peer: PeerCredentials

    def __init__(self, acceptor: SocketAcceptor, is_owners: bool) -> None:
        super().__init__()
        self.name = ""
        self._acceptor = acceptor
        self._is_owners = is_owners
        self.on_lost = lambda: acceptor.end(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self._acceptor.begin(self, self.transport, self._is_owners)
