"""The planning service without a network: what it does as time passes."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.errors import NoDevicesError
from coordinator.fleet import Fleet
from coordinator.leases import Leases
from coordinator.planning import PlanningServicer
from coordinator.store.writer import Writer
from tests.coordinator.small_fleet import ORIN_NODE, RUN, small_fleet
from tests.coordinator.test_store_writer import Paper
from wattfleet.errors import InvalidInputError
from wattfleet_proto.v1 import planning_pb2


@pytest.mark.parametrize("has_restarted", [False, True])
def test_a_round_whose_server_was_killed_keeps_its_devices_for_a_while_only(has_restarted: bool) -> None:
    async def story() -> None:
        now_s = 1_000.0
        fleet, writer = small_fleet(), Writer(Paper())
        service = PlanningServicer(fleet, writer, Leases(now_s), lambda: now_s)

        async def plan(run_id: str) -> planning_pb2.PlanRoundResponse:
            request = planning_pb2.PlanRoundRequest(run_id=run_id, round=1, node_ids=[ORIN_NODE], epochs=1.0)
            return await service.PlanRound(request, None)

        duration_s = (await plan(RUN)).duration_s
        if has_restarted:
            service = PlanningServicer(fleet, writer, Leases(now_s), lambda: now_s)
        fleet.start_run("next", "FedAvg", 1)
        for waited_s in (0.0, 2 * duration_s + 600.0):
            now_s = 1_000.0 + waited_s
            with pytest.raises(NoDevicesError, match=f"orin is ready, and part of round {RUN}/1"):
                await plan("next")
        now_s += 1.0
        assert [part.device_id for part in (await plan("next")).assignments] == ["orin"]
        await writer.close()

    asyncio.run(story())


def service_of(fleet: Fleet, writer: Writer) -> PlanningServicer:
    return PlanningServicer(fleet, writer, Leases(0.0), lambda: 0.0)


def test_a_node_that_can_be_no_device_is_no_hindrance_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        fleet, writer = small_fleet(), Writer(Paper())
        bindings = [
            planning_pb2.NodeBinding(node_id=number, device_id=device_id)
            for number, device_id in enumerate(("", "x" * 300, "a\0b", "late"))
        ]
        await service_of(fleet, writer).BindNodes(planning_pb2.BindNodesRequest(bindings=bindings), None)
        await writer.close()
        assert {node: fleet.nodes.get(node) for node in range(4)} == {0: None, 1: None, 2: None, 3: "late"}

    asyncio.run(story())
    assert caplog.text.count("is left out: a device's id has 1 to 200 printable characters") == 3


@pytest.mark.parametrize(("run_id", "strategy"), [("", "FedAvg"), ("x" * 201, "FedAvg"), ("1", "x" * 201)])
def test_a_run_without_a_usable_name_is_refused(run_id: str, strategy: str) -> None:
    async def story() -> None:
        fleet, writer = small_fleet(), Writer(Paper())
        request = planning_pb2.StartRunRequest(run_id=run_id, strategy=strategy, rounds=1)
        with pytest.raises(InvalidInputError, match="1 to 200 printable characters"):
            await service_of(fleet, writer).StartRun(request, None)
        await writer.close()
        assert list(fleet.runs) == [RUN]

    asyncio.run(story())


def test_of_what_went_wrong_the_beginning_is_kept() -> None:
    async def story() -> None:
        fleet, writer = small_fleet(), Writer(Paper())
        service, plan_id = service_of(fleet, writer), fleet.plan(RUN, 1, [ORIN_NODE], 1.0).plan_id
        results = [planning_pb2.DeviceResult(device_id="orin", failure="x" * 10_000)]
        await service.FinishRound(planning_pb2.FinishRoundRequest(plan_id=plan_id, wall_s=1.0, results=results), None)
        await service.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN, error="y" * 10_000), None)
        [result] = fleet.rounds[plan_id].results
        assert (result.failure, fleet.runs[RUN].error) == ("x" * 500, "y" * 2_000)
        with pytest.raises(InvalidInputError, match="a metric's name"):
            metrics = {"z" * 201: 1.0}
            await service.ReportMetrics(planning_pb2.ReportMetricsRequest(run_id=RUN, round=1, metrics=metrics), None)
        await writer.close()

    asyncio.run(story())
