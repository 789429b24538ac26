"""Conversions by name: a message's field, and the attribute of a value with the same name, mean the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from functools import lru_cache, partial
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from wattfleet.core.errors import InvalidInputError

_Filled = TypeVar("_Filled", bound=Message)


def message_of(kind: type[_Filled], *sources: object, **others: Any) -> _Filled:
    """Fill a message from the attributes of values that are named like its fields.

    None leaves a field unset. Enum members become the message's, and values become the message's own messages.

    Args:
        kind: the class of the message.
        sources: the values. The first one that has a field's name counts; a field whose name none has stays unset.
        others: fields that the values lack, or have in another form.
    """
    known = {}
    types = (kind, *map(type, sources))
    if (places := _places.get(types)) is None:
        places = _places[types] = _found(kind.DESCRIPTOR, sources)
    for name, convert, place in places:
        if name not in others and (value := getattr(sources[place], name)) is not None:
            known[name] = value if convert is None else convert(value)
    return kind(**known, **others)


_Places = tuple[tuple[str, Callable[[Any], Any] | None, int], ...]

# Values of one class have the same attributes, so the source of each field is searched for once.
_places: dict[tuple[type, ...], _Places] = {}


def _found(kind: Any, sources: Sequence[object]) -> _Places:
    """Each field that a source has: its name, its conversion, and the index of the first such source."""
    places = (
        (each, next((k for k, source in enumerate(sources) if hasattr(source, each.name)), None))
        for each in kind.fields
    )
    return tuple((each.name, _writer(each), place) for each, place in places if place is not None)


def _writer(field: FieldDescriptor) -> Callable[[Any], Any] | None:
    """What converts a value for a field; None if nothing has to."""
    if field.enum_type is not None:
        return partial(_number, field.enum_type)
    if field.message_type is None or _is_map(field):
        return None
    of_field = GetMessageClass(field.message_type)

    def converted(value: object) -> Message:
        return value if isinstance(value, Message) else message_of(of_field, value)

    return (lambda values: [converted(each) for each in values]) if field.is_repeated else converted


def values_of(message: Message, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """A message's fields as plain values by name, as JSON has them.

    A field that can be absent is None if it is; enum values are words, such as "ready"; maps are sorted by their keys.

    Args:
        message: the message.
        leave_out: names of fields to leave out.

    Raises:
        InvalidInputError: an enum value is unset, or unknown to this version.
    """
    return {name: read(message) for name, read in _readers(message.DESCRIPTOR) if name not in leave_out}


@lru_cache
def _readers(kind: Descriptor) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    return tuple((field.name, _reader(field)) for field in kind.fields)


def _reader(field: FieldDescriptor) -> Callable[[Any], Any]:
    name, has_presence, enum = field.name, field.has_presence, field.enum_type
    if _is_map(field):
        return lambda message: dict(sorted(getattr(message, name).items()))
    if field.message_type is not None:
        if field.is_repeated:
            return lambda message: [values_of(each) for each in getattr(message, name)]
        return lambda message: values_of(getattr(message, name)) if message.HasField(name) else None
    if field.is_repeated:
        return lambda message: list(getattr(message, name))
    if enum is not None:
        return lambda message: (
            _word(enum, getattr(message, name)) if not has_presence or message.HasField(name) else None
        )
    if has_presence:
        return lambda message: getattr(message, name) if message.HasField(name) else None
    return lambda message: getattr(message, name)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


@lru_cache
def _words(enum: EnumDescriptor) -> dict[int, str]:
    """The word of each member but the first, which stands for none: "ready" for `DEVICE_STATE_READY`."""
    prefix = enum.values[0].name.removesuffix("UNSPECIFIED")
    return {each.number: each.name.removeprefix(prefix).lower() for each in enum.values[1:]}


@lru_cache
def _numbers(enum: EnumDescriptor) -> dict[str, int]:
    return {word: number for number, word in _words(enum).items()}


def _number(enum: EnumDescriptor, word: Any) -> int:
    return _numbers(enum)[word.value if isinstance(word, Enum) else word]


def _word(enum: EnumDescriptor, number: int) -> str:
    words = _words(enum)
    if number not in words:
        raise InvalidInputError(f"unknown {enum.name} {number}: expected one of {', '.join(words.values())}")
    return words[number]
