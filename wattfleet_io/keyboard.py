"""Reads single keys from a terminal while a command shows a live display."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
