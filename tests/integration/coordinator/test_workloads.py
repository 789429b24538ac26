"""Workloads and duties over real gRPC: announcements, plans, the views, and the operator's commands about them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest

from coordinator.cli.client import InvalidRequestError
from coordinator.settings import CoordinatorSettings
from tests.fakes.fleets import front
from tests.fakes.served import READY, Agent, Client, asked, served_with_shell, serving_client, status
from tests.fakes.small_fleet import NANO_FRONT, NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN
from wattfleet.core.choosing import Front
from wattfleet.core.duties import KeptDuty
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.convert import front_to_message, kept_duty_from_message, kept_duty_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import duty_pb2, operator_pb2, planning_pb2, power_pb2, session_pb2, view_pb2

# --- Workloads --------------------------------------------------------------------------------------------------------
# Workloads over real gRPC: announcements, which devices are planned for which workload, and the views.


BERT = power_pb2.Workload(name="bert", parameters=1e8)


async def started(client: Client, run_id: str, workload: power_pb2.Workload | None = None) -> None:
    request = planning_pb2.StartRunRequest(run_id=run_id, strategy="FedAvg", rounds=3, workload=workload)
    await client.planning.StartRun(request)


async def bound(client: Client) -> None:
    bindings = [
        planning_pb2.NodeBinding(node_id=ORIN_NODE, device_id="orin"),
        planning_pb2.NodeBinding(node_id=NANO_NODE, device_id="nano"),
    ]
    await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))


async def ready(client: Client, device_id: str) -> Agent:
    agent = client.agent()
    await agent.hello(device_id)
    await agent.lease()
    await agent.send(state=READY)
    return agent


def report(device_front: Front, idle_w: float, workload: str = "", **more: Any) -> session_pb2.FrontReport:
    of = power_pb2.Workload(name=workload, batch=32) if workload else None
    return session_pb2.FrontReport(front=front_to_message(device_front), idle_w=idle_w, workload=of, **more)


async def test_a_run_is_announced_and_planned_with_the_fronts_that_follow(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        await bound(client)
        orin, nano = await ready(client, "orin"), await ready(client, "nano")
        await started(client, RUN, BERT)
        for agent in (orin, nano):
            announced = await agent.hear(agent.announced)
            assert [(each.name, each.parameters) for each in announced.workloads] == [("bert", 1e8)]
        planned = asyncio.create_task(client.plan())
        await asyncio.sleep(0.1)
        assert not planned.done(), "the devices were told of the workload just now"
        await orin.send(front=report(ORIN_FRONT, 5.0, "bert"))
        await nano.send(front=report(NANO_FRONT, 3.0, "bert", minibatches_per_epoch=100, profiled_modes=4))
        parts = {each.device_id: each for each in (await planned).assignments}
        assert set(parts) == {"orin", "nano"}
        assert (parts["orin"].length_assumed, parts["nano"].length_assumed) == (True, False)
        assert (parts["nano"].batch, parts["nano"].profiled_modes) == (32, 4)
        grant = await orin.grant()
        assert grant.workload == "bert"
        await orin.lease(GrantPhase.OVER, grant)


async def test_a_device_that_connects_later_is_told_of_the_live_runs(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        await started(client, "1", BERT)
        await started(client, "2", power_pb2.Workload(name="resnet18"))
        await started(client, "3", power_pb2.Workload(name="over"))
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id="3"))
        agent = await ready(client, "orin")
        announced = await agent.hear(agent.announced)
        assert [each.name for each in announced.workloads] == ["resnet18", "bert"]


async def test_a_silent_device_holds_a_plan_up_for_a_short_time_only(config: CoordinatorSettings) -> None:
    async with serving_client(config.with_values(rounds={"fronts_wait_s": 0.2})) as client:
        await bound(client)
        orin, _ = await ready(client, "orin"), await ready(client, "nano")
        await started(client, RUN, BERT)
        await orin.send(front=report(ORIN_FRONT, 5.0, "bert"))
        plan = await client.plan()
        assert {each.device_id: each.reason for each in plan.decisions if not each.selected} == {
            "nano": "has no prediction for the workload 'bert' yet"
        }


async def test_nodes_are_predicted_for_the_app_that_started_the_run(config: CoordinatorSettings) -> None:
    async with serving_client(config.with_values(rounds={"fronts_wait_s": 0.0})) as client:
        await bound(client)
        orin = await ready(client, "orin")
        request = planning_pb2.StartRunRequest(run_id=RUN, strategy="own", rounds=1, run_token="s", workload=BERT)
        await client.planning.StartRun(request)
        await orin.send(front=report(ORIN_FRONT, 5.0, "bert"))
        asked = planning_pb2.PredictNodesRequest(run_id=RUN, node_ids=NODES, epochs=2.0, run_token="s")
        known = {each.device_id: each for each in (await client.planning.PredictNodes(asked)).predictions}
        assert known["orin"].assignment.epoch_s == 10 and known["orin"].reason == ""
        assert not known["nano"].HasField("assignment")
        asked.run_token = "another"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.planning.PredictNodes(asked)
        assert status(refused)[0] is grpc.StatusCode.PERMISSION_DENIED


async def test_fronts_of_all_workloads_survive_a_restart(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        agent = await ready(client, "orin")
        await agent.send(front=report(ORIN_FRONT, 5.0, "bert", minibatches_per_epoch=7, profiled_modes=9))
        await agent.send(front=report(NANO_FRONT, 5.0, "gpt"))
        await agent.send(front=report(front((1, 2)), 5.0, "resnet18"))
        await agent.send(removed=session_pb2.WorkloadRemoved(workload="gpt"))
        await started(client, RUN, BERT)
    async with serving_client(config) as client:
        device = (await client.devices())["orin"]
        assert [each.workload.name for each in device.workloads] == ["bert", "resnet18"]
        [bert, resnet18] = device.workloads
        assert (bert.minibatches_per_epoch, bert.profiled_modes, bert.workload.batch) == (7, 9, 32)
        assert not resnet18.HasField("minibatches_per_epoch")
        assert (device.workload, device.front) == ("resnet18", resnet18.front)
        [run] = await client.runs()
        assert (run.workload.name, run.workload.parameters) == ("bert", 1e8)
        agent = await ready(client, "nano")
        assert [each.name for each in (await agent.hear(agent.announced)).workloads] == ["bert"]


async def test_workloads_are_listed_with_who_knows_them(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        orin, nano = await ready(client, "orin"), await ready(client, "nano")
        await orin.send(front=report(ORIN_FRONT, 5.0, "bert", profiled_modes=9))
        await nano.send(front=report(NANO_FRONT, 3.0, "bert", profiled_modes=4))
        await nano.send(front=report(NANO_FRONT, 3.0, "gpt"))
        await started(client, RUN, BERT)
        await started(client, "over", BERT)
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id="over"))
        answers = client.view.ListWorkloads(view_pb2.ListWorkloadsRequest())
        bert, gpt = [each async for answer in answers for each in answer.workloads]
        assert (bert.workload.name, bert.devices, bert.measured_devices, bert.median_modes) == ("bert", 2, 2, 6.5)
        assert (list(bert.live_run_ids), bert.runs, bert.workload.parameters) == ([RUN], 2, 1e8)
        assert bert.last_used_unix_s > 0
        assert (gpt.workload.name, gpt.devices, gpt.measured_devices, gpt.runs) == ("gpt", 1, 0, 0)
        assert not gpt.HasField("median_modes") and not gpt.HasField("last_used_unix_s")


# --- orders to measure ----------------------------------------------------------------------------------------------


async def test_devices_are_ordered_to_measure_a_workload(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        orin = await ready(client, "orin")
        away, broken = await ready(client, "away"), await ready(client, "broken")
        await away.goodbye()
        await broken.send(state=session_pb2.StateReport(state=session_pb2.DEVICE_STATE_DEGRADED, detail="no power"))
        request = operator_pb2.ProfileWorkloadRequest(
            workload=power_pb2.Workload(name="vision"), synthetic="resnet18", modes=12, devices=["id:*"]
        )
        answer = await client.operator.ProfileWorkload(request)
        assert list(answer.device_ids) == ["orin"]
        assert {each.device_id: each.reason for each in answer.not_told} == {
            "away": "it is offline: repeat the command when it is ready",
            "broken": "it is degraded: repeat the command when it is ready",
        }
        order = await orin.hear(orin.profile_orders)
        assert (order.workload.name, order.synthetic, order.modes) == ("vision", "resnet18", 12)


@pytest.mark.parametrize(
    ("values", "code", "error"),
    [
        ({"devices": ["id:nobody"]}, grpc.StatusCode.NOT_FOUND, "no device matches id:nobody"),
        ({"devices": []}, grpc.StatusCode.INVALID_ARGUMENT, "name the devices"),
        ({"devices": ["orin"]}, grpc.StatusCode.INVALID_ARGUMENT, "write id:NAME, tag:NAME or site:NAME"),
        ({"modes": 4}, grpc.StatusCode.INVALID_ARGUMENT, "a device measures 5 to 10,000 modes, not 4"),
        ({"workload": power_pb2.Workload()}, grpc.StatusCode.INVALID_ARGUMENT, "a workload's name must have 1 to 200"),
    ],
)
async def test_an_order_that_cannot_be_given_is_refused(
    config: CoordinatorSettings, values: dict[str, Any], code: grpc.StatusCode, error: str
) -> None:
    async with serving_client(config) as client:
        usual = {"workload": BERT, "modes": 12, "devices": ["id:*"]}
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.operator.ProfileWorkload(operator_pb2.ProfileWorkloadRequest(**{**usual, **values}))
        assert status(refused)[0] is code and error in status(refused)[1]


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x" * 10_000, "bell\x07", " "])
async def test_a_run_with_a_bad_workload_is_refused_without_harm(config: CoordinatorSettings, name: str) -> None:
    async with serving_client(config) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await started(client, RUN, power_pb2.Workload(name=name))
        code, text = status(refused)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "a workload's name must have 1 to 200 printable characters" in text and len(text) < 300
        assert await client.runs() == []


async def test_a_front_of_a_workload_that_was_never_announced_is_kept(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        agent = await ready(client, "orin")
        await agent.send(front=report(ORIN_FRONT, 5.0, "measured ahead", profiled_modes=30))
        [known] = (await client.devices())["orin"].workloads
        assert (known.workload.name, known.profiled_modes) == ("measured ahead", 30)


# --- Workload commands ------------------------------------------------------------------------------------------------
# The operator's commands about workloads, as a shell sees them.


async def ready_with(client: Client, device_id: str, *fronts: tuple[str, Front, int]) -> Agent:
    """A device that knows some workloads, each with its front and its minibatches in an epoch; 0 for unknown."""
    agent = client.agent()
    await agent.hello(device_id)
    await agent.lease()
    for name, known, minibatches in fronts:
        report = session_pb2.FrontReport(
            front=front_to_message(known),
            idle_w=5.0,
            profiled_modes=4,
            workload=power_pb2.Workload(name=name, batch=32),
            minibatches_per_epoch=minibatches or None,
        )
        await agent.send(front=report)
    await agent.send(state=READY)
    return agent


async def test_a_device_shows_each_workload_and_the_front_of_the_one_asked_for(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        _agent = await ready_with(client, "orin", ("bert", ORIN_FRONT, 70), ("gpt", NANO_FRONT, 0))
        content = await asked(shell, "device", "orin", "--workload", "bert")
        assert [point["epoch_s"] for point in content["front"]] == [10.0, 20.0, 40.0]
        latest = await asked(shell, "device", "orin")
        assert (latest["workload"], [point["epoch_s"] for point in latest["front"]]) == ("gpt", [35.0, 60.0])
        assert [(each["workload"], each["minibatches_per_epoch"]) for each in latest["workloads"]] == [
            ("bert", 70),
            ("gpt", None),
        ]
        text = (await shell("device", "orin", "--workload", "bert")).stdout
        assert "Pareto front of bert" in text
        rows = [line.split() for line in text.splitlines()]
        assert ["32", "4", "unknown", "~35.0", "s", "gpt"] in rows and ["32", "4", "70", "10.0", "s", "bert"] in rows
        [shown] = await asked(shell, "devices", "--workload", "bert")
        assert (shown["fastest_epoch_s"], shown["profiled_modes"]) == (10.0, 4)
        [shown] = await asked(shell, "devices", "--workload", "unknown")
        assert shown["fastest_epoch_s"] is None
        assert (
            "no front for the workload unknown yet" in (await shell("device", "orin", "--workload", "unknown")).stdout
        )
        with pytest.raises(InvalidRequestError, match="a workload's name must have 1 to 200"):
            await shell("devices", "--workload", "bell\x07")


async def test_what_assumes_the_length_of_an_epoch_is_shown_as_assumed(config: CoordinatorSettings) -> None:
    config = config.with_values(server={"http_address": "127.0.0.1:0"})
    async with served_with_shell(config) as (client, shell), httpx.AsyncClient() as browser:
        _agent = await ready_with(client, "orin", ("bert", ORIN_FRONT, 70), ("gpt", NANO_FRONT, 0))
        bindings = [planning_pb2.NodeBinding(node_id=1, device_id="orin")]
        await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))

        async def shown(workload: str, run_id: str) -> tuple[list[str], list[str]]:
            """What the commands and the page show of a workload and of a round with it."""
            start = planning_pb2.StartRunRequest(
                run_id=run_id, strategy="FedAvg", rounds=3, workload={"name": workload}
            )
            await client.planning.StartRun(start)
            preview = (await shell("plan", "--dry-run", columns=120)).stdout
            what_if = (await browser.get(f"http://{client.bound.http_address}/what-if")).text
            ask = planning_pb2.PlanRoundRequest(run_id=run_id, round=1, node_ids=[1], epochs=1.0)
            await client.planning.PlanRound(ask)
            commands = [
                (await shell("devices", "--workload", workload, columns=120)).stdout,
                (await shell("device", "orin", "--workload", workload)).stdout.split("Pareto front")[1],
                (await shell("round", run_id, "1", columns=140)).stdout,
                preview,
            ]
            run = (await browser.get(f"http://{client.bound.http_address}/runs/{run_id}")).text
            device = (await browser.get(f"http://{client.bound.http_address}/devices/orin")).text
            await client.planning.FinishRound(planning_pb2.FinishRoundRequest(plan_id=f"{run_id}/1", wall_s=1.0))
            await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=run_id))
            await client.end_trainings()
            return commands, [what_if, run, device]

        commands, pages = await shown("gpt", "unknown-length")
        assert all("assume" in text for text in commands), commands
        assert all("assumed length" in page for page in pages)
        assert all("~35.0" in text for text in (commands[0], commands[2], commands[3])), commands
        assert "assume 100 minibatches" in " ".join(commands[1].split())
        commands, pages = await shown("bert", "known-length")
        assert not any("assume" in text or "~" in text for text in commands), commands
        assert not any("assumed length" in page for page in pages[:2])


async def test_workloads_are_listed(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        assert "no workloads yet" in (await shell("workloads")).stdout
        _agent = await ready_with(client, "orin", ("bert", ORIN_FRONT, 70))
        workload = power_pb2.Workload(name="gpt", precision="bfloat16")
        await client.planning.StartRun(
            planning_pb2.StartRunRequest(run_id=RUN, strategy="FedAvg", rounds=3, workload=workload)
        )
        bert, gpt = await asked(shell, "workloads")
        assert (bert["workload"], bert["devices"], bert["median_modes"], bert["runs"]) == ("bert", 1, 4.0, 0)
        assert (gpt["workload"], gpt["live_run_ids"], gpt["precision"]) == ("gpt", [RUN], "bfloat16")
        lines = (await shell("workloads")).stdout.splitlines()
        assert lines[1].split() == ["training", "1", "1", "4", "0", "-", "bert"]
        assert lines[2].split()[-1] == "gpt"
        assert "workload gpt" in (await shell("rounds")).stdout


async def test_devices_are_told_to_measure_a_workload(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, away = await ready_with(client, "orin"), await ready_with(client, "away")
        await away.goodbye()
        await shell("tag", "orin", "away", "--add", "lab")
        order = ("profile", "--workload", "vision", "--synthetic", "resnet18", "--modes", "12", "--devices")
        lines = (await shell(*order, "tag:lab")).stdout.splitlines()
        assert lines[0] == "1 device ordered to measure vision"
        assert lines[1].startswith("progress: `devices --watch`")
        assert lines[2].split()[:6] == ["away", "not", "ordered:", "it", "is", "offline:"]
        told = await orin.hear(orin.profile_orders)
        assert (told.workload.name, told.synthetic, told.modes) == ("vision", "resnet18", 12)
        assert await asked(shell, *order, "orin") == {"device_ids": ["orin"], "not_told": {}}
        with pytest.raises(InvalidInputError, match="a workload's name must have"):
            await shell("profile", "--workload", " ", "--devices", "orin")


# --- Duties shown -----------------------------------------------------------------------------------------------------
# The operator's commands show how devices keep their duties.

KEPT = KeptDuty("camera", 500, 0.95, 29.5, 12, 2, (*[1] * 11, *[0] * 6), 1500.0, 350.0, 4, 0.5, 1, "too long")


@pytest.mark.parametrize("kept", [KEPT, replace(KEPT, latency_at_quantile_ms=None, waits="")])
def test_figures_survive_their_message(kept: KeptDuty) -> None:
    assert kept_duty_from_message(kept_duty_to_message(kept)) == kept


async def test_a_device_with_a_duty_is_shown_with_its_figures(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        assert (await asked(shell, "device", "orin"))["duty"] is None
        await orin.send(lease=session_pb2.Lease(number=1, duty=kept_duty_to_message(KEPT)))
        shown = await asked(shell, "device", "orin")
        assert shown["duty"]["missed"] == 2 and shown["duty"]["waits"] == "too long"
        words = " ".join((await shell("device", "orin")).stdout.split())
        assert "camera: 95% of requests within 500 ms" in words
        assert "29.5 per second, in batches of 4; 95% within 350 ms" in words
        assert "2 of 12 (16.7%)" in words
        assert "50% of the last half minute; it waits: too long" in words


async def test_figures_that_no_device_can_have_are_left_out_and_the_session_lasts(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await orin.send(lease=session_pb2.Lease(number=1, duty=kept_duty_to_message(KEPT)))
        hostile = duty_pb2.DutyFigures(workload="camera", latency_ms=float("nan"))
        await orin.send(lease=session_pb2.Lease(number=2, duty=hostile))
        shown = await asked(shell, "device", "orin")
        assert shown["state"] == "ready" and shown["duty"]["missed"] == 2
        await orin.send(lease=session_pb2.Lease(number=3))
        assert (await asked(shell, "device", "orin"))["duty"] is None


async def test_watts_at_rest_that_change_in_a_session_are_reserved(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        before = (await asked(shell, "budget", "show"))[0]["set_aside_w"]
        for watts, added in ((40.0, 35.0), (12.0, 7.0)):
            # More than 35 W are only accepted with a duty.
            report = session_pb2.FrontReport(no_front="the duty takes the board", idle_w=watts, is_idle_with_duty=True)
            await orin.send(front=report)
            assert (await asked(shell, "device", "orin"))["idle_w"] == watts
            assert (await asked(shell, "budget", "show"))[0]["set_aside_w"] == before + added


async def test_a_training_that_a_duty_makes_longer_gets_a_longer_grant(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await client.plan()
        granted = await orin.grant()
        training = session_pb2.Lease(
            number=1,
            grant_id=granted.id,
            plan_id=granted.plan_id,
            phase=session_pb2.GRANT_PHASE_TRAINING,
            duty=kept_duty_to_message(KEPT),
        )
        await orin.send(lease=training)
        slower = front_to_message(front((30, 50), (60, 30), (120, 20)))
        await orin.send(front=session_pb2.FrontReport(front=slower, idle_w=5.0, minibatches_per_epoch=100))
        longer = await orin.grant()
        assert (longer.plan_id, longer.mode, longer.power_limit_w) == (
            granted.plan_id,
            granted.mode,
            granted.power_limit_w,
        )
        assert longer.longest_s > granted.longest_s
        said = (await shell("rounds")).stdout
        assert "round 1 takes up to 60.0 s instead of 35.0 s: epochs take longer beside a duty" in said
