"""Settings of the database, and of what is kept in it."""

from __future__ import annotations

from wattfleet_io.settings.model import Group, setting


class StoreSettings(Group):
    """Store: the database that the coordinator restarts from."""

    location: str = setting(
        "wattfleet-coordinator.db",
        "Keep the state in this database: an SQLite file, created if absent, or a URL (docs/coordinator.md).",
        option="--store",
    )
    standby: bool = setting(False, "Wait while another coordinator uses the store, then take over.", option="--standby")
    keep_days: float | None = setting(
        None,
        "Delete runs this many days after their end.",
        unit="days",
        option="--keep-days",
        unset="never delete runs",
        gt=0,
        le=1_000_000,
    )
    max_absence_days: float = setting(
        7.0,
        "Distrust the date if, after a restart of the machine, it is later than the newest record by more than this."
        " History is then kept, and overrides may only lower budgets.",
        unit="days",
        gt=0,
        le=1_000_000,
    )
    lock_timeout_s: float = setting(5.0, "Time to wait for another program's lock on the database.", unit="s", ge=0.001)
    check_rows: bool = setting(
        True,
        "Check every row of an SQLite file at the start, which takes about half a second for each 100,000 observations."
        " Otherwise only its structure is checked.",
    )
    retry_s: float = setting(1.0, "Time between two attempts to write after one failed.", unit="s", gt=0)
    owner_check_s: float = setting(
        2.0, "Time between two checks that no other coordinator has taken the store over.", unit="s", gt=0
    )
    standby_check_s: float = setting(1.0, "Time between two attempts of a standby to take over.", unit="s", gt=0)
    archive_check_s: float = setting(
        1.0, "Time between two checks for rounds that no longer need to be in memory.", unit="s", gt=0
    )
