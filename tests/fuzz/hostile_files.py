"""Damaged and hostile file contents, and things other than files in a file's place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.hostile_values import Hostile

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
