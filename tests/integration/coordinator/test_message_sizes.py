"""Message size limits: enough for a fleet of ten thousand, and lower where thousands of messages arrive at once."""

from __future__ import annotations

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.served import serving_client, status
from tests.fakes.small_fleet import RUN
from wattfleet_proto.v1 import operator_pb2, planning_pb2

DEVICES = 10_000
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


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
