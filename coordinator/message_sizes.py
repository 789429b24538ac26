"""How large a message may be: gRPC has one bound for all that a server takes, and sessions need a tighter one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from coordinator.errors import OversizedMessageError

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Of any message: what came of a round of ten thousand devices, each with its reason, fits."""

MAX_STREAMED_BYTES = 1024 * 1024
"""Of each message of a stream, of which there may be as many at once as there are agents."""


MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Of any answer, which only those take who asked for it: the plan of a large round has a reason for every device."""


class SizeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Refuses what is too large for a stream before anything is built from it, which would take many times the room."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Bound a method's requests where they are streamed."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler.request_streaming:
            return handler
        return handler._replace(request_deserializer=_bounded(handler.request_deserializer))


def _bounded(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def deserialized(message: bytes) -> Any:
        if len(message) > MAX_STREAMED_BYTES:
            raise OversizedMessageError(
                f"a message of {len(message):,} bytes is refused: it may have {MAX_STREAMED_BYTES:,}"
            )
        return deserialize(message)

    return deserialized
