"""Which connections the agent's socket accepts, and what happens to the others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from edge_agent.runtime.app_trainings import training_now
from edge_agent.runtime.peer_credentials import PeerCredentials
from edge_agent.runtime.unix_socket import SocketAcceptor
from tests.fakes.agent_socket import agent_at
from wattfleet_proto.names import owner_socket

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
