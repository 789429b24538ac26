"""Measures the duration of every unary RPC. Streams are left out, because a session lasts for days."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from coordinator.service_figures import ServiceFigures, timed


class RpcLatencies(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Counts the seconds of each RPC, refused ones included. Place it before all other interceptors."""

    def __init__(self, figures: ServiceFigures) -> None:
        """Add the durations to the given figures."""
        self._figures = figures

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of a method that exists and is unary."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.response_streaming:
            return handler
        seconds = self._figures.rpc(handler_call_details.method.rpartition("/")[2])
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def answered(request: Any, context: Any) -> Any:
            with timed(seconds):
                return await inner(request, context)

        return handler._replace(**{"stream_unary" if handler.request_streaming else "unary_unary": answered})
