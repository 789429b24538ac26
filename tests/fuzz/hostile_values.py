"""Hostile numbers, texts and bytes, drawn from a seed."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence

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
