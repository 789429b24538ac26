"""The error boundary of every service: domain error -> gRPC status and public message."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn

import grpc

from wattfleet.errors import WattfleetError

_log = logging.getLogger(__name__)

TOLD_WITHIN_S = 2.0
"""A peer that does not read what was written to it is not waited for any longer to take its status."""

_LONGEST_DETAILS_BYTES = 2_000  # gRPC refuses a status whose metadata, with what is escaped, have more than 16 KiB

StatusTable = Mapping[type[WattfleetError], grpc.StatusCode]
"""The status of every error that a servicer may raise; the first base class that is listed counts."""


def status_of(error: WattfleetError, table: StatusTable) -> grpc.StatusCode:
    """The status that a client sees for an error."""
    for base in type(error).__mro__:
        if base in table:
            return table[base]
    return grpc.StatusCode.UNKNOWN


async def refuse(context: Any, code: grpc.StatusCode, details: str) -> NoReturn:
    """End a call with a status, whether or not its peer takes it; of long details the beginning counts.

    Raises:
        AbortError: to be let through, as `context.abort` has it.
        CancelledError: the peer is gone, or has not taken the status in `TOLD_WITHIN_S`: there is nobody to tell.
    """
    whole = details.encode(errors="replace")
    if len(whole) > _LONGEST_DETAILS_BYTES:
        details = whole[:_LONGEST_DETAILS_BYTES].decode(errors="ignore") + " ..."
    try:
        await asyncio.wait_for(context.abort(code, details), TOLD_WITHIN_S)
    except (asyncio.TimeoutError, grpc.aio.InternalError):
        raise asyncio.CancelledError from None
    raise AssertionError("abort returns never")


Handler = Any  # grpc.RpcMethodHandler, which is generic in its stubs only


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Turns domain errors into their status; anything else becomes INTERNAL, and is logged."""

    def __init__(self, table: StatusTable) -> None:
        """Use one service's table."""
        self._table = table
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap a method's handler."""
        method = handler_call_details.method
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return handler  # a method that nobody serves, of which there is no end
            self._guarded[method] = self._guard(method, handler)
        return self._guarded[method]

    def _guard(self, method: str, handler: Handler) -> Handler:
        """A method's handler whose errors are turned."""

        async def turn(error: Exception, context: Any) -> NoReturn:
            if isinstance(error, grpc.aio.InternalError):
                raise asyncio.CancelledError from None  # what was read or written failed, since the peer is gone
            if isinstance(error, WattfleetError):
                await refuse(context, status_of(error, self._table), str(error))
            _log.exception("%s failed", method, exc_info=error)
            await refuse(context, grpc.StatusCode.INTERNAL, "internal error; the service's log has it")

        def guarded(inner: Callable[..., Any]) -> Callable[..., Any]:
            async def unary(request: Any, context: Any) -> Any:
                try:
                    return await inner(request, context)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:
                    await turn(error, context)

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                try:
                    async for response in inner(request, context):
                        yield response
                except grpc.aio.AbortError:
                    raise
                except Exception as error:
                    await turn(error, context)

            # A streaming method may also be a coroutine that writes to its context, as the health service's Watch.
            return stream if inspect.isasyncgenfunction(inner) else unary

        if handler.request_streaming and handler.response_streaming:
            wrap, inner = grpc.stream_stream_rpc_method_handler, handler.stream_stream
        elif handler.response_streaming:
            wrap, inner = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        elif handler.request_streaming:
            wrap, inner = grpc.stream_unary_rpc_method_handler, handler.stream_unary
        else:
            wrap, inner = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        return wrap(guarded(inner), handler.request_deserializer, handler.response_serializer)
