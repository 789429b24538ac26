"""The benchmark of fleets, with a few agents: its output, and that it cleans up after itself."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from benchmarks.fleet import agent, requests
from benchmarks.fleet.__main__ import main
from benchmarks.fleet.connection import OK, UNAVAILABLE, connect, request_headers
from benchmarks.fleet.identities import FleetIdentities
from benchmarks.fleet.result import figure
from benchmarks.fleet.servers import HOST
from benchmarks.fleet.swarm import Swarm
from coordinator.settings import CoordinatorSettings
from edge_agent.session import coordinator_session
from edge_agent.settings import ConnectionSettings
from tests.fakes.served import serving_client
from tests.fakes.short_forms import first
from wattfleet.common import tasks
from wattfleet_proto.convert import front_from_message, workload_from_message, workload_to_message
from wattfleet_proto.v1 import planning_pb2, session_pb2

AGENTS = 8
_ENDS_WITHIN_S = 60.0
SHORT = ["--steady-s", "0.5", "--window-s", "0.2", "--repeats", "1", "--limit-s", "20", "--reference-kib", "256"]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore the limits, cores and signal handler of this process, which the benchmark sets."""
    files, cores = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    heeded = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, heeded)
    os.sched_setaffinity(0, cores)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("options", first(1, [[], ["--tls"]]), ids=["without TLS", "without and with TLS"])
def test_it_tells_every_figure_and_leaves_no_process(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    before = children()
    assert main(["--agents", str(AGENTS), "--workloads", "2", *options, *SHORT, "--json"]) == 0
    assert children() == before
    document = json.loads(capsys.readouterr().out)
    assert document["provenance"] == "simulated" and document["settings"]["workloads"] == 2
    fleets = document["fleets"]
    assert [fleet["tls"] for fleet in fleets] == [False, True][: len(fleets)] and len(fleets) == 1 + len(options)
    for fleet in fleets:
        require_every_figure(fleet)
    wanted = [fleet["goals"]["RSS of the coordinator, MB"]["wanted"] for fleet in fleets]
    assert wanted == ["at most 600", "at most 1000"][: len(fleets)]


def require_every_figure(fleet: dict[str, Any]) -> None:
    assert fleet["agents"] == fleet["ramp_settled"] == fleet["storm_settled"] == fleet["restart_settled"] == AGENTS
    lost = sum(count for reason, count in fleet["ended"].items() if "Connect call failed" not in reason)
    assert lost == AGENTS, "sessions end when the server is killed, and at no other time"
    for path in (
        *("ramp_s", "storm_s", "restart_s", "bare.ramp_s", "bare.storm_s", "rss_mb", "peak_rss_mb"),
        *("in_use.plan_ms.p50", "in_use.scrape_ms.p50", "in_use.peak_rss_mb"),
        *("storm_cpu_ms", "restart_cpu_ms", "bare.storm_cpu_ms", "sessions_per_s.rate"),
        *("generator_late_ms.p99", "reports_per_s.ratio", "reference_bytes_per_s.ratio"),
    ):
        value = figure(fleet, path)
        assert value is not None and value > 0, path
    # Few agents may not renew any lease in such a short time.
    assert (fleet["lease_cpu_us"] is not None) == (fleet["leases_per_s"] > 0)
    assert figure(fleet, "bare.peak_rss_mb") < figure(fleet, "peak_rss_mb")
    assert all(goal["met"] in (True, False) for goal in fleet["goals"].values()) and len(fleet["goals"]) == 6


@pytest.mark.parametrize("interrupt", first(1, [signal.SIG_IGN, signal.SIG_DFL]), ids=["background", "foreground"])
def test_interrupted_it_ends_its_servers(interrupt: signal.Handlers) -> None:
    """This also holds in the background, where a shell has set SIGINT to be ignored."""
    command = [sys.executable, "-m", "benchmarks.fleet", "--agents", "2", *SHORT, "--json"]
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        own = psutil.Process(process.pid)
        while not (servers := own.children(recursive=True)) and process.poll() is None:
            psutil.wait_procs([own], timeout=0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(_ENDS_WITHIN_S) == 128 + signal.SIGTERM
        assert servers and psutil.wait_procs(servers, timeout=_ENDS_WITHIN_S)[1] == []
    finally:
        process.kill()
        process.wait()


def test_what_agents_say_is_what_the_coordinator_takes() -> None:
    fronts = [session_pb2.SessionRequest.FromString(front) for front in requests.fronts(3)]
    assert [len(front_from_message(front.front.front)) for front in fronts] == [64] * 3
    assert [front.sequence for front in fronts] == [2, 3, 4]
    assert [workload_from_message(front.front.workload) for front in fronts] == [*map(requests.workload, range(3))]
    private, settings = vars(coordinator_session), ConnectionSettings()
    assert (agent.FIRST_BACKOFF_S, agent.MAX_BACKOFF_S) == (tasks.FIRST_S, tasks.MAX_S)
    assert agent.MAX_BACKOFF_OF_A_SMALL_FLEET_S == private["_MAX_BACKOFF_OF_A_SMALL_FLEET_S"]
    assert agent.SILENT_LEASES == private["_SILENT_LEASES"]
    assert agent.WELCOME_TIMEOUT_S == coordinator_session.WELCOME_TIMEOUT_S
    assert agent.SILENCE_TIMEOUT_S == settings.silence_timeout_s


async def test_agents_train_what_they_are_granted(config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "TRAINS_WITHIN_S", 0.01)

    async with serving_client(config) as client:
        host, _, port = client.bound.address.rpartition(":")
        swarm = Swarm(2, lambda number: connect((host, int(port))))
        assert await swarm.ramp(100.0, 10.0) is not None
        nodes = {number + 1: requests.device_id(number) for number in range(2)}
        bindings = [planning_pb2.NodeBinding(node_id=node, device_id=device_id) for node, device_id in nodes.items()]
        await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
        trained = workload_to_message(requests.workload(0))
        started = planning_pb2.StartRunRequest(run_id="1", strategy="FedAvg", rounds=2, workload=trained)
        await client.planning.StartRun(started)
        for number in (1, 2, 3):
            asked = planning_pb2.PlanRoundRequest(run_id="1", round=number, node_ids=nodes, epochs=1.0)
            assert len((await client.planning.PlanRound(asked)).assignments) == 2, "their last trainings are over"
        swarm.leave()
        assert not swarm.ended


Ended = tuple[list[bytes], int, str]


async def exchanged(
    behaviour: Any,
    messages: list[bytes],
    last: bool,
    drop: bool = False,
    credentials: grpc.ServerCredentials | None = None,
    context: ssl.SSLContext | None = None,
) -> Ended:
    """All replies of a real server to some messages, and how the call ended."""
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(behaviour)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"M": handler}),))
    if credentials is None:
        port = server.add_insecure_port(f"{HOST}:0")
    else:
        port = server.add_secure_port(f"{HOST}:0", credentials)
    await server.start()
    answers: list[bytes] = []
    over: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
    try:
        connection = await connect((HOST, port), context)
    except OSError:
        await server.stop(None)
        raise
    call = connection.call(request_headers("/t.T/M"), answers.append, lambda *how: over.set_result(how))
    for number, message in enumerate(messages, 1):
        call.send(message, last=last and number == len(messages))
    if drop:
        connection.drop()
    status, text = await asyncio.wait_for(over, 10)
    connection.drop()
    await server.stop(None)
    return answers, status, text


async def flood(said: Any, context: Any) -> Any:
    async for message in said:
        for number in range(300):
            yield message * 10_000 + bytes([number % 256])


async def refuse(said: Any, context: Any) -> Any:
    taken = 0
    async for message in said:
        taken += len(message)
        yield b"more"
        if taken >= 500_000:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")


def credentials_of(identities: FleetIdentities) -> grpc.ServerCredentials:
    key, certificate, trusted = (
        (identities.folder / name).read_bytes() for name in ("server.key", "server.pem", "trusted.pem")
    )
    return grpc.ssl_server_credentials([(key, certificate)], trusted, True)


async def caller(said: Any, context: Any) -> Any:
    async for _ in said:
        yield context.auth_context()["x509_common_name"][0]


async def test_every_agent_has_its_own_certificate(tmp_path: Path) -> None:
    identities = FleetIdentities(2, tmp_path, HOST)
    for number in range(2):
        answers, status, _ = await exchanged(
            caller, [b"x"], True, credentials=credentials_of(identities), context=identities.context(number)
        )
        assert (answers, status) == ([f"device {requests.device_id(number)}".encode()], OK)


async def test_with_tls_the_client_takes_and_sends_more_than_a_window(tmp_path: Path) -> None:
    identities = FleetIdentities(1, tmp_path, HOST)
    secured = {"credentials": credentials_of(identities), "context": identities.context(0)}
    answers, status, _ = await exchanged(flood, [b"abc"], last=True, **secured)
    assert status == OK and [answer[-1] for answer in answers] == [number % 256 for number in range(300)]
    answers, *ended = await exchanged(refuse, [bytes(10_000)] * 50, last=False, **secured)
    assert ended == [5, "no such thing"] and set(answers) == {b"more"}


async def test_the_client_refuses_a_server_of_another_authority(tmp_path: Path) -> None:
    own, other = (FleetIdentities(1, tmp_path / name, HOST) for name in ("own", "other"))
    with pytest.raises(ssl.SSLCertVerificationError):
        await exchanged(refuse, [b"x"], True, credentials=credentials_of(other), context=own.context(0))


async def test_a_server_in_plaintext_is_no_server_with_tls(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        await exchanged(refuse, [b"x"], True, context=FleetIdentities(1, tmp_path, HOST).context(0))


async def test_the_client_takes_more_than_a_window() -> None:
    answers, status, _ = await exchanged(flood, [b"abc"], last=True)
    assert status == OK
    assert [answer[-1] for answer in answers] == [number % 256 for number in range(300)]
    assert {len(answer) for answer in answers} == {30_001}


async def test_the_client_sends_more_than_a_window_and_hears_why_a_call_failed() -> None:
    answers, *ended = await exchanged(refuse, [bytes(10_000)] * 50, last=False)
    assert ended == [5, "no such thing"]
    assert set(answers) == {b"more"}


async def test_a_lost_connection_ends_its_calls() -> None:
    _, status, _ = await exchanged(refuse, [b"x"], last=False, drop=True)
    assert status == UNAVAILABLE
