"""Refuses requests that are larger than any fleet needs, before they are deserialised."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from coordinator.errors import (
    AlreadyEnrolledError,
    DamagedStoreError,
    DuplicateSessionError,
    FleetReturningError,
    ForeignDeviceError,
    InvalidInviteError,
    NoDevicesError,
    NotOwnerError,
    NotRunOwnerError,
    OversizedMessageError,
    QuotaExceededError,
    RotationError,
    RunEndedError,
    StillInUseError,
    StoreFullError,
    StoreUnavailableError,
    TooManyDevicesError,
    UncheckedReferenceError,
    UnknownRecordError,
    UploadTimeoutError,
)
from coordinator.service_figures import ServiceFigures, timed
from coordinator.settings import PeerSettings
from coordinator.state.names import abbreviate
from wattfleet.common.identity.certificates import InvalidCertificateError
from wattfleet.common.identity.http_access import AccessDeniedError
from wattfleet.common.identity.peers import UnknownPeerError
from wattfleet.common.parsing import utc_from
from wattfleet.common.tasks import TokenBucket
from wattfleet.core.errors import (
    CorruptReferenceError,
    EnergySpentError,
    InfeasibleBudgetError,
    InvalidInputError,
    NoCandidatesError,
)
from wattfleet_proto.error_boundary import StatusTable
from wattfleet_proto.limits import (
    MAX_ELEMENTS,
    MAX_ID_CHARACTERS,
    MAX_MESSAGE_BYTES,
    MAX_PLAN_ID_CHARACTERS,
    MAX_REASON_LENGTH,
    MAX_SESSION_BYTES,
    MAX_STREAMED_BYTES,
)
from wattfleet_proto.names import ProtocolVersionError

# --- Error statuses ---------------------------------------------------------------------------------------------------
# The gRPC status code of each domain error.


STATUS: StatusTable = {
    InfeasibleBudgetError: grpc.StatusCode.FAILED_PRECONDITION,
    EnergySpentError: grpc.StatusCode.OUT_OF_RANGE,
    InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    CorruptReferenceError: grpc.StatusCode.DATA_LOSS,
    UnknownRecordError: grpc.StatusCode.NOT_FOUND,
    DuplicateSessionError: grpc.StatusCode.ALREADY_EXISTS,
    TooManyDevicesError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    OversizedMessageError: grpc.StatusCode.INVALID_ARGUMENT,
    StillInUseError: grpc.StatusCode.FAILED_PRECONDITION,
    InvalidInviteError: grpc.StatusCode.PERMISSION_DENIED,
    AlreadyEnrolledError: grpc.StatusCode.ALREADY_EXISTS,
    RotationError: grpc.StatusCode.FAILED_PRECONDITION,
    NotRunOwnerError: grpc.StatusCode.PERMISSION_DENIED,
    RunEndedError: grpc.StatusCode.ABORTED,
    AccessDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    ForeignDeviceError: grpc.StatusCode.PERMISSION_DENIED,
    InvalidCertificateError: grpc.StatusCode.UNAUTHENTICATED,
    UnknownPeerError: grpc.StatusCode.UNAUTHENTICATED,
    QuotaExceededError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    # Commands treat UNAVAILABLE and DEADLINE_EXCEEDED as a coordinator that does not answer.
    UploadTimeoutError: grpc.StatusCode.ABORTED,
    UncheckedReferenceError: grpc.StatusCode.ABORTED,
    NoDevicesError: grpc.StatusCode.UNAVAILABLE,
    NoCandidatesError: grpc.StatusCode.UNAVAILABLE,
    FleetReturningError: grpc.StatusCode.UNAVAILABLE,
    # As with a missing method, a retry cannot succeed.
    ProtocolVersionError: grpc.StatusCode.UNIMPLEMENTED,
    DamagedStoreError: grpc.StatusCode.DATA_LOSS,
    StoreFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StoreUnavailableError: grpc.StatusCode.UNAVAILABLE,
    # The coordinator that took over may answer the same request.
    NotOwnerError: grpc.StatusCode.UNAVAILABLE,
}


# --- Peer quotas ------------------------------------------------------------------------------------------------------
# Limits on the requests of one peer, so that it leaves room for the others.
#
# A peer is a connection or a host. A fleet behind one address is one host with a connection for each device.

_SESSION_SERVICE = "/wattfleet.v1.SessionService/"
_BURST_S = 2.0
_MAX_HOSTS = 10_000
"""The most hosts whose rate is tracked; beyond this, the oldest is dropped."""


def host_of(peer: str) -> str:
    """The host of a peer that gRPC names, for example, `ipv4:10.0.0.7:41234`; equal for all connections of one host."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


class HostRates:
    """A token bucket for each host."""

    def __init__(self, per_s: float, burst: float) -> None:
        """Start with full buckets.

        Args:
            per_s: the most events per second of one host, on average.
            burst: the most events of one host at once.
        """
        self._per_s, self._burst = per_s, burst
        self._buckets: dict[str, TokenBucket] = {}

    def of(self, host: str, now_s: float) -> TokenBucket:
        """Get a host's bucket."""
        if host not in self._buckets:
            if len(self._buckets) >= _MAX_HOSTS:
                del self._buckets[next(iter(self._buckets))]
            self._buckets[host] = TokenBucket.full(self._per_s, self._burst, now_s)
        return self._buckets[host]


class PeerQuotas:
    """The calls in progress and the requests of every peer."""

    def __init__(self, settings: PeerSettings = PeerSettings(), now_s: Callable[[], float] = time.monotonic) -> None:
        """Start without any call.

        Args:
            settings: the limits.
            now_s: a clock, in seconds.
        """
        self._settings = settings
        self._now_s = now_s
        self._of_connection: Counter[str] = Counter()
        self._of_host: Counter[str] = Counter()
        rate = settings.requests_per_s
        self._requests = HostRates(rate, max(1.0, _BURST_S * rate))

    @contextmanager
    def admitted(self, method: str, context: Any) -> Iterator[None]:
        """Count a call while it is in progress.

        Raises:
            QuotaExceededError: the peer has too many calls in progress, or sends too many requests.
        """
        connection: str = context.peer()
        host = host_of(connection)
        for calls, name, limit, what, setting in (
            (
                self._of_connection,
                connection,
                self._settings.calls_per_connection,
                "one connection",
                "peers.calls_per_connection",
            ),
            (self._of_host, host, self._settings.calls_per_host, "one host", "peers.calls_per_host"),
        ):
            if calls[name] >= limit:
                raise QuotaExceededError(
                    f"{limit:,} calls of {what} are in progress, which is the limit: end some, or raise the "
                    f"coordinator's setting {setting}"
                )
        # Agents spread their reconnections, and a session limits its own messages.
        if not method.startswith(_SESSION_SERVICE) and not self._may_request(host):
            raise QuotaExceededError(
                f"one host may send {self._settings.requests_per_s:g} requests each second: send fewer, or raise the"
                " coordinator's setting peers.requests_per_s"
            )
        self._of_connection[connection] += 1
        self._of_host[host] += 1
        try:
            yield
        finally:
            _count_down(self._of_connection, connection)
            _count_down(self._of_host, host)

    def _may_request(self, host: str) -> bool:
        now_s = self._now_s()
        return self._requests.of(host, now_s).take(now_s)


def _count_down(calls: Counter[str], name: str) -> None:
    calls[name] -= 1
    if not calls[name]:
        del calls[name]


def stated_since(request: Any) -> datetime | None:
    """The earliest time that a request for stored records asks for; None if it states none.

    Raises:
        InvalidInputError: no date represents it.
    """
    if not request.HasField("since_unix_s"):
        return None
    try:
        return utc_from(request.since_unix_s)
    except ValueError:
        raise InvalidInputError(f"{request.since_unix_s:g} is not a valid time: change --since") from None


# --- RPC latencies ----------------------------------------------------------------------------------------------------
# Measures the duration of every unary RPC. Streams are left out, because a session lasts for days.


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


# --- Request limits ---------------------------------------------------------------------------------------------------

_WITH_ALL_DEVICES = (
    f"/wattfleet.v1.{method}"
    for method in (
        "PlanningService/BindNodes",
        "PlanningService/FinishRound",
        "PlanningService/ReportUnplannedRound",
        "OperatorService/TagDevices",
        "OperatorService/DrainDevices",
        "OperatorService/ForgetDevices",
        "ViewService/ListDevices",
    )
)
"""Methods whose requests may be large, because they may have an element for each device of a fleet."""

_MAX_BYTES: Mapping[str, int] = {
    **dict.fromkeys(_WITH_ALL_DEVICES, MAX_MESSAGE_BYTES),
    "/wattfleet.v1.SessionService/Session": MAX_SESSION_BYTES,
}
"""Largest request of a method in bytes, if it is not `MAX_STREAMED_BYTES`."""

_MAX_CHARACTERS: Mapping[str, int | None] = {
    "plan_id": MAX_PLAN_ID_CHARACTERS,
    "error": None,  # a text, which is shortened
    "run_token": None,  # a secret; its own check does not quote it
    "token": None,  # as well
    "reason": MAX_REASON_LENGTH,
}
"""The most characters of a field, by its name; any other text is an id or a name."""

_MAX_OTHER_FIELDS = 20
"""The most fields of a request that are not lists; the largest request has a few."""

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5


class RequestLimits(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Limits the size of every request, the number of its elements, and the length of its ids.

    Size and elements are checked before the request is deserialised, because an element of two bytes needs 100 bytes of
    memory.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Limit the requests of one method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        limit = _MAX_BYTES.get(handler_call_details.method, MAX_STREAMED_BYTES)
        return handler._replace(request_deserializer=_limited(handler.request_deserializer, limit))


def _limited(deserialize: Callable[[bytes], Message], max_bytes: int) -> Callable[[bytes], Message]:
    def deserialized(message: bytes) -> Message:
        if len(message) > max_bytes:
            raise OversizedMessageError(
                f"a message of {len(message):,} bytes is too large: at most {max_bytes:,} bytes are allowed"
            )
        if _has_more_fields(message, MAX_ELEMENTS + _MAX_OTHER_FIELDS):
            raise _too_many_elements()
        request = deserialize(message)
        _require_short_fields(request)
        return request

    return deserialized


def _too_many_elements() -> OversizedMessageError:
    return OversizedMessageError(
        f"a list in a message is too long: at most {MAX_ELEMENTS:,} elements are allowed; send the others separately"
    )


def _has_more_fields(message: bytes, limit: int) -> bool:
    """Whether a serialised message has more fields than a limit; the elements of a list are fields.

    Counting stops at the limit, so its time does not depend on the message's size. The result is False for a malformed
    message.
    """
    size, position, count = len(message), 0, 0
    if size <= 2 * limit:  # a field has at least two bytes
        return False
    try:
        while position < size:
            count += 1
            if count > limit:
                return True
            tag, position = _varint(message, position)
            kind = tag & 7
            if kind == _LENGTH_DELIMITED:
                length, position = _varint(message, position)
                position += length
            elif kind == _VARINT:
                _, position = _varint(message, position)
            elif kind in (_FIXED64, _FIXED32):
                position += 8 if kind == _FIXED64 else 4
            else:
                return False  # a group, which no message here uses: deserialising refuses or skips it
    except IndexError:
        return False
    return False


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Read the varint at a position; return it and the position after it."""
    value, shift = message[position], 7
    position += 1
    if value < 0x80:
        return value, position
    value &= 0x7F
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift >= 70:  # too long for a number: malformed
            raise IndexError


def _require_short_fields(request: Message) -> None:
    """Check that lists and ids are not longer than allowed."""
    lists, texts = _limited_fields(request.DESCRIPTOR)
    for name in lists:  # packed numbers are one field
        if len(getattr(request, name)) > MAX_ELEMENTS:
            raise _too_many_elements()
    for name, is_list, limit in texts:
        value = getattr(request, name)
        for text in value if is_list else (value,):
            if len(text) > limit:
                raise InvalidInputError(f"{name} must have at most {limit} characters, not {abbreviate(text)}")


@cache
def _limited_fields(message: Descriptor) -> tuple[tuple[str, ...], tuple[tuple[str, bool, int], ...]]:
    """A message's lists and ids: for each, its name, whether it is a list, and the most characters."""
    fields = message.fields
    limits = {field.name: _MAX_CHARACTERS.get(field.name, MAX_ID_CHARACTERS) for field in fields}
    return (
        tuple(field.name for field in fields if field.is_repeated),
        tuple(
            (field.name, field.is_repeated, limit)
            for field in fields
            if field.type == FieldDescriptor.TYPE_STRING and (limit := limits[field.name]) is not None
        ),
    )
