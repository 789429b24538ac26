"""The formats and levels of a service's log, and the environment variables that choose them for every process."""

from __future__ import annotations

from typing import Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

FORMAT_VARIABLE = "WATTFLEET_LOG_FORMAT"
"""The default format."""

LEVEL_VARIABLE = "WATTFLEET_LOG_LEVEL"
"""The default minimum level."""
