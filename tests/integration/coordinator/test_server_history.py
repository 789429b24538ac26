"""History while a coordinator serves: rounds that are only in its store, retention, and clock jumps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import URL

from coordinator.clocks import BootClock
from coordinator.errors import StoreFullError
from coordinator.repository.repository import FleetRepository, delete_old_runs_daily
from coordinator.repository.writer import Writer
from coordinator.settings import CoordinatorSettings, StoreSettings
from coordinator.state.fleet import Fleet
from coordinator.state.records import RunRecord, SupplyOverride
from coordinator.state.rounds import ledger as round_cache
from coordinator.store.store import Store
from tests.fakes.polling import eventually
from tests.fakes.served import Client, Running, runs_of, serving_client, start_run
from tests.fakes.small_fleet import NANO_NODE, ORIN_FRONT, ORIN_NODE, RUN, end_training, small_fleet, train
from tests.fakes.stored_records import finished_round, old_runs_deleted, planned_round, rounds_of
from wattfleet.core.budgets import Override
from wattfleet.core.planning.policies import AllDevices
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import (
    operator_pb2,
    planning_pb2,
    planning_pb2_grpc,
    session_pb2,
    view_pb2,
    view_pb2_grpc,
)

# --- Server history ---------------------------------------------------------------------------------------------------
# A coordinator whose rounds are only in its store; retention while it serves.


_WITHIN_S = 30.0


@pytest.fixture(autouse=True)
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let coordinators check often whether a store is free or has another owner."""
    monkeypatch.setattr("coordinator.repository.repository.STANDBY_CHECK_S", 0.01)
    monkeypatch.setattr("coordinator.repository.writer.OWNER_CHECK_S", 0.02)


async def test_rounds_of_a_run_that_ended_before_the_start_are_read_on_request(
    config: CoordinatorSettings,
) -> None:
    store = Store(Path(config.store.location))
    old, newest = finished_round(1, "old"), finished_round(1, "newest")
    store.save(RunRecord("old", "FedAvg", 1, finished=True), old)
    store.save(RunRecord("newest", "FedAvg", 1, finished=True), newest)
    store.close()

    running = Running(config)
    async with running.channel() as channel:
        view: Any = view_pb2_grpc.ViewServiceStub(channel)
        planning: Any = planning_pb2_grpc.PlanningServiceStub(channel)
        runs = [run async for answer in view.ListRuns(view_pb2.ListRunsRequest()) for run in answer.runs]
        assert runs[-1].run_id == "newest"
        streamed = view.StreamRounds(view_pb2.StreamRoundsRequest(run_id="old"))
        [listed] = [each async for each in streamed]
        assert (listed.plan_id, listed.wall_s, len(listed.observations)) == ("old/1", 41.5, 2)
        # No device is connected, so this can only be the original plan.
        again = planning_pb2.PlanRoundRequest(run_id="old", round=1, epochs=1.0)
        assert (await planning.PlanRound(again)).assignments == listed.plan.assignments
        await planning.ReportMetrics(
            planning_pb2.ReportMetricsRequest(run_id="old", round=1, metrics={"accuracy": 0.75})
        )
    await running.end()
    after = Store(Path(config.store.location))
    assert rounds_of(after, "old") == [replace(old, metrics={"accuracy": 0.75})]
    after.close()


async def test_a_run_longer_than_what_is_at_hand_goes_on_as_if_all_of_it_were(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round is in memory: each plan takes the earlier ones into account, and late reports find their rounds."""
    monkeypatch.setattr(round_cache, "_DECISIONS", 1)
    monkeypatch.setattr("coordinator.repository.repository.EVICT_S", 0.001)
    fleets: list[Fleet] = []

    right = FleetRepository.keep_evicting

    async def noting(repository: FleetRepository) -> None:
        fleets.append(repository.fleet)
        await right(repository)

    monkeypatch.setattr(FleetRepository, "keep_evicting", noting)

    async def at_hand(expected: set[str]) -> None:
        while set(fleets[-1].rounds.records) != expected:
            await asyncio.sleep(0.001)

    async def first(client: Client) -> None:
        orin, nano = await client.two_ready()
        for number in (1, 2, 3, 4):
            chosen = {part.device_id: "" for part in (await client.plan(number)).assignments}
            await client.end_trainings()
            failing = {**chosen, "nano": "no reply"} if "nano" in chosen else chosen
            results = [planning_pb2.DeviceResult(device_id=name, failure=why) for name, why in failing.items()]
            await client.planning.FinishRound(
                planning_pb2.FinishRoundRequest(plan_id=f"{RUN}/{number}", results=results, wall_s=9.0)
            )
        await at_hand({f"{RUN}/4"})
        await orin.send(observation=session_pb2.Observation(plan_id=f"{RUN}/1", epoch_s=20.0, power_w=30.0))
        await client.planning.ReportMetrics(
            planning_pb2.ReportMetricsRequest(run_id=RUN, round=2, metrics={"accuracy": 0.5})
        )
        again = await client.plan(2)
        assert (again.plan_id, len(again.assignments)) == (f"{RUN}/2", 2), "it is not planned anew"
        await at_hand({f"{RUN}/4"})
        listed = (await client.rounds(RUN)).rounds
        assert [(one.round, dict(one.metrics), len(one.observations)) for one in listed] == [
            (1, {}, 1),
            (2, {"accuracy": 0.5}, 0),
            (3, {}, 0),
            (4, {}, 0),
        ]
        await at_hand({f"{RUN}/4"})
        with pytest.raises(grpc.aio.AioRpcError, match="unknown plan"):
            await client.planning.FinishRound(planning_pb2.FinishRoundRequest(plan_id=f"{RUN}/9", wall_s=1.0))
        await orin.send(observation=session_pb2.Observation(plan_id=f"{RUN}/9", epoch_s=20.0, power_w=30.0))

    def nano_rests(plan: planning_pb2.PlanRoundResponse) -> bool:
        """Whether the Nano is left out, since it failed in rounds 1, 2 and 4."""
        reasons = {decision.device_id: decision.reason for decision in plan.decisions}
        return "failed 3 times in a row" in reasons["nano"]

    async def look(client: Client) -> None:
        await client.two_ready()
        preview = await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest(run_id=RUN))
        assert preview.round == 5 and nano_rests(preview.plan)

    async def go_on(client: Client) -> None:
        await client.two_ready()
        assert nano_rests(await client.plan(5))

    for story in (first, look, go_on):
        async with serving_client(config) as client:
            await story(client)


async def test_the_next_round_of_a_stored_run_is_shown_with_number_and_epochs(
    config: CoordinatorSettings,
) -> None:
    store = Store(Path(config.store.location))
    for name, rounds in (("older", 2), ("newer", 3)):
        store.save(RunRecord(name, "FedAvg", 9), *(finished_round(number + 1, name) for number in range(rounds)))
    store.close()

    async with serving_client(config) as client:
        await client.two_ready()
        shown = await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest(run_id="older"))
        assert (shown.round, shown.epochs) == (3, 1.5)


@pytest.mark.parametrize("first", ["plan", "start_run", "finish_round"])
async def test_no_round_of_an_archived_run_is_planned_twice(config: CoordinatorSettings, first: str) -> None:
    store = Store(Path(config.store.location))
    old = planned_round(1, "old")
    store.save(RunRecord("old", "FedAvg", 1, finished=True), old, RunRecord("newest", "FedAvg", 1))
    store.close()

    running = Running(config)
    async with running.channel() as channel:
        planning: Any = planning_pb2_grpc.PlanningServiceStub(channel)
        if first == "start_run":
            await start_run(channel, "old")
        elif first == "finish_round":
            await planning.FinishRound(planning_pb2.FinishRoundRequest(plan_id="old/1", wall_s=3.0))
        plan = await planning.PlanRound(planning_pb2.PlanRoundRequest(run_id="old", round=1, epochs=1.0))
        assert plan.plan_id == "old/1" and len(plan.assignments) == 2
    await running.end()
    after = Store(Path(config.store.location))
    assert [replace(record, wall_s=None) for record in rounds_of(after, "old")] == [old]
    after.close()


async def test_old_runs_are_forgotten_at_the_start(config: CoordinatorSettings) -> None:
    long_ago = Store(Path(config.store.location), lambda: datetime.now(timezone.utc) - timedelta(days=31))
    long_ago.save(RunRecord("old", "FedAvg", 1, finished=True), finished_round(1, "old"))
    long_ago.save(RunRecord("unfinished", "FedAvg", 1), planned_round(1, "unfinished"))
    long_ago.close()
    lately = Store(Path(config.store.location))
    lately.save(planned_round(2, "unfinished"))
    lately.close()

    async def runs_kept(keep_days: float | None, last: str) -> list[str]:
        """The runs of a coordinator, once it has shown that it keeps the old run as expected."""
        async with serving_client(config.with_values(store={"keep_days": keep_days})) as client:

            async def is_seen() -> bool:
                return [run.run_id for run in await client.runs()][0] == last

            await eventually(is_seen)
        return runs_of(config)

    assert await runs_kept(None, "old") == ["old", "unfinished"]
    assert await runs_kept(32, "old") == ["old", "unfinished"]
    assert await runs_kept(30, "unfinished") == ["unfinished"]


@pytest.mark.parametrize("is_given_up", [False, True], ids=["awaited", "given up"])
async def test_a_restart_with_a_short_retention_keeps_what_may_draw_power(
    config: CoordinatorSettings, is_given_up: bool
) -> None:
    """The Orin trains while the coordinator restarts; its run was last changed longer ago than runs are kept."""
    config = config.with_values(site={"budget_w": 90.0}, store={"keep_days": 1e-6}, sessions={"return_grace_s": 0.01})
    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        plan = await client.plan()
        await orin.obey(GrantPhase.TRAINING)
        held_w = sum(each.power_limit_w for each in plan.assignments if not is_given_up or each.device_id == "orin")
        if is_given_up:
            await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN))
            await nano.lease()
    await asyncio.sleep(0.2)
    async with serving_client(config) as client:
        third = client.agent()
        await third.become_ready("third", ORIN_FRONT, 5.0)
        await client.planning.BindNodes(
            planning_pb2.BindNodesRequest(bindings=[planning_pb2.NodeBinding(node_id=9, device_id="third")])
        )
        other = planning_pb2.StartRunRequest(run_id="other", strategy="FedAvg", rounds=1)
        await client.planning.StartRun(other)
        [budget] = (await client.operator.GetBudgets(operator_pb2.GetBudgetsRequest())).supplies
        assert budget.set_aside_w >= held_w + 5.0, "the Orin may still train"
        request = planning_pb2.PlanRoundRequest(run_id="other", round=1, node_ids=[9], epochs=1.0)
        [granted] = (await client.planning.PlanRound(request)).assignments
        assert held_w + granted.power_limit_w <= 90.0
        assert [run.run_id for run in await client.runs()] == [RUN, "other"]


async def test_the_daily_deletion_spares_what_flower_gave_up(tmp_path: Path) -> None:
    store = Store(tmp_path / "coordinator.db", lambda: datetime.now(timezone.utc) - timedelta(days=9))
    fleet = small_fleet()
    planned = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    train(fleet, "orin")
    store.save(planned, fleet.flower.finish_run(RUN, ""))
    days = [0, 0]

    async def a_day(_: float) -> None:
        if not days:
            raise asyncio.CancelledError
        assert RUN in fleet.flower.runs
        days.pop()
        if not days:
            end_training(fleet, "orin")

    store._now = lambda: datetime.now(timezone.utc)  # noqa: SLF001 - nine days later
    keeper = Writer(store)
    with pytest.raises(asyncio.CancelledError):
        await delete_old_runs_daily(FleetRepository(fleet, keeper), timedelta(days=1), a_day)
    await keeper.close()
    assert RUN not in fleet.flower.runs, "its training is over"
    store.close()


async def test_old_runs_are_forgotten_every_day_in_the_store_and_in_memory(
    config: CoordinatorSettings, caplog: pytest.LogCaptureFixture
) -> None:
    now = [datetime(2026, 1, 1, tzinfo=timezone.utc)]
    store = Store(Path(config.store.location), lambda: now[0])
    fleet = small_fleet()
    fleet.flower.start_run("old", "FedAvg", 1)
    planned, awaited = fleet.flower.plan("old", 1, [ORIN_NODE], 1.0), fleet.flower.plan("4711", 1, [NANO_NODE], 1.0)
    store.save(fleet.flower.finish_run("old", ""), planned, fleet.flower.run("4711"), awaited)
    store.save(fleet.flower.start_run("left alone", "FedAvg", 1))
    days: list[float] = []

    async def a_day(seconds: float) -> None:
        if len(days) == 3:
            raise asyncio.CancelledError
        assert "old" in fleet.flower.runs
        days.append(seconds)
        now[0] += timedelta(seconds=seconds)

    with caplog.at_level("INFO"):
        keeper = Writer(store)
        with pytest.raises(asyncio.CancelledError):
            await delete_old_runs_daily(FleetRepository(fleet, keeper), timedelta(days=2.5), a_day)
        await keeper.close()
    assert days == [86_400.0] * 3
    assert "deleted 2 runs older than" in caplog.text
    assert (list(fleet.flower.runs), list(fleet.rounds.records)) == (["4711"], ["4711/1"])
    kept = store.load()
    assert ([record.run_id for record in kept.runs], kept.rounds) == (["4711"], [awaited])
    store.close()
    # The power reserved for its devices is free again, and their next round is planned as if it had never existed.
    anew = small_fleet()
    anew.flower.plan("4711", 1, [NANO_NODE], 1.0)
    assert fleet.flower.plan("4711", 2, list(fleet.flower.nodes), 1.0) == anew.flower.plan(
        "4711", 2, list(anew.flower.nodes), 1.0
    )


async def test_what_cannot_be_forgotten_today_is_tomorrow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full(Store):
        asked = 0

        def delete_some(self, *_: object) -> list[str] | None:
            self.asked += 1
            if self.asked % 2:
                return [f"old {self.asked}"]
            raise StoreFullError("the disk is full")

    full, days = Full(tmp_path / "coordinator.db"), [0]
    fleet = Fleet(
        small_fleet().operator.allowance, AllDevices(), runs=[RunRecord(f"old {k}", "FedAvg", 1) for k in (1, 2, 3)]
    )

    async def a_day(_: float) -> None:
        if not days:
            raise asyncio.CancelledError
        days.pop()

    keeper = Writer(full)
    with pytest.raises(asyncio.CancelledError):
        await delete_old_runs_daily(FleetRepository(fleet, keeper), timedelta(days=1), a_day)
    await keeper.close()
    full.close()
    assert full.asked == 4
    assert set(fleet.flower.runs) == {"old 2"}, "a run deleted from the store is removed from memory, too"
    assert "deleting old runs stopped until tomorrow: the disk is full" in caplog.text


# --- Clock jumps ------------------------------------------------------------------------------------------------------
# Clock jumps: no history is deleted early, and no override ends early, in one process and across restarts.

KEEP = timedelta(days=30)
START = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)


class Machine:
    """A machine with a clock that may jump, and a store that one coordinator after another opens and closes."""

    def __init__(self, location: Path | URL, opened: ExitStack) -> None:
        self.now = START
        self.since_boot_s = 1_000.0
        self.boots = 1
        self._location = location
        self._opened = opened

    def pass_time(self, **duration: float) -> None:
        self.now += timedelta(**duration)
        self.since_boot_s += timedelta(**duration).total_seconds()

    def jump(self, **by: float) -> None:
        self.now += timedelta(**by)

    def reboot(self) -> None:
        self.boots += 1
        self.since_boot_s = 20.0

    def start(self) -> Store:
        store = Store(
            self._location,
            lambda: self.now,
            StoreSettings(max_absence_days=7),
            BootClock(f"boot {self.boots}", lambda: self.since_boot_s),
        )
        self._opened.callback(store.close)
        return store


@pytest.fixture
def machine(location: Path | URL) -> Iterator[Machine]:
    with ExitStack() as opened:
        yield Machine(location, opened)


def with_history(machine: Machine) -> Store:
    store = machine.start()
    store.save(RunRecord("old", "FedAvg", 1, finished=True), finished_round(1, "old"))
    machine.pass_time(days=1)
    store.save(SupplyOverride("site", Override(50, machine.now + timedelta(hours=2))))
    return store


def runs(store: Store) -> list[str]:
    return [record.run_id for record in store.load().runs]


def remaining_s(store: Store, machine: Machine) -> float:
    until = store.load().budget_overrides["site"].until
    assert until is not None
    return (until - machine.now).total_seconds()


def test_no_history_is_deleted_after_a_jump_in_a_running_coordinator(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "coordinator.store")
    store = with_history(machine)
    machine.jump(days=365)
    assert old_runs_deleted(store, KEEP) == []
    store.close()
    after = machine.start()
    assert old_runs_deleted(after, KEEP) == []
    assert runs(after) == ["old"]
    assert "the clock was put forward by 365 days" in caplog.text


@pytest.mark.parametrize("reboots", [False, True])
def test_no_history_is_deleted_after_a_jump_while_no_coordinator_ran(machine: Machine, reboots: bool) -> None:
    with_history(machine).close()
    machine.jump(days=365)
    if reboots:
        machine.reboot()
    store = machine.start()
    assert old_runs_deleted(store, KEEP) == []
    assert runs(store) == ["old"]


def test_history_is_deleted_again_when_it_has_been_kept_long_enough_since_the_jump(machine: Machine) -> None:
    store = with_history(machine)
    machine.jump(days=365)
    store.load()
    machine.pass_time(days=29)
    assert old_runs_deleted(store, KEEP) == []
    store.close()
    machine.pass_time(days=2)
    assert old_runs_deleted(machine.start(), KEEP) == ["old"]


@pytest.mark.parametrize("reboots", [False, True])
def test_history_is_deleted_after_an_absence_without_a_jump(machine: Machine, reboots: bool) -> None:
    store = with_history(machine)
    machine.pass_time(days=26)
    store.require_owner()
    store.close()
    machine.pass_time(days=6)
    if reboots:
        machine.reboot()
    assert old_runs_deleted(machine.start(), KEEP) == ["old"]


@pytest.mark.parametrize("hours", [-26, 1, 24, 24 * 365])
def test_an_override_keeps_its_time_across_a_restart_and_a_jump(machine: Machine, hours: float) -> None:
    with_history(machine).close()
    machine.pass_time(minutes=30)
    machine.jump(hours=hours)
    store = machine.start()
    assert remaining_s(store, machine) == 90 * 60
    assert not store.load().is_clock_doubtful
    store.close()
    assert remaining_s(machine.start(), machine) == 90 * 60


def test_an_override_keeps_its_time_if_the_clock_jumps_while_a_coordinator_runs(machine: Machine) -> None:
    store = with_history(machine)
    machine.pass_time(minutes=30)
    machine.jump(days=1)
    store.require_owner()
    machine.pass_time(minutes=30)
    store.close()
    assert remaining_s(machine.start(), machine) == 60 * 60


def test_an_override_is_doubtful_after_a_reboot_with_an_implausible_clock(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with_history(machine).close()
    machine.jump(days=8)
    machine.reboot()
    store = machine.start()
    assert store.load().is_clock_doubtful
    assert remaining_s(store, machine) == 2 * 3600
    assert "raise store.max_absence_days" in caplog.text


def test_an_override_ends_in_a_plausible_absence(machine: Machine) -> None:
    with_history(machine).close()
    machine.pass_time(hours=3)
    machine.reboot()
    assert remaining_s(machine.start(), machine) == -3600
