"""The real deployment: Flower's SuperLink and SuperNodes, coordinator and agents as separate processes."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import grpc
import psutil
import pytest

from tests.fakes.polling import until
from wattfleet.common.cli import main
from wattfleet.common.identity.authority import SERVER_NAME
from wattfleet.common.identity.channels import require_identity
from wattfleet.simulation import simulate
from wattfleet_proto.v1 import view_pb2, view_pb2_grpc

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(600)]

# Programs that Flower starts by name must be found beside this Python, whatever the caller's PATH is.
_BARE_PATH = "/usr/bin:/bin"
WATTFLEET = str(Path(sys.executable).parent / "wattfleet")
_MARK = "WATTFLEET_TEST_RUN"


def processes_of(mark: str) -> list[str]:
    """Command lines of the processes with the mark in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if f"{_MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (OSError, NotADirectoryError):
            continue
    return found


def gone(mark: str) -> bool:
    """Whether all marked processes end; killed ones may take a moment."""
    give_up_s = time.monotonic() + 10
    while processes_of(mark):
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.1)
    return True


def command(out: Path, *arguments: str) -> tuple[list[str], dict[str, str], str]:
    mark = uuid.uuid4().hex
    small = ["--devices", "agx-orin,orin-nano", "--rounds", "1", "--modes", "10", "--app", "perceptron:32"]
    return (
        [WATTFLEET, "simulate", *small, "--out", str(out), *arguments],
        {**os.environ, "PATH": _BARE_PATH, _MARK: mark},
        mark,
    )


def printed_until(words: str, lines: Iterable[str]) -> tuple[str, list[str]]:
    """Read until a line has these words; returns the command for operators that was printed, and all lines."""
    printed, read = "", []
    for line in lines:
        read.append(line)
        if "operate the fleet meanwhile: " in line:
            printed = line.partition("operate the fleet meanwhile: ")[2].strip()
        if words in line:
            break
    return printed, read


def test_rounds_complete_on_a_protected_fleet(tmp_path: Path) -> None:
    line, environment, mark = command(tmp_path, "--policy", "fastest-k", "--clients", "2", "--json")
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr
        printed, read = printed_until("training in run", run.stderr)
        try:
            assert printed, read
            require_protected_fleet(tmp_path, mark, printed, environment)
        except BaseException:
            run.send_signal(signal.SIGTERM)
            raise
        stdout, stderr = run.communicate()
    assert run.returncode == 0, stderr
    assert gone(mark), processes_of(mark)
    assert not Path(printed.rpartition(" ")[2]).exists(), "keys end with the run"
    report = json.loads(stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert report["provenance"] == "simulated"
    (run,) = report["runs"]
    (first,) = run["rounds"]
    assert first["selected"] == ["agx-orin-0", "orin-nano-0"]
    assert first["site_budget_held"] is True
    assert first["observed_site_w"] < 70
    assert run["final_accuracy"] > run["initial_accuracy"]
    for device in run["devices"].values():
        assert 0 < device["modes_profiled"] <= 10
        assert device["minibatches_per_epoch"] > 41
        assert 0 < device["time_mape_pct"] < 50
        assert 0 < device["power_mape_pct"] < 50
    own, presets, plain = run["comparison"]["ways"]
    assert (own["name"], presets["name"], plain["name"]) == ("this run", "NVIDIA's presets", "plain Flower")
    # The agents count the trainings alone, and only in the planned modes; here, all boards and modes count.
    assert own["energy_j"] > first["training_j"] and own["measuring_s"] > 0
    assert own["duration_s"] == pytest.approx(own["watts"]["at_s"][-1])
    assert (own["final_accuracy"], own["rounds"][-1]["accuracy"]) == (run["final_accuracy"], first["accuracy"])
    for way in (own, presets, plain):
        assert 0 < way["duration_s"] and way["most_w"] <= 1.01 * 70 and way["over_budget_s"] == 0
        assert way["initial_accuracy"] == pytest.approx(run["initial_accuracy"]), "the same parameters"
        assert way["final_accuracy"] > run["initial_accuracy"]
        assert way["to_target"]["s"] <= way["duration_s"]
    assert presets["measuring_s"] == plain["measuring_s"] == 0
    page = (tmp_path / "report.html").read_text()
    assert "agx-orin-0" in page and "simulated" in page and "Run 1 (perceptron) reached" in page


@pytest.mark.slow
def test_a_run_ends_before_its_energy_does_and_states_why(tmp_path: Path) -> None:
    line, environment, mark = command(tmp_path, "--energy-budget", "20kJ")
    line[line.index("--rounds") + 1] = "30"
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    assert gone(mark), processes_of(mark)
    [run] = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert 0 < len(run["rounds"]) < 30
    assert run["energy"]["budget_j"] == 20e3
    assert 0 < run["energy"]["spent_j"] + run["energy"]["set_aside_j"] <= 20e3
    said = " ".join(done.stdout.split())
    assert f"it ended after {len(run['rounds'])} of 30 rounds, because the rest does not suffice for another" in said


# The short forms are in `test_in_process` and `tests/integration/deploy/test_image_scripts.py`.
@pytest.mark.slow
def test_a_failing_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The budget never rises; the nodes connect within this time even on a busy machine.
    impatient = functools.partial(simulate.run_simulation, patience_s=60.0)
    monkeypatch.setattr(simulate, "run_simulation", impatient)

    def fails(out: Path, *arguments: str) -> tuple[int, str]:
        """The command's exit code in this process, and its error output."""
        (_, *line), environment, _ = command(out, *arguments)
        monkeypatch.setattr(sys, "argv", ["wattfleet", *line])
        monkeypatch.setenv("PATH", environment["PATH"])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), capsys.readouterr().err

    # Enough by the boards' true power, but not by the planner's quantiles: the plan, and so the Flower run, must fail.
    _, refused = fails(tmp_path / "refused", "--site-budget-w", "1")
    least_w = refused.split("pass at least ")[1].split(" W")[0]
    mark = uuid.uuid4().hex
    monkeypatch.setenv(_MARK, mark)
    code, error = fails(tmp_path / "out", "--site-budget-w", least_w, "--modes", "5")
    assert code == 1
    assert "the Flower run failed" in error and "is not enough to train one device" in error
    assert (tmp_path / "out" / "logs" / "superlink.log").exists()
    assert not (tmp_path / "out" / "report.json").exists()
    assert gone(mark), processes_of(mark)


def listening(mark: str) -> dict[int, str]:
    """The command lines of the marked processes that listen on TCP, by port."""
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark:
                ports = [each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"]
                found.update(dict.fromkeys(ports, " ".join(process.cmdline())))
        except psutil.Error:
            continue
    return found


def speaks_tls(port: int, client: ssl.SSLContext) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 20) as connection, client.wrap_socket(connection):
            return True
    except (ssl.SSLError, ConnectionError, TimeoutError):
        return False


def is_answered(channel: grpc.Channel) -> bool:
    """Whether a client on this channel may read the fleet."""
    with channel:
        stub = view_pb2_grpc.ViewServiceStub(channel)
        try:
            stub.GetFleet(view_pb2.GetFleetRequest(), timeout=20)
        except grpc.RpcError:
            return False
    return True


def test_a_fleet_that_is_terminated_leaves_no_process_and_no_keys(tmp_path: Path) -> None:
    line, environment, mark = command(tmp_path)
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout
        printed, read = printed_until("operate the fleet meanwhile: ", run.stdout)
        try:
            assert printed, read
            until(lambda: len(processes_of(mark)) > 4)
        finally:
            run.send_signal(signal.SIGTERM)
            run.stdout.read()
        assert run.wait(60) == 1
    assert gone(mark), processes_of(mark)
    assert not (tmp_path / "report.json").exists()
    folder = Path(printed.rpartition(" ")[2])
    assert not folder.exists(), "keys end with the run"


def require_protected_fleet(out: Path, mark: str, printed: str, environment: dict[str, str]) -> None:
    """Check a running simulation from outside.

    Args:
        out: its --out folder.
        mark: the mark of its processes.
        printed: the command that it printed for operators.
        environment: an environment without any identity.
    """
    # The operator's command works as printed, from any folder; without the identity it is refused.
    own = {name: value for name, value in environment.items() if name != _MARK}
    words = [WATTFLEET, *printed.split()[1:], "--json"]
    operator = subprocess.run(words, env=own, cwd="/", capture_output=True, text=True, timeout=60)
    assert {each["device_id"] for each in json.loads(operator.stdout)} == {"agx-orin-0", "orin-nano-0"}, operator.stderr
    identity = require_identity(Path(words[words.index("--identity") + 1]))
    address = ["--coordinator", identity.coordinator]
    stranger = [WATTFLEET, "coordinator", "devices", *address]
    refused = subprocess.run(stranger, env={**own, "HOME": "/nowhere"}, cwd="/", capture_output=True, text=True)
    assert refused.returncode == 1 and "requires a certificate" in refused.stderr

    named = [("grpc.ssl_target_name_override", SERVER_NAME)]
    trusting = grpc.ssl_channel_credentials(identity.trusted_pem)
    assert not is_answered(grpc.insecure_channel(identity.coordinator))
    assert not is_answered(grpc.secure_channel(identity.coordinator, trusting, options=named))

    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.set_alpn_protocols(["h2"])
    # A run may begin before its SuperNodes listen: it waits for them.
    until(lambda: sum("wattfleet.flower.supernode " in line for line in listening(mark).values()) == 2, within_s=60)
    plaintext = [line for port, line in listening(mark).items() if not speaks_tls(port, anybody)]
    # On loopback, /metrics and the page are open, and each SuperNode serves its own ClientApps.
    assert sum("coordinator serve" in line for line in plaintext) == 1
    assert sum("wattfleet.flower.supernode " in line for line in plaintext) == 2
    assert len(plaintext) == 3, plaintext

    written = "".join(log.read_text(errors="replace") for log in (out / "logs").iterdir())
    for secret in ("wfj1/", "PRIVATE KEY"):
        assert secret not in written
        assert not [line for line in processes_of(mark) if secret in line]
