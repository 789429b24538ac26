"""Refuses stream messages that are too large, before they are deserialised."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from coordinator.errors import OversizedMessageError
from wattfleet_proto.message_sizes import MAX_STREAMED_BYTES


class SizeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Refuses a large message before it is deserialised, which would take many times its memory."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Limit the size of streamed requests."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler.request_streaming:
            return handler
        return handler._replace(request_deserializer=_bounded(handler.request_deserializer))


def _bounded(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def deserialized(message: bytes) -> Any:
        if len(message) > MAX_STREAMED_BYTES:
            raise OversizedMessageError(
                f"a message of {len(message):,} bytes is too large: at most {MAX_STREAMED_BYTES:,} bytes are allowed"
            )
        return deserialize(message)

    return deserialized
