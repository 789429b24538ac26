"""Times of events, which the store records because the fleet's state reads no clock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Executable, select

from coordinator.store.tables import Device, Node, Round, Run

TimesOf = Executable
"""A query for ids, each with its first and its last time."""

OF_DEVICES: TimesOf = select(Device.device_id, Device.first_seen_at, Device.last_seen_at)
OF_NODES: TimesOf = select(Node.node_id, Node.bound_at, Node.bound_at)
OF_RUNS: TimesOf = select(Run.run_id, Run.started_at, Run.finished_at)


def of_rounds(run_id: str) -> TimesOf:
    """A query for when the rounds of a run were planned and finished, by plan id."""
    return select(Round.plan_id, Round.planned_at, Round.finished_at).where(Round.run_id == run_id)


@dataclass(frozen=True)
class Times:
    """The first and last time of something: started and finished, or first and last seen.

    Attributes:
        first: the first time; None if it was before times were stored.
        last: the last time; None if it has not happened yet, or was before times were stored.
    """

    first: datetime | None = None
    last: datetime | None = None

    @property
    def first_unix_s(self) -> float | None:
        """The first time in seconds since 1970, UTC; None if it is unknown."""
        return None if self.first is None else self.first.timestamp()

    @property
    def last_unix_s(self) -> float | None:
        """The last time in seconds since 1970, UTC; None if it is unknown."""
        return None if self.last is None else self.last.timestamp()
