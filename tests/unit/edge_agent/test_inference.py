"""The inference of a duty: in which modes it is measured, and what is known about it in all modes."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.devices.device import DutyNotKeptError, PowerTrace
from edge_agent.learning.profiling_plan import ProfilingProgress
from edge_agent.paths import INFERENCE_DIRECTORY
from edge_agent.profiling.mode_measurement import ProfilerSettings
from edge_agent.serving import inference
from edge_agent.serving.duty_planning import InferenceMeasuring
from edge_agent.serving.inference import InferenceRows, batch_sizes, known_inference, no_rows, with_live_times
from edge_agent.serving.server_stream import ServerGoneError
from edge_agent.serving.turns import LiveTimes
from tests.fakes.boards import RealTimeBoard
from tests.fakes.duties import FAST, HALF, MODES, SLOW, Planning, duty_within
from wattfleet.core.choosing import KnownModes
from wattfleet.core.duties import largest_slowdown, largest_slowdowns
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Measurement, PowerMode, Profile, Task, array_to_modes, modes_to_array, read_profile
from wattfleet.core.prediction import Prediction, normal_quantile

# --- Inference measuring ----------------------------------------------------------------------------------------------
# Measuring the inference of a duty: in which modes, with which batch sizes, and when it ends.


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
        turns.duty = duty_within(1_000.0)
        settings = ProfilerSettings(minibatches=5, power_samples=3)
        board: Any = self.board
        self.measuring = InferenceMeasuring(board, turns, self.planning, self.rows, self.servers, modes, settings)
        self.reports: list[ProfilingProgress] = []

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
    bench.planning.turns.duty = duty_within(158.0)
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


# --- Known inference --------------------------------------------------------------------------------------------------
# A device's knowledge of inference in all modes: stored rows, predictions, and live times that correct them.

TWO_MODES = modes_to_array([FAST, HALF])


def rows_of(*rows: tuple[PowerMode, int, float, float]) -> Profile:
    measured = (Measurement(mode, ms, mw, batch) for mode, batch, ms, mw in rows)
    return Profile.of(measured, Task.INFERENCE)


def predicted(ms: float, log_sd: float = 0.1) -> Prediction:
    n = len(TWO_MODES)
    return Prediction(np.full(n, ms), np.full(n, 9_000.0), np.full(n, log_sd), np.full(n, 0.2))


def test_rows_are_stored_as_a_profile_and_the_latest_of_a_mode_and_batch_counts(tmp_path: Path) -> None:
    store = InferenceRows(tmp_path)
    assert len(store.read("camera")) == 0
    store.add("camera", rows_of((FAST, 1, 10.0, 9e3), (FAST, 4, 20.5, 9e3)))
    store.add("camera", rows_of((FAST, 1, 11.0, 9e3), (HALF, 1, 0.1 + 0.2, 8e3)))
    expected = rows_of((FAST, 4, 20.5, 9e3), (FAST, 1, 11.0, 9e3), (HALF, 1, 0.1 + 0.2, 8e3))
    assert InferenceRows(tmp_path).read("camera").canonical_rows() == expected.canonical_rows()
    (path,) = (tmp_path / INFERENCE_DIRECTORY).iterdir()
    assert read_profile(path).sha256() == expected.sha256(), "any tool of the project reads it"
    assert len(store.read("other")) == 0


def test_the_store_is_bounded_in_rows_and_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "MAX_ROWS", 2)
    monkeypatch.setattr(inference, "MAX_WORKLOADS", 2)
    store = InferenceRows(tmp_path)
    for number, name in enumerate(("first", "second", "third")):
        store.add(name, rows_of(*((FAST, batch, 10.0, 9e3) for batch in (1, 2, 4))))
        for path in (tmp_path / INFERENCE_DIRECTORY).glob(f"{name}*"):
            os.utime(path, (number, number))
    assert [store.read(name).batches for name in ("first", "second", "third")] == [(), (2, 4), (2, 4)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"cores,cpu_khz\n1,2\n",
        b"cores,cpu_khz,gpu_hz,mem_hz,batch,batch_ms,power_mw\n8,1,1,1,1,nan,9\n",
        b"cores,cpu_khz,gpu_hz,mem_hz,batch,batch_ms,power_mw\n8,1,1,1,1\n",
        b"cores,cpu_khz,gpu_hz,mem_hz,batch,batch_ms,power_mw\n8,1,1,1,x,3.0,9\n",
        b"cores,cpu_khz,gpu_hz,mem_hz,batch,batch_ms,power_mw\n" + 60_000 * b"8,1,1,1,1,3.0,9000.0\n",
    ],
    ids=["empty", "binary", "columns", "nan", "short", "word", "too large"],
)
def test_a_damaged_file_is_named_ignored_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    store = InferenceRows(tmp_path)
    store.add("camera", rows_of((FAST, 1, 10.0, 9e3)))
    (path,) = (tmp_path / INFERENCE_DIRECTORY).iterdir()
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match="is damaged: .*: remove the file"):
        store.read("camera")
    assert len(store.usable("camera")) == 0
    assert f"{path}: is damaged" in caplog.text
    store.add("camera", rows_of((FAST, 2, 10.0, 9e3)))
    assert store.read("camera").batches == (2,)


def test_rows_without_batches_or_of_training_are_refused(tmp_path: Path) -> None:
    one = np.array([10.0])
    for rows in (Profile(TWO_MODES[:1], one, one), Profile(TWO_MODES[:1], one, one, task=Task.INFERENCE)):
        with pytest.raises(InvalidInputError, match="rows of inference, each with its batch"):
            InferenceRows(tmp_path).add("camera", rows)


def test_batches_double_up_to_the_largest() -> None:
    assert [batch_sizes(each) for each in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_the_slowdowns_of_all_modes_are_those_of_each() -> None:
    rng = np.random.default_rng(7)
    modes = rng.integers(1, 9, (50, 4)).astype(np.float64)
    measured, *others = array_to_modes(modes)
    assert largest_slowdowns(measured, modes[1:]).tolist() == [largest_slowdown(measured, each) for each in others]


def test_measured_rows_replace_predictions_of_their_mode_and_batch() -> None:
    rows = rows_of((HALF, 4, 33.0, 7e3))
    known = known_inference(TWO_MODES, {1: predicted(10.0), 4: predicted(30.0)}, rows, {})
    assert known.stated_batch().tolist() == [1, 1, 4, 4]
    assert known.minibatch_ms.tolist() == [10.0, 10.0, 30.0, 33.0]
    assert known.measured.tolist() == [False, False, False, True]
    assert known.safe_minibatch_ms(0.95)[3] == 33.0
    unmeasured = known_inference(TWO_MODES, {1: predicted(10.0)}, no_rows(), {})
    assert not unmeasured.measured.any()


def test_a_seen_batch_counts_with_its_live_time_and_others_by_the_clocks() -> None:
    """In the fast mode, a batch of 4 took 40 ms live, where 100 ms were predicted."""
    known = known_inference(TWO_MODES, {1: predicted(90.0), 4: predicted(100.0), 8: predicted(500.0)}, no_rows(), {})
    safe_ms = with_live_times(known, {FAST: {4: 40.0}}).safe_minibatch_ms(0.95)
    # 1 request takes at most as long as 4, 8 at most twice as long, and half the GPU clock at most doubles each time.
    assert safe_ms == pytest.approx([40.0, 80.0, 40.0, 80.0, 80.0, 160.0])


def test_a_board_that_is_slower_than_known_counts_as_slower_everywhere() -> None:
    known = known_inference(TWO_MODES, {1: predicted(10.0), 4: predicted(20.0)}, no_rows(), {})
    corrected = with_live_times(known, {FAST: {1: 15.0}})
    high = math.exp(0.1 * normal_quantile(0.95))
    # Four requests take 30 ms, 1.5 times the prediction. This is below the 60 ms that follow from their number.
    expected = [15.0, 15.0 * high, 30.0 * high, 30.0 * high]
    assert corrected.safe_minibatch_ms(0.95) == pytest.approx(expected)
    assert corrected.power_mw.tolist() == known.power_mw.tolist(), "live times tell nothing of the watts"


def test_without_live_times_nothing_changes() -> None:
    known = known_inference(TWO_MODES, {1: predicted(10.0)}, no_rows(), {})
    assert with_live_times(known, {}) is known
    assert isinstance(known, KnownModes)


def test_live_times_count_once_there_are_enough_scaled_to_full_batches() -> None:
    times = LiveTimes()
    for number in range(8):
        assert times.full_batches_ms() == {}
        times.batch_answered(FAST, 3, 30.0, after_minibatch=number % 2 == 0)
    times.batch_answered(None, 1, 5.0, after_minibatch=False)
    times.batch_answered(HALF, 1, 5.0, after_minibatch=False)
    assert times.full_batches_ms() == {FAST: {4: 40.0}}
