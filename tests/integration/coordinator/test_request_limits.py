"""Requests that no fleet needs: refused in one line before they cost time, memory or log space."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.served import Client, serving_client, status
from tests.fakes.small_fleet import NODES, RUN
from wattfleet_proto.v1 import operator_pb2, planning_pb2, session_pb2, view_pb2

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
