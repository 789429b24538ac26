"""The operator's service, over real gRPC: its changes take effect immediately, and survive a restart."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.fronts import front
from tests.fakes.polling import eventually
from tests.fakes.served import Client, serving_client, status
from tests.fakes.small_fleet import RUN
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import operator_pb2, planning_pb2, view_pb2


async def budgets(client: Client) -> dict[str, operator_pb2.SupplyBudget]:
    answer = await client.operator.GetBudgets(operator_pb2.GetBudgetsRequest())
    return {budget.supply: budget for budget in answer.supplies}


async def set_budget(client: Client, watts: float, for_s: float | None = None) -> operator_pb2.SetBudgetResponse:
    request = operator_pb2.SetBudgetRequest(supply="site", watts=watts, for_s=for_s)
    return await client.operator.SetBudget(request)


# --- budgets ------------------------------------------------------------------------------------------------------


async def test_the_operators_watts_count_at_once_and_trim_what_is_in_flight(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        orin, _ = await client.two_ready()
        before = (await budgets(client))["site"]
        assert (before.watts, before.source, before.fallback, before.set_aside_w) == (100.0, "constant", False, 8.0)
        plan = await client.plan()
        await client.obey(GrantPhase.TRAINING)
        changed = await set_budget(client, 40.0)
        assert changed.trimmed_rounds == 1
        assert (changed.budget.watts, changed.budget.source) == (40.0, "operator")
        assert changed.budget.set_aside_w == plan.planned_w, "devices may act on their higher limits still"
        lower = await orin.grant()
        assert lower.HasField("mode")
        await orin.lease(GrantPhase.TRAINING, lower)
        await client.obey(GrantPhase.TRAINING)
        assert (await budgets(client))["site"].set_aside_w <= 40.0
        assert changed.budget.since_unix_s >= before.since_unix_s
        assert not changed.budget.HasField("until_unix_s")
        [view] = (await client.rounds()).rounds
        assert (view.device_count, view.other_mode_count, view.stopped_count) == (2, 1, 0)
        assert view.plan.first_planned.assignments == plan.assignments
        assert (view.plan.first_planned.site_budget_w, view.plan.site_budget_w) == (100.0, 40.0)
        request = view_pb2.StreamRoundsRequest(run_id=RUN, without_devices=True)
        [brief] = [each async for each in client.view.StreamRounds(request)]
        assert brief.plan.first_planned.planned_w == plan.planned_w and not brief.plan.first_planned.assignments
        assert (await client.view.GetFleet(view_pb2.GetFleetRequest())).site_budget_w == 40.0
        cleared = await client.operator.ClearBudget(operator_pb2.ClearBudgetRequest(supply="site"))
        assert (cleared.budget.watts, cleared.budget.source, cleared.trimmed_rounds) == (100.0, "constant", 0)


async def test_the_operators_watts_outlast_a_restart_until_they_are_cleared(config: CoordinatorSettings) -> None:
    async def first(client: Client) -> None:
        await set_budget(client, 40.0)

    async def second(client: Client) -> None:
        assert (await budgets(client))["site"].watts == 40.0
        await client.operator.ClearBudget(operator_pb2.ClearBudgetRequest(supply="site"))

    async def third(client: Client) -> None:
        assert (await budgets(client))["site"].source == "constant"

    for story in (first, second, third):
        async with serving_client(config) as client:
            await story(client)


async def test_an_expired_override_returns_to_its_source_while_serving_and_at_start(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config.with_values(site={"budget_check_s": 0.02})

    async def source_is_back(client: Client) -> bool:
        return (await budgets(client))["site"].source == "constant"

    async with serving_client(config) as client:
        changed = await set_budget(client, 40.0, for_s=0.3)
        assert changed.budget.until_unix_s - changed.budget.since_unix_s == pytest.approx(0.3, abs=0.1)
        await eventually(lambda: source_is_back(client))
        await set_budget(client, 30.0, for_s=0.1)
        await eventually(lambda: source_is_back(client))
    async with serving_client(config) as client:
        assert await source_is_back(client)


async def test_watts_of_a_supply_that_is_stated_no_more_are_let_go(config: CoordinatorSettings, tmp_path: Path) -> None:

    async with serving_client(config) as client:
        await set_budget(client, 40.0)
    (tmp_path / "site.toml").write_text("[supplies.hall]\nbudget = { watts = 70.0 }\n")
    async with serving_client(config.with_values(site={"budget_w": None, "file": tmp_path / "site.toml"})) as client:
        assert (await budgets(client))["hall"].watts == 70.0


async def test_watts_that_cannot_be_are_refused_and_change_nothing(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        for watts, for_s, text in (
            (0.0, None, "a budget must be finite and above 0 W"),
            (float("nan"), None, "a budget must be finite and above 0 W"),
            (5.0, 0.0, "a budget can be overridden for up to 366 days"),
            (5.0, float("nan"), "a budget can be overridden for up to 366 days"),
            (5.0, 1e12, "a budget can be overridden for up to 366 days"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await set_budget(client, watts, for_s)
            assert status(refused)[0] is grpc.StatusCode.INVALID_ARGUMENT and text in status(refused)[1]
        for method, request in (
            ("SetBudget", operator_pb2.SetBudgetRequest(supply="attic", watts=5.0)),
            ("ClearBudget", operator_pb2.ClearBudgetRequest(supply="attic")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await getattr(client.operator, method)(request)
            assert status(refused) == (
                grpc.StatusCode.NOT_FOUND,
                "unknown supply 'attic'; known: site",
            )
        assert (await budgets(client))["site"].watts == 100.0


# --- participation of devices -------------------------------------------------------------------------------------


async def test_tags_and_draining_are_obeyed_and_outlast_a_restart(config: CoordinatorSettings) -> None:
    config = config.with_values(selection={"exclude": ("tag:sick",)})

    async with serving_client(config) as client:
        await client.two_ready()
        tagged = await client.operator.TagDevices(operator_pb2.TagDevicesRequest(device_ids=["nano"], add=["sick"]))
        assert list(tagged.devices) == [operator_pb2.DeviceOverrides(device_id="nano", tags=["sick"])]
        await client.operator.DrainDevices(operator_pb2.DrainDevicesRequest(device_ids=["orin"]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.plan()
        assert "no device can be selected" in status(refused)[1]
        await client.operator.DrainDevices(operator_pb2.DrainDevicesRequest(device_ids=["orin"], undo=True))
        plan = await client.plan()
        assert {decision.device_id: decision.selected for decision in plan.decisions} == {"orin": True, "nano": False}
        await client.operator.DrainDevices(operator_pb2.DrainDevicesRequest(device_ids=["orin"]))
    async with serving_client(config) as client:
        await client.two_ready()
        seen = await client.devices()
        assert (list(seen["nano"].operator_tags), seen["nano"].drained) == (["sick"], False)
        assert (list(seen["orin"].operator_tags), seen["orin"].drained) == ([], True)
        await client.operator.TagDevices(operator_pb2.TagDevicesRequest(device_ids=["nano"], remove=["sick"]))
        plan = await client.plan(2)
        assert {decision.device_id: decision.reason for decision in plan.decisions}["orin"] == "drained by the operator"
        assert [assignment.device_id for assignment in plan.assignments] == ["nano"]


async def test_devices_that_never_connected_are_not_found(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:

        async def listed() -> None:
            [_ async for _ in client.view.ListDevices(view_pb2.ListDevicesRequest(device_ids=["none"]))]

        for call in (
            client.operator.TagDevices(operator_pb2.TagDevicesRequest(device_ids=["none"], add=["a"])),
            client.operator.DrainDevices(operator_pb2.DrainDevicesRequest(device_ids=["none"])),
            listed(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert status(refused) == (
                grpc.StatusCode.NOT_FOUND,
                "unknown device 'none': it never connected; is its agent running?",
            )


# --- views --------------------------------------------------------------------------------------------------------


async def test_devices_come_in_parts_and_with_fronts_only_where_asked_for(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.services.views._DEVICES_IN_A_MESSAGE", 1)

    async with serving_client(config) as client:
        await client.two_ready()
        answers = [answer async for answer in client.view.ListDevices(view_pb2.ListDevicesRequest())]
        assert [[device.device_id for device in answer.devices] for answer in answers] == [["nano"], ["orin"]]
        orin = answers[1].devices[0]
        assert not orin.HasField("front")
        assert (orin.fastest_epoch_s, orin.supply, orin.HasField("limit_w")) == (10.0, "site", False)


async def test_the_fastest_epoch_includes_its_warm_up_and_the_devices_limit(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    (tmp_path / "site.toml").write_text(
        "[supplies.site]\nbudget = { watts = 70.0 }\n"
        "[devices.limited]\nlimit_w = 30.0\n[devices.never]\nlimit_w = 9.0\n"
    )
    # The shorter epoch has the longer start-up time.
    starting = front((10, 50), (9, 30), (12, 20), warmup_s=(1, 4, 5))

    async with serving_client(config.with_values(site={"budget_w": None, "file": tmp_path / "site.toml"})) as client:
        agents = [client.agent() for _ in range(3)]
        for agent, device_id in zip(agents, ("free", "limited", "never"), strict=True):
            await agent.become_ready(device_id, starting, 5.0)
        devices = await client.devices()
        assert (devices["free"].fastest_epoch_s, devices["limited"].fastest_epoch_s) == (11.0, 13.0)
        assert not devices["never"].HasField("fastest_epoch_s")


async def test_rounds_of_a_run_in_the_archive_are_shown_and_stay_there(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        await client.two_ready()
        await client.plan()
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN, error="ValueError: no"))
        await client.planning.StartRun(planning_pb2.StartRunRequest(run_id="4712", strategy="FedAdam", rounds=1))
    async with serving_client(config) as client:
        runs = await client.runs()
        assert [(run.run_id, run.strategy, run.rounds, run.finished, run.error) for run in runs] == [
            (RUN, "FedAvg", 3, True, "ValueError: no"),
            ("4712", "FedAdam", 1, False, ""),
        ]
        for _ in range(2):
            request = view_pb2.StreamRoundsRequest(run_id=RUN)
            [whole] = [view async for view in client.view.StreamRounds(request)]
            assert len(whole.plan.assignments) == whole.device_count == 2
            request.without_devices = True
            [brief] = [view async for view in client.view.StreamRounds(request)]
            assert (brief.device_count, len(brief.plan.assignments), len(brief.plan.decisions)) == (2, 0, 0)
            assert brief.plan.planned_w == whole.plan.planned_w
