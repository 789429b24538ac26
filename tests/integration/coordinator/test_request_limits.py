"""Limits on requests, messages, peers, devices and lists: what no fleet needs is refused at a low cost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from coordinator.cli.client import CoordinatorClient
from coordinator.settings import CoordinatorSettings, SessionSettings
from coordinator.state.names import MAX_METRICS, MAX_TAGS
from tests.fakes.served import Agent, Client, serving_client, status
from tests.fakes.small_fleet import NODES, RUN
from wattfleet.common.clock import SystemClock
from wattfleet.common.identity.channels import Endpoint
from wattfleet.flower.server.errors import CoordinatorRefusedError
from wattfleet.flower.server.planning_client import PlanningClient
from wattfleet_proto.limits import MAX_MESSAGE_BYTES
from wattfleet_proto.v1 import operator_pb2, planning_pb2, session_pb2, session_pb2_grpc, view_pb2

# --- Request limits ---------------------------------------------------------------------------------------------------
# Requests that no fleet needs: refused in one line before they cost time, memory or log space.


MIB = 2**20
INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
MOST_LOG_BYTES = 10_000


async def call(client: Client, method: str, request: bytes) -> bytes:
    """Call a method with arbitrary bytes as its message."""
    answer: bytes = await client.channel.unary_unary(f"/wattfleet.v1.{method}", None, None)(request)
    return answer


async def refused(client: Client, method: str, request: bytes) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call(client, method, request)
    return status(error)


def logged_bytes(caplog: pytest.LogCaptureFixture) -> int:
    return sum(len(record.getMessage()) for record in caplog.records) + caplog.text.count("Traceback") * MIB


@asynccontextmanager
async def loop_stays_free(most_s: float) -> AsyncIterator[None]:
    """Fail if the event loop is blocked for longer than this: leases would expire."""
    loop, longest_s = asyncio.get_running_loop(), 0.0

    async def tick() -> None:
        nonlocal longest_s
        while True:
            begun_s = loop.time()
            await asyncio.sleep(0.01)
            longest_s = max(longest_s, loop.time() - begun_s)

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        await asyncio.sleep(0)
        ticking.cancel()
    assert longest_s < most_s


@pytest.mark.parametrize(
    ("method", "tag"),
    [
        ("PlanningService/BindNodes", 1),
        ("PlanningService/FinishRound", 4),
        ("OperatorService/TagDevices", 1),
        ("OperatorService/DrainDevices", 1),
        ("ViewService/ListDevices", 1),
    ],
)
async def test_millions_of_empty_elements_are_refused_before_they_are_read(
    config: CoordinatorSettings, caplog: pytest.LogCaptureFixture, method: str, tag: int
) -> None:
    request = bytes([tag << 3 | 2, 0]) * (4 * MIB - 1000)
    async with serving_client(config) as client:
        await client.two_ready()
        async with loop_stays_free(1.0):  # reading the bindings of such a request once took 50 s
            code, text = await refused(client, method, request)
    assert code is INVALID and "at most 20,000" in text
    assert logged_bytes(caplog) < MOST_LOG_BYTES


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("PlanningService/ResolveNodes", planning_pb2.ResolveNodesRequest(node_ids=[1] * 500_000)),
        (
            "PlanningService/PlanRound",
            planning_pb2.PlanRoundRequest(run_id=RUN, round=1, epochs=1.0, node_ids=[1] * 500_000),
        ),
    ],
)
async def test_a_list_of_half_a_million_nodes_is_refused(
    config: CoordinatorSettings, method: str, request_: planning_pb2.PlanRoundRequest
) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
        code, text = await refused(client, method, request_.SerializeToString())
    assert code is INVALID and "at most 20,000" in text


async def test_bindings_that_are_skipped_are_logged_in_one_line(
    config: CoordinatorSettings, caplog: pytest.LogCaptureFixture
) -> None:
    bindings = [planning_pb2.NodeBinding(node_id=k, device_id="") for k in range(5_000)]
    bindings.append(planning_pb2.NodeBinding(node_id=NODES[0], device_id="orin"))
    async with serving_client(config) as client:
        await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
        resolved = await client.planning.ResolveNodes(planning_pb2.ResolveNodesRequest(node_ids=[NODES[0]]))
    assert [binding.device_id for binding in resolved.bindings] == ["orin"]
    assert "5,000 of 5,001" in caplog.text
    assert logged_bytes(caplog) < MOST_LOG_BYTES


@pytest.mark.parametrize(
    ("size", "answer"), [(60_000, "1 to 230 printable characters"), (900_000, "too large: at most 65,536 bytes")]
)
async def test_huge_observations_leave_a_short_log(
    config: CoordinatorSettings, caplog: pytest.LogCaptureFixture, size: int, answer: str
) -> None:
    report = session_pb2.Observation(plan_id="\0" * size, epoch_s=1.0, power_w=1.0)
    async with serving_client(config) as client:
        for _ in range(10):
            agent = client.agent()
            await agent.hello("orin")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await agent.send(observation=report)
            assert status(error)[0] is INVALID and answer in status(error)[1]
    assert logged_bytes(caplog) < MOST_LOG_BYTES


LONG = "x" * 201


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("PlanningService/StartRun", planning_pb2.StartRunRequest(run_id=LONG, strategy="FedAvg")),
        ("PlanningService/PlanRound", planning_pb2.PlanRoundRequest(run_id=LONG, round=1, epochs=1.0)),
        ("PlanningService/GetPlan", planning_pb2.GetPlanRequest(plan_id=LONG * 2)),
        ("PlanningService/FinishRound", planning_pb2.FinishRoundRequest(plan_id=LONG * 2)),
        (
            "PlanningService/FinishRound",
            planning_pb2.FinishRoundRequest(results=[planning_pb2.DeviceResult(device_id=LONG)]),
        ),
        ("PlanningService/ReportMetrics", planning_pb2.ReportMetricsRequest(run_id=LONG)),
        ("PlanningService/FinishRun", planning_pb2.FinishRunRequest(run_id=LONG)),
        ("OperatorService/PreviewPlan", operator_pb2.PreviewPlanRequest(run_id=LONG)),
        ("OperatorService/SetBudget", operator_pb2.SetBudgetRequest(supply=LONG, watts=1.0)),
        ("OperatorService/ClearBudget", operator_pb2.ClearBudgetRequest(supply=LONG)),
        ("OperatorService/TagDevices", operator_pb2.TagDevicesRequest(device_ids=[LONG])),
        ("OperatorService/TagDevices", operator_pb2.TagDevicesRequest(remove=[LONG])),
        ("OperatorService/DrainDevices", operator_pb2.DrainDevicesRequest(device_ids=[LONG])),
        ("OperatorService/PinReference", operator_pb2.PinReferenceRequest(digest=LONG)),
        ("ViewService/ListDevices", view_pb2.ListDevicesRequest(device_ids=[LONG])),
        ("ViewService/StreamRounds", view_pb2.StreamRoundsRequest(run_id=LONG)),
        ("SessionService/FetchReference", session_pb2.FetchReferenceRequest(digest=LONG)),
    ],
)
async def test_an_id_of_more_than_200_characters_is_refused(
    config: CoordinatorSettings, method: str, request_: planning_pb2.StartRunRequest
) -> None:
    async with serving_client(config) as client:
        code, text = await refused(client, method, request_.SerializeToString())
    assert code is INVALID and "characters" in text
    assert LONG not in text


LAST = 2**32 - 1


async def test_a_round_that_no_run_reaches_is_refused(
    config: CoordinatorSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
        for method, request in (
            ("StartRun", planning_pb2.StartRunRequest(run_id="other", strategy="FedAvg", rounds=LAST)),
            ("PlanRound", planning_pb2.PlanRoundRequest(run_id=RUN, round=LAST, node_ids=NODES, epochs=1.0)),
            ("ReportMetrics", planning_pb2.ReportMetricsRequest(run_id=RUN, round=LAST, metrics={"accuracy": 1.0})),
        ):
            code, text = await refused(client, f"PlanningService/{method}", request.SerializeToString())
            assert code is INVALID and "1,000,000" in text, method
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "method", ["PlanningService/StartRun", "OperatorService/TagDevices", "ViewService/StreamRounds"]
)
async def test_a_request_of_two_megabytes_is_refused(config: CoordinatorSettings, method: str) -> None:
    async with serving_client(config) as client:
        code, text = await refused(client, method, b"\x0a\x80\x80\x80\x01" + b"x" * 2 * MIB)
    assert code in (EXHAUSTED, INVALID) and text


@pytest.mark.parametrize(
    "method",
    [
        "PlanningService/StartRun",
        "PlanningService/PlanRound",
        "OperatorService/GetBudgets",
        "OperatorService/PublishReference",
        "ViewService/ListDevices",
        "ViewService/StreamRounds",
        "SessionService/Session",
        "SessionService/FetchReference",
        "grpc.health.v1.Health/Check",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
@pytest.mark.parametrize("request_", [b"\xff", b"\x0a\x05ab"], ids=["tag", "length"])
async def test_a_malformed_message_is_refused_in_one_line(
    config: CoordinatorSettings, caplog: pytest.LogCaptureFixture, method: str, request_: bytes
) -> None:
    path = method if method.startswith("grpc.") else f"wattfleet.v1.{method}"
    caplog.set_level(logging.DEBUG)
    async with serving_client(config) as client:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.channel.stream_unary(f"/{path}", None, None)(iter([request_]))
    assert status(error)[0] is INVALID and "not a valid" in status(error)[1]
    assert "Traceback" not in caplog.text and "raised by servicer" not in caplog.text


# --- Message sizes ----------------------------------------------------------------------------------------------------
# Message size limits: enough for a fleet of ten thousand, and lower where thousands of messages arrive at once.

DEVICES = 10_000


async def test_a_fleet_of_ten_thousand_is_bound_and_its_round_finished(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        bindings = [planning_pb2.NodeBinding(node_id=k, device_id=f"{k:0200}") for k in range(DEVICES)]
        await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
        await client.two_ready()
        plan = await client.plan()
        results = [planning_pb2.DeviceResult(device_id="orin", failure="x" * 500)] * DEVICES
        request = planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=1.0, results=results)
        assert request.ByteSize() > 5_000_000
        await client.planning.FinishRound(request)


async def test_what_no_fleet_needs_is_refused(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN, error="x" * 9_000_000))
        assert status(refused)[0] is EXHAUSTED
        parts = [operator_pb2.PublishReferenceRequest(manifest=b"{}", weights_chunk=bytes(2_000_000))]
        with pytest.raises(grpc.aio.AioRpcError, match="at most 1,048,576") as refused:
            await client.operator.PublishReference(iter(parts))
        assert status(refused)[0] is grpc.StatusCode.INVALID_ARGUMENT


# --- Peer quotas ------------------------------------------------------------------------------------------------------
# A peer that requests too much is refused or slowed down, and the others are not affected.


async def test_one_connection_has_a_hundred_sessions_and_another_connection_is_free(
    config: CoordinatorSettings,
) -> None:
    async with serving_client(config) as client:
        agents = [client.agent() for _ in range(100)]
        for k, agent in enumerate(agents):
            await agent.hello(f"device-{k}")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.agent().hello("one-more")
        assert status(error)[0] is EXHAUSTED and "calls_per_connection" in status(error)[1]
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(client.bound.address, options) as other:
            await Agent(session_pb2_grpc.SessionServiceStub(other)).hello("elsewhere")
        agents[0].call.cancel()
        await asyncio.sleep(0.1)
        await client.agent().hello("device-0")


async def test_a_host_has_as_many_calls_as_its_setting_says(config: CoordinatorSettings) -> None:
    async with serving_client(config.with_values(peers={"calls_per_host": 2})) as client:
        for k in range(2):
            await client.agent().hello(f"device-{k}")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.agent().hello("one-more")
        assert status(error)[0] is EXHAUSTED and "calls_per_host" in status(error)[1]


async def test_a_host_that_sends_many_requests_is_refused_while_sessions_go_on(config: CoordinatorSettings) -> None:
    async with serving_client(config.with_values(peers={"requests_per_s": 5.0})) as client:
        agent = client.agent()
        await agent.hello("orin")
        calls = [client.view.GetFleet(view_pb2.GetFleetRequest()) for _ in range(500)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [each for each in answers if isinstance(each, grpc.aio.AioRpcError)]
        assert 0 < len(refused) < 500
        assert {each.code() for each in refused} == {EXHAUSTED}
        assert "requests_per_s" in str(refused[0].details())
        await agent.send(lease=session_pb2.Lease())
        await asyncio.sleep(0.5)
        await client.view.GetFleet(view_pb2.GetFleetRequest())


async def test_a_session_that_sends_many_messages_is_slowed_down(config: CoordinatorSettings) -> None:
    loop = asyncio.get_running_loop()
    async with serving_client(config.with_values(peers={"messages_per_s": 100.0, "messages_at_once": 50})) as client:
        agent, other = client.agent(), client.agent()
        await agent.hello("orin")
        await other.hello("nano")
        begun_s = loop.time()
        for _ in range(150):
            await agent.send(lease=session_pb2.Lease())
        assert loop.time() - begun_s > 0.9, "100 messages beyond the first 50 take a second"
        await other.send(lease=session_pb2.Lease())


# --- Enrolments -------------------------------------------------------------------------------------------------------
# The number of devices enrolled over one connection is limited: each adds metric lines and lengthens all leases.


async def enrol(client: Client, channel: grpc.aio.Channel, device_id: str) -> None:
    """Open a session for one device over the caller's connection, and close it immediately."""
    agent = Client(client.bound, channel, client.stop, client.running).agent()
    await agent.hello(device_id)
    await agent.goodbye()


async def test_a_connection_enrols_a_limited_number_of_devices(config: CoordinatorSettings) -> None:
    config = config.with_values(sessions={"max_new_devices_per_connection": 20})

    async with serving_client(config) as client:
        for k in range(20):
            await enrol(client, client.channel, f"device-{k}")
        for k in range(20, 25):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await enrol(client, client.channel, f"device-{k}")
            assert status(refused) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"device-{k}: this connection has reached its limit of 20 new devices: give each agent its own"
                " connection, or raise the coordinator's setting sessions.max_new_devices_per_connection",
            )
        await enrol(client, client.channel, "device-3")  # known devices reconnect
        async with grpc.aio.insecure_channel(
            client.bound.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as other:
            await enrol(client, other, "device-20")
        assert len(await client.devices()) == 21


async def test_a_host_enrols_a_limited_number_of_devices_over_any_connections(config: CoordinatorSettings) -> None:
    config = config.with_values(sessions={"max_new_devices_per_host": 3})

    async def enrol_anew(client: Client, device_id: str) -> None:
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(client.bound.address, options=own) as channel:
            await enrol(client, channel, device_id)

    async with serving_client(config) as client:
        for k in range(3):
            await enrol_anew(client, f"device-{k}")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await enrol_anew(client, "device-3")
        assert status(refused) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "device-3: this host has reached its limit of 3 new devices: if its devices are yours, raise the"
            " coordinator's setting sessions.max_new_devices_per_host",
        )
        await enrol_anew(client, "device-2")  # known devices reconnect


async def test_by_default_one_connection_leaves_the_leases_as_they_are(config: CoordinatorSettings) -> None:
    settings = SessionSettings()
    assert settings.max_new_devices_per_connection / settings.renewals_per_s < settings.lease_s


async def test_a_refused_device_does_not_count(config: CoordinatorSettings) -> None:
    config = config.with_values(sessions={"max_new_devices_per_connection": 1})

    async with serving_client(config) as client:
        with pytest.raises(grpc.aio.AioRpcError, match="printable"):
            await enrol(client, client.channel, "a\0b")
        await enrol(client, client.channel, "orin")


# --- Bounded lists ----------------------------------------------------------------------------------------------------
# Lists that one app or operator can fill: limits on their size, and long lists returned in parts.

# Eight of these fill the largest reply; one exceeds what this test's client accepts.
_LARGE = {f"{k:0190}": 1.0 for k in range(40_000)}
_MANY = {f"{k:0190}": 1.0 for k in range(5_000)}


async def test_metrics_of_8_mb_are_refused_and_runs_can_be_listed(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        for k in range(12):
            started = planning_pb2.StartRunRequest(run_id=f"run-{k}", strategy="FedAvg", rounds=1)
            await client.planning.StartRun(started)
            request = planning_pb2.ReportMetricsRequest(run_id=f"run-{k}", metrics=_LARGE)
            assert MAX_MESSAGE_BYTES > request.ByteSize() > 0.9 * MAX_MESSAGE_BYTES
            with pytest.raises(grpc.aio.AioRpcError, match="is too large: at most 1,048,576 bytes") as refused:
                await client.planning.ReportMetrics(request)
            assert status(refused)[0] is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.planning.ReportMetrics(planning_pb2.ReportMetricsRequest(run_id=f"run-{k}", metrics=_MANY))
            assert status(refused) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                f"run run-{k}, round 0: a round has at most {MAX_METRICS} metrics, not 5,000: report fewer",
            )
        assert [run.run_id for run in await client.runs()] == [f"run-{k}" for k in range(12)]


async def test_flowers_server_does_not_keep_a_report_that_is_too_large(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        await client.planning.StartRun(planning_pb2.StartRunRequest(run_id="run", strategy="FedAvg", rounds=1))
        flower = PlanningClient(Endpoint.of(client.bound.address, None), SystemClock())
        request = planning_pb2.ReportMetricsRequest(run_id="run", metrics=_LARGE)
        with pytest.raises(CoordinatorRefusedError, match="is too large"):
            await asyncio.to_thread(flower.report, "ReportMetrics", lambda: request)
        assert flower.pending_reports == 0


async def test_metrics_of_a_round_are_counted_over_all_its_reports(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        await client.two_ready()
        await client.plan()
        names = [f"metric-{k}" for k in range(MAX_METRICS)]
        for _ in range(2):  # a repeated report adds nothing
            request = planning_pb2.ReportMetricsRequest(run_id=RUN, round=1, metrics=dict.fromkeys(names, 0.5))
            await client.planning.ReportMetrics(request)
        with pytest.raises(grpc.aio.AioRpcError, match=f"at most {MAX_METRICS} metrics, not {MAX_METRICS + 1}"):
            more = planning_pb2.ReportMetricsRequest(run_id=RUN, round=1, metrics={"one more": 0.5})
            await client.planning.ReportMetrics(more)
        [shown] = (await client.rounds()).rounds
        assert sorted(shown.metrics) == sorted(names)


async def test_400_000_tags_on_a_device_are_refused_and_none_is_added(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        await client.two_ready()
        request = operator_pb2.TagDevicesRequest(device_ids=["orin", "nano"], add=[f"t{k}" for k in range(400_000)])
        with pytest.raises(grpc.aio.AioRpcError, match="a list in a message is too long") as refused:
            await client.operator.TagDevices(request)
        assert status(refused)[0] is grpc.StatusCode.INVALID_ARGUMENT
        del request.add[10_000:]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.operator.TagDevices(request)
        assert status(refused) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"at most {MAX_TAGS} tags can be added by command, not 10,000",
        )
        for word in ("a", "b"):
            request = operator_pb2.TagDevicesRequest(device_ids=["orin"], add=[f"{word}{k}" for k in range(MAX_TAGS)])
            if word == "a":
                await client.operator.TagDevices(request)
                continue
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.operator.TagDevices(request)
        assert status(refused)[1] == (
            f"orin: a device has at most {MAX_TAGS} tags set by command, not {2 * MAX_TAGS}: remove some first"
        )
        tags = {device_id: len(device.operator_tags) for device_id, device in (await client.devices()).items()}
        assert tags == {"nano": 0, "orin": MAX_TAGS}


async def test_runs_come_in_parts_and_the_commands_read_all(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.services.views._RUNS_IN_A_MESSAGE", 2)

    async with serving_client(config) as client:
        for k in range(5):
            started = planning_pb2.StartRunRequest(run_id=f"run-{k}", strategy="FedAvg", rounds=1)
            await client.planning.StartRun(started)
        answers = [answer async for answer in client.view.ListRuns(view_pb2.ListRunsRequest(with_times=True))]
        assert [len(answer.runs) for answer in answers] == [2, 2, 1]
        assert all(run.HasField("started_unix_s") for answer in answers for run in answer.runs)

        def command() -> list[str]:
            with CoordinatorClient(Endpoint(client.bound.address)) as connection:
                return [run.run_id for run in connection.runs()]

        assert await asyncio.to_thread(command) == [f"run-{k}" for k in range(5)]
