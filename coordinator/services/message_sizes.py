"""Rejects stream messages that are too large, before they are deserialised."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from coordinator.errors import OversizedMessageError
from wattfleet_proto.message_sizes import MAX_STREAMED_BYTES


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
