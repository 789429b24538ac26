"""A date and time that advances only when a test says so."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone


class StoreClock:
    """The clock of a store; it starts at a fixed time."""

    def __init__(self) -> None:
        self.now = datetime(2026, 3, 29, 0, 30, tzinfo=timezone.utc)

    def __call__(self) -> datetime:
        # In a time zone other than UTC, as an operator's clock may be.
        return self.now.astimezone(timezone(timedelta(hours=5, minutes=30)))

    def pass_days(self, days: float) -> None:
        self.now += timedelta(days=days)
