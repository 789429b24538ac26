"""The log of `wattfleet-superlink` and `wattfleet-supernode`: Flower's own lines and ours, in the chosen format."""

from __future__ import annotations

import argparse
import logging
import os
from typing import get_args

from flwr.common.logger import console_handler, update_console_handler

from wattfleet_io.log_choices import FORMAT_VARIABLE, LEVEL_VARIABLE, LogFormat, LogLevel
from wattfleet_io.logs import BoundedJson, log_format, log_level


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
        flower = logging.getLogger("flwr")
        flower.removeHandler(console_handler)
        # Flower's statements are not limited in rate, unlike ours: some write a line for each message.
        handler = logging.StreamHandler()
        handler.setFormatter(BoundedJson())
        handler.setLevel(console_handler.level)
        flower.addHandler(handler)
