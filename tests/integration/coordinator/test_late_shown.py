"""Devices that were late in a round, as shown by commands, exports and a restarted coordinator."""

from __future__ import annotations

import asyncio
import csv
from pathlib import Path
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg

from coordinator.settings import CoordinatorSettings
from tests.fakes.flower_in_process import GridOfNodes, Node
from tests.fakes.power_aware_runs import ARRAYS
from tests.fakes.served import Client, serving_client
from tests.fakes.shell import asked, served_with_shell
from tests.fakes.small_fleet import NANO_NODE, ORIN_NODE, RUN
from wattfleet_flower import PowerAware, Quorum
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import planning_pb2, session_pb2


async def late_round(client: Client, orin: Any, nano: Any) -> str:
    """A round that ends while the Nano trains."""
    plan = await client.plan(1)
    await nano.obey(GrantPhase.TRAINING)
    await orin.obey(GrantPhase.OVER)
    await orin.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=20.5, power_w=31.25))
    results = [
        planning_pb2.DeviceResult(device_id="orin", num_examples=96, loss=0.125, share=1.0),
        planning_pb2.DeviceResult(device_id="nano", late=True),
    ]
    await client.planning.FinishRound(
        planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=41.5, results=results)
    )
    return plan.plan_id


async def test_a_late_device_is_shown_as_late_and_not_as_failed(config: CoordinatorSettings, tmp_path: Path) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, nano = await client.two_ready()
        await late_round(client, orin, nano)
        [row] = [line for line in (await shell("rounds")).stdout.splitlines() if line.split()[:1] == ["1"]]
        assert row.split()[:4] == ["1", "2,", "1", "late"]
        [content] = (await asked(shell, "rounds"))["rounds"]
        assert (content["failed"], content["late"], content["devices"]) == ([], ["nano"], 2)
        await shell("export", "--format", "csv", "--out", str(tmp_path / "tables"))
        tables = {
            name: list(csv.DictReader((tmp_path / "tables" / f"{name}.csv").read_text().splitlines()))
            for name in ("rounds", "results")
        }
        assert [(each["failed"], each["late"]) for each in tables["rounds"]] == [("0", "1")]
        assert {each["device_id"]: (each["failure"], each["late"]) for each in tables["results"]} == {
            "orin": ("", "False"),
            "nano": ("", "True"),
        }


async def test_a_restarted_coordinator_keeps_the_watts_of_a_late_device(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        plan_id = await late_round(client, orin, nano)
        granted_w = (await client.devices())["nano"].granted_w
        assert granted_w > 10.0
    async with serving_client(config) as client:
        [shown] = (await client.rounds()).rounds
        assert (list(shown.late_device_ids), list(shown.failed_device_ids)) == (["nano"], [])
        after = (await client.devices())["nano"]
        assert (after.granted_plan_id, after.granted_w) == (plan_id, granted_w)


async def test_an_unplanned_round_has_late_devices_too(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
        results = {
            ORIN_NODE: planning_pb2.DeviceResult(num_examples=96.0, share=1.0),
            NANO_NODE: planning_pb2.DeviceResult(late=True),
        }
        await client.planning.ReportUnplannedRound(
            planning_pb2.ReportUnplannedRoundRequest(
                run_id=RUN,
                round=2,
                began_ago_s=600.0,
                wall_s=45.0,
                results=[planning_pb2.NodeResult(node_id=node, result=result) for node, result in results.items()],
            )
        )
        [shown] = (await client.rounds()).rounds
        assert (list(shown.late_device_ids), list(shown.failed_device_ids)) == (["nano"], [])


async def test_a_run_with_a_quorum_plans_around_the_late_device(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        loop = asyncio.get_running_loop()
        # A round takes the Orin 5 s, so the Nano replies to the first round during the third.
        grid = GridOfNodes({ORIN_NODE: Node("orin", takes_s=5.0), NANO_NODE: Node("nano", takes_s=13.0)})

        async def obey(number: int) -> None:
            await orin.obey(GrantPhase.OVER)
            await nano.obey(GrantPhase.OVER if number == 3 else GrantPhase.TRAINING)
            if number == 3:
                await nano.lease(GrantPhase.OVER)

        def evaluated(number: int, arrays: Any) -> MetricRecord:
            if number:
                asyncio.run_coroutine_threadsafe(obey(number), loop).result(20)
            return MetricRecord({"accuracy": 0.1 * number})

        strategy = PowerAware(
            FedAvg(fraction_evaluate=0.0),
            client.bound.address,
            quorum=Quorum(replies=1),
            survey_s=None,
            measures_left_out=False,
            clock=grid.clock,
        )
        await asyncio.to_thread(strategy.start, grid, ARRAYS, num_rounds=4, evaluate_fn=evaluated)
        seen = (await client.rounds()).rounds
        assert [view.device_count for view in seen] == [2, 1, 1, 2]
        assert [list(view.late_device_ids) for view in seen] == [["nano"], [], [], ["nano"]]
        assert not any(view.failed_device_ids for view in seen)
        granted = {each.device_id: each.power_limit_w for each in seen[0].plan.assignments}
        assert [view.idle_w for view in seen[1:3]] == [granted["nano"]] * 2, "its watts are set aside"
