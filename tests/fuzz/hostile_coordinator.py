"""A coordinator that answers agents with given bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc


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
