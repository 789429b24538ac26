"""The text that describes a device in lists, and the order of these lists."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.display.values import trainings_words
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
