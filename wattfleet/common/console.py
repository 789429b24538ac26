"""Prints the output of commands for programs and for people: JSON, plain text, counts and durations."""

from __future__ import annotations

import json
import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


# --- Keyboard ---------------------------------------------------------------------------------------------------------
# Reads single keys from a terminal while a command shows a live display.


WaitForKey = Callable[[float], str | None]
"""Waits at most for the given time, s; returns the name of a key pressed meanwhile, such as "down", or None."""

_NAMES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "k": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "j": "down",
    "\x1b[5~": "page up",
    "b": "page up",
    "\x1b[6~": "page down",
    " ": "page down",
    "\x1b[H": "home",
    "\x1b[1~": "home",
    "g": "home",
    "\x1b[F": "end",
    "\x1b[4~": "end",
    "G": "end",
    "q": "quit",
}


@contextmanager
def keyboard() -> Iterator[WaitForKey]:
    """Read single keys from standard input; if that is not a terminal, no key is ever reported."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield _pause
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    try:
        yield lambda seconds: _pressed(keys, seconds)
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _pause(seconds: float) -> None:
    time.sleep(seconds)


def _pressed(keys: int, seconds: float) -> str | None:
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        if not select.select([keys], [], [], left_s)[0]:
            return None
        pressed = os.read(keys, 16).decode(errors="replace")
        if not pressed:  # the terminal was closed
            return "quit"
        if pressed in _NAMES:
            return _NAMES[pressed]
    return None


# --- Console ----------------------------------------------------------------------------------------------------------

MODE_LEGEND = "mode: CPU cores, then CPU/GPU/memory clocks in GHz"
"""The meaning of power modes' labels, to print below them."""


def print_json(content: Any) -> None:
    """Print one indented JSON document; see `json_text`."""
    print(json_text(content, indent=2))


def json_text(content: Any, indent: int | None = None) -> str:
    """Return JSON text, with null for NaN and infinities, which JSON does not have.

    Args:
        content: dictionaries, lists and plain values.
        indent: spaces per level; None writes one line.
    """
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain_text(text: str, max_length: int | None = None, keep_newlines: bool = False) -> str:
    """Return text that is safe to print: without escape sequences and other control characters.

    Use it for all text from other processes that is shown or logged. Line breaks and tabs become spaces, so
    that a text cannot pretend to be several lines of a log.

    Args:
        text: any text.
        max_length: cut off longer text at this length, with a note; None keeps all of it.
        keep_newlines: keep line feeds.
    """
    if max_length is not None and len(text) > max_length:
        text = f"{text[:max_length]} ... ({len(text) - max_length:,} more characters)"
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or (keep_newlines and sign == "\n") else " " if sign.isspace() else ""
        for sign in text
    )


def print_line(text: str, to_stderr: bool = False) -> None:
    """Print one line of plain text at once."""
    print(plain_text(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)


def terminal(to_stderr: bool = False) -> Console:
    """Return a console for tables and coloured text, which removes control characters from the printed text."""
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PlainTextConsole(Console):
        """A console that removes control characters in `render`, which all text passes through.

        Rich itself adds colours and cursor movements.
        """

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control or segment.text.isprintable():
                    yield segment
                else:
                    yield Segment(plain_text(segment.text, keep_newlines=True), segment.style)

    return PlainTextConsole(highlight=False, stderr=to_stderr)


def count_of(count: int, singular: str) -> str:
    """Return a count with its noun, such as "1 mode" or "2,304 modes"."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"


def rounds_text(numbers: Sequence[int]) -> str:
    """Return numbers of rounds as text, such as "round 2" or "rounds 1–3, 5".

    Args:
        numbers: the numbers in ascending order.
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"round{'s' if len(numbers) > 1 else ''} {words}"


def duration_text(seconds: float | None) -> str:
    """Return a duration as text, such as "12.5 s", "42 min" or "3.1 h"; a dash if it is unknown."""
    if seconds is None:
        return "-"
    if seconds < 600:
        return f"{seconds:,.1f} s"
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{minutes} min" if minutes < 120 else f"{hours:,.1f} h"


def energy_text(joules: float | None) -> str:
    """Return an energy as text, such as "950 J", "12.5 kJ" or "1.25 MJ"; a dash if it is unknown."""
    if joules is None:
        return "-"
    if joules < 1e3:
        return f"{joules:,.0f} J"
    return f"{joules / 1e3:,.1f} kJ" if joules < 1e6 else f"{joules / 1e6:,.2f} MJ"
