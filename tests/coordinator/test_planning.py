"""The planning service without a network: what it does as time passes."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.errors import NoDevicesError
from coordinator.leases import Leases
from coordinator.planning import PlanningServicer
from coordinator.store.writer import Writer
from tests.coordinator.small_fleet import ORIN_NODE, RUN, small_fleet
from tests.coordinator.test_store_writer import Paper
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
        trial = fleet.copy()
        service.clear_way(trial, [ORIN_NODE])
        assert (trial.awaited_rounds(), len(fleet.awaited_rounds())) == ([], 1), "only the copy waits no more"
        assert [part.device_id for part in (await plan("next")).assignments] == ["orin"]
        await writer.close()

    asyncio.run(story())
