"""The duty service alone: how many apps it serves at once, and what it learns from their messages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from edge_agent.runtime.app_requests import STATUS
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_figures import DutyFile
from edge_agent.serving.duty_service import DutyServicer, TooManyAppsError
from edge_agent.serving.inference import InferenceRows
from edge_agent.serving.server_stream import ServerGoneError
from edge_agent.serving.turns import Kind
from tests.fakes.duty_agent import LiveBoard, duty
from tests.fakes.real_time_board import MODE
from wattfleet.modes import Profile
from wattfleet_io.tasks import stop_tasks
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.v1 import duty_pb2

HELLO = duty_pb2.ServeRequest(hello=duty_pb2.ServerHello(largest_batch=1))
WANTED = duty_pb2.ShareRequest(wanted=duty_pb2.MinibatchWanted())


async def requests_of(request: Any) -> AsyncIterator[Any]:
    """The request stream of an app that sends one message and stays connected."""
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
    return DutyServicer(board, turns, DutyFile(tmp_path), InferenceRows(tmp_path))


@pytest.mark.parametrize(("method", "says"), [("Serve", HELLO), ("Share", WANTED)], ids=["Serve", "Share"])
def test_a_seventeenth_app_is_refused_until_another_has_gone(servicer, turns, method, says):
    async def connected() -> None:
        async for _ in getattr(servicer, method)(requests_of(says), None):
            pass

    async def seventeen() -> None:
        turns.serve_here()
        apps = [asyncio.create_task(connected()) for _ in range(16)]
        await asyncio.sleep(0.01)
        with pytest.raises(TooManyAppsError, match="16 .* are already connected, the maximum: close one of them"):
            await asyncio.wait_for(connected(), 1.0)
        await stop_tasks(apps.pop())
        apps.append(asyncio.create_task(connected()))
        await asyncio.sleep(0.01)
        assert not any(app.done() for app in apps)
        await stop_tasks(*apps)

    asyncio.run(seventeen())
    assert TooManyAppsError in STATUS


def test_turns_are_handed_out_while_measured_rows_are_stored(servicer, turns, monkeypatch):
    storing, stored = threading.Event(), threading.Event()

    def add(rows: InferenceRows, workload: str, measured: Profile) -> None:
        storing.set()
        assert stored.wait(10)

    monkeypatch.setattr(InferenceRows, "add", add)
    row = duty_pb2.MeasuredBatch(mode=mode_to_message(MODE), batch=1, batch_ms=10.0, power_mw=5e3)

    async def stores() -> None:
        turns.serve_here()
        setting = asyncio.create_task(
            servicer.SetDuty(duty_pb2.SetDutyRequest(duty=duty().to_json(), measured=[row]), None)
        )
        assert await asyncio.to_thread(storing.wait, 10)
        ticket = await turns.take(Kind.MINIBATCH)
        turns.give_back(ticket)
        assert turns.duty is None
        clearing = asyncio.create_task(servicer.ClearDuty(duty_pb2.ClearDutyRequest(), None))
        stored.set()
        await setting
        assert (await clearing).was_set, "one after the other"
        assert turns.duty is None
        turns.stop()

    asyncio.run(stores())


@pytest.mark.parametrize("measures", [False, True], ids=["protocol 2.5", "protocol 2.6"])
def test_only_a_server_that_measures_is_asked_to(servicer, turns, measures):
    async def answers() -> None:
        turns.serve_here()
        says: asyncio.Queue[Any] = asyncio.Queue()
        says.put_nowait(duty_pb2.ServeRequest(hello=duty_pb2.ServerHello(largest_batch=4, measures=measures)))
        says.put_nowait(duty_pb2.ServeRequest(measured=duty_pb2.BatchMeasured(number=1)))  # no measuring was requested
        says.put_nowait(duty_pb2.ServeRequest(answered=duty_pb2.BatchAnswered(batch=1, latency_ms=[1.0])))

        async def requests() -> AsyncIterator[Any]:
            while True:
                yield await says.get()

        async with aclosing(servicer.Serve(requests(), None)) as stream:
            await anext(stream)
            await asyncio.sleep(0.01)
            assert servicer.largest_measured == (4 if measures else 0)
            if not measures:
                with pytest.raises(ServerGoneError, match="no connected inference server can measure"):
                    await servicer.measured_ms(2, 10.0)
        turns.stop()

    asyncio.run(answers())


def test_a_batch_that_was_retried_one_by_one_tells_nothing_of_later_ones(tmp_path):
    time_s = 0.0
    turns = DeviceTurns(lambda: time_s)
    turns.in_mode(MODE)
    board: Any = LiveBoard()
    servicer = DutyServicer(board, turns, DutyFile(tmp_path), InferenceRows(tmp_path))
    kept = []

    async def answers() -> None:
        nonlocal time_s
        turns.serve_here()
        turns.duty = duty(latency_ms=100.0)
        says: asyncio.Queue[Any] = asyncio.Queue()
        says.put_nowait(HELLO)

        async def requests() -> AsyncIterator[Any]:
            while True:
                yield await says.get()

        async with aclosing(servicer.Serve(requests(), None)) as stream:
            await anext(stream)
            for number, (took_s, failed) in enumerate([(0.5, 0), (0.02, 0), (0.5, 1), (0.02, 0)]):
                waiting = duty_pb2.RequestsWaiting(count=1, wants_turn=True, number=number)
                says.put_nowait(duty_pb2.ServeRequest(waiting=waiting))
                await anext(stream)
                time_s += took_s
                answered = duty_pb2.BatchAnswered(batch=1, latency_ms=[1.0] * (1 - failed), failed=failed)
                says.put_nowait(duty_pb2.ServeRequest(answered=answered))
                await asyncio.sleep(0.01)
                kept.append(turns.keeps_duty(MODE))
        turns.stop()

    asyncio.run(answers())
    assert kept == [True, True, True, True]
