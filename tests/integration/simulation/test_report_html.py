"""The report's page is self-contained, agrees with the report and escapes its input; its comparison with baselines."""

from __future__ import annotations

import copy
import html
import json
import math
import os
import re
import shlex
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from edge_agent.devices.virtual.simulated import DatedWork, SpanFile
from edge_agent.paths import SERVED_FILE
from edge_agent.serving.device_turns import ServedSpan
from tests.fakes.browser import browsing
from tests.fakes.simulated_report import FLEET, IDLE_W, mode_values, successful_report, way_values
from wattfleet.core.modes import PowerMode
from wattfleet.simulation.baselines import PLAIN_FLOWER, PRESETS
from wattfleet.simulation.comparison import THIS_RUN, compared, not_compared, own_way, verdict
from wattfleet.simulation.devices import FleetDevice, device_specs
from wattfleet.simulation.report import duties_of
from wattfleet.simulation.report_figures import duty_figures, figures
from wattfleet.simulation.report_html import device_styles, repeat_command, write_html
from wattfleet.simulation.settings import SimulatedApp, SimulationSettings
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.v1 import planning_pb2, view_pb2

# --- Report HTML ------------------------------------------------------------------------------------------------------
# The report's page is self-contained, agrees with the report, and escapes its input.


@pytest.fixture
def report() -> dict[str, Any]:
    return successful_report()


@pytest.fixture
def unfinished(report: dict[str, Any]) -> dict[str, Any]:
    """The same run, but one device never reported in round 2, and nothing was known before round 1."""
    report = copy.deepcopy(report)
    one = report["runs"][0]["rounds"][1]
    one["assignments"][2] |= {"observed_epoch_s": None, "observed_power_w": None}
    one |= {"observed_site_w": None, "site_budget_held": None, "observed_duration_s": None}
    one |= {"failed": ["orin-nx-0"], "accuracy": None, "loss": None}
    one["random_draw"] |= {"mean_duration_s": None, "worst_duration_s": None}
    report["runs"][0]["initial_accuracy"] = None
    return report


def _page(report: dict[str, Any], folder: Path) -> str:
    """The page without the plotting library, which is not ours."""
    write_html(report, folder / "report.html")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


def _text(page: str) -> str:
    """Roughly the text that a reader sees: no scripts, no markup, single spaces."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def _rename(value: Any, old: str, new: str) -> Any:
    """The value with a string replaced wherever it occurs, including keys."""
    if isinstance(value, dict):
        return {_rename(key, old, new): _rename(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [_rename(each, old, new) for each in value]
    return new if value == old else value


def test_page_asks_nothing_of_a_network(report: dict[str, Any], tmp_path: Path) -> None:
    page = _page(report, tmp_path)
    assert not re.search(r"https?:|\b(src|href|action|srcset|poster)\s*=|@import|url\(|\bfetch\(|XMLHttp", page)
    # The policy makes the browser block anything that the library might load.
    assert "Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline';" in page


def test_page_says_what_it_is(report: dict[str, Any], tmp_path: Path) -> None:
    report["runs"][0]["devices"]["orin-nano-1"] |= {"modes_profiled": 0, "time_mape_pct": 900.0}
    text = _text(_page(report, tmp_path))
    assert "Error of the predictors 6.2% · 3.5%" in text and "mean of 5 devices that measured modes" in text
    assert "No seconds or watts on this page were measured on a Jetson" in text
    assert "2 × agx-orin , 2 × orin-nano , 1 × orin-nx , 1 × xavier-agx" in text
    for words in ("seed 7", "policy fastest-k", "130 W for the whole site", "reference predictor agx_orin_resnet18"):
        assert words in text
    assert "Final accuracy 85.0%" in text
    assert "held in 3 of 3" in text
    assert repeat_command(report["settings"]) in text


def test_runs_of_two_networks_have_a_part_each(report: dict[str, Any], tmp_path: Path) -> None:
    second = {**copy.deepcopy(report["runs"][0]), "run": 2, "network": "perceptron", "workload": "wattfleet/digits#2"}
    for device in second["devices"].values():
        device["modes_profiled"] = 7
    report["runs"].append(second)

    page = _page(report, tmp_path)
    assert "at the same time" not in _text(page)
    assert "1 convolutional 4 2 300 2.0% 5.0% 85.0%" in _text(page)
    assert "2 perceptron 4 2 42 2.0% 5.0% 85.0%" in _text(page)
    for number, network in ((1, "convolutional"), (2, "perceptron")):
        assert f"Run {number}: {network} network, minibatches of 4" in _text(page)
        assert f'id="run-{number}-accuracy"' in page
    report["settings"]["apps"] = ["convolutional:4+perceptron:4"]
    assert "Runs 1 to 2 trained at the same time." in _text(_page(report, tmp_path))


def test_devices_reasons_and_modes_appear(report: dict[str, Any], tmp_path: Path) -> None:
    text = _text(_page(report, tmp_path))
    for device, decision in report["runs"][0]["rounds"][0]["decisions"].items():
        assert re.search(rf"{device} (yes|no) {re.escape(decision['reason'])}", text), device
        assert re.search(rf"{device} \S+ simulated 50 18,096 6\.2 3\.5", text), device
    assert "6c 1.73/0.92/2.13" in text


def test_why_the_selection_differs_from_a_random_draw(report: dict[str, Any], tmp_path: Path) -> None:
    text = _text(_page(report, tmp_path))

    assert "Rounds 1–3: agx-orin-0, agx-orin-1, orin-nx-0 were selected, predicted to take 100.0 s." in text
    assert "takes 238.5 s on average and 295.7 s at worst with a uniform draw of 3 from the 6 devices, and" in text
    assert "100.0 s with the selected ones: 58% less than the average" in text
    assert "2 of 20 sets could not train within 130 W at all" in text
    assert "orin-nano-0, orin-nano-1, xavier-agx-0 never trained, so their data did not enter the model" in text


@pytest.mark.parametrize(
    ("policy", "chosen", "draw", "words"),
    [
        (
            "random",
            3,
            {"draws": 20},
            "100.0 s with the selected ones. This policy draws at random, so no advantage is to be expected",
        ),
        ("fastest-k", 3, {"draws": 15}, "(15 drawn of 20)"),
        ("fastest-k", 3, {"mean_duration_s": None}, "No set of 3 that was drawn could train within 130 W"),
        ("all", 6, {"draws": 1}, "That is every device, so no other draw was possible"),
    ],
)
def test_no_advantage_is_claimed_where_there_is_none(
    policy: str, chosen: int, draw: dict[str, Any], words: str, report: dict[str, Any], tmp_path: Path
) -> None:
    report["settings"]["policy"] = policy
    for one in report["runs"][0]["rounds"]:
        one["selected"] = list(FLEET)[:chosen]
        one["random_draw"] |= draw

    assert words in _text(_page(report, tmp_path))


@pytest.mark.parametrize(
    ("replayed", "words"),
    [
        (set(FLEET), "its boards replay files of measurements"),
        ({"orin-nx-0"}, "some boards are models of time and power, the others replay measured files"),
    ],
)
def test_replayed_boards_are_said_to_be(replayed: set[str], words: str, report: dict[str, Any], tmp_path: Path) -> None:
    for device in replayed:
        report["runs"][0]["devices"][device]["provenance"] = "replayed"

    assert words in _text(_page(report, tmp_path))


def test_rounds_with_other_decisions_are_told_apart(report: dict[str, Any], tmp_path: Path) -> None:
    report["runs"][0]["rounds"][1]["decisions"]["orin-nano-0"]["reason"] = "too hungry"

    text = _text(_page(report, tmp_path))

    assert "Rounds 1, 3: agx-orin-0" in text
    assert "Round 2: agx-orin-0" in text


def test_observations_inside_their_intervals_are_counted(report: dict[str, Any], tmp_path: Path) -> None:
    assert "epoch times 9 of 9 are inside, of the watts 0 of 9" in _text(_page(report, tmp_path))


def test_unknown_values_are_dashes(unfinished: dict[str, Any], tmp_path: Path) -> None:
    page = _page(unfinished, tmp_path)

    assert "None" not in _text(page)
    assert "not observed in round 2" in _text(page)
    assert re.search(r"2 agx-orin-0, agx-orin-1, orin-nx-0 100\.0 – [\d.]+ – 130 not observed – –", _text(page))
    assert "held in 2 of 2 observed rounds; not observed in round 2" in _text(page)
    assert re.search(r"orin-nx-0 8c \S+ 4 2 41\.0 – 29\.8 – 30\.7", _text(page))


def test_a_selection_that_stayed_the_same_is_not_said_to_change(report: dict[str, Any], tmp_path: Path) -> None:
    report["settings"]["policy"] = "progress"
    assert "In this run, the selection was the same in every round." in _text(_page(report, tmp_path))
    report["runs"][0]["rounds"][1]["selected"] = list(FLEET)[:2]
    assert "the selection was the same" not in _text(_page(report, tmp_path))


def test_assumed_lengths_of_epochs_are_said_to_be_assumed(report: dict[str, Any], tmp_path: Path) -> None:
    assert "assume" not in _text(_page(report, tmp_path)).split("Rounds 1–3")[1]
    (run,) = report["runs"]
    first = run["rounds"][0]
    first |= {"length_assumed": True, "predicted_duration_s": 9.0, "observed_duration_s": 90.0}
    first["assignments"][0] |= {"length_assumed": True, "predicted_epoch_s": 2.0}
    run["devices"]["orin-nano-1"]["is_length_known"] = False

    text = _text(_page(report, tmp_path))
    assert "predicted to take 9.0 s with an assumed length of epochs" in text
    assert "1 agx-orin-0, agx-orin-1, orin-nx-0 9.0 (assumed length) 90.0" in text
    assert re.search(r"agx-orin-0 6c \S+ 4 2 2\.0 \(assumed length\)", text)
    assert "orin-nano-1 never reported how many minibatches an epoch has" in text and "520 (not reported)" in text
    # 90 s instead of the 9 s of an assumed length are no error of a prediction.
    assert "where the lengths of epochs were known, 2% more than predicted (100.0 s)" in text
    assert "epoch times 8 of 8 are inside, of the watts 0 of 9" in text
    seconds, watts = (figures(report)[f"run-1-{quantity}"]["data"][0]["x"] for quantity in ("seconds", "watts"))
    assert (len(seconds), len(watts)) == (2, 3)


def test_watts_that_were_exceeded_are_named(report: dict[str, Any], tmp_path: Path) -> None:
    report["runs"][0]["rounds"][2] |= {"observed_site_w": 131.0, "site_budget_held": False}

    text = _text(_page(report, tmp_path))

    assert "exceeded in round 3" in text
    assert "held in 3 of 3" not in text


@pytest.mark.parametrize("hostile", ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "a&b'\""])
def test_markup_is_escaped(report: dict[str, Any], hostile: str, tmp_path: Path) -> None:
    report = _rename(report, "orin-nx-0", hostile)
    report["runs"][0]["rounds"][0]["decisions"][hostile]["reason"] = f"because {hostile}"

    page = _page(report, tmp_path)

    assert f"because {hostile}" not in page
    assert str(html.escape(f"because {hostile}")).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in page
    if "<" in hostile:
        assert hostile not in page


def test_figures_reach_the_page_whole(report: dict[str, Any], tmp_path: Path) -> None:
    report = _rename(report, "orin-nx-0", "</script>")
    page = _page(report, tmp_path)

    blocks = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, flags=re.DOTALL)
    drawn = set(re.findall(r'class="plot" id="([^"]+)"', page))

    assert [json.loads(block) for block in blocks] == [json.loads(json.dumps(figures(report)))]
    assert drawn == set(figures(report))


@pytest.mark.parametrize("which", ["report", "unfinished"])
def test_figures_are_what_plotly_accepts(which: str, request: pytest.FixtureRequest) -> None:
    for name, figure in figures(request.getfixturevalue(which)).items():
        go.Figure(_rename(figure, "@ink", "black"))  # Refuses an unknown property or an impossible value.
        for axis in ("xaxis", "yaxis"):
            named = figure["layout"][axis].get("title") or figure["layout"][axis].get("ticktext")
            assert named, f"{name} does not say what its {axis} is"


def test_error_bars_are_the_90_percent_interval(report: dict[str, Any]) -> None:
    report["runs"][0]["devices"]["agx-orin-0"]["front"][0]["power_log_sd"] = math.log(1.25) / 1.645

    bars = figures(report)["run-1-front-0"]["data"][1]["error_y"]

    assert bars["array"][0] == pytest.approx(0.25 * 48.0)
    assert bars["arrayminus"][0] == pytest.approx(0.2 * 48.0)


def test_site_stacks_reach_the_reported_totals(report: dict[str, Any]) -> None:
    bars = [trace for trace in figures(report)["run-1-site"]["data"] if trace["type"] == "bar"]
    heights: dict[float, float] = {}
    for trace in bars:
        for at, watts in zip(trace["x"], trace["y"], strict=True):
            heights[at] = heights.get(at, 0.0) + watts

    expected = [one[key] for one in report["runs"][0]["rounds"] for key in ("planned_site_w", "observed_site_w")]
    assert [heights[at] for at in sorted(heights)] == pytest.approx(expected)


def test_duties_have_a_table_and_plots_on_one_time_axis(report: dict[str, Any], tmp_path: Path) -> None:
    mode = PowerMode(**mode_values(0))
    span = ServedSpan(3.0, 9.0, mode, 64, True, 9e3, [4.0, 5.0, 6.0, 7.0], [90.0, 80.0, 70.0, 600.0], [5.5, 8.5])
    SpanFile(tmp_path / SERVED_FILE, ServedSpan).append(span)
    boards = [FleetDevice(device, "", 0, 0, "resnet:1:500:0.5") for device in FLEET]
    report["duties"] = duties_of(boards, dict.fromkeys(FLEET, tmp_path), report["runs"])

    page = _page(report, tmp_path)
    assert "answers simulated requests, which arrive at random" in _text(page)
    assert "agx-orin-1 resnet 1 500 50% 4 75.00% 1" in _text(page)
    assert page.count('class="plot" id="duty-') == len(FLEET)
    drawn = duty_figures(report, device_styles(FLEET))
    layout = drawn["duty-0"]["layout"]
    bands = [shape for shape in layout["shapes"] if shape["type"] == "rect"]
    assert [(band["x0"], band["x1"]) for band in bands] == [(3.0, 9.0)]
    for figure in drawn.values():
        go.Figure(_rename(figure, "@ink", "black"))


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
async def test_a_browser_draws_the_page_without_a_complaint(
    report: dict[str, Any], scheme: str, width: int, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    write_html(report, page)
    async with browsing("", viewport={"width": width, "height": 1200}, color_scheme=scheme) as tab:
        await tab.page.goto(page.as_uri())
        assert await tab.page.locator(".plot .main-svg").count() >= len(figures(report))
        assert await tab.overflow_px() <= 0
        assert tab.complaints == []


@pytest.mark.skipif("REPORT_PICTURE" not in os.environ, reason="REPORT_PICTURE is not set: no picture is wanted")
async def test_the_picture_of_the_documentation_is_taken() -> None:
    async with browsing("", viewport={"width": 1200, "height": 1180}, color_scheme="light") as tab:
        await tab.page.goto(Path("out/simulate/report.html").resolve().as_uri())
        await tab.page.wait_for_selector("#run-1-compared-w .main-svg")
        await tab.page.screenshot(path=os.environ["REPORT_PICTURE"])


# --- Report comparison ------------------------------------------------------------------------------------------------
# The report's comparison with baselines: what it counts, what it says, and its figures.

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
        devices=[FleetDevice("a", "simulated:orin-nano", 0, 0, duty)],
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
    return DatedWork(begin_s, end_s, mode, watts * (end_s - begin_s), ended_unix_s, granted_w=0.0)


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
    own = own_way(rounds, 0.1, done, {"a": 5.0, "b": 4.0, "idle": 1.0}, 40.0, 1000.0, 1100.0)
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
    own = own_way([trimmed], 0.1, done, {"a": 5.0}, 40.0, 1000.0, 1100.0)
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


# --- Repeat command ---------------------------------------------------------------------------------------------------
# The command line in a report that repeats its simulation.


def test_command_repeats_the_fleet() -> None:
    specs = device_specs("orin-nx:1,agx-orin:2", [Path("my data/a.csv"), Path("b.csv")])
    settings = {
        "devices": dict(specs),
        "apps": ["convolutional:4", "perceptron:8"],
        "rounds": 5,
        "site_budget_w": 82.5,
        "modes": 20,
        "policy": "random",
        "clients": 2,
        "deadline_s": None,
        "seed": 3,
        "own_epochs": False,
        "duties": ["mobilenetv3:60:500", "resnet:30:300:0.9"],
        "reference": "agx_orin_resnet18",
    }

    assert "--own-epochs" in repeat_command({**settings, "own_epochs": True})
    in_time = {**settings, "policy": "deadline", "clients": None, "deadline_s": 62.5}
    assert "--policy deadline --deadline-s 62.5 --seed 3" in repeat_command(in_time)
    words = shlex.split(repeat_command(settings))
    given = list(zip(words[2::2], words[3::2], strict=True))
    files = [Path(value) for option, value in given if option == "--device-csv"]
    assert words[:2] == ["wattfleet", "simulate"]
    assert device_specs(dict(given)["--devices"], files) == specs
    assert [pair for pair in given if pair[0] not in ("--devices", "--device-csv")] == [
        *(("--app", "convolutional:4"), ("--app", "perceptron:8")),
        *(("--duty", "mobilenetv3:60:500"), ("--duty", "resnet:30:300:0.9")),
        *(("--rounds", "5"), ("--site-budget-w", "82.5"), ("--modes", "20"), ("--policy", "random")),
        *(("--clients", "2"), ("--seed", "3"), ("--reference", "agx_orin_resnet18")),
    ]
