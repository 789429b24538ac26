"""Serves the agent's unix socket: checks its path, and limits who may connect."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from edge_agent.runtime.local_socket import STATUS
from wattfleet.errors import InvalidInputError
from wattfleet_proto.error_boundary import ErrorInterceptor
from wattfleet_proto.message_sizes import MAX_STREAMED_BYTES
from wattfleet_proto.v1 import duty_pb2_grpc, local_pb2_grpc

_GROUP_MAY_CONNECT = 0o660


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
    """Serve the socket to the owner and the group of its file.

    Args:
        path: of the socket.
        trainings: runs the trainings of apps.
        duties: hands the device out in turns; None on a device without duties.

    Raises:
        InvalidInputError: the socket cannot be created.
    """
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor(STATUS)], options=[("grpc.max_receive_message_length", MAX_STREAMED_BYTES)]
    )
    local_pb2_grpc.add_LocalAgentServiceServicer_to_server(trainings, server)
    if duties is not None:
        duty_pb2_grpc.add_DutyServiceServicer_to_server(duties, server)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        require_own_socket(path)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        os.chmod(path, _GROUP_MAY_CONNECT)
    except (OSError, RuntimeError) as error:
        raise InvalidInputError(f"{path}: cannot serve a socket: {error}") from None
    try:
        yield
    finally:
        await server.stop(1.0)
