"""When things happened, as the store noted it: the fleet itself reads no clock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Executable, select

from coordinator.store.tables import Device, Round, Run

TimesOf = Executable
"""What times are asked for: of each thing its id, and when it was first and last."""

OF_DEVICES: TimesOf = select(Device.device_id, Device.first_seen_at, Device.last_seen_at)
OF_RUNS: TimesOf = select(Run.run_id, Run.started_at, Run.finished_at)


def of_rounds(run_id: str) -> TimesOf:
    """The rounds of a run, by their plans' ids: when they were planned, and when they were over."""
    return select(Round.plan_id, Round.planned_at, Round.finished_at).where(Round.run_id == run_id)


@dataclass(frozen=True)
class Times:
    """When something was first and last: begun and over, or seen.

    Attributes:
        first: None where it was before times were kept.
        last: None where it is not over, or was before times were kept.
    """

    first: datetime | None = None
    last: datetime | None = None

    @property
    def first_unix_s(self) -> float | None:
        """The first in seconds since 1970, UTC."""
        return None if self.first is None else self.first.timestamp()

    @property
    def last_unix_s(self) -> float | None:
        """The last in seconds since 1970, UTC."""
        return None if self.last is None else self.last.timestamp()
