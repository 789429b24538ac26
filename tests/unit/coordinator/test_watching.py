"""`--watch` in a terminal that is too low for all lines: what it shows, and which keys it handles."""

from __future__ import annotations

import io
import os
import sys
from datetime import datetime

import pytest
from rich.console import Console
from rich.text import Text

from coordinator.cli.options import Viewport
from wattfleet_io.console import keyboard

LINES = 30
CONTENT = Text("\n".join(f"device-{k}" for k in range(LINES)))


def drawn(view: Viewport, height: int = 12, width: int = 80) -> list[str]:
    shown = io.StringIO()
    Console(file=shown, force_terminal=True, color_system=None, width=width, height=height).print(view)
    return [line.rstrip() for line in shown.getvalue().splitlines()]


@pytest.fixture
def view() -> Viewport:
    return Viewport(CONTENT, lambda: datetime(2026, 1, 2, 13, 5, 12))


def test_what_is_cut_is_said_with_the_time(view: Viewport) -> None:
    assert drawn(view) == [
        *(f"device-{k}" for k in range(10)),
        "13:05:12; lines 1 to 10 of 30; arrows, space and b scroll; q ends",
    ]


def test_a_terminal_that_is_high_enough_shows_all(view: Viewport) -> None:
    assert drawn(view, height=40) == [*(f"device-{k}" for k in range(LINES)), "13:05:12; q ends"]


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        (["down"], 1),
        (["page down"], 10),
        (["page down", "up"], 9),
        (["end"], 20),
        (["end", "down", "page down"], 20),
        (["end", "home"], 0),
        (["up"], 0),
        (["page down"] * 9 + ["page up"], 10),
    ],
)
def test_keys_scroll_within_the_content(view: Viewport, keys: list[str], first: int) -> None:
    drawn(view)
    for key in keys:
        view.press(key)
        drawn(view)
    assert drawn(view)[0] == f"device-{first}"


def test_content_that_becomes_shorter_stays_in_sight(view: Viewport) -> None:
    drawn(view)
    view.press("end")
    drawn(view)
    view.content = Text("one\ntwo")
    assert drawn(view)[:2] == ["one", "two"]


def test_keys_of_a_terminal_have_names_and_others_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    user, terminal = os.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with keyboard() as wait_for_key:
            for typed, name in (("\x1b[B", "down"), ("\x1b[5~", "page up"), (" ", "page down"), ("q", "quit")):
                os.write(user, typed.encode())
                assert wait_for_key(20.0) == name
            os.write(user, b"x")
            assert wait_for_key(0.2) is None
    os.close(user)
