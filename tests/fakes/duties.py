"""An agent's duty service with apps that use it, and a device whose plans beside a duty are known."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.learning.fitting import FittedModes
from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.runtime.app_trainings import AppTrainings
from edge_agent.runtime.unix_socket import serve_socket
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_figures import DutyFile
from edge_agent.serving.duty_planning import DutyPlanning
from edge_agent.serving.duty_service import DutyServicer
from edge_agent.serving.inference import InferenceRows
from edge_agent.serving.serving_board import DutyDevice
from edge_agent.serving.turns import LiveTimes
from tests.fakes.boards import MODE, RealTimeBoard
from wattfleet.common.clock import SystemClock
from wattfleet.core.choosing import Front
from wattfleet.core.duties import ConstantArrivals, Duty
from wattfleet.core.modes import PowerMode, Profile, Workload, array_to_modes, modes_to_array
from wattfleet.core.prediction import Prediction

# --- Duty agent -------------------------------------------------------------------------------------------------------
# The duty service of an agent on its unix socket, on a board in real time, and apps that use it.


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


# --- Planned duty -----------------------------------------------------------------------------------------------------
# A device with three modes whose inference and training are known, and its plans beside a duty.

SLOW = PowerMode(8, 2_000_000, 250_000_000, 3_000_000_000)
HALF = PowerMode(8, 2_000_000, 500_000_000, 3_000_000_000)
FAST = PowerMode(8, 2_000_000, 1_000_000_000, 3_000_000_000)
MODES = modes_to_array([SLOW, HALF, FAST])
NONE = np.zeros(3)
TRAINING = Prediction(np.array([80.0, 40.0, 20.0]), np.array([5e3, 9e3, 15e3]), NONE, NONE)
KNOWN = KnownWorkload(Workload("digits"), 100)


class Planning(DutyPlanning):
    """Inference takes 40, 20 and 10 ms a request in the three modes; counts the predictions."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.turns, self.rows = DeviceTurns(lambda: self.now_s), InferenceRows(folder)
        self.times: LiveTimes = self.turns._turns.times  # noqa: SLF001 - the times that the turns observe
        super().__init__(self.turns, self.rows, MODES)
        self.turns.judge = self.judge
        self.fit = self.predict
        self.fits: list[tuple[str, tuple[int, ...], int]] = []

    def predict(self, workload: str, batches: tuple[int, ...], rows: Profile) -> Mapping[int, Prediction]:
        self.fits.append((workload, batches, len(rows)))
        power_mw = np.array([4e3, 7e3, 20e3])
        return {batch: Prediction(np.array([40.0, 20.0, 10.0]) * batch, power_mw, NONE, NONE) for batch in batches}

    def front(self) -> Front:
        fitted = FittedModes(MODES, TRAINING, {}, KNOWN)
        return fitted.front(KNOWN, np.ones(3, dtype=bool), 0.0, self.beside)[0]

    def modes_of_front(self) -> set[PowerMode]:
        return set(array_to_modes(self.front().modes))


def duty_within(latency_ms: float, per_s: float = 1.0) -> Duty:
    return Duty("camera", ConstantArrivals(per_s), latency_ms)
