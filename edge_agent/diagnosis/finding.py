"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "limited", "absent", "fails"]
"""As it should be; usable with less; no part of such a machine, so that its agent serves no round; to be repaired."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what, such as `power rails`.
        level: what it means for the agent.
        found: what is there.
        advice: what to do about it; empty where nothing has to be done.
    """

    topic: str
    level: Level
    found: str
    advice: str = ""


def fine(topic: str, found: str) -> Finding:
    """Something that is as it should be."""
    return Finding(topic, "ok", found)


def limited(topic: str, found: str, advice: str) -> Finding:
    """Something that the agent can do without."""
    return Finding(topic, "limited", found, advice)


def absent(topic: str, found: str, advice: str) -> Finding:
    """Something that such a machine need not have, but without which its agent serves no round."""
    return Finding(topic, "absent", found, advice)


def failing(topic: str, found: str, advice: str) -> Finding:
    """Something that the agent cannot do without."""
    return Finding(topic, "fails", found, advice)
