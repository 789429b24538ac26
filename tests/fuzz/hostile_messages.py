"""Hostile protobuf messages, built from their descriptors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz.hostile_values import MAX_BYTES, Hostile

Known = Mapping[str, Sequence[Any]]
"""Values that mean something to the receiver, by the field's name."""

_UNSIGNED = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64}
_SIGNED = {FieldDescriptor.TYPE_INT32: 32, FieldDescriptor.TYPE_INT64: 64}
_MAX_DEPTH = 6


class HostileMessages:
    """Creates requests that a receiver has to survive.

    Args:
        hostile: the source of the values.
        known: values that the receiver knows.
    """

    def __init__(self, hostile: Hostile, known: Known) -> None:
        self._hostile = hostile
        self._known = known

    def serialized(self, kind: Any, valid: Sequence[Message]) -> bytes:
        """A request: valid, with changed fields, with random fields, or not a message at all.

        Args:
            kind: the request's descriptor.
            valid: requests of this type that the receiver accepts.
        """
        drawn = self._hostile.random()
        if drawn < 0.2 or not valid:
            message = self.random(kind)
        else:
            message = GetMessageClass(kind)()
            message.CopyFrom(self._hostile.choice(valid))
            if drawn > 0.3:
                self.change(message)
        content = message.SerializeToString()
        if self._hostile.random() < 0.2:
            content = self._hostile.damaged(content)
        return self._hostile.some_bytes() if self._hostile.random() < 0.03 else content

    def random(self, kind: Any, depth: int = 0) -> Message:
        """A message in which every field may have any value."""
        message = GetMessageClass(kind)()
        for field in kind.fields:
            if self._hostile.random() < 0.7:
                self._set(message, field, depth)
        return message

    def change(self, message: Message, depth: int = 0) -> None:
        """Change some fields of a message, or of its nested messages."""
        fields: list[FieldDescriptor] = list(cast(Any, message.DESCRIPTOR).fields)
        for field in self._hostile.sample(fields, min(len(fields), self._hostile.choice((1, 1, 2, 3)))):
            if field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field) and self._hostile.random() < 0.7:
                inner = getattr(message, field.name)
                parts = list(inner) if field.is_repeated else [inner] if message.HasField(field.name) else []
                if parts:
                    self.change(self._hostile.choice(parts), depth + 1)
                    continue
            if self._hostile.random() < 0.15:
                message.ClearField(field.name)
            else:
                self._set(message, field, depth)

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.type == FieldDescriptor.TYPE_MESSAGE and depth >= _MAX_DEPTH:
            return
        message.ClearField(field.name)
        held, inner = getattr(message, field.name), cast(Any, field.message_type)
        if _is_map(field):
            key, value = inner.fields
            for _ in range(self._hostile.count()):
                held[self._value(key)] = self._value(value)
        elif field.is_repeated:
            count = self._hostile.count()
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                different = [self.random(inner, depth + 1) for _ in range(min(count, 8))]
                largest = max((each.ByteSize() for each in different), default=0)
                held.extend(self._hostile.choice(different) for _ in range(min(count, MAX_BYTES // (largest + 8))))
            else:
                held.extend(self._value(field) for _ in range(min(count, 2_000)))
                if count > 2_000:
                    held.extend([held[0]] * (count - 2_000))
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            held.CopyFrom(self.random(inner, depth + 1))
        else:
            setattr(message, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        # Fields of one name may have several types.
        known = [value for value in self._known.get(field.name, ()) if fits(field, value)]
        if known and self._hostile.random() < 0.5:
            return self._hostile.choice(known)
        if field.type in _UNSIGNED:
            return self._hostile.integer(_UNSIGNED[field.type])
        if field.type in _SIGNED:
            return self._hostile.integer(_SIGNED[field.type], signed=True)
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return self._hostile.real()
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self._hostile.random() < 0.5
        if field.type == FieldDescriptor.TYPE_ENUM:
            return self._hostile.choice((0, 1, 2, 3, 4, 5, 6, 7, -1, 2**31 - 1))
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._hostile.some_bytes()
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._hostile.text()
        raise AssertionError(f"{field.full_name}: no generator for fields of this type; add one")


def fits(field: FieldDescriptor, value: Any) -> bool:
    """Whether a value can be put into a field."""
    kind = type(value)
    if field.type in _UNSIGNED:
        return kind is int and 0 <= value < 2 ** _UNSIGNED[field.type]
    if field.type in _SIGNED:
        limit = 2 ** (_SIGNED[field.type] - 1)
        return kind is int and -limit <= value < limit
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return kind in (int, float)
    return kind is {FieldDescriptor.TYPE_STRING: str, FieldDescriptor.TYPE_BYTES: bytes}.get(field.type)


def _is_map(field: FieldDescriptor) -> bool:
    return field.type == FieldDescriptor.TYPE_MESSAGE and bool(cast(Any, field.message_type).GetOptions().map_entry)
