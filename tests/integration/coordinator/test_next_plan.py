"""The preview of the next plan, from a client and from a shell: it shows the plan and changes nothing."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from coordinator.cli.client import RequestFailedError, RequestRefusedError
from coordinator.settings import CoordinatorSettings
from tests.fakes.served import READY, Agent, Client, serving_client, status
from tests.fakes.shell import asked, rack_and_roof, served_with_shell
from tests.fakes.small_fleet import RUN, RUN_NAME
from wattfleet.errors import InvalidInputError
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import operator_pb2, planning_pb2, session_pb2

RUN_AFTER = "4712"


@pytest.fixture
def site(config: CoordinatorSettings, tmp_path: Path) -> CoordinatorSettings:
    return config.with_values(site=rack_and_roof(tmp_path))


async def back(client: Client, *device_ids: str) -> list[Agent]:
    """Reconnect devices that were ready before a restart; sessions last as long as the agents are referenced."""
    agents = [client.agent() for _ in device_ids]
    for agent, device_id in zip(agents, device_ids, strict=True):
        await agent.hello(device_id)
        await agent.lease()
        await agent.send(state=READY)
    return agents


async def test_a_look_at_the_next_plan_is_what_it_becomes_and_stores_nothing(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        _agents = await client.two_ready()
        looked = await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest())
        assert (looked.run_id, looked.round, looked.epochs, looked.all_devices) == (RUN, 1, 1.0, False)
        assert not (await client.rounds()).rounds
        planned = await client.plan()
        planned.plan_id = ""
        assert looked.plan == planned
        await client.planning.FinishRound(planning_pb2.FinishRoundRequest(plan_id=f"{RUN}/1", wall_s=1.0))
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN))
        await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=RUN_AFTER, strategy="FedAvg", rounds=1))
    async with serving_client(config) as client:
        _agents = await back(client, "orin", "nano")
        for run_id, code in (("none", grpc.StatusCode.NOT_FOUND), (RUN, grpc.StatusCode.INVALID_ARGUMENT)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest(run_id=run_id))
            assert status(refused)[0] is code
        assert status(refused)[1].startswith(f"run {RUN_NAME} has ended: ")
        assert (await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest())).run_id == RUN_AFTER
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN_AFTER))
        looked = await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest())
        assert (looked.run_id, looked.round, looked.all_devices) == ("", 1, True)


async def test_right_after_a_restart_a_look_waits_for_the_fleet_as_the_plan_does(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        _agents = await client.two_ready()
        client.stop.set()  # while the sessions last
        await client.running
    async with serving_client(config) as client:
        _orin = await back(client, "orin")
        refusals = []
        for asking in (client.plan(), client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asking
            refusals.append((status(refused)[0], status(refused)[1].partition(";")[0]))
        assert refusals[0] == refusals[1]
        assert "waiting for devices to reconnect: 1 still missing" in refusals[0][1]
        _nano = await back(client, "nano")
        looked = await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest())
        planned = await client.plan()
        assert looked.plan.assignments == planned.assignments and looked.plan.decisions == planned.decisions


async def test_a_look_at_the_next_plan_gives_every_reason(site: CoordinatorSettings) -> None:

    async with served_with_shell(site) as (client, shell):
        with pytest.raises(InvalidInputError, match="this command only previews a round"):
            await shell("plan")
        with pytest.raises(RequestFailedError, match="no device is ready to train: none ever connected"):
            await shell("plan", "--dry-run")
        _agents = await client.two_ready()
        await shell("drain", "orin")
        shown = " ".join((await shell("plan", "--dry-run", "--epochs", "2")).stdout.split())
        assert f"round 1 of run {RUN_NAME}, 2 epochs, if planned now: 1 of 2 devices selected" in shown
        assert "drained by the operator" in shown and "roof 40.0" in shown
        content = await asked(shell, "plan", "--dry-run", "--all-devices")
        nano, orin = content["devices"]
        assert (nano["selected"], nano["epoch_s"], orin["mode"]) == (True, 35.0, None)
        assert content["supplies"][1] == {"supply": "rack", "budget_w": 60.0, "planned_w": 5.0}
        assert not (await client.rounds()).rounds
        with pytest.raises(InvalidInputError, match="--epochs must be above 0 and finite"):
            await shell("plan", "--dry-run", "--epochs", "-1")
        with pytest.raises(InvalidInputError, match="unknown run 'x': it never started"):
            await shell("plan", "--dry-run", "--run", "x")
        await shell("budget", "set", "site", "9")
        with pytest.raises(RequestRefusedError, match="is not enough to train one device"):
            await shell("plan", "--dry-run")


async def test_a_look_names_devices_that_are_not_looked_at(config: CoordinatorSettings) -> None:

    async with served_with_shell(config) as (client, shell):
        agents = await client.two_ready()
        others = [client.agent() for _ in range(14)]
        for k, agent in enumerate(others):
            await agent.hello(f"new-{k:02}")
        _, _, said = (await shell("plan", "--dry-run")).stdout.partition("14 devices not considered\n")
        assert said.split()[:4] == ["new-00,", "new-01,", "new-02,", "new-03,"]
        assert "enrolled" in said.splitlines()[0] and "new-11 and 2 more" in " ".join(said.split())
        content = await asked(shell, "plan", "--dry-run")
        assert content["not_looked_at"] == [{"device_id": f"new-{k:02}", "reason": "enrolled"} for k in range(14)]
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN))
        assert "round 1 of a new run, 1 epoch" in (await shell("plan", "--dry-run")).stdout
        with pytest.raises(RequestRefusedError, match=f"run {RUN_NAME} has ended"):
            await shell("plan", "--dry-run", "--run", RUN)
        for agent in (*agents, *others):
            await agent.goodbye()


async def test_in_the_middle_of_a_round_the_one_after_it_is_previewed(site: CoordinatorSettings) -> None:
    async with served_with_shell(site) as (client, shell):
        agents = await client.two_ready()
        plan = await client.plan(1)
        before = await client.devices()
        for agent in agents:
            await agent.lease(GrantPhase.TRAINING, await agent.grant())
            await agent.send(state=session_pb2.StateReport(state=session_pb2.DEVICE_STATE_TRAINING, profiled_modes=50))
        with pytest.raises(grpc.aio.AioRpcError, match="no device is ready to train"):
            await client.plan(2)
        content = await asked(shell, "plan", "--dry-run")
        assert (content["round"], content["assumed_ended"]) == (2, [plan.plan_id])
        assert {each["device_id"]: each["selected"] for each in content["devices"]} == {"orin": True, "nano": True}
        shown = " ".join((await shell("plan", "--dry-run", columns=120)).stdout.split())
        assert f"assuming that round 1 of run {RUN_NAME}, which is in flight, has ended" in shown
        assert {each: view.state for each, view in before.items()} != {
            each: view.state for each, view in (await client.devices()).items()
        }, "they train, as before the preview"
        new_run = await asked(shell, "plan", "--dry-run", "--workload", "unnamed")
        assert (new_run["run_id"], new_run["round"], new_run["assumed_ended"]) == (None, 1, [plan.plan_id])


async def test_a_newer_run_that_has_ended_does_not_hide_the_one_that_goes_on(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        _agents = await client.two_ready()
        await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=RUN_AFTER, strategy="FedAvg", rounds=1))
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN_AFTER))
        assert (await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest())).run_id == RUN


async def test_any_supply_can_be_assumed_to_have_other_watts(site: CoordinatorSettings) -> None:
    async with served_with_shell(site) as (client, shell):
        _agents = await client.two_ready()
        usual = {each["supply"]: each for each in (await asked(shell, "plan", "--dry-run"))["supplies"]}
        options = ("--budget", "rack=25", "--budget", "roof=13.5")
        assumed = {each["supply"]: each for each in (await asked(shell, "plan", "--dry-run", *options))["supplies"]}
        assert {name: each["budget_w"] for name, each in assumed.items()} == {"site": 100.0, "rack": 25.0, "roof": 13.5}
        assert assumed["rack"]["planned_w"] <= 25 < usual["rack"]["planned_w"]
        assert assumed["roof"]["planned_w"] <= 13.5 < usual["roof"]["planned_w"]
        assert {each["supply"]: each["watts"] for each in await asked(shell, "budget", "show")} == {
            each: usual[each]["budget_w"] for each in usual
        }, "no budget has changed"
        for option, said in (
            ("attic=5", "unknown supply 'attic': use one of site, rack, roof"),
            ("rack=0", "the assumed budget of rack must be finite and above 0 W, not 0"),
            ("rack", "--budget is written as SUPPLY=WATTS, such as site=60, not 'rack'"),
            ("rack=many", "--budget is written as SUPPLY=WATTS, such as site=60, not 'rack=many'"),
        ):
            with pytest.raises(InvalidInputError, match=said):
                await shell("plan", "--dry-run", "--budget", option)
