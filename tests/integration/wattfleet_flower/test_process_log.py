"""The effects of `--log-format` and `--log-level` on `wattfleet-superlink` and `wattfleet-supernode`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("flwr")

PROGRAM = """
import argparse, logging, sys
from flwr.common import log
from wattfleet_flower import process_log
parser = argparse.ArgumentParser()
process_log.add_options(parser)
process_log.start(parser.parse_args())
for level in (logging.INFO, logging.WARNING):
    for _ in range(30):
        log(level, "a line of %s", "Flower")
"""


def lines(*arguments: str, **variables: str) -> list[str]:
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", **variables}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stderr.splitlines()


def test_each_line_of_flower_is_an_object_in_json() -> None:
    logged = [json.loads(line) for line in lines("--log-format", "json")]
    assert [each["level"] for each in logged] == ["info"] * 30 + ["warning"] * 30
    assert {each["message"] for each in logged} == {"a line of Flower"}


def test_the_environment_decides_where_no_option_is_given() -> None:
    logged = lines(WATTFLEET_LOG_FORMAT="json", WATTFLEET_LOG_LEVEL="warning")
    assert {json.loads(line)["level"] for line in logged} == {"warning"} and len(logged) == 30


def test_text_stays_flowers_own() -> None:
    logged = lines("--log-level", "warning")
    assert len(logged) == 30 and all("WARNING" in line and line.endswith("a line of Flower") for line in logged)
