"""What the page and commands show: texts about devices, axes of plots, costs of runs, and `--watch`."""

from __future__ import annotations

import io
import os
import sys
from datetime import datetime, timezone
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from coordinator.cli.options import Viewport
from coordinator.display.values import run_energy, trainings_words
from coordinator.display.words import (
    RunNames,
    granted,
    in_state_for,
    last_training,
    live_line,
    prediction_errors,
    profiling_left,
    troubles,
    trust,
    worst_first,
)
from coordinator.page.plots import Timeline, round_log_values, round_values
from coordinator.page.queries import Queries
from coordinator.page.snapshots import RunCosts
from wattfleet.common.console import duration_text, keyboard
from wattfleet.core.modes import PowerMode
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.v1 import planning_pb2, view_pb2

# --- Words about devices ----------------------------------------------------------------------------------------------
# The text that describes a device in lists, and the order of these lists.


NOW = 10_000.0
NAMES = RunNames([{"run_id": "4711", "name": "digits-night"}])


def device(name: str, state: str, **values: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        **{"left_out": None, "drained": False, "fastest_epoch_s": 9.0, "sample": None, "throttled_unix_s": None},
        **{"observed_w": 20.0, "observed_limit_w": 20.0},
        **{"observed_run_id": "4711", "observed_round": 2, "is_observed_run_live": True},
        **{"prediction_errors": None, "trust": None},
        **{"granted_w": None, "granted_plan_id": None, "confirmed_w": None},
    }
    return {"device_id": name, "state": state, **usual, **values}


def test_devices_that_need_somebody_come_first() -> None:
    found = [
        device("a ready one", "ready"),
        device("a slow one", "ready", fastest_epoch_s=30.0),
        device("drained", "ready", drained=True),
        device("without a front", "ready", fastest_epoch_s=None),
        device("training", "training"),
        device("profiling", "profiling"),
        device("too thirsty", "ready", observed_w=21.0),
        device("too thirsty and throttled", "ready", observed_w=21.0, throttled_unix_s=NOW - 30),
        device("doubtful", "ready", left_out="its observations contradict its predictions"),
        device("failing", "degraded"),
        device("b away", "offline"),
        device("a away", "offline"),
    ]
    assert [each["device_id"] for each in worst_first(found, NOW)] == [
        *("a away", "b away", "doubtful", "failing", "too thirsty and throttled", "too thirsty"),
        *("profiling", "training", "drained", "a slow one", "a ready one", "without a front"),
    ]


def test_a_device_is_hot_throttled_or_over_budget_by_what_was_seen_of_it() -> None:
    assert troubles(device("orin", "training"), NOW) == []
    hot = device("orin", "training", sample={"temperature_c": 85.0})
    assert troubles(hot, NOW) == ["hot"]
    assert troubles({**hot, "sample": {"temperature_c": 84.9}}, NOW) == []
    assert troubles({**hot, "sample": {"temperature_c": None}}, NOW) == []
    throttled = device("orin", "training", throttled_unix_s=NOW - 599)
    assert troubles(throttled, NOW) == ["throttled"]
    assert troubles(throttled, NOW + 2) == []
    over = device("orin", "ready", observed_w=20.1)
    assert troubles(over, NOW) == ["over budget"]
    assert troubles({**over, "is_observed_run_live": False}, NOW) == [], "nothing can be done for an ended run"
    assert troubles({**over, "observed_w": None, "observed_limit_w": None}, NOW) == []


def test_a_last_training_is_told_with_what_was_allowed_and_its_round() -> None:
    over = device("orin", "ready", observed_w=20.1)
    assert last_training(over, NAMES) == "20.1 W of 20.0 W allowed, in round 2 of run digits-night"
    assert last_training(over, RunNames([])).endswith("of run 4711"), "a deleted run has no name any more"
    assert last_training({**over, "is_observed_run_live": False}, NAMES).endswith("digits-night, which has ended")
    assert last_training({**over, "observed_w": None}, NAMES) == "no training yet"
    older = {**over, "observed_run_id": None, "observed_round": None, "is_observed_run_live": False}
    assert last_training(older, NAMES) == "20.1 W of 20.0 W allowed"


def errors(trainings: int, times: tuple[float, float, float] | None, powers: tuple[float, float, float]) -> Any:
    """Prediction errors, given the least, the most and the last ratio."""
    ratios = {"time": times or (None, None, None), "power": powers}
    ends = ("least", "most", "last")
    of_ends = {
        f"{end}_{what}_ratio": each for what, found in ratios.items() for end, each in zip(ends, found, strict=True)
    }
    return {"trainings": trainings, **of_ends}


def test_predictions_that_are_far_off_are_said_beside_the_trust() -> None:
    drifting = device("orin", "ready", trust=1.0, prediction_errors=errors(3, (1.58, 2.79, 1.58), (0.98, 1.02, 1.02)))
    assert troubles(drifting, NOW) == ["off prediction"]
    assert trust(drifting).startswith(
        "100% of recent predictions not contradicted (a contradiction is a factor of 3 in"
    )
    assert prediction_errors(drifting) == (
        "its last training took 58% more time, and drew 2% more watts than predicted; its last 3: in time +58% to"
        " +179%, in watts -2% to +2%"
    )
    assert troubles({**drifting, "is_observed_run_live": False}, NOW) == []
    beside_a_duty = device("orin", "ready", prediction_errors=errors(1, None, (0.9, 0.9, 0.9)))
    assert prediction_errors(beside_a_duty) == "its last training drew 10% fewer watts than predicted"
    assert troubles(beside_a_duty, NOW) == []
    for time_ratio, power_ratio, is_off in ((1.25, 1.0, False), (0.74, 1.0, True), (1.0, 1.16, True)):
        seen = errors(1, (time_ratio,) * 3, (power_ratio,) * 3)
        assert bool(troubles(device("orin", "ready", prediction_errors=seen), NOW)) is is_off, time_ratio


def test_a_device_that_trains_is_never_granted_nothing_without_a_reason() -> None:
    assert granted(device("orin", "ready"), NAMES) == "nothing beyond idle power"
    over = granted(device("orin", "training"), NAMES)
    assert over == "nothing any more: its training is over, and it learns from it"
    trains = device("orin", "training", granted_w=30.7, granted_plan_id="4711/3")
    assert granted(trains, NAMES) == "30.7 W for round 3 of run digits-night, not confirmed yet"
    assert granted({**trains, "confirmed_w": 30.7}, NAMES).endswith("night, confirmed")
    stopped = granted({**trains, "granted_w": 0.0}, NAMES)
    assert stopped == "nothing any more: it was told to stop its training of round 3 of run digits-night"


def test_what_a_board_says_is_one_line_without_what_it_does_not_report() -> None:
    sample = {
        **{"power_w": 12.34, "temperature_c": 61.6, "fan_share": 0.4, "gpu_use_share": None},
        "mode": {"cores": 4, "cpu_khz": 1_500_000, "gpu_hz": 600_000_000, "mem_hz": 2_133_000_000},
    }
    assert live_line(sample) == "12.3 W, 62 °C, 4c 1.50/0.60/2.13, fan 40%"
    assert live_line(None).startswith("unknown: it is offline")


def test_a_device_offline_since_before_the_start_counts_from_its_last_report() -> None:
    seen = {"state_since_unix_s": None, "last_seen_unix_s": 1000.0}
    assert in_state_for({**seen, "state": "offline"}, 1000.0 + 7200) == "2 h"
    assert in_state_for({**seen, "state": "ready"}, 1000.0 + 7200) == "-"
    assert in_state_for({**seen, "state": "ready", "state_since_unix_s": 8000.0}, 8045.0) == "45 s"


def test_profiling_that_takes_longer_than_expected_is_overdue() -> None:
    texts = [profiling_left({"profiling_left_s": left_s}) for left_s in (None, 95.0, 0.0)]
    assert texts == ["-", "≤ 95 s", "overdue"]


@pytest.mark.parametrize(
    ("observed", "trainings", "words"),
    [(1, 1, "1 training"), (0, 1, "0 of 1 training"), (9, 9, "9 trainings"), (7, 9, "7 of 9 trainings")],
)
def test_the_trainings_that_an_energy_covers_are_counted_in_words(observed: int, trainings: int, words: str) -> None:
    assert trainings_words(observed, trainings) == words


# --- Axes of the page's plots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (0.3, [0, 0.1, 0.2, 0.3]),
        (1, [0, 0.5, 1]),
        (23.1, [0, 10, 20]),
        (60, [0, 20, 40, 60]),
        (12_345.6, [0, 5_000, 10_000]),
    ],
)
def test_an_axis_has_round_values(most: float, expected: list[float]) -> None:
    assert round_values(most, 4) == expected


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (90.0, ["0.0 s", "20.0 s", "40.0 s", "60.0 s", "80.0 s"]),
        (3_000.0, ["0.0 s", "10 min", "20 min", "30 min", "40 min", "50 min"]),
        (9_000.0, ["0.0 s", "30 min", "60 min", "90 min", "2.0 h", "2.5 h"]),
        (72_000.0, ["0.0 s", "5.0 h", "10.0 h", "15.0 h", "20.0 h"]),
    ],
)
def test_a_rounds_timeline_is_labelled_at_round_times(seconds: float, labels: list[str]) -> None:
    drawn = Timeline.of([], {"planned_s": seconds})
    assert [duration_text(tick_s) for _, tick_s in drawn.ticks] == labels


@given(most=st.floats(1e-6, 1e9), about=st.integers(3, 8))
def test_values_are_few_evenly_spaced_and_within_the_axis(most: float, about: int) -> None:
    values = round_values(most, about)
    assert values[0] == 0 and 2 <= len(values) <= about + 1
    assert values[-1] <= most * 1.001
    step = values[1]
    assert f"{step:.0e}"[0] in "125" and step == pytest.approx(float(f"{step:.0e}"))
    assert values == pytest.approx([k * step for k in range(len(values))])
    assert values[-1] + step > most * 0.999, "no further value has room"


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        (12, 43.2, [15, 20, 30]),
        (0.8, 21, [1, 3, 10]),
        (0.02, 700, [0.1, 1, 10, 100]),
        (3, 90, [3, 10, 30]),
        (40, 400, [50, 100, 200]),
        (104, 131, [110, 120, 130]),
        (27.1, 27.9, [27.2, 27.4, 27.6, 27.8]),
        (31, 31, [31]),
    ],
)
def test_a_logarithmic_axis_has_round_values(least: float, most: float, expected: list[float]) -> None:
    assert round_log_values(least, most, 5) == expected


@given(least=st.floats(1e-3, 1e7), ratio=st.floats(1.001, 1e6))
def test_a_logarithmic_axis_has_a_few_ascending_values_within(least: float, ratio: float) -> None:
    most = least * ratio
    values = round_log_values(least, most, 5)
    assert 2 <= len(values) <= 9
    assert values == sorted(set(values))
    assert least * 0.999 <= values[0] and values[-1] <= most * 1.001
    assert all(float(f"{value:.5g}") == pytest.approx(value, rel=1e-12) for value in values)


# --- Run costs --------------------------------------------------------------------------------------------------------
# The totals of ended runs are cached, but never kept without observations that arrive after the end.


class Rounds:
    """The only round of a run, and how often it was read."""

    def __init__(self) -> None:
        self.view = view_pb2.RoundView(run_id="a", round=1, devices=2, observed_trainings=1, training_j=640.0)
        self.read = 0

    async def rounds(self, run_id: str) -> list[view_pb2.RoundView]:
        self.read += 1
        return [self.view]


async def test_an_observation_that_arrives_after_the_end_of_a_run_is_counted_soon() -> None:
    found, now_s = Rounds(), 0.0
    costs = RunCosts(cast(Queries, found), lambda: now_s)
    run = view_pb2.RunView(run_id="a", finished=True, finished_unix_s=1.0)

    async def shown() -> Any:
        values = await costs.of(run)
        return values["training_j"], values["observed_trainings"], values["trainings"]

    assert [await shown() for _ in range(2)] == [(640.0, 1, 2)] * 2 and found.read == 1
    found.view.observed_trainings, found.view.training_j = 2, 1180.0
    now_s = 11.0
    assert await shown() == (1180.0, 2, 2)
    now_s = 1e6
    assert await shown() == (1180.0, 2, 2) and found.read == 2, "complete totals are read once"


# --- `--watch` --------------------------------------------------------------------------------------------------------
# `--watch` in a terminal that is too low for all lines: what it shows, and which keys it handles.

LINES = 30
CONTENT = Text("\n".join(f"device-{k}" for k in range(LINES)))


def drawn(view: Viewport, height: int = 12, width: int = 80) -> list[str]:
    shown = io.StringIO()
    Console(file=shown, force_terminal=True, color_system=None, width=width, height=height).print(view)
    return [line.rstrip() for line in shown.getvalue().splitlines()]


@pytest.fixture
def view() -> Viewport:
    return Viewport(CONTENT, lambda: datetime(2026, 1, 2, 13, 5, 12))


def test_what_is_cut_is_said_with_the_time(view: Viewport) -> None:
    assert drawn(view) == [
        *(f"device-{k}" for k in range(10)),
        "13:05:12; lines 1 to 10 of 30; arrows, space and b scroll; q ends",
    ]


def test_a_terminal_that_is_high_enough_shows_all(view: Viewport) -> None:
    assert drawn(view, height=40) == [*(f"device-{k}" for k in range(LINES)), "13:05:12; q ends"]


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        (["down"], 1),
        (["page down"], 10),
        (["page down", "up"], 9),
        (["end"], 20),
        (["end", "down", "page down"], 20),
        (["end", "home"], 0),
        (["up"], 0),
        (["page down"] * 9 + ["page up"], 10),
    ],
)
def test_keys_scroll_within_the_content(view: Viewport, keys: list[str], first: int) -> None:
    drawn(view)
    for key in keys:
        view.press(key)
        drawn(view)
    assert drawn(view)[0] == f"device-{first}"


def test_content_that_becomes_shorter_stays_in_sight(view: Viewport) -> None:
    drawn(view)
    view.press("end")
    drawn(view)
    view.content = Text("one\ntwo")
    assert drawn(view)[:2] == ["one", "two"]


def test_keys_of_a_terminal_have_names_and_others_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    user, terminal = os.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with keyboard() as wait_for_key:
            for typed, name in (("\x1b[B", "down"), ("\x1b[5~", "page up"), (" ", "page down"), ("q", "quit")):
                os.write(user, typed.encode())
                assert wait_for_key(20.0) == name
            os.write(user, b"x")
            assert wait_for_key(0.2) is None
    os.close(user)


def test_a_training_that_was_ended_in_between_counts_for_its_share() -> None:
    outcomes: dict[str, dict[str, Any]] = {"whole": {"share": 1.0}, "half": {"share": 0.5}, "lost": {"failure": "gone"}}
    mode = mode_to_message(PowerMode(4, 1, 1, 1))
    view = view_pb2.RoundView(
        planned_unix_s=datetime(2026, 11, 29, tzinfo=timezone.utc).timestamp(),
        plan=planning_pb2.PlanRoundResponse(
            assignments=[planning_pb2.Assignment(device_id=name, mode=mode, epochs=2.0) for name in outcomes]
        ),
        observations=[view_pb2.DeviceObservation(device_id=name, epoch_s=10.0, power_w=20.0) for name in outcomes],
        results=[planning_pb2.DeviceResult(device_id=name, **outcome) for name, outcome in outcomes.items()],
    )
    found = {device_id: joules for (_, device_id), (joules, _, _) in run_energy([view]).items()}
    # A training whose reply was lost was observed to its end.
    assert found == {"whole": 400.0, "half": 200.0, "lost": 400.0}
