"""A device's knowledge of inference in all modes: stored rows, predictions, and live times that correct them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from edge_agent.paths import INFERENCE_DIRECTORY
from edge_agent.serving import inference
from edge_agent.serving.inference import InferenceRows, batch_sizes, known_inference, no_rows, with_live_times
from edge_agent.serving.turns import LiveTimes
from wattfleet.choosing import KnownModes
from wattfleet.duties import largest_slowdown, largest_slowdowns
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, PowerMode, Profile, Task, array_to_modes, modes_to_array, read_profile
from wattfleet.prediction import Prediction, normal_quantile

FAST = PowerMode(8, 2_000_000, 1_000_000_000, 3_000_000_000)
HALF = PowerMode(8, 2_000_000, 500_000_000, 3_000_000_000)
MODES = modes_to_array([FAST, HALF])


def rows_of(*rows: tuple[PowerMode, int, float, float]) -> Profile:
    measured = (Measurement(mode, ms, mw, batch) for mode, batch, ms, mw in rows)
    return Profile.of(measured, Task.INFERENCE)


def predicted(ms: float, log_sd: float = 0.1) -> Prediction:
    n = len(MODES)
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
    for rows in (Profile(MODES[:1], one, one), Profile(MODES[:1], one, one, task=Task.INFERENCE)):
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
    known = known_inference(MODES, {1: predicted(10.0), 4: predicted(30.0)}, rows, {})
    assert known.stated_batch().tolist() == [1, 1, 4, 4]
    assert known.minibatch_ms.tolist() == [10.0, 10.0, 30.0, 33.0]
    assert known.measured.tolist() == [False, False, False, True]
    assert known.safe_minibatch_ms(0.95)[3] == 33.0
    unmeasured = known_inference(MODES, {1: predicted(10.0)}, no_rows(), {})
    assert not unmeasured.measured.any()


def test_a_seen_batch_counts_with_its_live_time_and_others_by_the_clocks() -> None:
    """In the fast mode, a batch of 4 took 40 ms live, where 100 ms were predicted."""
    known = known_inference(MODES, {1: predicted(90.0), 4: predicted(100.0), 8: predicted(500.0)}, no_rows(), {})
    safe_ms = with_live_times(known, {FAST: {4: 40.0}}).safe_minibatch_ms(0.95)
    # 1 request takes at most as long as 4, 8 at most twice as long, and half the GPU clock at most doubles each time.
    assert safe_ms == pytest.approx([40.0, 80.0, 40.0, 80.0, 80.0, 160.0])


def test_a_board_that_is_slower_than_known_counts_as_slower_everywhere() -> None:
    known = known_inference(MODES, {1: predicted(10.0), 4: predicted(20.0)}, no_rows(), {})
    corrected = with_live_times(known, {FAST: {1: 15.0}})
    high = math.exp(0.1 * normal_quantile(0.95))
    # Four requests take 30 ms, 1.5 times the prediction. This is below the 60 ms that follow from their number.
    expected = [15.0, 15.0 * high, 30.0 * high, 30.0 * high]
    assert corrected.safe_minibatch_ms(0.95) == pytest.approx(expected)
    assert corrected.power_mw.tolist() == known.power_mw.tolist(), "live times tell nothing of the watts"


def test_without_live_times_nothing_changes() -> None:
    known = known_inference(MODES, {1: predicted(10.0)}, no_rows(), {})
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
