"""The order of a list of devices, and what it says of each."""

from __future__ import annotations

from typing import Any

from coordinator.display.device_words import in_state_for, worst_first


def test_devices_that_need_somebody_come_first() -> None:
    def device(name: str, state: str, **values: Any) -> dict[str, Any]:
        return {"device_id": name, "state": state, "left_out": None, "drained": False, "fastest_epoch_s": 9.0, **values}

    found = [
        device("a ready one", "ready"),
        device("a slow one", "ready", fastest_epoch_s=30.0),
        device("drained", "ready", drained=True),
        device("without a front", "ready", fastest_epoch_s=None),
        device("training", "training"),
        device("profiling", "profiling"),
        device("doubtful", "ready", left_out="its observations contradict its predictions"),
        device("failing", "degraded"),
        device("b away", "offline"),
        device("a away", "offline"),
    ]
    order = ["a away", "b away", "doubtful", "failing", "profiling", "training", "drained", "a slow one"]
    assert [each["device_id"] for each in worst_first(found)] == [*order, "a ready one", "without a front"]


def test_a_device_offline_since_before_the_start_counts_from_its_last_report() -> None:
    seen = {"state_since_unix_s": None, "last_seen_unix_s": 1000.0}
    assert in_state_for({**seen, "state": "offline"}, 1000.0 + 7200) == "2 h"
    assert in_state_for({**seen, "state": "ready"}, 1000.0 + 7200) == "-"
    assert in_state_for({**seen, "state": "ready", "state_since_unix_s": 8000.0}, 8045.0) == "45 s"
