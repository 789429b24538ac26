"""Splits the time of a round into stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

STAGES = (
    "pushed, until a SuperNode picks it up",
    "picked up, until the process starts",
    "process started, until the app is called",
    "the app's imports and training",
    "trained, until the SuperNode sends the reply",
    "reply sent, until it is pulled",
)
"""The stages in order. Each ends where the next one begins."""


@dataclass(frozen=True)
class Seen:
    """The times of a SuperNode's log lines.

    Attributes:
        received_s: when it logged a message that it received, in seconds since 1970.
        sent_s: when it logged a reply that it sent.
    """

    received_s: list[float]
    sent_s: list[float]


def round_seconds(rounds: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of each round, from its first push to its last pull."""
    return [float(each["pulled_s"]) - float(each["pushed_s"]) for each in rounds]


def stage_seconds(rounds: Sequence[Mapping[str, Any]], logs: Sequence[Seen]) -> dict[str, float]:
    """Return the median seconds of each stage, for the node that was the last to train in each round.

    Args:
        rounds: the ServerApp's times of each round, with those of the nodes.
        logs: the times of each SuperNode's log lines.
    """
    spans: list[list[float]] = []
    for each in rounds:
        last = max(each["nodes"], key=lambda node: float(node["trained_s"]))
        began_s, ended_s = float(each["pushed_s"]), float(each["pulled_s"])
        # The log with the message and reply that enclose the start of the node's process most closely.
        received_s = max(s for log in logs for s in log.received_s if began_s <= s <= last["started_s"] + 0.05)
        sent_s = min(s for log in logs for s in log.sent_s if s >= last["trained_s"])
        moments = [began_s, received_s, last["started_s"], last["called_s"], last["trained_s"], sent_s, ended_s]
        spans.append([later - earlier for earlier, later in zip(moments, moments[1:], strict=False)])
    return {stage: median(span[index] for span in spans) for index, stage in enumerate(STAGES)}
