"""The text that describes a device in lists, and the order of these lists."""

from __future__ import annotations

from typing import Any

from coordinator.display.device_words import (
    in_state_for,
    last_training,
    live_line,
    profiling_left,
    troubles,
    worst_first,
)

NOW = 10_000.0


def device(name: str, state: str, **values: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        **{"left_out": None, "drained": False, "fastest_epoch_s": 9.0, "sample": None, "throttled_unix_s": None},
        **{"observed_w": 20.0, "observed_limit_w": 20.0},
        **{"observed_run_id": "4711", "observed_round": 2, "is_observed_run_live": True},
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
    assert last_training(over) == "20.1 W of 20.0 W allowed, in round 2 of run 4711"
    assert last_training({**over, "is_observed_run_live": False}).endswith("of run 4711, which has ended")
    assert last_training({**over, "observed_w": None}) == "no training yet"
    older = {**over, "observed_run_id": None, "observed_round": None, "is_observed_run_live": False}
    assert last_training(older) == "20.1 W of 20.0 W allowed"


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
