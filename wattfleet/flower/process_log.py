"""Logging in the Flower processes that Wattfleet starts: Flower's lines, the app's and ours in one format."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any, get_args

from flwr.common.logger import console_handler, update_console_handler

from wattfleet.common.logs import (
    FORMAT_VARIABLE,
    LEVEL_VARIABLE,
    BoundedJson,
    LogFormat,
    LogLevel,
    log_failures,
    log_format,
    log_level,
)


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
    """Set up logging from the options, or else from the environment, for this process and those that it starts.

    Args:
        options: parsed options, including those of `add_options`; None uses the environment only.

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
        # Flower's lines are not rate-limited like ours, since some of them are written for each message.
        handler = logging.StreamHandler()
        handler.setFormatter(BoundedJson())
        handler.setLevel(console_handler.level)
        # Libraries log warnings and above, as Python does by default. Flower's own lines pass at any level.
        logging.basicConfig(level=max(logging.WARNING, log_level()), handlers=[handler], force=True)
        logging.getLogger("flwr").removeHandler(console_handler)
        log_failures()


def without_handlers(uvicorn_config: dict[str, Any]) -> dict[str, Any]:
    """Return uvicorn's log configuration without handlers, so that its lines go to the root logger.

    Args:
        uvicorn_config: Flower's configuration of uvicorn's log, as for `logging.config.dictConfig`.
    """
    loggers = {
        name: {**each, "handlers": [], "propagate": True}
        | ({"filters": ["routine_access"]} if "access" in each.get("handlers", ()) else {})
        for name, each in uvicorn_config["loggers"].items()
    }
    return {**uvicorn_config, "handlers": {}, "loggers": loggers}
