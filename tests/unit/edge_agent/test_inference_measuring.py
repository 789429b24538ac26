"""Measuring the inference of a duty: in which modes, with which batch sizes, and when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.devices.device import DutyNotKeptError, PowerTrace
from edge_agent.learning.profiling_plan import Progress
from edge_agent.profiling.mode_measurement import ProfilerSettings
from edge_agent.serving.duty_planning import InferenceMeasuring
from edge_agent.serving.server_stream import ServerGoneError
from tests.fakes.planned_duty import FAST, HALF, MODES, SLOW, Planning, duty
from tests.fakes.real_time_board import RealTimeBoard
from wattfleet.modes import Measurement, PowerMode, Profile, Task


class Board(RealTimeBoard):
    """A board that draws 12 W in any mode. A test can take away its meter or make it refuse modes."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = MODES
        self.mode = FAST
        self.refused: set[PowerMode] = set()
        self.has_meter = True

    def apply(self, mode: PowerMode) -> None:
        if mode in self.refused:
            raise DutyNotKeptError("requests would be late")
        super().apply(mode)

    def start_meter(self) -> Any:
        board = self

        class Meter(RealTimeBoard.Meter):
            def read(self) -> PowerTrace:
                trace = super().read()
                return trace if board.has_meter else PowerTrace(trace.at_s, np.full(len(trace.at_s), np.nan))

        self.meters += 1
        return Meter(self)


class Servers:
    """Servers that repeat batches of up to 4 requests: 100 ms per request in SLOW, 50 ms in HALF and 25 ms in FAST."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.largest_measured = 4
        self.asked: list[tuple[PowerMode, int]] = []
        self.waits_s = 0.0
        self.gone_after = 10_000

    async def measured_ms(self, batch: int, work_ms: float) -> float:
        self.asked.append((self.board.mode, batch))
        if len(self.asked) > self.gone_after:
            raise ServerGoneError("the inference server has disconnected")
        took_ms = batch * {SLOW: 100.0, HALF: 50.0, FAST: 25.0}[self.board.mode]
        self.board.clock.sleep_s(self.waits_s + took_ms / 1e3)
        return took_ms


class Bench:
    """A device whose duty leaves time for training, and whose server has answered requests."""

    def __init__(self, folder: Path, modes: int = 3) -> None:
        self.planning, self.board = Planning(folder), Board()
        self.servers = Servers(self.board)
        turns, self.rows = self.planning.turns, self.planning.rows
        turns.server_connected(4)
        for _ in range(8):
            self.planning.times.batch_answered(FAST, 1, 10.0, False)

        def here(work: Any) -> Any:
            made: Coroutine[Any, Any, Any] = work()
            return asyncio.run(made)

        turns.measured = here  # type: ignore[method-assign]
        turns.duty = duty(1_000.0)
        settings = ProfilerSettings(minibatches=5, power_samples=3)
        board: Any = self.board
        self.measuring = InferenceMeasuring(board, turns, self.planning, self.rows, self.servers, modes, settings)
        self.reports: list[Progress] = []

    def measure(self) -> set[tuple[PowerMode, int, float, float]]:
        """Measure all wanted modes; returns all stored rows."""
        self.measuring.measure(self.measuring.wanted([]), self.reports.append)
        rows = self.rows.read("camera").measurements()
        return {(each.mode, each.batch or 0, round(each.minibatch_ms), each.power_mw) for each in rows}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_modes_that_keep_the_duty_are_measured_with_two_batches(bench: Bench) -> None:
    """A request may wait for a whole batch before its own: at most 500 ms each by the predictions."""
    bench.planning.front()
    rows = bench.measure()
    assert rows == {
        (mode, batch, batch * ms, 12e3) for mode, ms in ((SLOW, 100), (HALF, 50), (FAST, 25)) for batch in (1, 4)
    }
    assert bench.measuring.wanted([]) == [], "all modes are measured"
    assert [(each.done, each.total) for each in bench.reports] == [(1, 3), (2, 3), (3, 3)]
    assert bench.board.meters == bench.board.held == 0


def test_only_batches_that_leave_time_for_requests_are_measured(bench: Bench) -> None:
    bench.planning.turns.duty = duty(158.0)
    bench.planning.front()
    bench.measure()
    # Predictions: 40, 20 and 10 ms per request. Two batches of 80 ms take too long, although 95 % of requests are in
    # time.
    assert set(bench.servers.asked) == {(SLOW, 1), (HALF, 1), (HALF, 2), (FAST, 1), (FAST, 4)}


def test_no_more_modes_are_measured_than_asked_for_and_profiled_ones_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path, modes=2)
    bench.planning.front()
    assert bench.measuring.wanted([HALF]) == [HALF, FAST]
    bench.rows.add("camera", Profile.of([Measurement(SLOW, 100.0, 9e3, 1)], Task.INFERENCE))
    assert bench.measuring.wanted([SLOW, HALF]) == [HALF], "a row of another mode was stated"
    assert Bench(tmp_path, modes=0).measuring.wanted([FAST]) == []


def test_nothing_is_measured_before_a_plan_an_answer_and_a_duty(bench: Bench) -> None:
    assert bench.measuring.wanted([]) == [], "nothing can be planned yet"
    bench.planning.front()
    bench.servers.largest_measured = 0
    assert bench.measuring.wanted([]) == [], "no server has answered yet"
    bench.servers.largest_measured = 4
    assert bench.measuring.wanted([])
    bench.planning.turns.duty = None
    assert bench.measuring.wanted([]) == []


def test_a_board_without_a_meter_is_not_measured(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.planning.front()
    bench.board.has_meter = False
    with caplog.at_level(logging.WARNING):
        assert bench.measure() == set()
    assert "is not measured, as the board's power cannot be read" in caplog.text
    assert (bench.servers.asked, bench.measuring.wanted([])) == ([], [])


def test_measuring_ends_with_the_server_and_goes_on_with_the_next(bench: Bench) -> None:
    bench.planning.front()
    bench.servers.gone_after = 3
    assert bench.measure() == set()
    assert len(bench.servers.asked) == 4
    bench.servers.gone_after = 10_000
    assert len(bench.measure()) == 6


def test_a_mode_that_does_not_keep_the_duty_any_more_is_left_out(bench: Bench) -> None:
    bench.planning.front()
    bench.board.refused = {SLOW}
    assert {mode for mode, *_ in bench.measure()} == {HALF, FAST}
    assert bench.measuring.wanted([]) == [], "it is not tried again and again"
    bench.planning.front()
    assert bench.measuring.wanted([]) == [], "nor after another plan"


def test_a_mode_in_which_requests_leave_no_time_is_given_up(bench: Bench) -> None:
    bench.planning.front()
    bench.servers.waits_s = 70.0
    assert bench.measure() == set()
    assert len(bench.servers.asked) <= 3 * 3
