"""The settings of a service's log, in the table `[log]` of each service's settings."""

from __future__ import annotations

from wattfleet_io.log_choices import FORMAT_VARIABLE, LEVEL_VARIABLE, LogFormat, LogLevel
from wattfleet_io.settings.model import Group, setting


class LogSettings(Group):
    """Log: level and format of the log on standard error."""

    format: LogFormat | None = setting(
        None,
        "Write the log as lines of text, or as one JSON object per line.",
        option="--log-format",
        unset=f"{FORMAT_VARIABLE}, else text",
    )
    level: LogLevel | None = setting(
        None,
        "Leave out lines below this level.",
        option="--log-level",
        unset=f"{LEVEL_VARIABLE}, else info",
    )
