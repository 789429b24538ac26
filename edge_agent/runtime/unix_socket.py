"""Serves the agent's unix sockets: checks their paths, and limits who may connect.

Apps use one socket, whose group may connect. Beside it is the owner's: the kernel lets nobody but the agent's own user,
usually root, connect to it.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc

from edge_agent.runtime.local_socket import STATUS, OwnerOnlyError
from wattfleet.errors import InvalidInputError
from wattfleet_proto.error_boundary import ErrorInterceptor
from wattfleet_proto.local_socket import owner_socket
from wattfleet_proto.message_sizes import MAX_STREAMED_BYTES
from wattfleet_proto.v1 import duty_pb2_grpc, local_pb2_grpc

_GROUP_MAY_CONNECT, _OWNER_MAY_CONNECT = 0o660, 0o600
_OF_OWNER = frozenset({"/wattfleet.v1.DutyService/SetDuty", "/wattfleet.v1.DutyService/ClearDuty"})
"""What an app may not do: it would take the device from the others."""


def require_own_socket(path: Path) -> None:
    """Check that a socket can be served at a path; remove a socket that a killed agent has left.

    Raises:
        InvalidInputError: another agent serves it, or the path is another kind of file.
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
) -> AsyncIterator[None]:
    """Serve the socket to the owner and the group of its file, and the owner's socket beside it.

    Args:
        path: of the socket.
        trainings: runs the trainings of apps.
        duties: hands the device out in turns; None on a device without duties.

    Raises:
        InvalidInputError: a socket cannot be created.
    """
    async with AsyncExitStack() as served:
        for each, mode, guard in (
            (path, _GROUP_MAY_CONNECT, ErrorInterceptor(STATUS, _app_may_call)),
            (owner_socket(path), _OWNER_MAY_CONNECT, ErrorInterceptor(STATUS)),
        ):
            server = grpc.aio.server(
                interceptors=[guard], options=[("grpc.max_receive_message_length", MAX_STREAMED_BYTES)]
            )
            local_pb2_grpc.add_LocalAgentServiceServicer_to_server(trainings, server)
            if duties is not None:
                duty_pb2_grpc.add_DutyServiceServicer_to_server(duties, server)
            try:
                each.parent.mkdir(parents=True, exist_ok=True)
                require_own_socket(each)
                server.add_insecure_port(f"unix:{each}")
                await server.start()
                served.push_async_callback(server.stop, 1.0)
                os.chmod(each, mode)
            except (OSError, RuntimeError) as error:
                raise InvalidInputError(f"{each}: cannot serve a socket: {error}") from None
        yield


@contextmanager
def _app_may_call(method: str, context: Any) -> Iterator[None]:
    if method in _OF_OWNER:
        raise OwnerOnlyError("only the user of the agent, usually root, may do this: run the command with sudo")
    yield
