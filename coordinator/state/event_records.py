"""Records of what happened in the fleet: immutable, and stored as they are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

EVENTS_KEEP = timedelta(days=90)
MAX_EVENTS = 100_000


@dataclass(frozen=True)
class EventRecord:
    """One event.

    Attributes:
        event_id: a random id.
        at: when it happened.
        kind: what it is about: one of `coordinator.display.event_words.EVENT_KINDS`.
        text: what happened, for people.
        needs_attention: whether somebody should look at it.
        device_id: the device that it concerns; empty if it concerns no single one.
        run_id: the run that it concerns; empty if it concerns none.
        round: the run's round; 0 if it concerns none.
        supply: the supply whose budget changed, or that the device is behind; empty if there is none.
        caller: who caused it, such as an operator; empty if nobody did.
    """

    event_id: str
    at: datetime
    kind: str
    text: str
    needs_attention: bool = False
    device_id: str = ""
    run_id: str = ""
    round: int = 0
    supply: str = ""
    caller: str = ""


@dataclass(frozen=True)
class EventFilter:
    """Which events to read.

    Attributes:
        kinds: of these kinds; empty for all.
        device_id: of this device; empty for all.
        run_id: of this run; empty for all.
        supplies: at these supplies; None for all.
        since: leaves out earlier ones; None for none.
        limit: the most events, the newest ones.
    """

    kinds: Collection[str] = ()
    device_id: str = ""
    run_id: str = ""
    supplies: Collection[str] | None = None
    since: datetime | None = None
    limit: int = MAX_EVENTS


@dataclass(frozen=True)
class ExpiredEvents:
    """Which events to delete.

    Attributes:
        now: the time.
        keep: older events are deleted.
        max_events: how many are kept at most, the newest ones.
    """

    now: datetime
    keep: timedelta = EVENTS_KEEP
    max_events: int = MAX_EVENTS
