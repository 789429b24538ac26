"""The duty service of an agent on its unix socket, on a board in real time, and apps that use it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge_agent.runtime.app_trainings import AppTrainings
from edge_agent.runtime.unix_socket import serve_socket
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_figures import DutyFile
from edge_agent.serving.duty_service import DutyServicer
from edge_agent.serving.inference import InferenceRows
from edge_agent.serving.serving_board import DutyDevice
from tests.fakes.real_time_board import MODE, RealTimeBoard
from wattfleet.duties import ConstantArrivals, Duty
from wattfleet.modes import PowerMode
from wattfleet_io.clock import SystemClock


class LiveBoard(RealTimeBoard):
    """A board on the machine's own clock, whose mode changes take a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SystemClock()  # type: ignore[assignment]
        self.mode = MODE

    def apply(self, mode: PowerMode) -> None:
        time.sleep(0.005)
        self.mode = mode


class DutyAgent:
    """The operations of the agent that a test can use."""

    def __init__(self, socket: Path, board: Any) -> None:
        self.socket = str(socket)
        self.board = board
        self.turns = DeviceTurns()
        self.device = DutyDevice(board, self.turns)
        self.servicer = DutyServicer(board, self.turns, DutyFile(socket.parent), InferenceRows(socket.parent))
        self.loop = asyncio.new_event_loop()

    def set_duty(self, duty: Duty | None) -> None:
        """Set a duty, on the agent's own loop."""

        async def put() -> None:
            self.turns.duty = duty

        asyncio.run_coroutine_threadsafe(put(), self.loop).result(10)


def duty(latency_ms: float = 200.0, per_s: float = 20.0) -> Duty:
    return Duty("camera", ConstantArrivals(per_s), latency_ms)


@contextmanager
def duty_agent_at(socket: Path, in_force: Duty | None = None, board: Any = None) -> Iterator[DutyAgent]:
    """An agent that serves until the end of the block; it can be restarted at the same path."""
    agent = DutyAgent(socket, board or LiveBoard())
    ready, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        agent.turns.serve_here()
        agent.turns.duty = in_force
        agent.turns.in_mode(agent.board.current_mode())
        async with serve_socket(socket, AppTrainings("orin-nano-0"), agent.servicer):
            ready.set()
            await stop.wait()
            agent.turns.stop()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: agent.loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    try:
        yield agent
    finally:
        agent.loop.call_soon_threadsafe(stop.set)
        thread.join(10)
