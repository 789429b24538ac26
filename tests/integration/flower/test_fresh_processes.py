"""Fresh Python processes: what a Flower app's imports load, and the log format and level of Flower's programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import wattfleet.flower
from wattfleet.flower.logged_program import logged

# --- Imports ----------------------------------------------------------------------------------------------------------
# The modules that the imports of a Flower app load, each in a fresh Python process.


CLIENT = (
    "from wattfleet.flower import AgentUnreachableError, planned_loader, planned_work, power_mode_mod, profiled,"
    " until_deadline"
)
SERVER = (
    "from wattfleet.flower import BatchChoice, FedBuff, NoUpdatesError, PlanningError, PowerAware, Quorum,"
    " TwoStrategiesError"
)
BESIDE_FLOWER = "import sys, flwr.app, flwr.clientapp, flwr.serverapp; before = set(sys.modules); "
OTHER_PARTS = ("coordinator", "edge_agent", "reference_models", "wattfleet.evaluation", "wattfleet.simulation")
HEAVY = ("scipy", "pandas", "sklearn", "torch", "safetensors", "sqlalchemy", "pydantic", "prometheus_client")


def printed_by(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def loaded_beside_flower(statement: str) -> list[str]:
    """The modules that a statement loads and that Flower had not loaded yet."""
    return printed_by(f"{BESIDE_FLOWER}{statement}; print(*sorted(set(sys.modules) - before))")


def packages_of(modules: list[str]) -> set[str]:
    return {module.split(".")[0] for module in modules} - set(sys.stdlib_module_names)


def test_every_public_name_can_be_imported() -> None:
    assert {"FedBuff", "PowerAware", "power_mode_mod", "profiled", "until_deadline"} < set(wattfleet.flower.__all__)
    for name in wattfleet.flower.__all__:
        assert getattr(wattfleet.flower, name).__name__ == name


def test_the_client_side_loads_nothing_of_the_server_side_or_the_services() -> None:
    modules = loaded_beside_flower(CLIENT)
    assert packages_of(modules) <= {"wattfleet", "wattfleet_proto", "grpc", "google", "lazy_loader", "numpy"}
    own = {module.split(".")[1] for module in modules if module.startswith("wattfleet.")}
    assert own == {"common", "core", "flower"}
    assert not [module for module in modules if module.startswith("wattfleet.flower.server")]
    # Of the core, it needs only errors: power modes are the agent's, and predictors, fronts and plans are not used.
    core = {"wattfleet.core", "wattfleet.core.errors"}
    assert {module for module in modules if module.startswith("wattfleet.core")} == core


def test_the_client_side_alone_loads_no_heavy_library() -> None:
    assert printed_by(f"import sys; {CLIENT}; print(*({set(HEAVY + OTHER_PARTS)!r} & set(sys.modules)))") == []


def test_the_server_side_needs_no_other_part_installed() -> None:
    code = (
        f"{BESIDE_FLOWER}"
        f"sys.modules.update(dict.fromkeys({OTHER_PARTS + HEAVY!r}));"  # importing any of these fails
        f"{SERVER}; from flwr.serverapp.strategy import FedAvg; PowerAware(FedAvg()); PowerAware(FedBuff(2));"
        "print(*[name for name in set(sys.modules) - before if sys.modules[name] is not None])"
    )
    modules = printed_by(code)
    assert "wattfleet.flower.server.power_aware" in modules
    assert not [module for module in modules if module.startswith("wattfleet.flower.client")]


# --- Logged program ---------------------------------------------------------------------------------------------------
# Flower's programs, started with the selected log format: none of their lines is plain text.


FAILING_PROGRAM = """
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
    path.write_text(f"#!{sys.executable}\n{FAILING_PROGRAM}")
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
        ("error", "wattfleet.common.logs"),
        ("critical", "wattfleet.common.logs"),
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
    command = [sys.executable, "-m", f"wattfleet.flower.{name}", "--log-format", "json", option, str(tmp_path / "none")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    [line] = map(json.loads, ended.stderr.splitlines())
    assert ended.returncode == 2 and line["level"] == "error" and str(tmp_path / "none") in line["message"]


# --- Process log ------------------------------------------------------------------------------------------------------
# The effects of `--log-format` and `--log-level` on `wattfleet-superlink` and `wattfleet-supernode`.

LOGGING_PROGRAM = """
import argparse, logging, sys
from flwr.common import log
from wattfleet.flower import process_log
parser = argparse.ArgumentParser()
process_log.add_options(parser)
process_log.start(parser.parse_args())
for level in (logging.INFO, logging.WARNING):
    for _ in range(30):
        log(level, "a line of %s", "Flower")
"""


def lines(*arguments: str, **variables: str) -> list[str]:
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", **variables}
    command = [sys.executable, "-c", LOGGING_PROGRAM, *arguments]
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
