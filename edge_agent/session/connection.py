"""Connections to the coordinator: a new one for every attempt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc

from wattfleet_proto.v1 import session_pb2_grpc

# A channel that is kept would try again only as gRPC's own backoff has it, up to two minutes apart, and go on over a
# connection on which nothing comes any more. Channels that are alive at once must not share either.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)

Connect = Callable[[], AbstractAsyncContextManager["session_pb2_grpc.SessionServiceAsyncStub"]]
"""Opens a connection to the coordinator of its own, closed with the context."""


def connects_to(address: str) -> Connect:
    """What opens connections to host:port."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[session_pb2_grpc.SessionServiceAsyncStub]:
        async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
            yield session_pb2_grpc.SessionServiceStub(channel)

    return connect
