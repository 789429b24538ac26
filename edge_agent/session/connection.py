"""Connections to the coordinator: every attempt opens a new one, with the identity that is then on disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc

from wattfleet.errors import InvalidInputError
from wattfleet_identity.endpoint import Endpoint
from wattfleet_identity.handshakes import HandshakeError, why_refused
from wattfleet_proto.v1 import session_pb2_grpc

# A long-lived channel retries at gRPC's own intervals, up to two minutes apart, and keeps using a dead connection.
# Channels that exist at the same time must share neither backoff nor connection.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)

Connect = Callable[[], AbstractAsyncContextManager["session_pb2_grpc.SessionServiceAsyncStub"]]
"""Opens a new connection to the coordinator; leaving the context closes it.

It raises a `HandshakeError` if the identity cannot be used, or client and coordinator do not accept each other.
"""


def connects_to(endpoint: Endpoint) -> Connect:
    """Return a function that opens connections to a coordinator."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[session_pb2_grpc.SessionServiceAsyncStub]:
        async with channel_to(endpoint) as channel:
            yield session_pb2_grpc.SessionServiceStub(channel)

    return connect


@asynccontextmanager
async def channel_to(endpoint: Endpoint) -> AsyncIterator[grpc.aio.Channel]:
    """Open a new channel.

    Raises:
        HandshakeError: the identity cannot be used, or client and coordinator do not accept each other.
    """
    try:
        opened = endpoint.async_channel(_OPTIONS)
    except InvalidInputError as error:
        raise HandshakeError(str(error)) from None
    try:
        async with opened as channel:
            yield channel
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and _is_handshake(error.details() or ""):
            refused = await asyncio.to_thread(why_refused, endpoint)
            if refused is not None:
                raise refused from None
        raise


def _is_handshake(details: str) -> bool:
    """Return whether gRPC's text may describe a failed handshake rather than an unreachable coordinator."""
    return any(words in details for words in ("Socket closed", "handshake", "verification check"))
