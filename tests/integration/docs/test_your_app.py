"""Guides for an app over simulated boards, typed into a shell: with fake programs that record calls, and the real ones.

The real programs need a minute on two idle cores, so `make test` leaves this test out; `make guides` runs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import parse_config_args

from tests.fakes.documented_commands import (
    ROOT,
    blocks_of,
    blocks_of_page,
    check_call,
    check_options,
    flower_programs,
    flwr_command,
)
from wattfleet.common.cli import wattfleet
from wattfleet.simulation.flower import OFFLINE, free_ports, program

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PAGE = ROOT / "docs" / "your-app.md"
_BLOCKS = {"own app": blocks_of("own app"), "quickstart": blocks_of("quickstart")}
_BOARDS = {"own app": {"agx-orin", "orin-nx", "orin-nano", "xavier-agx"}, "quickstart": {"orin-0", "nano-0"}}
_RECORDING = """#!/bin/sh
{ basename "$0"; for argument in "$@"; do printf '%s\\n' "$argument"; done; } > "$CALLS/$(basename "$0")-$$"
"""


@dataclass(frozen=True)
class Followed:
    """The results of a guide's commands.

    Attributes:
        guide: name of its group of blocks.
        last_folder: the folder in which its last command was typed.
        flower_folder: the folder in which `flwr` finds its settings.
        calls: the name and the arguments of each program that was started.
    """

    guide: str
    last_folder: Path
    flower_folder: Path
    calls: list[list[str]]

    def of(self, *begin: str) -> list[list[str]]:
        return [call for call in self.calls if call[: len(begin)] == list(begin)]


def value(call: list[str], option: str) -> str:
    return call[call.index(option) + 1]


@pytest.fixture(scope="module", params=_BLOCKS)
def followed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Followed:
    """A guide that was followed, except for its `kill`, with programs that only record how they are called."""
    folder = tmp_path_factory.mktemp("guide")
    programs, called = folder / "programs", folder / "calls"
    for made in (programs, called):
        made.mkdir()
    for name in ("wattfleet", "flwr", *flower_programs()):
        (programs / name).write_text(_RECORDING)
        (programs / name).chmod(0o755)
    variables = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(called)}
    script = [block.text for block in _BLOCKS[request.param] if not block.text.startswith("kill")]
    done = subprocess.run(
        ["bash", "-euc", "\n".join([*script, "wait", 'echo "$PWD"', 'echo "$FLWR_HOME"'])],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    last, flower = done.stdout.splitlines()
    return Followed(
        request.param, Path(last), Path(flower), [file.read_text().splitlines() for file in called.iterdir()]
    )


def test_every_call_is_one_that_the_program_takes(followed: Followed) -> None:
    assert len(followed.calls) == {"own app": 15, "quickstart": 10}[followed.guide]
    for name, *arguments in followed.calls:
        if name in ("wattfleet", "flwr"):
            check_call(arguments, wattfleet if name == "wattfleet" else flwr_command())
        else:
            check_options(arguments, flower_programs()[name])


def test_each_supernode_is_that_of_one_agent(followed: Followed) -> None:
    agents = followed.of("wattfleet", "agent", "run")
    nodes: list[dict[str, Any]] = [
        parse_config_args([value(call, "--node-config")]) for call in followed.of("wattfleet-supernode")
    ]
    of_agents = {(value(call, "--device-id"), value(call, "--socket")) for call in agents}
    assert {(node["device-id"], node["agent-socket"]) for node in nodes} == of_agents
    boards = _BOARDS[followed.guide]
    assert {name for name, _ in of_agents} == boards
    assert len({value(call, "--state-dir") for call in agents}) == len({socket for _, socket in of_agents})
    assert sorted(node["partition-id"] for node in nodes) == list(range(len(boards)))
    assert {node["num-partitions"] for node in nodes} == {len(boards)}


def test_all_parts_of_flower_meet_at_the_superlink(followed: Followed) -> None:
    [superlink] = followed.of("flower-superlink")
    address = f"{value(superlink, '--host')}:{value(superlink, '--port')}"
    nodes = followed.of("wattfleet-supernode")
    assert {value(call, "--superlink") for call in nodes} == {address}
    assert len({value(call, "--port") for call in nodes}) == len(nodes) == len(_BOARDS[followed.guide])
    connections = tomllib.loads((followed.flower_folder / "config.toml").read_text())["superlink"]
    assert connections[connections["default"]] == {"address": address, "insecure": True}
    for run in followed.of("flwr", "run"):
        assert run[3] in connections or run[3].startswith("--")


def test_apps_are_where_the_guide_says(followed: Followed) -> None:
    runs = followed.of("flwr", "run")
    if followed.guide == "own app":
        assert [(followed.last_folder / run[2]).resolve() for run in runs] == [followed.last_folder.parent / "my-app"]
    else:
        assert len(runs) == 4 and all((ROOT / run[2] / "pyproject.toml").exists() for run in runs)


def with_the_lines_of_the_page(app: Path) -> None:
    """Change an app as step 2 describes."""
    server, client, task = (block.lines for block in blocks_of_page(_PAGE) if block.language == "python")
    for name, lines, begin in (
        ("server_app.py", server, "strategy = "),
        ("client_app.py", client, "app = "),
        ("task.py", task, "for images, labels in batches:"),
    ):
        [file] = app.glob(f"*/{name}")
        imported = next(line for line in lines if "import" in line)
        changed = next(line for line in lines if line.startswith(begin.partition(" in ")[0])).partition("  #")[0]
        text, count = re.subn(rf"^( *){begin}.*$", rf"\1{changed}", file.read_text(), flags=re.M)
        assert count == 1, name
        future = "from __future__ import annotations\n"
        file.write_text(text.replace(future, f"{future}\n{imported}\n", 1))


def test_the_lines_of_the_page_make_the_example_without_wattfleet_the_one_with_it(tmp_path: Path) -> None:
    app = tmp_path / "my-app"
    shutil.copytree(ROOT / "examples/quickstart-sklearn/plain", app)
    with_the_lines_of_the_page(app)
    for file in app.rglob("*.py"):
        expected = ROOT / "examples/quickstart-sklearn/power_aware" / file.relative_to(app)
        assert sorted(filter(None, file.read_text().split("\n"))) == sorted(
            filter(None, expected.read_text().split("\n"))
        )


# The tests above follow the same blocks with programs that only record their calls.
@pytest.mark.deployment
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_the_guide_leads_to_planned_rounds(short_folder: Path) -> None:
    app = short_folder / "my-app"
    shutil.copytree(ROOT / "examples/quickstart-sklearn/plain", app)
    with_the_lines_of_the_page(app)
    coordinator, http, superlink, *supernodes = free_ports(7)
    script = "\n".join(block.text for block in _BLOCKS["own app"])
    for there, here in {
        "18000": str(superlink),
        "$((19094 + partition))": "${ports[partition]}",
        "wattfleet coordinator devices": "until wattfleet coordinator devices | grep '4 ready'; do sleep 1; done",
    }.items():
        assert there in script
        script = script.replace(there, here)
    variables = {
        **os.environ,
        **OFFLINE,
        "HOME": str(short_folder),
        "PATH": f"{Path(program('wattfleet')).parent}:{os.environ['PATH']}",
        "WATTFLEET_COORDINATOR": f"127.0.0.1:{coordinator}",
        "WATTFLEET_AGENT_SESSION_COORDINATOR": f"127.0.0.1:{coordinator}",
        "WATTFLEET_COORDINATOR_SERVER_ADDRESS": f"127.0.0.1:{coordinator}",
        "WATTFLEET_COORDINATOR_SERVER_HTTP_ADDRESS": f"127.0.0.1:{http}",
    }
    done = subprocess.run(
        ["bash", "-ec", f"trap 'kill $(jobs -p)' EXIT\nports=({' '.join(map(str, supernodes))})\n{script}\nwait"],
        cwd=short_folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    shown = done.stdout + done.stderr
    assert "4 devices: 4 ready" in shown, shown
    assert re.search(r"3 rounds requested, finished", shown), shown
    assert re.search(r"^ +3 +[1-4]\b", shown, re.MULTILINE), shown
