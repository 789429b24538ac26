"""The agent's socket: which connections it accepts, who may use it, and which messages an app may send."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge_agent.runtime.app_trainings import training_now
from edge_agent.runtime.peer_credentials import PeerCredentials
from edge_agent.runtime.readiness import parked_mode
from edge_agent.runtime.unix_socket import SocketAcceptor
from tests.fakes.agent_socket import FINISH, Agent, App, agent_at, granted, started
from tests.fakes.duties import duty_agent_at
from tests.fakes.polling import until
from wattfleet_proto.names import owner_socket
from wattfleet_proto.v1 import local_pb2

# --- Local socket -----------------------------------------------------------------------------------------------------
# The messages that an app may send over the agent's socket: others are refused, with at most one log line.


TRAIN = "/wattfleet.v1.LocalAgentService/Train"
INVALID = grpc.StatusCode.INVALID_ARGUMENT
GRANT_IDS = itertools.count(2)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with agent_at(tmp_path_factory.mktemp("agent") / "agent.sock") as running:
        yield running


def outcome(agent: Agent, *requests: bytes) -> tuple[grpc.StatusCode, str, int]:
    """Send messages and end the stream; returns its status, and the number of answers."""
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        call: Any = channel.stream_stream(TRAIN, None, None)(iter(requests))
        answers = 0
        try:
            for _ in call:
                answers += 1
        except grpc.RpcError:
            pass
        return call.code(), call.details(), answers


def granted_start(agent: Agent, plan_id: str) -> bytes:
    """The start of a training that the coordinator has granted; each grant is valid for one training."""
    agent.grant(granted(plan_id=plan_id, grant_id=next(GRANT_IDS)))
    return start(plan_id=plan_id)


def start(**other: Any) -> bytes:
    values = {"plan_id": "7/1", "device_id": "orin-nano-0", "epochs": 1.0}
    return local_pb2.TrainRequest(start=local_pb2.StartTraining(**{**values, **other})).SerializeToString()


def is_clean(caplog: pytest.LogCaptureFixture) -> bool:
    return "Traceback" not in caplog.text and "raised by servicer" not in caplog.text and len(caplog.text) < 10_000


def test_a_stream_that_ends_before_its_start_is_refused(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    code, text, _ = outcome(agent)
    assert code is INVALID and "before its Start" in text
    assert is_clean(caplog)


def test_a_stream_that_ends_before_its_finish_parks_the_device(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    code, text, answers = outcome(agent, granted_start(agent, "7/2"))
    assert code is grpc.StatusCode.ABORTED and "before its Finish" in text
    assert answers == 1
    until(lambda: agent.board.current_mode() == parked_mode(agent.board))
    assert is_clean(caplog)


@pytest.mark.parametrize(
    "request_", [b"\xff", b"\x0a\x05ab", b"\x0a\x04\x0a\x02\xff\xfe"], ids=["tag", "length", "utf8"]
)
def test_a_malformed_message_is_refused_in_one_line(
    agent: Agent, caplog: pytest.LogCaptureFixture, request_: bytes
) -> None:
    caplog.set_level(logging.DEBUG, "wattfleet_proto")
    code, text, _ = outcome(agent, request_)
    assert code is INVALID and "not a valid" in text
    assert is_clean(caplog)


def test_a_malformed_message_in_a_training_parks_the_device(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    code, _, answers = outcome(agent, granted_start(agent, "7/3"), b"\xff")
    assert code is INVALID and answers == 1
    until(lambda: agent.board.current_mode() == parked_mode(agent.board))
    assert is_clean(caplog)


def test_a_report_of_400000_minibatches_is_refused(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    report = local_pb2.MinibatchesTrained(minibatches=[local_pb2.MinibatchTimes()] * 400_000)
    request = local_pb2.TrainRequest(minibatches=report).SerializeToString()
    code, text, _ = outcome(agent, granted_start(agent, "7/4"), request)
    assert code is INVALID and "at most 10,000 minibatches" in text
    assert is_clean(caplog)


def test_ids_that_no_coordinator_gives_are_refused_in_a_short_text(agent: Agent) -> None:
    for request in (start(plan_id="x" * 10_000), start(device_id="x" * 10_000)):
        code, text, _ = outcome(agent, request)
        assert code is INVALID and len(text) < 500


def test_the_longest_plan_id_of_a_coordinator_is_accepted(agent: Agent) -> None:
    finish = local_pb2.TrainRequest(finish=local_pb2.FinishTraining(failed=True)).SerializeToString()
    code, text, _ = outcome(agent, granted_start(agent, "r" * 200 + "/1000000"), finish)
    assert code is grpc.StatusCode.OK, text


def test_a_training_that_cannot_begin_does_not_report_the_energy_of_the_one_before(agent: Agent) -> None:
    agent.reports.energies.clear()
    for plan_id, power_limit_w in (("7/5", 25.0), ("7/6", 1.0)):
        grant = granted(plan_id=plan_id, grant_id=next(GRANT_IDS), power_limit_w=power_limit_w)
        grant.counts_energy = True
        agent.grant(grant)
        code, _, _ = outcome(agent, start(plan_id=plan_id), FINISH.SerializeToString())
        assert (code is grpc.StatusCode.OK) == (plan_id == "7/5")
    until(lambda: len(agent.reports.energies) == 2)
    trained, refused = agent.reports.energies
    assert trained.plan_id == "7/5" and trained.energy_j > 0
    assert (refused.plan_id, refused.energy_j, refused.lasted_s) == ("7/6", 0.0, 0.0)


# --- Socket acceptor --------------------------------------------------------------------------------------------------
# Which connections the agent's socket accepts, and what happens to the others.

ROOT = 0


class Users:
    """Opens connections as different users; an accepted one is greeted by the server behind the socket."""

    def __init__(self, socket: Path) -> None:
        self.uid = ROOT
        self.opened: list[asyncio.StreamWriter] = []
        self._socket = socket

    async def opens(self, uid: int) -> bool:
        """Open a connection; returns whether it was accepted."""
        self.uid = uid
        reader, writer = await asyncio.open_unix_connection(self._socket)
        self.opened.append(writer)
        try:
            return await reader.read(5) == b"hello"
        except ConnectionError:
            return False

    async def open_many(self, uid: int) -> int:
        """Open connections until one is refused; returns how many were accepted."""
        accepted = 0
        while await self.opens(uid):
            accepted += 1
        return accepted


@pytest.fixture
async def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Users]:
    greeted: list[asyncio.StreamWriter] = []

    def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeted.append(writer)
        writer.write(b"hello")

    behind = await asyncio.start_unix_server(greet, tmp_path / "grpc")
    acceptor = SocketAcceptor(tmp_path / "grpc", lambda peer: peer.uid == ROOT)
    await acceptor.listen(tmp_path / "agent.sock", 0o600)
    opening = Users(tmp_path / "agent.sock")
    monkeypatch.setattr(PeerCredentials, "of", lambda connection: PeerCredentials(1, opening.uid, opening.uid))
    yield opening
    await acceptor.close()
    for writer in (*opening.opened, *greeted):
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    behind.close()
    await behind.wait_closed()


async def test_a_few_users_cannot_take_all_connections(users: Users) -> None:
    assert await users.open_many(1001) == 64
    for uid in range(1002, 1006):
        assert await users.open_many(uid) >= 5
    assert await users.opens(1006)
    assert all([await users.opens(ROOT) for _ in range(16)])


async def test_a_connection_that_cannot_be_passed_on_is_closed(
    users: Users, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    pass_on = loop.create_unix_connection

    async def failing(factory: Any, path: Any = None, **options: Any) -> Any:
        if path is not None:  # a connection of the test's user
            return await pass_on(factory, path, **options)
        raise OSError(24, "too many open files")

    monkeypatch.setattr(loop, "create_unix_connection", failing)
    assert not await asyncio.wait_for(users.opens(1001), 10)
    assert "connection closed: too many open files" in caplog.text


def test_two_agents_whose_sockets_differ_after_the_dot_do_not_share_a_folder(tmp_path: Path) -> None:
    with agent_at(tmp_path / "agent.a") as first, agent_at(tmp_path / "agent.b") as second:
        assert training_now(first.socket) is None and training_now(second.socket) is None
        assert len(list(tmp_path.glob("*/grpc"))) == 2


def test_whoever_may_not_enter_the_sockets_folder_sees_no_training(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    owner_socket(folder / "agent.sock").touch()
    uid = os.geteuid()
    folder.chmod(0o000)
    if uid == ROOT:
        os.seteuid(54_321)
    try:
        assert training_now(folder / "agent.sock") is None
    finally:
        os.seteuid(uid)
        folder.chmod(0o700)


# --- Socket users -----------------------------------------------------------------------------------------------------
# Who may use the agent's sockets, and what the agent reports about who trains.

DENIED = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture(scope="module")
def users_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with agent_at(tmp_path_factory.mktemp("agent") / "agent.sock") as running:
        yield running


# --- callers ------------------------------------------------------------------------------------------------------


def test_the_agent_tells_its_owner_and_its_log_who_trains(users_agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edge_agent")
    assert training_now(users_agent.socket) is None
    with grpc.insecure_channel(f"unix:{users_agent.socket}") as channel:
        app = App(channel)
        app.send(started("7/1"))  # as granted
        app.answer()
        shown = training_now(users_agent.socket)
        assert shown is not None
        assert (shown["plan_id"], shown["uid"], shown["pid"]) == ("7/1", os.getuid(), os.getpid())
        assert f"7/1 is trained by user {shown['user']}, process {os.getpid()}" in caplog.text
        app.send(FINISH)
        app.answer()
        app.end()
    assert training_now(users_agent.socket) is None


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


def test_grpcs_own_socket_is_for_the_agent_alone(users_agent: Agent) -> None:
    """A connection that does not come through the acceptor has no known user, and is refused even for root."""
    folder = users_agent.socket.with_name(f"{users_agent.socket.name}.d")
    assert folder.stat().st_mode & 0o777 == 0o700
    with grpc.insecure_channel(f"unix:{folder}/grpc") as channel:
        app = App(channel)
        app.send(started("7/1"))
        code, reason = app.refusal()
        app.end()
    assert code is DENIED and "no known user" in reason
