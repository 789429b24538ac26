"""A SuperNode reports whether it can reach its device's agent, over real sockets."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from flwr.app import ConfigRecord, RecordDict

from tests.fakes.agent_socket import Agent, answered, context, message
from wattfleet_flower import power_mode_mod
from wattfleet_flower.client.mod import pairing_problem
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, PAIRING_PROBLEM_KEY, RECORD_KEY

NOBODY = 65_534


@contextmanager
def old_agent(path: Path) -> Iterator[None]:
    """An agent of an earlier version, which does not know any of the calls."""
    with ThreadPoolExecutor(1) as workers:
        server = grpc.server(workers)
        server.add_insecure_port(f"unix:{path}")
        server.start()
        yield
        server.stop(None).wait()


def told(path: Path, device_id: str = "orin-nano-0") -> ConfigRecord:
    request = message(RecordDict({RECORD_KEY: ConfigRecord({IDENTIFY_KEY: True})}))
    reply = power_mode_mod(request, context(**{DEVICE_ID_KEY: device_id, "agent-socket": str(path)}), answered)
    assert not reply.has_error(), "Flower's server would exclude the node for ten minutes"
    record = reply.content[RECORD_KEY]
    assert record[DEVICE_ID_KEY] == device_id
    return record


def test_a_node_with_its_agent_has_no_problem(agent: Agent) -> None:
    assert told(agent.socket)[PAIRING_PROBLEM_KEY] == ""


def test_the_agent_of_another_device_is_named(agent: Agent) -> None:
    problem = told(agent.socket, "orin-nano-1")[PAIRING_PROBLEM_KEY]
    assert f"the socket {agent.socket} belongs to orin-nano-0, but the SuperNode names orin-nano-1" in problem
    assert "--node-config 'device-id=\"orin-nano-0\"'" in problem


def test_a_socket_that_does_not_exist_is_named(tmp_path: Path) -> None:
    problem = told(tmp_path / "absent.sock")[PAIRING_PROBLEM_KEY]
    assert problem.startswith(f"there is no socket {tmp_path / 'absent.sock'}")
    assert "systemctl start wattfleet-agent" in problem and 'agent-socket="..."' in problem


def test_an_agent_that_was_killed_is_away(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert str(told(path)[PAIRING_PROBLEM_KEY]).startswith(f"no agent listens at {path}: start it")


def test_a_path_that_no_socket_can_have_is_told(tmp_path: Path) -> None:
    assert "cannot be used" in str(told(tmp_path / ("long" * 40))[PAIRING_PROBLEM_KEY])


def test_an_older_agent_is_not_a_problem(tmp_path: Path) -> None:
    with old_agent(tmp_path / "agent.sock"):
        assert PAIRING_PROBLEM_KEY not in told(tmp_path / "agent.sock")


def test_an_agent_that_hangs_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattfleet_flower.client.mod._WITHIN_S", 0.2)
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(tmp_path / "agent.sock"))
        hanging.listen()
        assert "does not answer" in str(told(tmp_path / "agent.sock")[PAIRING_PROBLEM_KEY])


def _as_nobody(path: str, tell: Callable[[str | None], None]) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    tell(pairing_problem("orin-nano-0", path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_user_who_may_not_use_the_socket_is_told_the_group(agent: Agent) -> None:
    # The test's folders are accessible to root only.
    folder = agent.socket.parent
    while folder != folder.parent and not folder.stat().st_mode & 0o001:
        folder.chmod(folder.stat().st_mode | 0o011)
        folder = folder.parent
    processes = multiprocessing.get_context("spawn")
    answers: multiprocessing.SimpleQueue[str | None] = processes.SimpleQueue()
    process = processes.Process(target=_as_nobody, args=(str(agent.socket), answers.put))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    problem = answers.get()
    assert problem is not None and "may not use the socket" in problem and "usermod -aG" in problem


def test_a_device_that_is_being_prepared_tells_its_name(agent: Agent) -> None:
    trainings = agent.trainings
    is_away = threading.Event()
    agent.loop.call_soon_threadsafe(lambda: (setattr(trainings, "_ready", None), is_away.set()))
    assert is_away.wait(10)
    assert told(agent.socket)[PAIRING_PROBLEM_KEY] == ""
