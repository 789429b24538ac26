"""The report's comparison with baselines: what it counts, what it says, and its figures."""

from __future__ import annotations

import copy
import html
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from edge_agent.devices.virtual.simulated import DatedWork
from tests.fakes.simulated_report import IDLE_W, successful_report, way_values
from wattfleet.modes import PowerMode
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.v1 import planning_pb2, view_pb2
from wattfleet_simulation.baselines import PLAIN_FLOWER, PRESETS
from wattfleet_simulation.comparison import THIS_RUN, compared, not_compared, own_way, verdict
from wattfleet_simulation.report_figures import figures
from wattfleet_simulation.report_html import write_html
from wattfleet_simulation.settings import SimulatedApp, SimulatedDevice, SimulationSettings

PLANNED, OTHER = PowerMode(4, 1, 1, 1), PowerMode(2, 1, 1, 1)


def text_of(report: dict[str, Any], folder: Path) -> str:
    """Roughly the text that a reader sees."""
    write_html(report, folder / "report.html")
    page = (folder / "report.html").read_text(encoding="utf-8")
    body = re.sub(r"<(script|style|title)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def run_with(comparison: dict[str, Any]) -> dict[str, Any]:
    return {"run": 2, "network": "perceptron", "comparison": comparison}


def test_the_first_sentence_says_what_was_lost_and_gained(tmp_path: Path) -> None:
    text = text_of(successful_report(), tmp_path)
    assert text.startswith(
        "Wattfleet simulation simulated Run 1 (convolutional) reached 80.0% accuracy for good in 100 s and 10.0 kJ:"
        " 11% later than NVIDIA's presets (90 s) and with 11% more energy (9.0 kJ), and 58% sooner than plain Flower"
        " (240 s) and with 64% less energy (27.5 kJ)."
    )
    assert (
        "All of them had at least that after 3 rounds: this run 85.0%, NVIDIA's presets 90.0%, plain Flower 80.0%."
    ) in text
    assert "This includes measuring modes: 15% of the boards' working time, and 840 J above idle power." in text
    assert "this run 100.0 10.0 140.0 14.0 85.0% 100.0 0.0 42.0" in text


def test_a_tie_is_called_a_tie() -> None:
    same = (100.0,), (10.0,), (0.9,)
    found = verdict(run_with(compared(way_values(THIS_RUN, *same), [way_values(PRESETS, *same)], 130.0)))
    assert found[0] == (
        "Run 2 (perceptron) reached 90.0% accuracy for good in 100 s and 10.0 kJ: as soon as NVIDIA's presets"
        " (100 s) and with the same energy (10.0 kJ)."
    )
    assert len(found) == 2, "nothing was measured"


def test_an_accuracy_counts_once_it_is_kept() -> None:
    accuracy = {THIS_RUN: (0.8, 0.9, 0.85), PRESETS: (0.2, 0.8, 0.8), PLAIN_FLOWER: (0.9, 0.3, 0.95)}
    own, *others = [way_values(name, (10.0, 20.0, 30.0), (1.0, 2.0, 3.0), each) for name, each in accuracy.items()]
    found = compared(own, others, 130.0)
    assert found["target"] == 0.8
    assert [way["to_target"]["s"] for way in found["ways"]] == [10.0, 20.0, 30.0]
    assert [way["to_target"]["j"] for way in found["ways"]] == [1e3, 2e3, 3e3]


def test_many_times_the_cost_is_said_as_such() -> None:
    own, other = way_values(THIS_RUN, (90.0,), (7.0,), (0.9,)), way_values(PRESETS, (10.0,), (2.0,), (0.9,))
    found = verdict(run_with(compared(own, [other], 130.0)))
    assert "9.0 times as late as NVIDIA's presets (10 s) and with 3.5 times the energy (2.0 kJ)" in found[0]


def test_watts_over_the_budget_are_counted_and_small_noise_is_not() -> None:
    own = way_values(THIS_RUN, (60.0,), (6.0,), (0.9,))
    for budget_w, over_s in ((100.0, 0.0), (99.5, 0.0), (98.0, 60.0)):
        (way,) = compared(own, [], budget_w)["ways"]
        assert (way["over_budget_s"], way["most_w"]) == (over_s, 100.0)


def test_baselines_that_cannot_train_are_named_with_the_reason() -> None:
    own = way_values(THIS_RUN, (60.0,), (6.0,), (0.9,))
    reason = {"name": PLAIN_FLOWER, "reason": "no board fits into 50 W in MAXN"}
    *_, last = verdict(run_with(compared(own, [way_values(PRESETS, (60.0,), (6.0,), (0.8,)), reason], 50.0)))
    assert last == "Plain Flower cannot train: no board fits into 50 W in MAXN."
    assert verdict(run_with(compared(own, [reason], 50.0)))[-1] == last


@pytest.mark.parametrize(
    ("apps", "duty", "numbers"),
    [
        ([("perceptron",)], "resnet:1:500", {1}),
        ([("perceptron",), ("convolutional", "perceptron"), ("perceptron",)], None, {2, 3}),
    ],
)
def test_runs_that_cannot_be_compared_say_why(
    apps: list[tuple[str, ...]], duty: str | None, numbers: set[int], tmp_path: Path
) -> None:
    settings = SimulationSettings(
        devices=[SimulatedDevice("a", "simulated:orin-nano", 0, 0, duty)],
        apps=[tuple(SimulatedApp(network, 16) for network in together) for together in apps],
        rounds=1,
        site_budget_w=50.0,
        profile_modes=5,
        policy="progress",
        clients=None,
        seed=0,
        reference="",
        metrics_port=0,
    )
    reasons = {number: settings.why_not_compared(number) for number in range(1, sum(map(len, apps)) + 1)}
    assert {number for number, reason in reasons.items() if reason is not None} == numbers
    report = successful_report()
    reason = reasons[max(numbers)]
    assert reason is not None
    report["runs"][0]["comparison"] = not_compared(reason)
    text = text_of(report, tmp_path)
    assert f"Run 1 (convolutional) is not compared with baselines: {reason}." in text
    assert "and its baselines, in the boards' own time" not in text
    assert not [name for name in figures(report) if "compared" in name]


# --- what a run of the fleet counts ---------------------------------------------------------------------------------


def work(begin_s: float, end_s: float, mode: PowerMode, watts: float, ended_unix_s: float) -> DatedWork:
    return DatedWork(begin_s, end_s, mode, watts * (end_s - begin_s), ended_unix_s)


def planned_round(number: int, at_unix_s: float, accuracy: float, *devices: str) -> view_pb2.RoundView:
    parts = [planning_pb2.Assignment(device_id=each, mode=mode_to_message(PLANNED)) for each in devices]
    return view_pb2.RoundView(
        round=number,
        planned_unix_s=at_unix_s,
        plan=planning_pb2.PlanRoundResponse(assignments=parts),
        metrics={"accuracy": accuracy},
    )


def test_a_run_counts_what_its_boards_did_before_the_first_plan_and_when_left_out() -> None:
    rounds = [planned_round(1, 1010.0, 0.5, "a"), planned_round(2, 1020.0, 0.7, "a", "b")]
    done = {
        "a": [
            work(0, 9, PLANNED, 20, 900.0),  # in an earlier run
            work(9, 12, OTHER, 20, 1005.0),  # before the first plan
            work(12, 13, OTHER, 20, 1012.0),
            work(13, 20, PLANNED, 20, 1015.0),
            work(20, 30, PLANNED, 20, 1025.0),
            work(30, 99, PLANNED, 20, 1200.0),  # in a later run
        ],
        "b": [work(0, 5, OTHER, 10, 1014.0), work(5, 20, PLANNED, 10, 1026.0)],
    }
    own = own_way(rounds, 0.1, done, {"a": 5.0, "b": 4.0, "idle": 1.0}, 1000.0, 1100.0)
    assert [(one["round"], one["devices"], one["end_s"]) for one in own["rounds"]] == [
        (0, ["a"], 3.0),
        (1, ["a", "b"], 11.0),
        (2, ["a", "b"], 26.0),
    ]
    assert [one["accuracy"] for one in own["rounds"]] == [None, 0.5, 0.7]
    first_j = 3 * (20 + 4 + 1)
    second_j = 8 * 20 + 5 * 10 + 3 * 4 + 8 * 1
    third_j = 10 * 20 + 5 * 5 + 15 * 10 + 15 * 1
    joules = [first_j, first_j + second_j, first_j + second_j + third_j]
    assert [one["energy_j"] for one in own["rounds"]] == pytest.approx(joules)
    assert own["measuring_s"] == 3 + 1 + 5
    assert own["measuring_j"] == pytest.approx(3 * 15 + 1 * 15 + 5 * 6)
    assert own["worked_s"] == 3 + 8 + 5 + 10 + 15


def test_a_mode_that_a_trim_has_changed_is_no_measurement() -> None:
    trimmed = planned_round(1, 1010.0, 0.5, "a")
    first = planning_pb2.PlanRoundResponse(
        assignments=[planning_pb2.Assignment(device_id="a", mode=mode_to_message(OTHER))]
    )
    trimmed.plan.first_planned.CopyFrom(first)
    done = {"a": [work(0, 5, OTHER, 20, 1012.0), work(5, 9, PLANNED, 10, 1013.0)]}
    own = own_way([trimmed], 0.1, done, {"a": 5.0}, 1000.0, 1100.0)
    assert (own["measuring_s"], own["worked_s"]) == (0.0, 9.0)


# --- figures --------------------------------------------------------------------------------------------------------


def test_the_first_figures_show_all_ways_over_time_and_energy_and_measuring() -> None:
    report = successful_report()
    drawn = figures(report)
    assert list(drawn)[:3] == ["run-1-compared-s", "run-1-compared-j", "run-1-compared-w"]
    time, energy, watts = (drawn[name]["data"] for name in list(drawn)[:3])
    assert [(trace["x"], trace["y"]) for trace in time] == [
        ([0.0, 60.0, 100.0, 140.0], [0.1, 0.35, 0.81, 0.85]),
        ([0.0, 50.0, 90.0, 125.0], [0.1, 0.4, 0.8, 0.9]),
        ([0.0, 80.0, 160.0, 240.0], [0.1, 0.9, 0.2, 0.8]),
    ]
    assert [trace["x"] for trace in energy] == [[0, 6, 10, 14], [0, 5, 9, 12.5], [0, 9, 18, 27.5]]
    idle, training, measuring, *baselines = watts
    assert idle["y"] == [IDLE_W] * 3
    assert training["y"] == [0.0, 60.0, 0.0] and measuring["y"] == [60.0, 0.0, 0.0]
    assert [trace["y"] for trace in baselines] == [[100.0, 40.0]] * 2
    shapes = drawn["run-1-compared-w"]["layout"]["shapes"]
    assert (shapes[0]["y0"], shapes[0]["x1"]) == (130.0, 240.0), "the budget, over all ways"
    for name in list(drawn)[:3]:
        shown = copy.deepcopy(drawn[name])
        for shape in shown["layout"]["shapes"]:
            shape["line"]["color"] = "black"
        go.Figure(shown)
