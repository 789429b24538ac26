"""The error boundary of every service: it turns domain errors into gRPC statuses."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from wattfleet.core.errors import InvalidInputError, WattfleetError

_log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 2.0
"""How long to wait for a peer to take its status; one that stopped reading never does."""

_MAX_DETAILS_BYTES = 2_000  # gRPC limits a status with its escaped metadata to 16 KiB

StatusTable = Mapping[type[WattfleetError], grpc.StatusCode]
"""The status of every error that a servicer may raise; an error's first listed base class counts."""


class MalformedMessageError(InvalidInputError):
    """The bytes of a message are not a message of its type: use the same protocol on both sides."""


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a request that could not be read: gRPC would answer UNKNOWN, and log a traceback."""

    error: WattfleetError


def status_of(error: WattfleetError, table: StatusTable) -> grpc.StatusCode:
    """Return the status that a client sees for an error."""
    for base in type(error).__mro__:
        if base in table:
            return table[base]
    return grpc.StatusCode.UNKNOWN


async def refuse(context: Any, code: grpc.StatusCode, details: str) -> NoReturn:
    """End a call with a status, whether or not the peer takes it; long details are truncated.

    Raises:
        AbortError: from `context.abort`; let it pass.
        CancelledError: the peer is gone, or did not take the status within `STATUS_TIMEOUT_S`.
    """
    whole = details.encode(errors="replace")
    if len(whole) > _MAX_DETAILS_BYTES:
        details = whole[:_MAX_DETAILS_BYTES].decode(errors="ignore") + " ..."
    try:
        await asyncio.wait_for(context.abort(code, details), STATUS_TIMEOUT_S)
    except (asyncio.TimeoutError, grpc.aio.InternalError):
        raise asyncio.CancelledError from None
    raise AssertionError("abort never returns")


Admission = Callable[[str, Any], AbstractContextManager[None]]


def _admit_every_call(method: str, context: Any) -> AbstractContextManager[None]:
    return nullcontext()


Handler = Any  # grpc.RpcMethodHandler, which is generic in its stubs only


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Turns domain errors into their status; any other exception is logged and becomes INTERNAL."""

    def __init__(self, table: StatusTable, admitted: Admission = _admit_every_call) -> None:
        """Use a service's table.

        Args:
            table: the statuses.
            admitted: a context around every call, by its method and gRPC context; it may refuse the call.
        """
        self._table = table
        self._admitted = admitted
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
                return handler  # unknown methods are not cached, since there is no limit to their number
            self._guarded[method] = self._guard(method, handler)
        return self._guarded[method]

    def _guard(self, method: str, handler: Handler) -> Handler:
        """Wrap a method's handler so that its errors become statuses."""

        async def translate(error: Exception, context: Any) -> NoReturn:
            if isinstance(error, grpc.aio.InternalError):
                raise asyncio.CancelledError from None  # a read or write failed because the peer is gone
            if isinstance(error, WattfleetError):
                await refuse(context, status_of(error, self._table), str(error))
            _log.exception("%s failed", method, exc_info=error)
            await refuse(context, grpc.StatusCode.INTERNAL, "internal error; see the service's log")

        def guarded(inner: Callable[..., Any]) -> Callable[..., Any]:
            async def unary(request: Any, context: Any) -> Any:
                try:
                    with self._admitted(method, context):
                        if isinstance(request, _Unreadable):
                            raise request.error
                        return await inner(request, context)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:
                    await translate(error, context)

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                try:
                    with self._admitted(method, context):
                        if isinstance(request, _Unreadable):
                            raise request.error
                        async for response in inner(request, context):
                            yield response
                except grpc.aio.AbortError:
                    raise
                except Exception as error:
                    await translate(error, context)

            # A streaming method may also be a coroutine that writes to its context, such as the health service's Watch.
            return stream if inspect.isasyncgenfunction(inner) else unary

        if handler.request_streaming and handler.response_streaming:
            wrap, inner = grpc.stream_stream_rpc_method_handler, handler.stream_stream
        elif handler.response_streaming:
            wrap, inner = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        elif handler.request_streaming:
            wrap, inner = grpc.stream_unary_rpc_method_handler, handler.stream_unary
        else:
            wrap, inner = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        read = _readable(method, handler.request_deserializer, handler.request_streaming)
        return wrap(guarded(inner), read, handler.response_serializer)


def _readable(method: str, deserialize: Callable[[bytes], Any] | None, is_stream: bool) -> Callable[[bytes], Any]:
    """Make a deserialiser's errors domain errors; a stream's handler reads messages itself, and so sees them raised."""

    def read(message: bytes) -> Any:
        try:
            return message if deserialize is None else deserialize(message)
        except DecodeError:
            error: WattfleetError = MalformedMessageError(
                f"{method}: the request is not a valid protobuf message of its type: use the same version of Wattfleet"
                " on both sides"
            )
        except WattfleetError as refused:
            error = refused
        if is_stream:
            raise error
        return _Unreadable(error)

    return read
