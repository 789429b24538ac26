"""Refuses requests that are larger than any fleet needs, before they are deserialised."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from coordinator.errors import OversizedMessageError
from coordinator.state.names import abbreviate
from wattfleet.errors import InvalidInputError
from wattfleet_proto.message_sizes import (
    MAX_ELEMENTS,
    MAX_ID_CHARACTERS,
    MAX_MESSAGE_BYTES,
    MAX_PLAN_ID_CHARACTERS,
    MAX_REASON_LENGTH,
    MAX_SESSION_BYTES,
    MAX_STREAMED_BYTES,
)

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
    """Check that lists and ids are not longer than allowed.

    Raises:
        OversizedMessageError: a list is too long.
        InvalidInputError: an id is too long.
    """
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
