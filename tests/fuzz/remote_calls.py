"""Calls of any RPC with arbitrary bytes, a server's list of RPCs, and a coordinator that answers with given bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.fuzz.campaign import ANSWER_S
from tests.fuzz.hostile_input import Hostile, HostileMessages, Known

# --- Remote calls -----------------------------------------------------------------------------------------------------
# Calls of any RPC with arbitrary bytes, and the list of RPCs that a server offers.


UNTYPED = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
"""Statuses that mean that the service itself has failed."""

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

    async def ended_with(self, channel: grpc.Channel) -> grpc.StatusCode:
        """Make the call and return its status, which has to be a valid gRPC status.

        gRPC's asyncio client would not do. If a service ends a call while this client writes, it replaces the status.
        If it has not read all answers, it also keeps the call's stream until the connection ends. After 16 such calls,
        the agent's limit for a connection, all further calls would wait.

        Raises:
            AssertionError: the service does not answer, or has failed.
        """
        raw: Any = channel
        sent, is_over = threading.Event(), threading.Event()

        def requests() -> Iterator[bytes]:
            yield from self.parts
            sent.set()
            if self.goes_away:
                is_over.wait(ANSWER_S)  # without closing its side of the call

        call = raw.stream_stream(self.method.path)(requests())
        if not call.add_callback(sent.set):
            sent.set()  # the call has already ended
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._end_of, call, sent), ANSWER_S)
        except asyncio.TimeoutError:
            raise AssertionError(f"no answer within {ANSWER_S:g} s") from None
        finally:
            call.cancel()
            sent.set()
            is_over.set()

    def _end_of(self, call: Any, sent: threading.Event) -> grpc.StatusCode:
        if self.goes_away:
            sent.wait()
            return grpc.StatusCode.CANCELLED
        with suppress(grpc.RpcError):
            for _ in call:
                if self.method.path in _ENDLESS:
                    return grpc.StatusCode.OK
        code: grpc.StatusCode = call.code()
        assert code not in UNTYPED, f"{code.name}: {call.details()}"
        return code


# --- Hostile coordinator ----------------------------------------------------------------------------------------------
# A coordinator that answers agents with given bytes.


class HostileCoordinator:
    """Sends its answers to every session and every fetch of a reference; then ends the call or stays silent.

    Attributes:
        answers: the messages to send.
        status: the status that ends the call; None leaves it open.
        received: the size of every message from the agent, in bytes.
        answered: set once all answers were sent, or the agent has disconnected.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.answer_with([], None)

    def answer_with(self, answers: Sequence[bytes], status: grpc.StatusCode | None) -> None:
        """Answer the next calls with these messages."""
        self.answers, self.status = answers, status
        self.received.clear()
        self.answered = asyncio.Event()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Serve at the yielded address."""
        server = grpc.aio.server()
        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "FetchReference": grpc.unary_stream_rpc_method_handler(self._fetch),
            "FetchMetadata": grpc.unary_unary_rpc_method_handler(self._answer_once),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("wattfleet.v1.SessionService", handlers),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)

    async def _session(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self.received.append(len(await anext(aiter(requests), b"")))
        noting = asyncio.create_task(self._note(requests))
        try:
            await self._answer(context)
        finally:
            noting.cancel()

    async def _note(self, requests: AsyncIterator[bytes]) -> None:
        async for request in requests:
            self.received.append(len(request))

    async def _fetch(self, request: bytes, context: Any) -> None:
        await self._answer(context)

    async def _answer_once(self, request: bytes, context: Any) -> bytes:
        answer, self.answers = self.answers[:1], self.answers[1:]
        if not answer:
            await self._answer(context)
        return b"".join(answer)

    async def _answer(self, context: Any) -> None:
        try:
            for answer in self.answers:
                await context.write(answer)
        finally:
            self.answered.set()
        if self.status is None:
            await asyncio.Event().wait()
        elif self.status is not grpc.StatusCode.OK:
            await context.abort(self.status, "\x1b[2J" + "a" * 1_000)
