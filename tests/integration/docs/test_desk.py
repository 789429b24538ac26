"""The guide to two boards on a desk, run from the first to the last command with two simulated boards.

Only names, addresses and ports differ from the page: everything listens on loopback and on free ports.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.documented_commands import ROOT, blocks_of
from wattfleet.simulation.flower import OFFLINE, Parts, environment, free_ports, program

# The short forms are `test_supernode_deployment`, and `test_documentation` for every command of the page.
pytestmark = [pytest.mark.deployment, pytest.mark.slow, pytest.mark.timeout(900)]

_WITHIN_S = 300.0
_GOES_ON = re.compile(r"^(wattfleet coordinator serve|wattfleet-superlink|wattfleet agent run|wattfleet-supernode) ")
_LINE = re.compile(r"^wfj1/\S+$", re.MULTILINE)
_RUNS_FOR_ONE_ROUND = "num-server-rounds=1 "


def until(what: str, condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + _WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_s, f"{what}: not within {_WITHIN_S:g} s"
        time.sleep(0.5)


class Desk:
    """A folder in which the commands of the page are typed, one after the other."""

    def __init__(self, folder: Path, parts: Parts) -> None:
        self._folder, self._parts = folder, parts
        self._lines: dict[str, str] = {}
        self._started: list[Path] = []
        coordinator, enrolment, http, superlink, *supernodes = free_ports(6)
        self._environment = {
            **OFFLINE,
            "HOME": str(folder),
            "FLWR_HOME": str(folder / "flower"),
            "WATTFLEET_COORDINATOR_IDENTITY_ENROLMENT_ADDRESS": f"127.0.0.1:{enrolment}",
            "WATTFLEET_COORDINATOR_SERVER_HTTP_ADDRESS": f"127.0.0.1:{http}",
        }
        self._here = {
            "laptop.local": "localhost",
            "0.0.0.0": "127.0.0.1",
            "<checkout>": str(ROOT),
            "batch-size=4": f"{_RUNS_FOR_ONE_ROUND}batch-size=4",
            **{f"{port}": str(mine) for port, mine in [(7070, coordinator), (8000, superlink)]},
            **{str(port): str(mine) for port, mine in zip((9094, 9095), supernodes, strict=True)},
        }

    def type(self, command: str) -> str:
        """Run a command until it ends; one that keeps running is started, and awaited until its first output."""
        for there, here in self._here.items():
            command = command.replace(there, here)
        if _GOES_ON.match(command):
            return self._start(command)
        done = subprocess.run(
            ["bash", "-ec", command],
            env=self._variables(),
            cwd=self._folder,
            input=self._pasted(command),
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            check=False,
        )
        printed = done.stdout + done.stderr
        assert done.returncode == 0, f"{command}: {printed}\n{self._logs()}"
        if line := _LINE.search(done.stdout):
            name = re.search(r"--(?:device|name) (\S+)", command)
            assert name is not None
            self._lines[name[1]] = line[0]
        return printed

    def see(self, command: str, what: str, condition: Callable[[str], bool]) -> None:
        """Repeat a command until its output is as expected."""
        until(f"{what}\n{self._logs()}", lambda: condition(self.type(command)))

    def _pasted(self, command: str) -> str:
        name = re.search(r"agent join --device-id (\S+)", command)
        if name is not None:
            return self._lines[name[1]]
        return self._lines["superlink"] if command == "wattfleet join" else ""

    def _start(self, command: str) -> str:
        name = f"{len(self._started)}-{command.split()[0]}"
        part = self._parts.start(name, ["bash", "-c", f"cd {self._folder} && exec {command}"], self._variables())
        self._started.append(part.log)
        until(f"{command} says something", lambda: part.failure() or part.log.read_text())
        if command.startswith("wattfleet coordinator serve"):
            until("the coordinator serves", lambda: part.failure() or "coordinator serves" in part.log.read_text())
        failure = part.failure()
        assert failure is None, f"{failure}\n{self._logs()}"
        return ""

    def _variables(self) -> dict[str, str]:
        found = environment(self._environment)
        return {**found, "PATH": f"{Path(program('wattfleet')).parent}:{found['PATH']}"}

    def _logs(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in self._started)


@pytest.fixture
def desk(short_folder: Path) -> Iterator[Desk]:
    with Parts(short_folder / "logs") as parts:
        yield Desk(short_folder, parts)


def test_the_guide_leads_to_a_round_on_both_boards(desk: Desk) -> None:
    for block in blocks_of("desk"):
        for command in block.text.replace("\\\n", " ").split("\n"):
            if command == "wattfleet coordinator devices":
                desk.see(command, "both boards are ready", lambda shown: shown.count(" ready ") >= 2)
            elif command == "wattfleet flower connect":
                desk.see("wattfleet coordinator devices", "both are enrolled", lambda shown: "2 devices" in shown)
                desk.type(command)
                desk.see("flwr supernode list wattfleet", "both online", lambda shown: shown.count("online") >= 2)
            elif command.startswith("flwr run"):
                desk.type(command)
                found = json.loads(desk.type("wattfleet coordinator devices --json"))
                measured = {each["device_id"]: (each["profiled_modes"], each["detail"]) for each in found}
                assert len(measured) == 2 and all(modes for modes, _ in measured.values()), measured
            elif command == "wattfleet coordinator rounds":
                shown = desk.type(command)
                assert "finished" in shown and re.search(r"^ +1 +[12]\b", shown, re.MULTILINE), shown
            else:
                desk.type(command)
