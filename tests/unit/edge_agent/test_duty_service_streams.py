"""The duty's service alone: how many apps it serves at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from edge_agent.runtime.local_socket import STATUS
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_file import DutyFile
from edge_agent.serving.duty_service import DutyServicer, TooManyAppsError
from tests.fakes.duty_agent import LiveBoard
from tests.fakes.real_time_board import MODE
from wattfleet_io.tasks import stop_tasks
from wattfleet_proto.v1 import duty_pb2

HELLO = duty_pb2.ServeRequest(hello=duty_pb2.ServerHello(largest_batch=1))
WANTED = duty_pb2.ShareRequest(wanted=duty_pb2.MinibatchWanted())


async def requests_of(request: Any) -> AsyncIterator[Any]:
    """The requests of an app that says one thing and stays connected."""
    yield request
    await asyncio.Event().wait()


@pytest.fixture
def turns() -> DeviceTurns:
    turns = DeviceTurns()
    turns.in_mode(MODE)
    return turns


@pytest.fixture
def servicer(turns, tmp_path) -> DutyServicer:
    board: Any = LiveBoard()
    return DutyServicer(board, turns, DutyFile(tmp_path))


@pytest.mark.parametrize(("method", "says"), [("Serve", HELLO), ("Share", WANTED)], ids=["Serve", "Share"])
def test_a_seventeenth_app_is_refused_until_another_has_gone(servicer, turns, method, says):
    async def connected() -> None:
        async for _ in getattr(servicer, method)(requests_of(says), None):
            pass

    async def seventeen() -> None:
        turns.serve_here()
        apps = [asyncio.create_task(connected()) for _ in range(16)]
        await asyncio.sleep(0.01)
        with pytest.raises(TooManyAppsError, match="16 .* are connected already: close one of them"):
            await asyncio.wait_for(connected(), 1.0)
        await stop_tasks(apps.pop())
        apps.append(asyncio.create_task(connected()))
        await asyncio.sleep(0.01)
        assert not any(app.done() for app in apps)
        await stop_tasks(*apps)

    asyncio.run(seventeen())
    assert TooManyAppsError in STATUS
