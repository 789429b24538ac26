"""Serves the agent's unix sockets: checks their paths, and limits who may connect.

Apps use one socket, to which its group may connect. Beside it is the owner's socket: the kernel lets only the agent's
own user, usually root, connect to it. The user of each connection is checked once more when it calls.
"""

from __future__ import annotations

import errno
import grp
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc

from edge_agent.runtime.peer_credentials import PEER, PeerNotAllowedError, SocketUsers
from edge_agent.runtime.socket_acceptor import SocketAcceptor
from edge_agent.runtime.socket_errors import STATUS, OwnerOnlyError
from wattfleet.errors import InvalidInputError
from wattfleet_proto.error_boundary import Admission, ErrorInterceptor
from wattfleet_proto.local_socket import owner_socket
from wattfleet_proto.message_sizes import MAX_STREAMED_BYTES
from wattfleet_proto.v1 import duty_pb2_grpc, local_pb2_grpc

_GROUP_MAY_CONNECT, _OWNER_MAY_CONNECT = 0o660, 0o600
_INNER = "grpc"
_OF_OWNER = frozenset(
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
    """Create a folder beside an agent's socket for gRPC's socket; only the agent's own user may enter it.

    Raises:
        OSError: the folder cannot be created, or belongs to another user.
    """
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
        if (method in _OF_OWNER or accepted.is_owners) and not (accepted.is_owners and users.owns(accepted.peer)):
            raise OwnerOnlyError("only the user of the agent, usually root, may do this: run the command with sudo")
        PEER.set(accepted.peer)
        yield

    return admitted
