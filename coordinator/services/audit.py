"""The audit log: who requested which change, when, and with which outcome."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from coordinator.errors import StoreUnavailableError
from coordinator.repository.repository import FleetRepository
from coordinator.services.issuing import CertificateOf
from coordinator.services.request_limits import HostRates, host_of
from coordinator.state.identity_records import AuditEntry
from wattfleet.common.clock import utc_now
from wattfleet.common.console import plain_text
from wattfleet.common.identity.channels import is_loopback
from wattfleet.core.errors import WattfleetError

_log = logging.getLogger(__name__)

_AUDITED = (
    "/wattfleet.v1.OperatorService/",
    "/wattfleet.v1.IdentityService/",
    "/wattfleet.v1.SuperLinkService/IssueServerCertificate",
)
_CHANGE_NOTHING = frozenset(
    {
        "PreviewPlan",
        "GetBudgets",
        "GetBatteries",
        "ListReferences",
        "GetMetadata",
        "ListInvites",
        "ListCertificates",
        "ReadAuditLog",
    }
)
_SECRETS = frozenset({"token", "run_token", "line"})
_LONGEST_VALUE, _LONGEST_SUMMARY = 100, 400
_MAX_LISTED = 10
_DENIED_AT_ONCE, _DENIED_PER_S = 10, 1 / 600
"""The most denied requests of one caller that are logged, so that a flood cannot push other entries out."""


def is_audited(method: str) -> bool:
    """Whether an RPC, given its full name, may change something or issues a server's certificate."""
    return method.startswith(_AUDITED) and method.rpartition("/")[2] not in _CHANGE_NOTHING


def name_of_caller(context: Any, certificate_of: CertificateOf) -> str:
    """The caller's name for display: the owner of the certificate, or the host of a call without one."""
    certificate = certificate_of(context)
    if certificate is not None:
        return str(certificate.peer)
    peer: str = context.peer()
    host = unquote(host_of(peer))
    is_local = peer.startswith("unix:") or is_loopback(host.partition(":")[2])
    return "unauthenticated on loopback" if is_local else f"unauthenticated at {host}"


def summary_of(message: Message) -> str:
    """Summarise a message's fields in one line, without secrets and file contents."""
    parts = []
    for field, value in message.ListFields():
        if field.name in _SECRETS:
            parts.append(f"{field.name}=(secret)")
        elif field.is_repeated:
            values = list(value)
            more = f" and {len(values) - _MAX_LISTED:,} more" if len(values) > _MAX_LISTED else ""
            parts.append(f"{field.name}={', '.join(_shown(field, each) for each in values[:_MAX_LISTED])}{more}")
        else:
            parts.append(f"{field.name}={_shown(field, value)}")
    return plain_text(" ".join(parts), _LONGEST_SUMMARY)


class AuditLog(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Logs every request that `is_audited`.

    Place it after the error boundary, so that it sees domain errors, and after the limits on requests.
    """

    def __init__(
        self, repository: FleetRepository, certificate_of: CertificateOf, now: Callable[[], datetime] = utc_now
    ) -> None:
        """Log to a store.

        Args:
            repository: the fleet and its store.
            certificate_of: returns the caller's certificate.
            now: returns the time.
        """
        self._repository = repository
        self._certificate_of = certificate_of
        self._now = now
        self._denied = HostRates(_DENIED_PER_S, _DENIED_AT_ONCE)

    def denied(self, method: str, context: Any, why: str) -> None:
        """Log that a peer requested a change that its role may not make, up to a limit per peer."""
        certificate = self._certificate_of(context)
        if certificate is None or not is_audited(method):
            return
        caller, now_s = str(certificate.peer), self._now().timestamp()
        if self._denied.of(caller, now_s).take(now_s):
            self._repository.save_soon(self._entry(caller, method, [], f"refused: {why}"))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap a method's handler if the method is audited."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not is_audited(method):
            return handler
        if handler.response_streaming:
            return handler._replace(unary_stream=self._streaming(method, handler.unary_stream))
        if handler.request_streaming:
            return handler._replace(stream_unary=self._answering(method, handler.stream_unary))
        return handler._replace(unary_unary=self._answering(method, handler.unary_unary))

    def _answering(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        async def noted(request: Any, context: Any) -> Any:
            async with self._noted(method, context) as summary:
                # For a stream of messages, only the response shows what it was about.
                if isinstance(request, Message):
                    summary.append(summary_of(request))
                answer = await inner(request, context)
                if not summary:
                    summary.append(summary_of(answer))
                return answer

        return noted

    def _streaming(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        async def noted(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._noted(method, context) as summary:
                summary.append(summary_of(request))
                async for answer in inner(request, context):
                    yield answer

        return noted

    @asynccontextmanager
    async def _noted(self, method: str, context: Any) -> AsyncIterator[list[str]]:
        """Log a request once it is answered. Yields a list to which the caller appends its summary."""
        caller, summary = name_of_caller(context, self._certificate_of), list[str]()
        try:
            yield summary
        except BaseException as error:
            self._repository.save_soon(self._entry(caller, method, summary, _outcome_of(error)))
            raise
        try:
            await self._repository.save(self._entry(caller, method, summary, ""))
        except StoreUnavailableError as error:  # the entry waits for the next attempt; the change has been made
            _log.warning("an entry of the audit log waits until the store is available: %s", error)

    def _entry(self, caller: str, method: str, summary: list[str], outcome: str) -> AuditEntry:
        return AuditEntry(
            secrets.token_hex(8),
            self._now(),
            caller,
            method.rpartition("/")[2],
            "".join(summary),
            plain_text(outcome, _LONGEST_SUMMARY),
        )


def _outcome_of(error: BaseException) -> str:
    """What became of a request that raised an error."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "unanswered: the caller left before the answer"
    why = str(error) or type(error).__name__
    is_refused = isinstance(error, WattfleetError) and not isinstance(error, StoreUnavailableError)
    return f"refused: {why}" if is_refused else f"failed: {why}"


def _shown(field: FieldDescriptor, value: Any) -> str:
    if isinstance(value, Message):
        return f"({summary_of(value)})"
    if isinstance(value, bytes):
        return f"({len(value):,} bytes)"
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return f"{value:g}"
    return plain_text(str(value), _LONGEST_VALUE)
