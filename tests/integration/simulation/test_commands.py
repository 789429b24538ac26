"""`wattfleet simulate`: input that it refuses, and its output without a terminal."""

from __future__ import annotations

import io
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

import reference_models
from tests.fakes.simulated_report import COMPARISON
from wattfleet.common.cli import main
from wattfleet.simulation.comparison import not_compared
from wattfleet.simulation.display import LineDisplay, LiveDisplay, closing_line, closing_tables
from wattfleet.simulation.flower import environment
from wattfleet.simulation.run import SimulationProgress
from wattfleet_proto.v1 import planning_pb2, session_pb2, view_pb2

# --- Commands ---------------------------------------------------------------------------------------------------------
# Input that `wattfleet simulate` refuses: exit code 2, the problem and its remedy, and nothing is written.


HEADER = "cores,cpu_khz,gpu_hz,mem_hz,minibatch_ms,power_mw\n"
ROW = "4,1190400,306000000,665600000,462.3,10931\n"


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> str:
    """The command's message when it refuses."""
    monkeypatch.setattr("sys.argv", ["wattfleet", "simulate", "--out", str(out), *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert not out.exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "raspberry:1"], r"unknown device 'simulated:raspberry'.*agx-orin"),
        (["--devices", ""], "1 to 32 devices, not 0"),
        (["--devices", "agx-orin:0"], "1 to 32 devices, not 0"),
        (["--devices", "agx-orin:500"], "1 to 32 devices, not 500"),
        (["--devices", "agx-orin:two"], "kind:count"),
        (["--devices", "agx-orin,agx-orin"], "twice"),
        (
            ["--devices", "agx-orin,orin-nano", "--site-budget-w", "12"],
            r"12 W are too few for one training device.*pass at least \d+ W",
        ),
        (["--site-budget-w", "-5"], "above 0"),
        (["--site-budget-w", "nan"], "finite"),
        (["--sun", "52.5,13.4", "--site-budget-w", "-5"], "above 0 W"),
        (["--sun", "52.5,13.4", "--energy-budget", "5kJ"], "takes no --energy-budget: leave it out"),
        (
            ["--sun", "typical", "--app", "perceptron:32", "--rounds", "5", "--energy-budget", "5Wh", "--modes", "9"],
            "takes no --app, --rounds, --energy-budget, --modes: leave it out",
        ),
        (["--sun", "typical", "--duty", "resnet:9:500", "--metrics-port", "9"], "takes no --duty, --metrics-port"),
        (["--days", "3"], "--days, --panel-w and --battery are for boards with batteries: add --sun"),
        (["--battery", "20Wh"], "add --sun"),
        (["--panel-w", "5"], "add --sun"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--modes", "3"], "at least 5"),
        (["--app", "perceptron"], "write network:minibatch size, such as perceptron:32"),
        (["--app", "perceptron:0"], "at least 1 sample, not 0"),
        (["--app", "convolutional:16+"], "join apps that train at the same time by +"),
        (["--app", "transformer:8"], "unknown network 'transformer': choose one of convolutional"),
        (["--app", "+".join(["perceptron:32"] * 5)], "at most 4 apps may train at the same time"),
        (["--policy", "best"], "unknown policy 'best': choose one of fastest-k, all, random"),
        (["--policy", "all", "--clients", "2"], "'all' does not take count"),
        (["--policy", "deadline"], "pass it as --deadline-s"),
        (["--policy", "deadline", "--deadline-s", "0"], "the deadline must be above 0 s"),
        (["--deadline-s", "60"], "'progress' does not take deadline_s"),
        (["--device-csv", "absent.csv"], "absent.csv: no such file"),
        (["--reference", "absent"], "absent"),
        (
            ["--duty", "vgg:60:500"],
            "--duty: there are no measurements of the inference of 'vgg': choose one of mobilenetv3",
        ),
        (["--duty", "mobilenetv3:60"], "write network:requests per second:latency in ms"),
        (["--duty", "mobilenetv3:0:500"], "requests per second must be above 0"),
        (["--devices", "orin-nano", "--duty", "mobilenetv3:60:5"], r"no mode answers .* allow at least \d+ ms"),
    ],
)
def test_unusable_options(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    said = refused(capsys, monkeypatch, tmp_path / "out", *arguments)
    with_one_line_each = " ".join(said.split())
    assert with_one_line_each.startswith("wattfleet: ")
    assert re.search(message, with_one_line_each), said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("cores,cpu_khz\n4,1190400\n", "missing columns gpu_hz"),
        (HEADER + "4,1190.4,306,665.6,462.3,10931\n", "cpu_khz is 1190.4, expected kHz"),
        (HEADER + "4,1190400,306000000,665600000,-1,10931\n", "minibatch_ms is -1"),
        (HEADER + "4,1190400,306000000,665600000,462.3,nan\n", "power_mw is nan"),
        (HEADER + ROW + ROW, "this mode is repeated"),
    ],
)
def test_unusable_csv(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    content: str,
    message: str,
) -> None:
    csv = tmp_path / "board.csv"
    csv.write_text(content)
    assert message in refused(capsys, monkeypatch, tmp_path / "out", "--device-csv", str(csv))


def test_corrupted_reference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    damaged = tmp_path / "reference"
    shutil.copytree(Path(reference_models.__file__).parent / "agx_orin_resnet18", damaged)
    weights = damaged / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    said = refused(capsys, monkeypatch, tmp_path / "out", "--reference", str(damaged))
    assert "weights.safetensors has the SHA-256" in said


def test_port_in_use(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(capsys, monkeypatch, tmp_path / "out", "--devices", "orin-nano", "--metrics-port", str(port))
    assert f"cannot listen on port {port}: choose another" in said


def test_settings_of_the_users_own_fleet_do_not_reach_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTFLEET_COORDINATOR_SITE_FILE", "site.toml")
    monkeypatch.setenv("WATTFLEET_AGENT_PROFILE_MODES_FIRST", "3")
    monkeypatch.setenv("WATTFLEET_IDENTITY", "/home/anna/identity")
    monkeypatch.setenv("WATTFLEET_CONFIG", "/home/anna/config.toml")
    found = environment({"FLWR_HOME": "/tmp/flower"})
    own = {name: value for name, value in found.items() if name.startswith("WATTFLEET_")}
    assert own == {"WATTFLEET_CONFIG": ""}, "no settings file is read"
    assert environment({"WATTFLEET_IDENTITY": "own"})["WATTFLEET_IDENTITY"] == "own"
    assert found["FLWR_HOME"] == "/tmp/flower"


# --- Display ----------------------------------------------------------------------------------------------------------
# The output of a simulation without a terminal.


def shown(*devices: view_pb2.DeviceView) -> str:
    out = io.StringIO()
    LineDisplay(Console(file=out, width=200)).show(
        SimulationProgress("measuring idle power", 0, devices, [], None, 0.0, {}, 11.0)
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
    display.show(SimulationProgress("training in run 1 of 2", 1, [], rounds, None, 0.0, {}, 100.0, 3, 170.0))
    assert out.getvalue().splitlines() == [
        "[ 100.0 s] training in run 1 of 2; about 3 min left",
        "[ 100.0 s] round 1 of 3: 31.0 of 60 W planned, 20 s",
        "[ 100.0 s] round 1 of 3 done: 31.0 of 60 W planned, 20 s, accuracy 50.0%; about 3 min left",
    ]


def test_on_a_terminal_the_first_line_states_how_long_the_run_takes() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with Live(console=console, auto_refresh=False) as live:
        LiveDisplay(live).show(SimulationProgress("training in run 1 of 2", 1, [], [], None, 0.0, {}, 100.0, 3, 170.0))
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
        "rounds_asked_for": 2,
        "energy": None,
        "error": "",
    }
    assert closing_line(run) == (
        "run 2: final accuracy 91.2%, median error of an epoch's seconds 2.1% over 4 trainings and of watts – over 0"
        " trainings, 8 modes measured, watts held in 1 of 2 observed rounds, 7.5 kJ for 4 trainings"
    )
    run["rounds"][1] |= {"site_budget_held": None, "observed_trainings": 1}
    assert "watts held in 1 of 1 observed round (1 not observed), 7.5 kJ for 3 of 4 trainings" in closing_line(run)
    run["energy"] = {"budget_j": 8e3, "spent_j": 7e3, "set_aside_j": 0.0}
    assert closing_line(run).endswith(
        "; 7.0 kJ above idle spent of the energy budget of 8.0 kJ: it ended after 2 of 2 rounds, because all its rounds"
        " were done"
    )
    run |= {"rounds_asked_for": 9, "energy": {"budget_j": 8e3, "spent_j": 7e3, "set_aside_j": 500.0}}
    assert closing_line(run).endswith(
        "; 7.0 kJ above idle spent and 500 J set aside of the energy budget of 8.0 kJ: it ended after 2 of 9 rounds,"
        " because the rest does not suffice for another training"
    )
    run["error"] = "the app was stopped by signal 15"
    assert closing_line(run).endswith("after 2 of 9 rounds, because it failed: the app was stopped by signal 15")


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
