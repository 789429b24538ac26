"""`wattfleet agent duty`, the service behind it, and the process that finds the modes in which a duty is kept."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner, Result

from edge_agent.paths import DUTY_FILE
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.serving.duty_figures import DutyFile
from edge_agent.serving.duty_process import keep_duty_in_process
from edge_agent.serving.duty_service import NoAgentError
from edge_agent.serving.inference import InferenceRows
from tests.fakes.duties import MODES, TRAINING, DutyAgent, duty, duty_agent_at
from tests.fakes.polling import until
from wattfleet.common import cli
from wattfleet.common.clock import VirtualClock
from wattfleet.core.choosing import KnownModes
from wattfleet.core.duties import Demand
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import read_profile
from wattfleet.serving import DutyServer
from wattfleet_proto.names import owner_socket
from wattfleet_proto.v1 import duty_pb2, duty_pb2_grpc

# --- Duty commands ----------------------------------------------------------------------------------------------------
# `wattfleet agent duty`, the service behind it, and the requests that it refuses.


SET = ("set", "--workload", "camera", "--latency-ms", "500")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[DutyAgent]:
    with duty_agent_at(tmp_path / "agent.sock") as running:
        yield running


def command(socket: Path | str, *arguments: str, group: tuple[str, ...] = ("agent", "duty")) -> Result:
    """Run a command against the agent; its exceptions are raised."""
    result = CliRunner().invoke(cli.wattfleet, [*group, *arguments, "--socket", str(socket)], prog_name="wattfleet")
    if isinstance(result.exception, WattfleetError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_a_duty_is_set_shown_and_cleared(agent, tmp_path):
    assert command(agent.socket, "show").output == "no duty\n"
    set_ = command(agent.socket, *SET, "--arrivals-per-s", "30", "--quantile", "0.9")
    assert "90% of the requests of camera within 500 ms" in set_.output
    assert "no inference server is connected" in command(agent.socket, "show").output
    shown = json.loads(command(agent.socket, "show", "--json").output)
    assert shown["duty"] == {"workload": "camera", "arrivals": {"per_s": 30}, "latency_ms": 500, "quantile": 0.9}
    assert shown["kept"]["requests"] == 0
    assert DutyFile(tmp_path).read() == agent.turns.duty
    assert command(agent.socket, "clear").output == "cleared\n"
    assert agent.turns.duty is None and not (tmp_path / DUTY_FILE).exists()
    assert command(agent.socket, "clear").output == "there was no duty\n"


def test_the_figures_of_a_server_are_shown_in_words(agent):
    command(agent.socket, *SET, "--assumed-arrivals-per-s", "30")
    with DutyServer(lambda inputs: inputs, agent_socket=agent.socket) as server:
        for number in range(5):
            server.answer_blocking(number)
        until(lambda: agent.turns.kept_duty().requests == 5)
        shown = command(agent.socket, "show").output
    assert "camera: 95% of requests within 500 ms" in shown
    assert "0 of 5 (0.0%)" in shown


def test_status_shows_the_duty_of_a_running_agent_and_a_stored_one(tmp_path):
    arguments = ("--device", "simulated:orin-nano", "--state-dir", str(tmp_path))
    with duty_agent_at(tmp_path / "agent.sock") as agent:
        command(agent.socket, *SET, "--arrivals-per-s", "30")
        shown = command(agent.socket, "status", *arguments, group=("agent",)).output
        assert "camera: 95% of requests within 500 ms" in shown and "no inference server" in shown
        content = json.loads(command(agent.socket, "status", *arguments, "--json", group=("agent",)).output)
        assert content["duty"]["latency_ms"] == 500 and content["duty"]["kept"]["servers"] == 0
        watched = command(agent.socket, "watch", *arguments, "--seconds", "0", "--json", group=("agent",)).output
        assert json.loads(watched)["duty"]["workload"] == "camera"
        assert (
            "no inference server"
            in command(agent.socket, "watch", *arguments, "--seconds", "0", group=("agent",)).output
        )
    shown = command(tmp_path / "agent.sock", "status", *arguments, group=("agent",)).output
    assert "no agent keeps it now" in shown


def test_measured_rows_of_inference_are_stored_with_the_duty(agent, tmp_path):
    table = tmp_path / "measured.csv"
    table.write_text("cores,cpu_khz,gpu_hz,mem_hz,batch,batch_ms,power_mw\n4,1000000,500000000,2000000000,8,41.5,9e3\n")
    command(agent.socket, *SET, "--arrivals-per-s", "30", "--measured", str(table))
    assert InferenceRows(tmp_path).read("camera").sha256() == read_profile(table).sha256()
    command(agent.socket, *SET, "--arrivals-per-s", "20")
    assert len(InferenceRows(tmp_path).read("camera")) == 1, "another duty of the workload keeps them"


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("cores,cpu_khz,gpu_hz,mem_hz,batch,minibatch_ms,power_mw", "rows of inference"),
        ("cores,cpu_khz,gpu_hz,mem_hz,unused,batch_ms,power_mw", "rows of inference"),
        ("cores,cpu_khz,gpu_hz,mem_hz,batch,batch_ms,power", "missing columns power_mw"),
    ],
)
def test_measured_rows_of_another_kind_are_refused(agent, tmp_path, header, problem):
    table = tmp_path / "measured.csv"
    table.write_text(f"{header}\n4,1000000,500000000,2000000000,8,41.5,9e3\n")
    with pytest.raises(InvalidInputError, match=problem):
        command(agent.socket, *SET, "--arrivals-per-s", "30", "--measured", str(table))
    assert agent.turns.duty is None


def test_a_schedule_is_set(agent):
    command(agent.socket, *SET, "--arrivals-schedule", "06:00-18:00=30,18:00-06:00=2", "--time-zone", "Europe/Berlin")
    arrivals = json.loads(agent.turns.duty.to_json())["arrivals"]
    assert arrivals == {"zone": "Europe/Berlin", "schedule": {"06:00-18:00": 30, "18:00-06:00": 2}}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "give exactly one of"),
        (("--arrivals-per-s", "30", "--assumed-arrivals-per-s", "30"), "give exactly one of"),
        (("--arrivals-per-s", "0"), "requests per second must be"),
        (("--arrivals-per-s", "30", "--quantile", "1"), "quantile must be"),
        (("--arrivals-per-s", "nan"), "requests per second must be"),
        (("--arrivals-schedule", "all day"), "is not a part of a schedule"),
        (("--arrivals-schedule", "06:00-18:00=30"), "no arrivals for"),
        (("--arrivals-schedule", "00:00-24:00=30", "--time-zone", "Mars"), "not a time zone"),
    ],
)
def test_what_is_no_duty_is_refused_with_a_reason(agent, arguments, problem):
    with pytest.raises(InvalidInputError, match=problem):
        command(agent.socket, *SET, *arguments)
    assert agent.turns.duty is None


def test_without_an_agent_the_remedy_is_named(tmp_path):
    with pytest.raises(NoAgentError, match="start it with `wattfleet agent run`"):
        command(tmp_path / "none.sock", *SET, "--arrivals-per-s", "30")


def test_a_device_that_measures_itself_is_refused(agent):
    agent.board.clock = VirtualClock()
    with pytest.raises(InvalidInputError, match="does not run in real time"):
        command(agent.socket, *SET, "--arrivals-per-s", "30")


def test_unknown_keys_and_other_hostile_requests_are_refused(agent):
    hello = duty_pb2.ServeRequest(hello=duty_pb2.ServerHello(largest_batch=4))
    waiting = duty_pb2.ServeRequest(waiting=duty_pb2.RequestsWaiting(count=1, oldest_ms=float("nan")))
    ended = duty_pb2.ShareRequest(ended=duty_pb2.MinibatchEnded(minibatch_ms=5))
    wanted = duty_pb2.ShareRequest(wanted=duty_pb2.MinibatchWanted())
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        stub = duty_pb2_grpc.DutyServiceStub(channel)
        calls = [
            stub.Serve(iter([])),
            stub.Serve(iter([waiting])),
            stub.Serve(iter([duty_pb2.ServeRequest(hello=duty_pb2.ServerHello())])),
            stub.Serve(iter([hello, waiting])),
            stub.Share(iter([ended])),
            stub.Share(iter([wanted, wanted])),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() is grpc.StatusCode.INVALID_ARGUMENT, call.details()
    with (
        grpc.insecure_channel(f"unix:{owner_socket(Path(agent.socket))}") as channel,
        pytest.raises(grpc.RpcError, match="unknown key 'limit'"),
    ):
        duty_pb2_grpc.DutyServiceStub(channel).SetDuty(duty_pb2.SetDutyRequest(duty='{"limit": 5}'))
    until(lambda: agent.turns.servers == 0)
    assert not agent.turns.is_shared


def test_an_app_neither_sets_nor_clears_the_duty(agent):
    command(agent.socket, *SET, "--arrivals-per-s", "30")
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        stub = duty_pb2_grpc.DutyServiceStub(channel)
        for method, request in (
            (stub.SetDuty, duty_pb2.SetDutyRequest(duty=duty().to_json())),
            (stub.ClearDuty, duty_pb2.ClearDutyRequest()),
        ):
            with pytest.raises(grpc.RpcError, match="run the command with sudo") as refused:
                method(request)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "camera" in command(agent.socket, "show").output
    assert stat.S_IMODE(owner_socket(Path(agent.socket)).stat().st_mode) == 0o600


def test_a_stored_duty_that_is_damaged_is_named_with_the_remedy(tmp_path):
    file = DutyFile(tmp_path)
    file.write(duty())
    assert file.read() == duty()
    (tmp_path / DUTY_FILE).write_text('{"workload": 5}')
    with pytest.raises(InvalidInputError, match="remove the file, and set the duty again"):
        file.read()


# --- Duty process -----------------------------------------------------------------------------------------------------
# The process that finds the modes in which a duty is kept.

INFERENCE = KnownModes.of(MODES, TRAINING, None, np.ones(3, dtype=np.int64))


class Slow(float):
    """A number that takes a minute to arrive in the other process, so that no answer can be early."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[float]]:
        return time.sleep, (60.0,)


def test_an_agent_that_stops_does_not_wait_for_the_modes_that_keep_a_duty() -> None:
    questions = iter([False, True])
    with pytest.raises(StoppedError):
        keep_duty_in_process(lambda: next(questions), KnownModes.of(MODES, TRAINING), INFERENCE, Demand(1, 500), Slow())


def test_the_modes_that_keep_a_duty_are_found_aside() -> None:
    found = keep_duty_in_process(lambda: False, KnownModes.of(MODES, TRAINING), INFERENCE, Demand(1, 500), 0.0)
    assert len(found.beside.modes) == 3
