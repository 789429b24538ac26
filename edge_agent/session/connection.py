"""Connections to the coordinator: every attempt opens a new one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc

from wattfleet_proto.v1 import session_pb2_grpc

# A channel that is kept retries by gRPC's own backoff, up to two minutes apart, and keeps using a dead connection.
# Channels that exist at the same time must share neither.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)

Connect = Callable[[], AbstractAsyncContextManager["session_pb2_grpc.SessionServiceAsyncStub"]]
"""Opens a new connection to the coordinator; leaving the context closes it."""


def connects_to(address: str) -> Connect:
    """Return a function that opens connections to host:port."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[session_pb2_grpc.SessionServiceAsyncStub]:
        async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
            yield session_pb2_grpc.SessionServiceStub(channel)

    return connect
