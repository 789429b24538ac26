"""Input that `wattfleet simulate` refuses: exit code 2, the problem and its remedy, and nothing is written."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path

import pytest

import reference_models
from wattfleet_io.cli import main
from wattfleet_simulation.flower import environment

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
