"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "limited", "absent", "fails"]
"""The levels: fine; works with restrictions; missing on this kind of machine, so it joins no rounds; must be fixed."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: what was checked, such as `power rails`.
        level: what the result means for the agent.
        found: the result.
        advice: what to do; empty if nothing.
    """

    topic: str
    level: Level
    found: str
    advice: str = ""


def fine(topic: str, found: str) -> Finding:
    """A check without problems."""
    return Finding(topic, "ok", found)


def limited(topic: str, found: str, advice: str) -> Finding:
    """A problem that the agent can work with."""
    return Finding(topic, "limited", found, advice)


def absent(topic: str, found: str, advice: str) -> Finding:
    """A missing part without which the agent joins no rounds; not an error."""
    return Finding(topic, "absent", found, advice)


def failing(topic: str, found: str, advice: str) -> Finding:
    """A problem that stops the agent from working."""
    return Finding(topic, "fails", found, advice)
