"""The clocks at the store's newest transaction, so that the next transaction or start notices a jump of the date."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, insert, select, update

from coordinator.clocks import BootClock, Moment, jump_s, jump_text
from coordinator.store.tables import BudgetOverride, CoordinatorClock

_log = logging.getLogger(__name__)

_NOTED_EVERY_S = 60.0


class ClockRecord:
    """Records the clocks in the database, and corrects records that depend on the date when it jumps.

    Attributes:
        jumped_at: the date and time just after the newest jump; None if there was none.
        is_doubtful: the date was implausible after a start of the machine, so the elapsed time is unknown.
    """

    def __init__(self, clock: BootClock, now: Callable[[], datetime], max_absence_s: float) -> None:
        """Use the clocks of a machine.

        Args:
            clock: the time since the machine started.
            now: returns the date and time, with a UTC offset.
            max_absence_s: the most seconds by which the date may be ahead after a start of the machine.
        """
        self.jumped_at: datetime | None = None
        self.is_doubtful = False
        self._clock = clock
        self._now = now
        self._max_absence_s = max_absence_s
        self._newest: Moment | None = None
        self._written_s = -_NOTED_EVERY_S

    def open(self, connection: Connection) -> None:
        """Compare the clocks with those of the newest transaction of an earlier process."""
        row = connection.execute(select(CoordinatorClock.__table__)).one_or_none()
        if row is not None:
            self._newest = Moment(row.noted_at, row.boot_id, row.since_boot_s)
            self.jumped_at = row.jumped_at
        before = self._newest
        if self.note(connection) and before is not None and before.boot_id != self._clock.boot_id:
            self.is_doubtful = True
            _log.warning(
                "the machine was restarted with an implausible date, so it is unknown how much time has passed; if the "
                "machine was really off for this long, raise store.max_absence_days"
            )

    def note(self, connection: Connection) -> bool:
        """Compare the clocks with those at the newest transaction, and record them from time to time.

        Returns:
            Whether the date has jumped.
        """
        moment = Moment(self._now(), self._clock.boot_id, self._clock.since_boot_s())
        jumped_s = 0.0 if self._newest is None else jump_s(self._newest, moment, self._max_absence_s)
        if jumped_s:
            self.jumped_at = moment.noted_at
            _log.warning(
                "the clock was %s: overrides keep their remaining time, and the retention time of older runs starts "
                "again now",
                jump_text(jumped_s),
            )
            _move_overrides(connection, timedelta(seconds=jumped_s))
        self._newest = moment
        if jumped_s or moment.since_boot_s - self._written_s >= _NOTED_EVERY_S or moment.since_boot_s < self._written_s:
            self._written_s = moment.since_boot_s
            connection.execute(delete(CoordinatorClock))
            connection.execute(
                insert(CoordinatorClock).values(
                    only=1,
                    noted_at=moment.noted_at,
                    boot_id=moment.boot_id,
                    since_boot_s=moment.since_boot_s,
                    jumped_at=self.jumped_at,
                )
            )
        return bool(jumped_s)

    def keeps_until(self, keep: timedelta) -> datetime | None:
        """The time until which no run may be deleted because the date has jumped; None if runs may be deleted."""
        if self.jumped_at is None:
            return None
        until = self.jumped_at + keep
        return until if self._now() < until else None


def _move_overrides(connection: Connection, by: timedelta) -> None:
    """Move the ends of all budget overrides, so that their remaining time stays the same."""
    for row in connection.execute(select(BudgetOverride.supply, BudgetOverride.until)).all():
        if row.until is not None:
            moved = update(BudgetOverride).where(BudgetOverride.supply == row.supply).values(until=row.until + by)
            connection.execute(moved)
