"""Turns of a device on an event loop with virtual time: rates, idle modes, and the end of the agent."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.serving_board import DutyDevice
from edge_agent.serving.turns import Kind
from tests.fakes.duty_agent import LiveBoard, duty
from tests.fakes.real_time_board import MODE, OTHER, PARKED
from wattfleet.modes import modes_to_array


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
    ticket = await turns.take(Kind.INFERENCE, server=server)
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
                ticket = await turns.take(Kind.MINIBATCH)
                await asyncio.sleep(0.08)
                turns.give_back(ticket)
        assert turns.why_training_waits() is None
        ceased_s = loop.time()
        ticket = await turns.take(Kind.MINIBATCH)
        await asyncio.sleep(0.08)
        turns.give_back(ticket)
        await turns.take(Kind.MINIBATCH)
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
        await turns.take(Kind.INFERENCE)  # so that no other turn is given
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
