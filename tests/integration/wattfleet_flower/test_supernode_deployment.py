"""`wattfleet-supernode` with a real SuperLink, and an app that trains nothing."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.fakes.polling import until
from wattfleet_simulation.flower import FlowerDeployment, Node, Part, Parts

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(180)]

APP = Path(__file__).parents[3] / "benchmarks" / "round_overhead" / "app"
RUNTIME = "Each message starts a new process"


@dataclass
class Running:
    """A SuperLink with one SuperNode that runs rounds."""

    deployment: FlowerDeployment
    superlink: Part
    supernode: Part
    result: Path
    run_id: str = ""

    def rounds(self) -> list[dict[str, float]]:
        """The rounds that have ended."""
        if not self.result.exists():
            return []
        return [json.loads(line) for line in self.result.read_text().splitlines() if line.endswith("}")]

    def fork_servers(self) -> list[psutil.Process]:
        """The fork servers, without the processes that they have forked."""
        children = psutil.Process(self.supernode.process.pid).children(recursive=True)
        servers = [child for child in children if "fork_server" in " ".join(_command(child))]
        return [server for server in servers if server.ppid() not in {other.pid for other in servers}]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Parts(tmp_path / "logs") as parts:
        node = Node("a", 0, tmp_path / "none.sock")
        deployment = FlowerDeployment(parts, tmp_path / "home", [node])
        superlink = deployment.start_superlink()
        deployment.connect()
        supernode = deployment.start_supernode(node)
        result = tmp_path / "rounds.jsonl"
        running = Running(deployment, superlink, supernode, result)
        until(lambda: len(running.fork_servers()) == 1)
        config = {"rounds": 8, "devices": 1, "waiting": "wattfleet", "result": str(result)}
        running.run_id = deployment.submit(APP, config)
        yield running


# The short form is `test_a_killed_server_is_replaced_by_flowers_own_start`.
@pytest.mark.slow
def test_rounds_go_on_when_the_fork_server_is_killed(running: Running) -> None:
    until(lambda: len(running.rounds()) >= 3)
    for server in running.fork_servers():
        server.kill()
    until(lambda: len(running.rounds()) == 8)
    assert all(len(each["nodes"]) == 1 for each in running.rounds()), "no message was lost"
    warnings = [line for line in running.supernode.log.read_text().splitlines() if RUNTIME in line]
    assert len(warnings) == 1 and "the fork server has ended" in warnings[0]


# The short form, of an enrolled device, is in `test_enrolled_deployment.py`.
@pytest.mark.slow
def test_a_plain_supernode_returns_to_a_superlink_that_was_restarted(running: Running) -> None:
    until(lambda: len(running.rounds()) >= 2)
    running.superlink.process.kill()
    running.superlink.process.wait()
    running.deployment.start_superlink()
    until(lambda: "has accepted this SuperNode again" in running.supernode.log.read_text(), within_s=120.0)
    before = len(running.rounds())
    config = {"rounds": 2, "devices": 1, "waiting": "wattfleet", "result": str(running.result)}
    running.deployment.submit(APP, config)
    until(lambda: len(running.rounds()) == before + 2, within_s=120.0)


def test_nothing_is_left_when_the_supernode_is_terminated(running: Running) -> None:
    until(lambda: len(running.rounds()) >= 2)
    servers = running.fork_servers()
    others = psutil.Process(running.supernode.process.pid).children(recursive=True)
    temporary = [Path(path) for path in re.findall(r"\S*/wattfleet-supernode-\w+", " ".join(servers[0].cmdline()))]
    assert temporary and all(path.is_dir() for path in temporary)
    running.supernode.process.send_signal(signal.SIGTERM)
    running.supernode.process.wait(timeout=30)
    _, alive = psutil.wait_procs([*servers, *others], timeout=30)
    assert not alive
    assert not any(path.exists() for path in temporary)
