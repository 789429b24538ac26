"""Serves the agent's unix sockets: checks their paths, and limits who may connect.

Apps use one socket, to which its group may connect. Beside it is the owner's socket: the kernel lets only the agent's
own user, usually root, connect to it. The user of each connection is checked once more when it calls.
"""

from __future__ import annotations

import asyncio
import errno
import grp
import logging
import os
import secrets
import socket
import stat
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from edge_agent.runtime.app_requests import STATUS, OwnerOnlyError
from edge_agent.runtime.peer_credentials import PEER, PeerCredentials, PeerNotAllowedError, SocketUsers
from wattfleet.common.tasks import stop_tasks
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.error_boundary import Admission, ErrorInterceptor
from wattfleet_proto.limits import MAX_STREAMED_BYTES
from wattfleet_proto.names import owner_socket
from wattfleet_proto.v1 import duty_pb2_grpc, local_pb2_grpc

_log = logging.getLogger(__name__)


# --- Socket acceptor --------------------------------------------------------------------------------------------------
# Accepts the connections of the agent's sockets, notes who opened each, and passes their bytes on to gRPC.
#
# gRPC does not say which process has opened a connection of a unix socket. Therefore each connection is accepted here
# and passed on to gRPC's own socket, which nobody else can open. There, each connection gets a secret name, which
# gRPC reports as the peer of every call.


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


# --- Unix socket ------------------------------------------------------------------------------------------------------

_GROUP_MAY_CONNECT, _OWNER_MAY_CONNECT = 0o660, 0o600
_INNER = "grpc"
_SOCKET_OF_OWNER = frozenset(
    {
        "/wattfleet.v1.DutyService/SetDuty",
        "/wattfleet.v1.DutyService/ClearDuty",
        "/wattfleet.v1.LocalAgentService/ShowTraining",
    }
)
"""Calls that apps may not make: they would take the device from other apps, or reveal those apps' plans."""

_MAX_STREAMS = 16
"""Maximum of simultaneous calls per connection; gRPC lets the client wait with further ones."""


def require_own_socket(path: Path) -> None:
    """Check that a socket can be served at a path; remove a socket that a killed agent left there.

    Raises:
        InvalidInputError: another agent serves the socket, or the path is another kind of file.
    """
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise InvalidInputError(f"{path} exists and is not a socket: choose another --socket")
    except FileNotFoundError:
        return
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot serve a socket: {error.strerror}") from None
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            try:
                path.unlink()
            except OSError as error:
                raise InvalidInputError(f"{path}: a stale socket cannot be removed: {error.strerror}") from None
            return
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot serve a socket: {error.strerror}") from None
    raise InvalidInputError(f"another agent serves {path}: give each device a --socket of its own")


@asynccontextmanager
async def serve_socket(
    path: Path,
    trainings: local_pb2_grpc.LocalAgentServiceServicer,
    duties: duty_pb2_grpc.DutyServiceServicer | None = None,
    group: str | None = None,
) -> AsyncIterator[None]:
    """Serve a socket to its owner and group, and beside it the owner's socket.

    Args:
        path: the socket's path.
        trainings: runs the trainings of apps.
        duties: gives programs their turns of the device; None on a device without duties.
        group: the group's name; None for the group of this process.

    Raises:
        InvalidInputError: there is no such group, or a socket cannot be created.
    """
    gid = os.getegid() if group is None else _gid_of(group)
    async with AsyncExitStack() as served:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for each in (path, owner_socket(path)):
                require_own_socket(each)
            users = SocketUsers.of_group(gid)
            acceptor = SocketAcceptor(served.enter_context(_own_folder(path)) / _INNER, users.owns)
            server = grpc.aio.server(
                interceptors=[ErrorInterceptor(STATUS, _admission(acceptor, users))],
                options=[
                    ("grpc.max_receive_message_length", MAX_STREAMED_BYTES),
                    ("grpc.max_concurrent_streams", _MAX_STREAMS),
                ],
            )
            local_pb2_grpc.add_LocalAgentServiceServicer_to_server(trainings, server)
            if duties is not None:
                duty_pb2_grpc.add_DutyServiceServicer_to_server(duties, server)
            server.add_insecure_port(f"unix:{acceptor.inner}")
            await server.start()
            # Calls get a moment to end before their connections are closed.
            served.push_async_callback(acceptor.close)
            served.push_async_callback(server.stop, 1.0)
            await acceptor.listen(path, _GROUP_MAY_CONNECT, None if group is None else gid)
            await acceptor.listen(owner_socket(path), _OWNER_MAY_CONNECT, is_owners=True)
        except (OSError, RuntimeError) as error:
            raise InvalidInputError(f"{path}: cannot serve a socket: {error}") from None
        yield


@contextmanager
def _own_folder(path: Path) -> Iterator[Path]:
    """Create a folder beside an agent's socket for gRPC's socket; only the agent's own user may enter it."""
    folder = path.with_name(f"{path.name}.d")
    inner = folder / _INNER
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "it is in use by another user: remove it", str(folder))
    folder.chmod(0o700)
    inner.unlink(missing_ok=True)  # left by an agent that was killed
    try:
        yield folder
    finally:
        inner.unlink(missing_ok=True)
        with suppress(OSError):  # a file is in the way
            folder.rmdir()


def _gid_of(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise InvalidInputError(
            f"there is no group {group!r} for the agent's socket: run `groupadd --system {group}`, or name another one"
        ) from None


def _admission(acceptor: SocketAcceptor, users: SocketUsers) -> Admission:
    """Admits the calls of the socket's users, and the owner's calls from the owner only."""

    @contextmanager
    def admitted(method: str, context: Any) -> Iterator[None]:
        accepted = acceptor.accepted(context)
        if accepted is None:  # the connection has ended, or did not come through one of the agent's sockets
            raise PeerNotAllowedError("the connection has no known user: connect again, to the agent's own socket")
        users.require(accepted.peer)
        if (method in _SOCKET_OF_OWNER or accepted.is_owners) and not (
            accepted.is_owners and users.owns(accepted.peer)
        ):
            raise OwnerOnlyError("only the user of the agent, usually root, may do this: run the command with sudo")
        PEER.set(accepted.peer)
        yield

    return admitted
