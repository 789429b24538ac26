"""Flower's programs, started with the selected log format: none of their lines is plain text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from wattfleet_flower.logged_program import logged  # noqa: E402

PROGRAM = """
import logging, threading, warnings
from flwr.common import log
log(logging.INFO, "a line of Flower")
logging.getLogger("an.app").warning("a line of an app")
logging.getLogger("httpx").info("a line of a library")
warnings.warn("a warning of Python")
def fail(): raise ValueError("in a thread")
thread = threading.Thread(target=fail, name="worker")
thread.start()
thread.join()
raise RuntimeError("at the end\\nof all")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "flwr-program"
    path.write_text(f"#!{sys.executable}\n{PROGRAM}")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return path.name


def errors_of(command: list[str]) -> list[str]:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    return ended.stderr.splitlines()


def test_no_line_is_text_in_json(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTFLEET_LOG_FORMAT", "json")
    lines = [json.loads(line) for line in errors_of(logged([program]))]
    assert [(each["level"], each["logger"]) for each in lines] == [
        ("info", "flwr"),
        ("warning", "an.app"),
        ("warning", "py.warnings"),
        ("error", "wattfleet_io.logs"),
        ("critical", "wattfleet_io.logs"),
    ]
    assert lines[0]["message"] == "a line of Flower" and "a warning of Python" in lines[2]["message"]
    assert lines[3]["message"] == "thread worker ends: ValueError: in a thread"
    assert "RuntimeError: at the end\nof all" in lines[4]["traceback"]


def test_text_is_flowers_own(program: str) -> None:
    assert logged([program]) == [program]
    lines = errors_of(logged([program]))
    assert any(line.endswith("a line of Flower") for line in lines) and "RuntimeError: at the end" in lines


def test_what_is_not_of_this_python_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTFLEET_LOG_FORMAT", "json")
    assert logged(["sh", "-c", "true"]) == ["sh", "-c", "true"]


@pytest.mark.parametrize("name", ["superlink", "supernode"])
def test_an_error_of_our_commands_is_an_object_too(name: str, tmp_path: Path) -> None:
    option = {"superlink": "--identity", "supernode": "--enrolled"}[name]
    command = [sys.executable, "-m", f"wattfleet_flower.{name}", "--log-format", "json", option, str(tmp_path / "none")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    [line] = map(json.loads, ended.stderr.splitlines())
    assert ended.returncode == 2 and line["level"] == "error" and str(tmp_path / "none") in line["message"]
