"""The turns of a device on an event loop whose time is virtual: rates, resting modes, and the end of the agent."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.turns import Kind
from tests.fakes.duty_agent import duty
from tests.fakes.real_time_board import MODE


class _NoWait(selectors.SelectSelector):
    """Waits for nothing: the time until the next timer passes at once."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0.0)
        if not ready and timeout:
            self.passed_s += timeout
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
    """Answer one batch of one request."""
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
        for batch in range(200):  # 100 requests per s: 8 arrive during a minibatch, and their batch takes too long
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
