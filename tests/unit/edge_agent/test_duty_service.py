"""The duty service alone, and the turns of its device on an event loop with virtual time."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.runtime.app_requests import STATUS
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_figures import DutyFile
from edge_agent.serving.duty_service import DutyServicer, TooManyAppsError
from edge_agent.serving.inference import InferenceRows
from edge_agent.serving.server_stream import ServerGoneError
from edge_agent.serving.serving_board import DutyDevice
from edge_agent.serving.turns import TurnPurpose
from tests.fakes.boards import MODE, OTHER, PARKED
from tests.fakes.duties import LiveBoard, duty
from wattfleet.common.tasks import stop_tasks
from wattfleet.core.modes import Profile, modes_to_array
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.v1 import duty_pb2

# --- Duty service streams ---------------------------------------------------------------------------------------------
# The duty service alone: how many apps it serves at once, and what it learns from their messages.


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
        ticket = await turns.take(TurnPurpose.MINIBATCH)
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


# --- Device turns in virtual time -------------------------------------------------------------------------------------
# Turns of a device on an event loop with virtual time: rates, idle modes, and the end of the agent.


class _NoWait(selectors.SelectSelector):
    """A selector that never blocks: it adds the time until the next timer to `passed_s` instead."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0.0)
        if not ready and timeout:
            self.passed_s += max(timeout, 1e-6)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self._waits = _NoWait()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.passed_s


def run(loop: VirtualLoop, work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(work)


async def answer(turns: DeviceTurns, server: int, took_s: float, arrived: int = 1) -> None:
    """Take a turn for one batch of requests and answer it."""
    ticket = await turns.take(TurnPurpose.INFERENCE, server=server)
    await asyncio.sleep(took_s)
    turns.batch_answered(arrived, [took_s * 1e3], 0)
    turns.give_back(ticket)


def test_training_goes_on_when_requests_cease_although_no_server_reports_it():
    loop = VirtualLoop()
    turns = DeviceTurns(loop.time)
    turns.in_mode(MODE)

    async def requests_cease() -> None:
        turns.serve_here()
        turns.duty = duty(latency_ms=150.0)
        server = turns.server_connected(8)
        for batch in range(200):  # 100 requests per second: 8 arrive during a minibatch, and their batch would be late
            await answer(turns, server, 0.02, arrived=10)
            await asyncio.sleep(0.08)
            if batch % 20 == 0:
                ticket = await turns.take(TurnPurpose.MINIBATCH)
                await asyncio.sleep(0.08)
                turns.give_back(ticket)
        assert turns.why_training_waits() is None
        ceased_s = loop.time()
        ticket = await turns.take(TurnPurpose.MINIBATCH)
        await asyncio.sleep(0.08)
        turns.give_back(ticket)
        await turns.take(TurnPurpose.MINIBATCH)
        assert loop.time() - ceased_s < 40.0
        turns.stop()

    run(loop, requests_cease())


def test_without_a_mode_that_keeps_the_duty_a_device_stays_in_the_highest():
    turns = DeviceTurns(lambda: 0.0)
    modes = modes_to_array([PARKED, OTHER, MODE])
    turns.duty = duty(latency_ms=1.0)
    turns.server_connected(1)
    turns.in_mode(OTHER)
    turns.times.batch_answered(turns.mode, 1, 20.0, after_minibatch=False)
    assert not turns.is_rested(PARKED, modes)
    turns.in_mode(turns.resting_mode(PARKED, modes))
    assert turns.is_rested(PARKED, modes), "there is none better to change to"
    turns.duty = duty(latency_ms=1000.0)
    turns.in_mode(PARKED)
    assert not turns.is_rested(PARKED, modes)


def test_a_mode_that_keeps_the_duty_again_is_returned_to():
    turns = DeviceTurns(lambda: 0.0)
    modes = modes_to_array([PARKED, OTHER, MODE])
    turns.duty = duty(latency_ms=1.0)
    turns.server_connected(1)
    turns.in_mode(MODE)
    turns.times.batch_answered(turns.mode, 1, 20.0, after_minibatch=False)
    assert turns.resting_mode(PARKED, modes) == MODE
    turns.in_mode(OTHER)
    turns.duty = duty(latency_ms=1000.0)
    assert turns.is_rested(PARKED, modes), "it keeps this duty"


def test_a_mode_change_that_is_asked_for_while_the_agent_stops_goes_on():
    turns = DeviceTurns()
    turns.in_mode(MODE)
    changed = threading.Event()

    class ChangesLate(LiveBoard):
        def apply(self, mode):
            changed.set()

    board: Any = ChangesLate()
    device = DutyDevice(board, turns)

    async def stops() -> None:
        turns.serve_here()
        turns.server_connected(1)
        await turns.take(TurnPurpose.INFERENCE)  # so that no other turn is given
        changing = asyncio.get_running_loop().run_in_executor(None, device.apply, OTHER)
        time.sleep(0.1)  # blocks the event loop on purpose, while the call from the other thread is pending
        turns.stop()
        await changing

    asyncio.run(stops())
    assert changed.is_set()


def test_the_mode_in_force_is_noted_after_a_failed_change_and_a_restoration():
    class Fails(LiveBoard):
        def apply(self, mode):
            super().apply(OTHER)
            raise ModeNotAppliedError("another mode was read back")

        def restore(self, knobs):
            self.mode = PARKED

    turns = DeviceTurns()
    board: Any = Fails()
    device = DutyDevice(board, turns)
    turns.in_mode(MODE)
    with pytest.raises(ModeNotAppliedError):
        device.apply(MODE)
    assert turns.mode == OTHER
    device.restore({})
    assert turns.mode == PARKED
