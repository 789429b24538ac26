"""Hostile values, protobuf messages and files, drawn from a seed."""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

# --- Hostile values ---------------------------------------------------------------------------------------------------
# Hostile numbers, texts and bytes, drawn from a seed.


_REALS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 5e-324, -5e-324, 1e300, 1.7976931348623157e308, math.inf, -math.inf, math.nan,
    sys.float_info.epsilon, 2.0**53, -(2.0**53), 800.0, 1e-9, 1e7, 253_402_300_800.0, 1e18,
)  # fmt: skip
_TEXTS = (
    "", " ", "a", "a" * 200, "a" * 201, "a" * 10_000, "\0", "\x1b[2J\x1b]0;title\x07", "\r\n", "=1+1", "@a",
    "../../etc", "/", "4711/0", "4711/4294967296", "4711/-1", "4711/1e9", "/1", "4711/", "4711//1", "%s%n{0}",
    "\u202e\u200b", "\ud7ff\ue000\U0010ffff", "\u00e4" * 200, "\u0663", "nan", "1_0", "'; --", "é" * 201, "9" * 4_301,
)  # fmt: skip
_INTEGERS = (0, 1, 2, 5, 64, 65, 127, 1_000_000, 1_000_001)

MAX_BYTES = 16 * 2**20
"""The size of an input: larger than every limit of a request, small enough to make many inputs."""


class Hostile(random.Random):
    """Draws values at the limits of their types, and outside the range that the project expects."""

    def real(self) -> float:
        """A floating-point number, including NaN and infinity."""
        if self.random() < 0.7:
            return self.choice(_REALS)
        return self.choice((1, -1)) * math.exp(self.uniform(-700, 700))

    def integer(self, bits: int, signed: bool = False) -> int:
        """An integer of a type with the given number of bits."""
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        edges = (low, high, high - 1, high // 2, high // 2 + 1, min(high, 2**31), min(high, 2**32))
        return self.choice(edges if self.random() < 0.4 else _INTEGERS)

    def text(self, known: Sequence[str] = ()) -> str:
        """A text: one that the receiver knows, or one that no user would write."""
        if known and self.random() < 0.6:
            return self.choice(known)
        if self.random() < 0.9:
            return self.choice(_TEXTS)
        return "".join(chr(self.choice((self.randrange(1, 0x500), self.randrange(0xE000, 0x10FFFF)))) for _ in range(9))

    def count(self) -> int:
        """The length of a list, which is usually small."""
        drawn = self.random()
        return self.randrange(4) if drawn < 0.9 else self.randrange(200) if drawn < 0.98 else self.randrange(25_000)

    def some_bytes(self) -> bytes:
        """Random bytes."""
        return self.randbytes(self.choice((0, 1, 7, 64, 1_000, 70_000)))

    def damaged(self, content: bytes) -> bytes:
        """Content that was truncated, overwritten, repeated or mixed with other bytes."""
        for _ in range(self.choice((1, 1, 1, 2, 5))):
            content = self.choice(_DAMAGES)(self, content)[:MAX_BYTES]
        return content


def _truncated(hostile: Hostile, content: bytes) -> bytes:
    return content[: hostile.randrange(len(content) + 1)]


def _beheaded(hostile: Hostile, content: bytes) -> bytes:
    return content[hostile.randrange(len(content) + 1) :]


def _flipped(hostile: Hostile, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(hostile.choice((1, 2, 30))):
        if changed:
            changed[hostile.randrange(len(changed))] ^= 1 << hostile.randrange(8)
    return bytes(changed)


def _overwritten(hostile: Hostile, content: bytes) -> bytes:
    at = hostile.randrange(len(content) + 1)
    filler = hostile.choice((b"\0", b"\xff", b"\xc3\x28", b"\n", hostile.randbytes(4))) * hostile.choice((1, 9, 500))
    return content[:at] + filler + content[at + len(filler) :]


def _inserted(hostile: Hostile, content: bytes) -> bytes:
    at = hostile.randrange(len(content) + 1)
    return content[:at] + hostile.choice((hostile.randbytes(3), b"\0" * 64, b"\r", b"\xef\xbb\xbf")) + content[at:]


def _spliced(hostile: Hostile, content: bytes) -> bytes:
    begin, end, at = sorted(hostile.randrange(len(content) + 1) for _ in range(3))
    return content[:at] + content[begin:end] * hostile.choice((1, 2, 20)) + content[end:]


_DAMAGES: tuple[Callable[[Hostile, bytes], bytes], ...] = (
    _truncated, _beheaded, _flipped, _flipped, _overwritten, _inserted, _spliced,
)  # fmt: skip


# --- Hostile messages -------------------------------------------------------------------------------------------------
# Hostile protobuf messages, built from their descriptors.

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
        return self._hostile.some_bytes() if self._hostile.random() < 0.03 else content[:MAX_BYTES]

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
                    size = len(held[0]) if isinstance(held[0], str | bytes) else 8
                    held.extend([held[0]] * min(count - 2_000, MAX_BYTES // (size + 8)))
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


# --- Hostile files ----------------------------------------------------------------------------------------------------
# Damaged and hostile file contents, and things other than files in a file's place.

_TOKEN = re.compile(rb'"[^"\n]*"|[A-Za-z0-9_.+:-]+')
_NUMBERS = (
    b"0", b"-0", b"-1", b"1e400", b"-1e400", b"1e-400", b"5e-324", b"nan", b"NaN", b"inf", b"-Infinity", b"Infinity",
    b"4294967296", b"18446744073709551616", b"9" * 4_301, b"-" + b"9" * 4_301, b"0." + b"9" * 5_000, b"1_0", b"0x10",
    "٣".encode(), b"1e309", b"2e3",
)  # fmt: skip
_OTHERS = (
    b"null", b"true", b"[]", b"{}", b'""', b'"\\ud800"', b'"\\u0000"', b'"\\u001b[2J"', b'"' + b"a" * 70_000 + b'"',
    b"[[]]", b'{"a": 1, "a": 2}', b"'", b'"""', b",", b"\0", b"\xff\xfe", b"=1+1", b"1979-05-27T07:32:00Z", b"99:99",
    b"0001-01-01T00:00+23:59", b"9999-12-31T23:59-23:59", b"../../../../etc/passwd", b"/", b"\n\n[[a]]\n", b"# ",
)  # fmt: skip


def hostile_content(hostile: Hostile, valid: bytes) -> bytes:
    """Hostile content for a file: valid content with words replaced or bytes damaged, or something else."""
    drawn = hostile.random()
    if drawn < 0.55:
        for _ in range(hostile.choice((1, 1, 2, 4))):
            valid = _with_other_word(hostile, valid)
        return valid
    if drawn < 0.9:
        return hostile.damaged(valid)
    if drawn < 0.95:
        return hostile.some_bytes()
    opening, closing = hostile.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"a = [", b"]"), (b"a.", b""), (b"[a.", b"]")))
    depth = hostile.choice((20, 2_000, 100_000))
    return opening * depth + b"1" + closing * depth + b"\n"


def _with_other_word(hostile: Hostile, content: bytes) -> bytes:
    words = list(_TOKEN.finditer(content))
    if not words:
        return content
    word = hostile.choice(words)
    drawn = hostile.random()
    if drawn < 0.4:
        new = hostile.choice(_NUMBERS)
    elif drawn < 0.7:
        new = hostile.choice(_OTHERS)
    elif drawn < 0.85:
        new = hostile.choice(words).group()
    elif drawn < 0.9:
        depth = hostile.choice((20, 5_000, 100_000))
        new = b"[" * depth + b"]" * depth
    else:
        new = hostile.damaged(word.group())
    return content[: word.start()] + new + content[word.end() :]


def place(hostile: Hostile, path: Path, content: bytes, is_a_file: bool) -> str:
    """Write a hostile file, or put something else in its place if `is_a_file`; returns a description for messages."""
    if not is_a_file or hostile.random() < 0.95:
        path.write_bytes(content)
        return f"{content[:2_000]!r}{'...' if len(content) > 2_000 else ''}"
    name, make = hostile.choice(_NO_FILES)
    make(path)
    return name


def remove(path: Path) -> None:
    """Remove what `place` has created."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def _link_to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def _link_to_zeros(path: Path) -> None:
    path.with_name("zeros").write_bytes(b"\0" * 100_000)
    path.symlink_to(path.with_name("zeros"))


_NO_FILES: tuple[tuple[str, Callable[[Path], None]], ...] = (
    ("a folder", Path.mkdir),
    ("a link to itself", _link_to_itself),
    ("a link to nothing", _link_to_nothing),
    ("a link to zeros", _link_to_zeros),
    ("nothing", lambda path: path.unlink(missing_ok=True)),
)
