"""The log of Flower's processes that Wattfleet starts: Flower's own lines, the app's and ours, in the chosen format."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any, get_args

from flwr.common.logger import console_handler, update_console_handler

from wattfleet_io.log_choices import FORMAT_VARIABLE, LEVEL_VARIABLE, LogFormat, LogLevel
from wattfleet_io.logs import BoundedJson, log_failures, log_format, log_level


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--log-format` and `--log-level`."""
    parser.add_argument(
        "--log-format",
        choices=get_args(LogFormat),
        help=f"write the log as Flower's text, or as one JSON object a line (default: {FORMAT_VARIABLE}, or text)",
    )
    parser.add_argument(
        "--log-level",
        choices=get_args(LogLevel),
        help=f"leave out lines below this level (default: {LEVEL_VARIABLE}, or info)",
    )


def start(options: argparse.Namespace | None = None) -> None:
    """Log as the options say, else as the environment says; processes of ours that this one starts do the same.

    Args:
        options: parsed, with those of `add_options`; None takes everything from the environment.

    Raises:
        InvalidInputError: the environment names an unknown format or level.
    """
    if options is not None:
        for variable, value in ((FORMAT_VARIABLE, options.log_format), (LEVEL_VARIABLE, options.log_level)):
            if value is not None:
                os.environ[variable] = value
    if os.environ.get(LEVEL_VARIABLE):
        update_console_handler(level=log_level())
    if log_format() == "json":
        # Flower's statements are not limited in rate, unlike ours: some write a line for each message.
        handler = logging.StreamHandler()
        handler.setFormatter(BoundedJson())
        handler.setLevel(console_handler.level)
        # Lines of libraries are left out below warnings, as where nothing is set up. Flower's pass at any level.
        logging.basicConfig(level=max(logging.WARNING, log_level()), handlers=[handler], force=True)
        logging.getLogger("flwr").removeHandler(console_handler)
        log_failures()


def without_handlers(uvicorns: dict[str, Any]) -> dict[str, Any]:
    """Flower's configuration of uvicorn's log, whose lines then go where all others go.

    Args:
        uvicorns: as for `logging.config.dictConfig`.
    """
    loggers = {
        name: {**each, "handlers": [], "propagate": True}
        | ({"filters": ["routine_access"]} if "access" in each.get("handlers", ()) else {})
        for name, each in uvicorns["loggers"].items()
    }
    return {**uvicorns, "handlers": {}, "loggers": loggers}
