"""Commands that forget devices and delete runs: those in use are kept, the others stay deleted after a restart."""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
from contextlib import closing

import pytest

from coordinator.cli.client import RequestRefusedError
from coordinator.repository.writer import Writer
from coordinator.settings import CoordinatorSettings
from coordinator.state.records import DeviceOverrides, ForgottenDevice, NodeRecord
from coordinator.store.store import Store
from tests.fakes.polling import eventually
from tests.fakes.recording_store import RecordingStore, device
from tests.fakes.served import Agent, Client
from tests.fakes.shell import a_round, asked, served_with_shell
from tests.fakes.small_fleet import NANO_FRONT, NANO_NODE, RUN, RUN_NAME
from wattfleet.errors import InvalidInputError
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import (
    identity_pb2,
    identity_pb2_grpc,
    operator_pb2,
    planning_pb2,
    session_pb2,
    view_pb2,
)

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
    reader, writer = await asyncio.open_connection(*client.bound.metrics_address.split(":"))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return text


# --- forget -------------------------------------------------------------------------------------------------------


async def test_a_forgotten_device_is_gone_and_may_enrol_again(config: CoordinatorSettings) -> None:

    async with served_with_shell(config) as (client, shell):
        orin, nano = await client.two_ready()
        await a_round(client, orin)
        await shell("tag", "nano", "--add", "old")
        with pytest.raises(RequestRefusedError) as refused:
            await shell("forget", "orin", "nano")
        assert str(refused.value) == "orin is connected: stop its agent, then forget the device"
        await leave(client, nano, "nano")
        assert (await shell("forget", "nano")).stdout == "nano: forgotten\n"
        assert list(await client.devices()) == ["orin"]
        assert "nano" not in await metrics(client)
        resolved = await client.planning.ResolveNodes(planning_pb2.ResolveNodesRequest(node_ids=[NANO_NODE]))
        assert list(resolved.unknown_node_ids) == [NANO_NODE]
        with pytest.raises(RequestRefusedError, match="unknown device 'nano'"):
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
        with pytest.raises(RequestRefusedError) as refused:
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
        with pytest.raises(RequestRefusedError) as refused:
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
        with pytest.raises(RequestRefusedError) as refused:
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
        with pytest.raises(RequestRefusedError) as refused:
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
