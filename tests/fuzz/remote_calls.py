"""Calls of any RPC with arbitrary bytes, and the list of RPCs that a server offers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.fuzz.campaign import ANSWER_S
from tests.fuzz.hostile_messages import HostileMessages, Known
from tests.fuzz.hostile_values import Hostile

UNTYPED = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
"""Statuses that mean that the service itself has failed."""

_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
_BROKEN_OFF = "Internal error from Core"
"""Set by gRPC's client where the service has ended a call while the client was writing."""

_ENDLESS = {"/grpc.health.v1.Health/Watch"}
"""RPCs that answer until the client goes away."""

Valid = Mapping[str, Sequence[Sequence[Message]]]
"""For each RPC, by its path, requests that it takes; each is a list of the messages of one call."""


@dataclass(frozen=True)
class Method:
    """One RPC.

    Attributes:
        path: its path in requests.
        request: the descriptor of its requests.
        takes_stream: whether a call has a stream of requests.
    """

    path: str
    request: Any
    takes_stream: bool


def methods_of(service: ServiceDescriptor) -> list[Method]:
    """The RPCs of a service."""
    return [
        Method(f"/{service.full_name}/{method.name}", method.input_type, method.client_streaming)
        for method in service.methods
    ]


async def offered_services(channel: grpc.aio.Channel) -> list[ServiceDescriptor]:
    """The services of a server, as listed by the server itself."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    listed = [service.name async for answer in call for service in answer.list_services_response.service]
    return [descriptor_pool.Default().FindServiceByName(name) for name in listed]


@dataclass(frozen=True)
class HostileCall:
    """One call: its messages, and whether the client then closes its side or disconnects."""

    method: Method
    parts: Sequence[bytes]
    goes_away: bool

    def __str__(self) -> str:
        parts = ", ".join(
            f"{part[:300].hex()}{'...' if len(part) > 300 else ''} ({len(part)} bytes)" for part in self.parts
        )
        return f"{self.method.path} [{parts}]{', then goes away' if self.goes_away else ''}"

    @classmethod
    def drawn(cls, hostile: Hostile, method: Method, valid: Valid, known: Known) -> HostileCall:
        """A random call of an RPC.

        Args:
            hostile: the source of the values.
            method: the RPC.
            valid: valid calls of the RPC.
            known: values that the receiver knows.
        """
        made, calls = HostileMessages(hostile, known), valid[method.path]
        if not method.takes_stream:
            content = made.serialized(method.request, [messages[0] for messages in calls])
            return cls(method, [content], hostile.random() < 0.03)
        messages = list(hostile.choice(calls))
        every = [message for messages in calls for message in messages]
        drawn = hostile.random()
        if drawn < 0.15:
            hostile.shuffle(messages)
        elif drawn < 0.3:
            messages = messages[: hostile.randrange(len(messages) + 1)]
        elif drawn < 0.4:
            messages = [message for message in messages for _ in range(hostile.choice((1, 1, 2, 3)))]
        parts = [message.SerializeToString() for message in messages]
        for _ in range(hostile.choice((0, 1, 1, 2, 5))):
            at = hostile.randrange(len(parts) + 1) if hostile.random() < 0.3 else len(parts)
            content = made.serialized(method.request, every)
            if hostile.random() < 0.4 and at < len(parts):
                parts[at] = content
            else:
                parts.insert(at, content)
        return cls(method, parts, hostile.random() < 0.2)

    async def ended_with(self, channel: grpc.aio.Channel) -> grpc.StatusCode:
        """Make the call and return its status, which has to be a valid gRPC status.

        Raises:
            TimeoutError: the service does not answer.
        """
        raw: Any = channel
        call = raw.stream_stream(self.method.path)()
        try:
            async with asyncio.timeout(ANSWER_S):
                # The service may end the call before it has received everything.
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                    for part in self.parts:
                        await call.write(part)
                    if self.goes_away:
                        return grpc.StatusCode.CANCELLED
                    await call.done_writing()
                with suppress(grpc.aio.AioRpcError):
                    while await call.read() is not _END:
                        if self.method.path in _ENDLESS:
                            return grpc.StatusCode.OK
                code: grpc.StatusCode = await call.code()
                details = await call.details()
                if details == _BROKEN_OFF:
                    return grpc.StatusCode.CANCELLED
                assert code not in UNTYPED, f"{code.name}: {details}"
                return code
        finally:
            call.cancel()
