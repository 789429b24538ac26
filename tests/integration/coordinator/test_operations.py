"""The operator's service and the commands that remove devices and runs: changes take effect, and survive a restart."""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from coordinator.cli.client import InvalidRequestError
from coordinator.repository.writer import Writer
from coordinator.settings import CoordinatorSettings
from coordinator.state.records import DeviceOverrides, ForgottenDevice, NodeRecord
from coordinator.store.store import Store
from tests.fakes.fleets import front
from tests.fakes.polling import eventually
from tests.fakes.served import Agent, Client, a_round, asked, served_with_shell, serving_client, status
from tests.fakes.small_fleet import NANO_FRONT, NANO_NODE, RUN, RUN_NAME
from tests.fakes.stored_records import RecordingStore, device
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import (
    identity_pb2,
    identity_pb2_grpc,
    operator_pb2,
    planning_pb2,
    session_pb2,
    view_pb2,
)

# --- Operations -------------------------------------------------------------------------------------------------------
# The operator's service, over real gRPC: its changes take effect immediately, and survive a restart.


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
        assert (view.devices, view.in_other_mode, view.stopped) == (2, 1, 0)
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
    monkeypatch.setattr("coordinator.budgets.budget_watch.CHECK_S", 0.02)

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
        assert [(run.run_id, run.strategy, run.rounds_asked_for, run.finished, run.error) for run in runs] == [
            (RUN, "FedAvg", 3, True, "ValueError: no"),
            ("4712", "FedAdam", 1, False, ""),
        ]
        for _ in range(2):
            request = view_pb2.StreamRoundsRequest(run_id=RUN)
            [whole] = [view async for view in client.view.StreamRounds(request)]
            assert len(whole.plan.assignments) == whole.devices == 2
            request.without_devices = True
            [brief] = [view async for view in client.view.StreamRounds(request)]
            assert (brief.devices, len(brief.plan.assignments), len(brief.plan.decisions)) == (2, 0, 0)
            assert brief.plan.planned_w == whole.plan.planned_w


# --- Removal ----------------------------------------------------------------------------------------------------------
# Commands that forget devices and delete runs: those in use are kept, the others stay deleted after a restart.

_TRAINING = session_pb2.StateReport(state=session_pb2.DEVICE_STATE_TRAINING)
_TABLES = ("device", "workload_front", "device_overrides", "node", "run", "round", "observation", "unplanned_round")


def rows(config: CoordinatorSettings) -> dict[str, int]:
    """The number of rows of each table."""
    with closing(sqlite3.connect(config.store.location)) as connection:
        return {name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in _TABLES}


async def leave(client: Client, agent: Agent, device_id: str) -> None:
    """End a device's session."""
    await agent.goodbye()

    async def is_offline() -> bool:
        return (await client.states())[device_id] == "offline"

    await eventually(is_offline)


async def metrics(client: Client) -> str:
    reader, writer = await asyncio.open_connection(*client.bound.http_address.split(":"))
    writer.write(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return text


# --- forget -------------------------------------------------------------------------------------------------------


async def test_a_forgotten_device_is_gone_and_may_enrol_again(config: CoordinatorSettings) -> None:

    async with served_with_shell(config) as (client, shell):
        orin, nano = await client.two_ready()
        await a_round(client, orin)
        await shell("tag", "nano", "--add", "old")
        with pytest.raises(InvalidRequestError) as refused:
            await shell("forget", "orin", "nano")
        assert str(refused.value) == "orin is connected: stop its agent, then forget the device"
        await leave(client, nano, "nano")
        assert (await shell("forget", "nano")).stdout == "nano: forgotten\n"
        assert list(await client.devices()) == ["orin"]
        assert "nano" not in await metrics(client)
        resolved = await client.planning.ResolveNodes(planning_pb2.ResolveNodesRequest(node_ids=[NANO_NODE]))
        assert list(resolved.unknown_node_ids) == [NANO_NODE]
        with pytest.raises(InvalidRequestError, match="unknown device 'nano'"):
            await shell("forget", "nano")
    assert rows(config) | {"round": 1} == {
        **{"device": 1, "workload_front": 1, "device_overrides": 0, "node": 1},
        **{"run": 1, "round": 1, "observation": 1, "unplanned_round": 0},
    }
    async with served_with_shell(config) as (client, shell):
        assert list(await client.devices()) == ["orin"]
        await client.agent().become_ready("nano", NANO_FRONT, 3.0)
        again = (await client.devices())["nano"]
        assert list(again.operator_tags) == [] and again.HasField("front")
        assert [len(view.results) for view in (await client.rounds()).rounds] == [2], "history stays"
    assert rows(config)["workload_front"] == 2


async def test_a_device_that_a_round_holds_watts_for_is_not_forgotten(config: CoordinatorSettings) -> None:

    async with served_with_shell(config) as (client, shell):
        _, nano = await client.two_ready()
        await client.plan()
        await leave(client, nano, "nano")
        with pytest.raises(InvalidRequestError) as refused:
            await shell("forget", "nano")
        assert re.fullmatch(
            f"watts are still held for nano by round 1 of run {RUN_NAME}: repeat the command when its grant has lapsed,"
            " in at most 12. s",
            str(refused.value),
        )
        assert list(await client.devices()) == ["nano", "orin"]


async def test_a_device_expected_after_a_restart_is_forgotten_and_not_awaited(config: CoordinatorSettings) -> None:
    config = config.with_values(sessions={"return_grace_s": 0.5, "check_s": 0.05})

    async with served_with_shell(config) as (client, shell):
        await client.agent().hello("orin")
        await client.agent().hello("nano")
    async with served_with_shell(config) as (client, shell):
        assert await asked(shell, "forget", "nano") == [{"device_id": "nano", "forgotten": True}]
        await asyncio.sleep(0.7)  # the coordinator checks for devices that did not return
        await client.agent().hello("orin")
        assert not client.running.done()
        assert await client.states() == {"orin": "enrolled"}


async def test_a_device_forgotten_before_it_was_stored_leaves_nothing_behind(config: CoordinatorSettings) -> None:

    recording = RecordingStore()
    writer = Writer(recording)
    recording.free.clear()
    first = asyncio.create_task(writer.save(device("other")))
    await asyncio.sleep(0)
    writer.save_soon(device("nano", "old"), NodeRecord(1, "nano"), DeviceOverrides("nano"), NodeRecord(2, "orin"))
    writer.save_soon(ForgottenDevice("nano"))
    writer.save_soon(device("nano", "new"))
    recording.free.set()
    await first
    await writer.close()
    assert set(recording.saved) == {
        device("other"),
        NodeRecord(2, "orin"),
        ForgottenDevice("nano"),
        device("nano", "new"),
    }


def test_a_store_forgets_a_device_before_it_takes_what_enrolled_again(store: Store) -> None:
    store.save(device("nano", "old"), NodeRecord(1, "nano"), DeviceOverrides("nano", frozenset({"old"})))
    store.save(ForgottenDevice("nano"), device("nano", "new"))
    kept = store.load()
    assert ([record.detail for record in kept.devices], kept.nodes, kept.overrides) == (["new"], {}, [])


# --- delete -------------------------------------------------------------------------------------------------------


async def test_a_finished_run_is_deleted_with_its_rounds(config: CoordinatorSettings) -> None:

    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await a_round(client, orin)
        unplanned = planning_pb2.ReportUnplannedRoundRequest(run_id=RUN, round=2, began_ago_s=60.0, wall_s=45.0)
        await client.planning.ReportUnplannedRound(unplanned)
        await client.planning.StartRun(planning_pb2.StartRunRequest(run_id="other", strategy="FedAvg", rounds=1))
        with pytest.raises(InvalidRequestError) as refused:
            await shell("delete", RUN, "other")
        assert str(refused.value) == (
            f"run '{RUN_NAME}' is running: stop its Flower app, or pass --end to end the run at the coordinator"
        )
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN))
        assert "wattfleet_unplanned_rounds 1.0" in await metrics(client)
        assert (await shell("delete", RUN)).stdout == f"run {RUN_NAME}: deleted\n"
        assert "wattfleet_unplanned_rounds 0.0" in await metrics(client)
        assert [run.run_id for run in await client.runs()] == ["other"]
        with pytest.raises(InvalidInputError, match=f"unknown run '{RUN}'"):
            await shell("delete", RUN)
        with pytest.raises(InvalidInputError, match=f"unknown run '{RUN}'"):
            await shell("rounds", "--run", RUN)
    assert {name: rows(config)[name] for name in ("run", "round", "observation", "unplanned_round")} == {
        "run": 1,
        "round": 0,
        "observation": 0,
        "unplanned_round": 0,
    }
    async with served_with_shell(config) as (client, shell):
        assert [run.run_id for run in await client.runs()] == ["other"]


_ENDED = "stopped by an operator, who ended it"


async def in_training(client: Client) -> tuple[Agent, Agent]:
    """The Orin trains for a round, and the Nano was granted its part and has not begun."""
    orin, nano = await client.two_ready()
    await client.plan()
    await orin.obey(GrantPhase.TRAINING)
    await orin.send(state=_TRAINING)
    await nano.obey()
    return orin, nano


async def is_audited(client: Client, outcome: str) -> bool:
    """Whether the audit log has one entry, of a deletion with this outcome."""
    answers = identity_pb2_grpc.IdentityServiceStub(client.channel).ReadAuditLog(identity_pb2.ReadAuditLogRequest())
    entries = [(entry.method, entry.outcome) async for answer in answers for entry in answer.entries]
    return entries == [("DeleteRuns", outcome)]


async def test_a_run_is_ended_and_deleted_once_its_trainings_are_stopped(
    config: CoordinatorSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with served_with_shell(config) as (client, shell):
        orin, nano = await in_training(client)
        deleting = asyncio.create_task(shell("delete", RUN, "--end"))
        for agent in (orin, nano):
            stop = await agent.grant()
            assert not stop.HasField("mode") and not deleting.done()
            [run] = await client.runs()
            assert (run.finished, run.error) == (True, _ENDED), "it stays while its watts are held"
            await agent.lease(GrantPhase.OVER, stop)
        assert (await deleting).stdout == f"run {RUN_NAME}: deleted\n"
        assert await client.runs() == []
        assert await is_audited(client, "")
    assert f"run {RUN_NAME} ({RUN}) was {_ENDED}" in caplog.text


async def test_a_run_whose_devices_cannot_be_reached_is_not_even_ended(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, nano = await in_training(client)
        await leave(client, orin, "orin")
        with pytest.raises(InvalidRequestError) as refused:
            await shell("delete", RUN, "--end")
        assert re.fullmatch(
            f"run '{RUN_NAME}' holds watts for orin, which cannot be reached, so nothing was changed: repeat the"
            " command when these devices are connected, or when their grants have lapsed, in at most 12. s",
            str(refused.value),
        )
        [run] = await client.runs()
        assert not run.finished
        await nano.lease(GrantPhase.TRAINING, nano.keeps_to)
        assert (await client.devices())["nano"].granted_w > 3.0, "its training goes on"
        await eventually(lambda: is_audited(client, f"refused: {refused.value}"))


async def test_a_run_that_has_ended_is_kept_while_a_device_still_trains_for_it(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, nano = await in_training(client)
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN))
        await nano.lease(GrantPhase.OVER, await nano.grant())
        with pytest.raises(InvalidRequestError) as refused:
            await shell("delete", RUN)
        assert str(refused.value) == (
            f"run '{RUN_NAME}' has ended, but watts are still held for orin: delete the run when these devices have"
            " finished their trainings, or pass --end to stop them"
        )
        await orin.lease(GrantPhase.OVER, orin.keeps_to)
        assert await asked(shell, "delete", RUN) == [{"run_id": RUN, "name": RUN_NAME, "deleted": True}]
        assert await client.runs() == []


async def test_a_run_is_deleted_although_the_caller_has_left(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, _):
        orin, nano = await in_training(client)
        call = client.operator.DeleteRuns(operator_pb2.DeleteRunsRequest(run_ids=[RUN], end=True))
        reading = asyncio.create_task(call.read())
        stops = [await agent.grant() for agent in (orin, nano)]
        call.cancel()
        await asyncio.wait([reading])
        await eventually(lambda: is_audited(client, "unanswered: the caller left before the answer"))
        for agent, stop in zip((orin, nano), stops, strict=True):
            await agent.lease(GrantPhase.OVER, stop)

        async def is_gone() -> bool:
            return not await client.runs()

        await eventually(is_gone)


async def test_a_run_with_more_rounds_than_one_transaction_deletes_is_deleted(config: CoordinatorSettings) -> None:

    async with served_with_shell(config) as (client, shell):
        agents = dict(zip(("orin", "nano"), await client.two_ready(), strict=True))
        for number in range(1, 20):
            plan = await client.plan(number)
            for each in plan.assignments:
                await agents[each.device_id].trained(plan.plan_id)
            await client.planning.FinishRound(planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=1.0))
        assert (await shell("delete", RUN, "--end")).stdout == f"run {RUN_NAME}: deleted\n"
        streamed = client.view.StreamRounds(view_pb2.StreamRoundsRequest(run_id=RUN))
        with pytest.raises(Exception, match="unknown run"):
            [_ async for _ in streamed]
    assert rows(config)["round"] == 0
