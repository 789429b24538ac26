"""Whether the boards of a simulated fleet can keep their duties, and how the report shows them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from edge_agent.devices.selection import open_virtual_board
from edge_agent.devices.virtual.simulated import SpanFile
from edge_agent.paths import SERVED_FILE
from edge_agent.serving.device_turns import ServedSpan
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode
from wattfleet_simulation.report import duties_of
from wattfleet_simulation.run import duties_named, require_kept
from wattfleet_simulation.settings import SimulatedDevice

MODE = PowerMode(4, 1190400, 306000000, 665600000)


def require(duty: str) -> None:
    device = SimulatedDevice("orin-nano-0", "simulated:orin-nano", 1, 0, duty)
    require_kept([device], {"orin-nano-0": open_virtual_board(device.spec, device.seed)})


def test_a_latency_that_no_mode_keeps_is_refused_with_the_lowest_that_would_do() -> None:
    with pytest.raises(InvalidInputError, match="--duty mobilenetv3:60:5: orin-nano-0: no mode answers") as refused:
        require("mobilenetv3:60:5")
    lowest = re.search(r"allow at least (\d+) ms", str(refused.value))
    assert lowest is not None
    require(f"mobilenetv3:60:{int(lowest[1]) + 1}")
    with pytest.raises(InvalidInputError, match="no mode answers"):
        require(f"mobilenetv3:60:{int(lowest[1]) - 2}")


def test_more_requests_than_a_board_answers_are_refused_with_the_most_that_would_do() -> None:
    with pytest.raises(InvalidInputError, match=r"send at most [\d.]+ a second"):
        require("resnet:5000:500")


def test_a_replayed_board_has_no_duty(tmp_path: Path) -> None:
    file = tmp_path / "board.csv"
    file.write_text("cores,cpu_khz,gpu_hz,mem_hz,minibatch_ms,power_mw\n4,1190400,306000000,665600000,462.3,10931\n")
    device = SimulatedDevice("replay-0", f"replay:{file}", 0, 0, "resnet:5:500")
    with pytest.raises(InvalidInputError, match="replay-0: a replayed board has no inference measurements"):
        require_kept([device], {"replay-0": open_virtual_board(device.spec, 0)})
    require_kept([SimulatedDevice("replay-0", device.spec, 0, 0)], {})


def test_the_option_is_named_where_a_duty_is_refused() -> None:
    assert [duty.workload for duty in duties_named(["resnet:5:500", "mobilenetv3:5:500"])] == ["resnet", "mobilenetv3"]
    with pytest.raises(InvalidInputError, match="--duty: there are no measurements of the inference of 'vgg'"):
        duties_named(["resnet:5:500", "vgg:5:500"])


def span(begin_s: float, latencies_ms: list[float], minibatches: int = 0) -> ServedSpan:
    """Ten seconds in which a request arrives every second."""
    arrival_s = [begin_s + k for k in range(len(latencies_ms))]
    ends_s = (begin_s + 10 * (np.arange(minibatches) + 1) / max(1, minibatches)).tolist()
    return ServedSpan(begin_s, begin_s + 10, MODE, 64, minibatches > 0, 9e3, arrival_s, latencies_ms, ends_s)


def test_the_report_has_latencies_and_training_on_one_time_axis(tmp_path: Path) -> None:
    file = SpanFile(tmp_path / SERVED_FILE, ServedSpan)
    for each in (span(100, [20] * 10), span(110, [20] * 10), span(120, [400, 600, *[300] * 8], 20), span(900, [30])):
        file.append(each)
    part = {"device": "a", "predicted_epoch_s": 12.0, "observed_epoch_s": 10.0, "length_assumed": False}
    assumed = part | {"observed_epoch_s": 1.0, "length_assumed": True}
    runs = [{"rounds": [{"assignments": [part, assumed, part | {"device": "b"}]}]}]
    (duty,) = duties_of([SimulatedDevice("a", "", 0, 0, "resnet:1:500")], {"a": tmp_path}, runs).values()

    assert (duty["requests"], duty["missed"]) == (31, 1)
    assert duty["in_time_share"] == pytest.approx(30 / 31)
    assert duty["beside_training"]["p50_ms"] == 300
    assert duty["at_rest"]["p99_ms"] == pytest.approx(28, abs=2)
    assert (duty["minibatches"], duty["training_s"], duty["rest_s"]) == (20, 10, 30)
    assert (duty["training_of_plan"], duty["observed_trainings"]) == (1.2, 1)
    spans = [(each["begin_s"], each["end_s"], each["is_training"]) for each in duty["spans"]]
    assert spans == [(100, 120, False), (120, 130, True), (900, 910, False)]
    series, late = duty["series"], duty["late"]
    assert late == {"at_s": [121.0], "latency_ms": [600.0]}
    assert series["at_s"][0] == pytest.approx(100 + series["width_s"] / 2)
    assert sum(series["minibatches_per_s"]) * series["width_s"] == pytest.approx(20, rel=1e-3)
    during = [value for at_s, value in zip(series["at_s"], series["p50_ms"], strict=True) if 140 < at_s < 890]
    assert set(during) == {None}
    known = [(at_s, value) for at_s, value in zip(series["at_s"], series["p95_ms"], strict=True) if value is not None]
    assert max(known, key=lambda each: each[1])[0] == pytest.approx(121, abs=series["width_s"])


def test_boards_without_duties_are_not_in_the_report(tmp_path: Path) -> None:
    assert duties_of([SimulatedDevice("a", "", 0, 0)], {"a": tmp_path}, []) == {}
