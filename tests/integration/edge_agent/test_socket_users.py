"""Who may use the agent's sockets, and what the agent reports about who trains."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from edge_agent.runtime.app_trainings import training_now
from tests.fakes.agent_socket import Agent, agent_at
from tests.fakes.duty_agent import duty_agent_at
from tests.fakes.streaming_app import FINISH, App, started
from wattfleet_proto.names import owner_socket

TRAIN = "/wattfleet.v1.LocalAgentService/Train"
DENIED = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with agent_at(tmp_path_factory.mktemp("agent") / "agent.sock") as running:
        yield running


# --- callers ------------------------------------------------------------------------------------------------------


def test_the_agent_tells_its_owner_and_its_log_who_trains(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edge_agent")
    assert training_now(agent.socket) is None
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        app = App(channel)
        app.send(started("7/1"))  # as granted
        app.answer()
        shown = training_now(agent.socket)
        assert shown is not None
        assert (shown["plan_id"], shown["uid"], shown["pid"]) == ("7/1", os.getuid(), os.getpid())
        assert f"7/1 is trained by user {shown['user']}, process {os.getpid()}" in caplog.text
        app.send(FINISH)
        app.answer()
        app.end()
    assert training_now(agent.socket) is None


OTHER_USER, MEMBERS = 54_321, 54_322
ANOTHER_USERS_CALL = """
import os, sys
socket, method, groups, uid, gid = sys.argv[1:]
import grpc
from wattfleet_proto.v1 import duty_pb2, duty_pb2_grpc, local_pb2, local_pb2_grpc
os.setgroups([int(each) for each in groups.split(",") if each])
os.setgid(int(gid)); os.setuid(int(uid))
with grpc.insecure_channel("unix:" + socket) as channel:
    stub = local_pb2_grpc.LocalAgentServiceStub(channel)
    start = local_pb2.TrainRequest(start=local_pb2.StartTraining(plan_id="none", device_id="orin-nano-0", epochs=1))
    try:
        if method == "Train":
            list(stub.Train(iter([start])))
        else:
            stub.ShowTraining(local_pb2.ShowTrainingRequest(), timeout=10)
    except grpc.RpcError as error:
        print(error.code().name, error.details())
"""


@contextmanager
def open_to_everybody(path: Path) -> Iterator[None]:
    """Allow every user to connect, as after a mistaken chmod, so that the agent itself has to refuse."""
    for folder in path.parents:
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    for each in (path, owner_socket(path)):
        each.chmod(0o666)
    yield


CALLS = [  # the caller, the call, and the answer
    ("Train", OTHER_USER, "", "PERMISSION_DENIED", f"user {OTHER_USER} may not use the agent's socket"),
    ("Train", MEMBERS, "", "RESOURCE_EXHAUSTED", "is being prepared"),
    ("Train", OTHER_USER, f"{MEMBERS}", "RESOURCE_EXHAUSTED", "is being prepared"),
    ("owner", MEMBERS, f"{MEMBERS}", "PERMISSION_DENIED", "only the user of the agent"),
]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.timeout(300)  # each call is a process of its own
def test_only_root_the_agents_user_and_members_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getegid", lambda: MEMBERS)  # the group of the agent's process
    with duty_agent_at(tmp_path / "agent.sock") as running, open_to_everybody(Path(running.socket)):
        for method, gid, groups, code, reason in CALLS:
            path = running.socket if method == "Train" else owner_socket(Path(running.socket))
            ended = subprocess.run(
                [sys.executable, "-c", ANOTHER_USERS_CALL, str(path), method, groups, str(OTHER_USER), str(gid)],
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.stdout.startswith(code) and reason in ended.stdout, ended.stdout + ended.stderr


def test_grpcs_own_socket_is_for_the_agent_alone(agent: Agent) -> None:
    """A connection that does not come through the acceptor has no known user, and is refused even for root."""
    folder = agent.socket.with_name(f"{agent.socket.name}.d")
    assert folder.stat().st_mode & 0o777 == 0o700
    with grpc.insecure_channel(f"unix:{folder}/grpc") as channel:
        app = App(channel)
        app.send(started("7/1"))
        code, reason = app.refusal()
        app.end()
    assert code is DENIED and "no known user" in reason
