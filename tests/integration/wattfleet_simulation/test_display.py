"""The output of a simulation without a terminal."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console
from rich.live import Live

from tests.fakes.simulated_report import COMPARISON
from wattfleet_proto.v1 import planning_pb2, session_pb2, view_pb2
from wattfleet_simulation.comparison import not_compared
from wattfleet_simulation.display import LineDisplay, LiveDisplay, closing_line, closing_tables
from wattfleet_simulation.run import Snapshot


def shown(*devices: view_pb2.DeviceView) -> str:
    out = io.StringIO()
    LineDisplay(Console(file=out, width=200)).show(
        Snapshot("measuring idle power", 0, devices, [], None, 0.0, {}, 11.0)
    )
    return out.getvalue()


def ready(**more: float) -> view_pb2.DeviceView:
    return view_pb2.DeviceView(
        device_id="orin-nx-0", state=session_pb2.DEVICE_STATE_READY, mode_count=5824, idle_w=more.get("idle_w", 0.0)
    )


def test_idle_watts_are_shown_once_they_are_known() -> None:
    assert "orin-nx-0: ready, 5,824 modes\n" in shown(ready())
    assert "orin-nx-0: ready, 5,824 modes, 4.8 W idle\n" in shown(ready(idle_w=4.81))


def test_without_a_terminal_lines_state_how_far_the_run_is_and_how_long_it_takes() -> None:
    plan = planning_pb2.PlanRoundResponse(planned_w=31.0, site_budget_w=60.0, duration_s=20.0)
    rounds = [view_pb2.RoundView(round=1, plan=plan, wall_s=25.0, metrics={"accuracy": 0.5})]
    out = io.StringIO()
    display = LineDisplay(Console(file=out, width=200))
    display.show(Snapshot("training in run 1 of 2", 1, [], rounds, None, 0.0, {}, 100.0, 3, 170.0))
    assert out.getvalue().splitlines() == [
        "[ 100.0 s] training in run 1 of 2; about 3 min left",
        "[ 100.0 s] round 1 of 3: 31.0 of 60 W planned, 20 s",
        "[ 100.0 s] round 1 of 3 done: 31.0 of 60 W planned, 20 s, accuracy 50.0%; about 3 min left",
    ]


def test_on_a_terminal_the_first_line_states_how_long_the_run_takes() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with Live(console=console, auto_refresh=False) as live:
        LiveDisplay(live).show(Snapshot("training in run 1 of 2", 1, [], [], None, 0.0, {}, 100.0, 3, 170.0))
        live.refresh()
    assert "training in run 1 of 2  100 s; about 3 min left" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_last_line_of_a_run_states_its_errors_modes_and_watts() -> None:
    run: dict[str, Any] = {
        "run": 2,
        "final_accuracy": 0.912,
        "median_error": {"epoch_s": {"share": 0.021, "trainings": 4}, "power_w": {"share": None, "trainings": 0}},
        "devices": {"a": {"modes_profiled": 5}, "b": {"modes_profiled": 3}},
        "rounds": [
            {"site_budget_held": held, "training_j": joules, "observed_trainings": 2, "trainings": 2}
            for held, joules in ((True, 6500.0), (False, 1e3))
        ],
    }
    assert closing_line(run) == (
        "run 2: final accuracy 91.2%, median error of an epoch's seconds 2.1% over 4 trainings and of watts – over 0"
        " trainings, 8 modes measured, watts held in 1 of 2 observed rounds, 7.5 kJ for 4 trainings"
    )
    run["rounds"][1] |= {"site_budget_held": None, "observed_trainings": 1}
    assert "watts held in 1 of 1 observed round (1 not observed), 7.5 kJ for 3 of 4 trainings" in closing_line(run)


def test_a_run_ends_with_its_comparison_with_the_baselines() -> None:
    run = {"run": 1, "network": "perceptron", "batch_sizes": [4], "devices": {}, "rounds": [], "comparison": COMPARISON}
    out = io.StringIO()
    Console(file=out, width=200).print(*closing_tables(run))
    lines = [" ".join(re.sub("[│┃]", " ", line).split()) for line in out.getvalue().splitlines()]
    for row in (
        "to 80.0% to 80.0% all all accuracy",
        "this run 100.0 10.0 140.0 14.0 85.0% 100.0",
        "NVIDIA's presets 90.0 9.0 125.0 12.5 90.0% 100.0",
        "plain Flower 240.0 27.5 240.0 27.5 80.0% 100.0",
    ):
        assert row in lines
    out = io.StringIO()
    Console(file=out, width=200).print(*closing_tables({**run, "comparison": not_compared("of duties")}))
    assert "presets" not in out.getvalue()
