"""The planning service without a network, and the grants that it sends in steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from coordinator.errors import NoDevicesError, QuotaExceededError, RunEndedError, StoreUnavailableError
from coordinator.repository.repository import FleetRepository
from coordinator.repository.writer import Writer
from coordinator.services.orders import MAX_UNSENT_ORDERS, Orders, ResponseStream
from coordinator.services.planning import PlanningServicer, RoundPlanning
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Leases
from coordinator.state.records import RoundRecord
from tests.fakes.small_fleet import NODES, ORIN_FRONT, ORIN_NODE, RUN, PlaintextContext, make_ready, small_fleet
from tests.fakes.stored_records import RecordingStore
from wattfleet.core.budgets import InForce
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import Allowance
from wattfleet.core.planning.policies import AllDevices, PlanningContext, SelectionRequest
from wattfleet_proto.device_state import DeviceState, GrantPhase
from wattfleet_proto.v1 import planning_pb2, power_pb2, session_pb2

# --- Planning ---------------------------------------------------------------------------------------------------------
# The planning service without a network: plans, refusals, and events during planning.


@pytest.mark.parametrize("has_restarted", [False, True])
async def test_a_round_whose_server_was_killed_keeps_its_devices_for_a_while_only(has_restarted: bool) -> None:

    now_s = 1_000.0
    fleet, writer = small_fleet(), Writer(RecordingStore())
    repository = FleetRepository(fleet, writer)
    orders = Orders(fleet)
    planning = RoundPlanning(repository, Leases(now_s), orders, lambda: now_s)

    async def plan(run_id: str) -> planning_pb2.PlanRoundResponse:
        request = planning_pb2.PlanRoundRequest(run_id=run_id, round=1, node_ids=[ORIN_NODE], epochs=1.0)
        return await PlanningServicer(repository, planning, orders).PlanRound(request, PlaintextContext())

    duration_s = (await plan(RUN)).duration_s
    if has_restarted:
        planning = RoundPlanning(repository, Leases(now_s), orders, lambda: now_s)
    fleet.flower.start_run("next", "FedAvg", 1)
    for waited_s in (0.0, 2 * duration_s + 600.0):
        now_s = 1_000.0 + waited_s
        with pytest.raises(NoDevicesError, match=f"orin is ready, and part of round 1 of run {RUN}"):
            await plan("next")
    now_s += 1.0
    preview = await planning.preview("next", False, 1.0)
    assert (len(preview.record.nodes), len(fleet.rounds.in_flight())) == (2, 1), "only the copy releases it"
    assert [part.device_id for part in (await plan("next")).assignments] == ["orin"]
    await writer.close()


def service_of(fleet: Fleet, writer: Writer) -> PlanningServicer:
    repository = FleetRepository(fleet, writer)
    orders = Orders(fleet)
    return PlanningServicer(repository, RoundPlanning(repository, Leases(0.0), orders, lambda: 0.0), orders)


async def test_a_node_that_can_be_no_device_is_no_hindrance_to_the_others(caplog: pytest.LogCaptureFixture) -> None:

    fleet, writer = small_fleet(), Writer(RecordingStore())
    bindings = [
        planning_pb2.NodeBinding(node_id=number, device_id=device_id)
        for number, device_id in enumerate(("", "x" * 300, "a\0b", "late"))
    ]
    await service_of(fleet, writer).BindNodes(planning_pb2.BindNodesRequest(bindings=bindings), PlaintextContext())
    await writer.close()
    assert {node: fleet.flower.nodes.get(node) for node in range(4)} == {0: None, 1: None, 2: None, 3: "late"}
    assert "3 of 4 nodes are not bound; the first one is node 0: a device's id must have 1 to 200" in caplog.text


@pytest.mark.parametrize(("run_id", "strategy"), [("", "FedAvg"), ("x" * 201, "FedAvg"), ("1", "x" * 201)])
async def test_a_run_without_a_usable_name_is_refused(run_id: str, strategy: str) -> None:

    fleet, writer = small_fleet(), Writer(RecordingStore())
    request = planning_pb2.StartRunRequest(run_id=run_id, strategy=strategy, rounds=1)
    with pytest.raises(InvalidInputError, match="1 to 200 printable characters"):
        await service_of(fleet, writer).StartRun(request, PlaintextContext())
    await writer.close()
    assert list(fleet.flower.runs) == [RUN]


async def test_of_what_went_wrong_the_beginning_is_kept() -> None:

    fleet, writer = small_fleet(), Writer(RecordingStore())
    service, plan_id = service_of(fleet, writer), fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0).plan_id
    results = [planning_pb2.DeviceResult(device_id="orin", failure="x" * 10_000)]
    await service.FinishRound(
        planning_pb2.FinishRoundRequest(plan_id=plan_id, wall_s=1.0, results=results), PlaintextContext()
    )
    await service.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN, error="y" * 10_000), PlaintextContext())
    [result] = fleet.rounds.records[plan_id].results
    assert (result.failure, fleet.flower.runs[RUN].error) == ("x" * 500, "y" * 2_000)
    with pytest.raises(InvalidInputError, match="a metric's name"):
        metrics = {"z" * 201: 1.0}
        await service.ReportMetrics(
            planning_pb2.ReportMetricsRequest(run_id=RUN, round=1, metrics=metrics), PlaintextContext()
        )
    await writer.close()


async def test_a_run_that_has_ended_gets_no_plans_and_keeps_its_reason() -> None:
    fleet, writer = small_fleet(), Writer(RecordingStore())
    service = service_of(fleet, writer)
    fleet.flower.start_run("8", "FedAvg", 3, name="night")
    for run_id in (RUN, "8"):
        fleet.flower.finish_run(run_id, "ended by the operator")
    plan = planning_pb2.PlanRoundRequest(run_id=RUN, round=1, node_ids=[ORIN_NODE], epochs=1.0)
    of_named = planning_pb2.PlanRoundRequest(run_id="8", round=1, node_ids=[ORIN_NODE], epochs=1.0)
    for request, name in ((plan, RUN), (of_named, "night")):
        with pytest.raises(RunEndedError, match=f"run '{name}' has ended, start another run: ended by the operator"):
            await service.PlanRound(request, PlaintextContext())
    with pytest.raises(RunEndedError):
        await service.PredictNodes(planning_pb2.PredictNodesRequest(run_id=RUN), PlaintextContext())
    await service.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN, error="RefusedError"), PlaintextContext())
    assert fleet.flower.runs[RUN].error == "ended by the operator"
    await service.StartRun(planning_pb2.StartRunRequest(run_id=RUN, strategy="FedAvg"), PlaintextContext())
    assert (await service.PlanRound(plan, PlaintextContext())).assignments
    await writer.close()


async def test_nothing_is_granted_before_the_plan_is_stored() -> None:
    fleet, store = small_fleet(), RecordingStore()
    writer = Writer(store)
    service = service_of(fleet, writer)
    request = planning_pb2.PlanRoundRequest(run_id=RUN, round=1, node_ids=NODES, epochs=1.0)
    store.fails_with = StoreUnavailableError("the disk is full")
    with pytest.raises(StoreUnavailableError):
        await service.PlanRound(request, PlaintextContext())
    assert fleet.take_orders() == []
    store.fails_with = None
    await service.PlanRound(request, PlaintextContext())
    assert {device_id for device_id, _ in fleet.take_orders()} == {"orin", "nano"}
    await writer.close()


class SlowPolicy:
    """A policy that selects all devices, but only once the test lets it continue."""

    name, counts = "slow", False

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def request(self, context: PlanningContext) -> SelectionRequest:
        self.asked.set()
        assert self.go_on.wait(10), "the test did not let it continue"
        return AllDevices().request(context)


async def planning(
    fleet: Fleet, policy: SlowPolicy, story: Callable[[PlanningServicer], Awaitable[None]]
) -> RoundRecord:
    """Plan a round of two devices, and run `story` while the policy is selecting."""
    writer = Writer(RecordingStore())
    service = service_of(fleet, writer)
    asked = asyncio.create_task(service.PlanRound(request(RUN), PlaintextContext()))
    await asyncio.to_thread(policy.asked.wait, 10)
    await story(service)
    policy.go_on.set()
    plan = await asked
    await writer.close()
    return fleet.rounds.records[plan.plan_id]


def request(run_id: str) -> planning_pb2.PlanRoundRequest:
    return planning_pb2.PlanRoundRequest(run_id=run_id, round=1, node_ids=NODES, epochs=1.0)


async def test_a_device_that_goes_while_a_round_is_planned_is_left_out() -> None:
    policy = SlowPolicy()
    fleet = small_fleet(policy=policy)

    async def story(service: PlanningServicer) -> None:
        fleet.agents.disconnect("nano")
        fleet.agents.report_state("orin", DeviceState.READY, 51, "another mode measured")

    record = await planning(fleet, policy, story)
    assert set(record.nodes) == {"orin"}
    assert fleet.agents.get("orin").profiled_modes == 51


async def test_a_device_that_is_forgotten_while_a_round_is_planned_is_left_out() -> None:
    policy = SlowPolicy()
    fleet = small_fleet(policy=policy)

    async def story(service: PlanningServicer) -> None:
        fleet.agents.disconnect("nano")
        fleet.forget(["nano"])

    assert set((await planning(fleet, policy, story)).nodes) == {"orin"}


async def test_watts_that_fall_while_a_round_is_planned_are_never_granted() -> None:
    policy = SlowPolicy()
    fleet = small_fleet(policy=policy)

    async def story(service: PlanningServicer) -> None:
        assert fleet.set_budget("site", InForce(40.0, "command", False, "set")) == []

    record = await planning(fleet, policy, story)
    assert record.plan.planned_w <= 40.0, "it was asked for with 100 W"
    granted_w = sum(grant.counted_w for _, grant in fleet.rounds.grants.in_flight())
    assert 0 < granted_w <= 40.0


async def test_two_runs_that_ask_at_once_are_not_given_the_same_devices() -> None:
    policy = SlowPolicy()
    fleet = small_fleet(policy=policy)
    fleet.flower.start_run("other", "FedAvg", 1)
    others: list[asyncio.Task[planning_pb2.PlanRoundResponse]] = []

    async def story(service: PlanningServicer) -> None:
        others.append(asyncio.create_task(service.PlanRound(request("other"), PlaintextContext())))
        await asyncio.sleep(0)

    await planning(fleet, policy, story)
    with pytest.raises(NoDevicesError, match="part of round"):
        await others[0]


async def test_a_round_that_is_asked_for_again_while_it_is_planned_is_planned_once() -> None:
    policy = SlowPolicy()
    fleet = small_fleet(policy=policy)
    again: list[asyncio.Task[planning_pb2.PlanRoundResponse]] = []

    async def story(service: PlanningServicer) -> None:
        again.append(asyncio.create_task(service.PlanRound(request(RUN), PlaintextContext())))
        await asyncio.sleep(0)
        fleet.operator.drain(["nano"])

    record = await planning(fleet, policy, story)
    assert {part.device_id for part in (await again[0]).assignments} == set(record.nodes) == {"orin", "nano"}


# --- Orders -----------------------------------------------------------------------------------------------------------
# Grants of a large plan are sent in steps, between which other requests are served and budgets may change.

COUNT = 60
IDLE_W = 5.0
LARGEST_STEP = 5


class ConnectedFleet:
    """A fleet of ready devices, each with a stream; `sent` lists the grants sent, in order."""

    def __init__(self, budget_w: float) -> None:
        self.fleet = Fleet(Allowance.of_site(budget_w), AllDevices())
        self.orders = Orders(self.fleet)
        self.sent: list[tuple[str, session_pb2.Grant]] = []
        for number in range(COUNT):
            device_id = f"orin-{number:02}"
            make_ready(self.fleet, device_id, ORIN_FRONT, IDLE_W, number + 1)
            self.orders.begin(device_id, ResponseStream(partial(self._write, device_id)))
        self.fleet.flower.start_run(RUN, "FedAvg", 3)
        self.fleet.trim()

    def plan(self) -> None:
        self.fleet.flower.plan(RUN, 1, list(range(1, COUNT + 1)), 1.0)
        self.orders.send_due()

    async def until_sent(self, count: int) -> None:
        async with asyncio.timeout(10.0):
            while len(self.sent) < count:
                await asyncio.sleep(0)

    def confirm(self, device_id: str, grant: session_pb2.Grant) -> None:
        phase = GrantPhase.WAITING if grant.HasField("mode") else GrantPhase.OVER
        self.fleet.rounds.grants.confirm(device_id, grant.id, grant.plan_id, phase)

    async def _write(self, device_id: str, response: session_pb2.SessionResponse) -> None:
        self.sent.append((device_id, response.grant))


def watts(amount: float) -> InForce:
    return InForce(amount, "query", False, "the meter")


async def test_other_devices_are_answered_between_the_steps_of_a_large_plan() -> None:
    connected = ConnectedFleet(COUNT * 50.0)
    connected.plan()
    largest = before = 0
    async with asyncio.timeout(10.0):
        while before < COUNT:
            await asyncio.sleep(0)  # a turn of the event loop, in which other requests are served
            largest, before = max(largest, len(connected.sent) - before), len(connected.sent)
    assert 0 < largest <= LARGEST_STEP
    assert sorted(device_id for device_id, _ in connected.sent) == [f"orin-{number:02}" for number in range(COUNT)]


async def test_a_budget_that_falls_between_two_steps_holds_for_the_later_ones() -> None:
    connected = ConnectedFleet(COUNT * 50.0)
    connected.plan()
    await connected.until_sent(LARGEST_STEP)
    told = dict(connected.sent)
    for device_id, grant in told.items():
        connected.confirm(device_id, grant)
    connected.sent.clear()
    connected.fleet.set_budget("site", watts(COUNT * 20.0))
    connected.orders.send_due()
    await connected.until_sent(len(told))
    await asyncio.sleep(0.2)  # time for further steps, which must not come
    assert {device_id for device_id, _ in connected.sent} == set(told), "the others wait for their confirmations"
    for device_id, grant in connected.sent:
        connected.confirm(device_id, grant)
    connected.fleet.trim()
    connected.orders.send_due()
    await connected.until_sent(COUNT)
    newest = dict(connected.sent)
    assert len(newest) == COUNT, "nobody was sent what was planned before the budget fell"
    assert sum(max(grant.power_limit_w, IDLE_W) for grant in newest.values()) <= COUNT * 20.0


async def test_a_round_that_is_given_up_between_two_steps_begins_on_no_further_device() -> None:
    connected = ConnectedFleet(COUNT * 50.0)
    connected.plan()
    await connected.until_sent(LARGEST_STEP)
    told = dict(connected.sent)
    for device_id, grant in told.items():
        connected.confirm(device_id, grant)
    connected.sent.clear()
    connected.fleet.rounds.finish(f"{RUN}/1", [], 1.0)
    connected.orders.send_due()
    await connected.until_sent(len(told))
    await asyncio.sleep(0.2)  # time for further steps, which must not come
    assert {device_id for device_id, _ in connected.sent} == set(told)
    assert not any(grant.HasField("mode") for _, grant in connected.sent), "their trainings are called off"


async def test_no_grant_is_sent_after_the_coordinator_began_to_stop() -> None:
    connected = ConnectedFleet(COUNT * 50.0)
    connected.plan()
    await connected.until_sent(LARGEST_STEP)
    await connected.orders.close()
    sent = len(connected.sent)
    await asyncio.sleep(0.2)
    assert len(connected.sent) == sent < COUNT


# --- orders to measure ----------------------------------------------------------------------------------------------


def profile_order(workload: str, modes: int) -> session_pb2.ProfileOrder:
    return session_pb2.ProfileOrder(workload=power_pb2.Workload(name=workload), modes=modes)


class SlowReader:
    """A device that receives nothing until it reads; `taken` lists the orders received."""

    def __init__(self) -> None:
        self.orders = Orders(Fleet(Allowance.of_site(100.0), AllDevices()))
        self.taken: list[tuple[str, int]] = []
        self.reads = asyncio.Event()
        self.stream = ResponseStream(self._write)
        self.orders.begin("orin", self.stream)

    async def _write(self, response: session_pb2.SessionResponse) -> None:
        await self.reads.wait()
        self.taken.append((response.profile.workload.name, response.profile.modes))

    async def read(self, count: int) -> None:
        self.reads.set()
        async with asyncio.timeout(10.0):
            while len(self.taken) < count:
                await asyncio.sleep(0)


async def test_orders_to_measure_different_workloads_are_all_sent() -> None:
    device = SlowReader()
    for workload, modes in [("bert", 10), ("gpt", 20), ("bert", 30)]:
        device.orders.order_profile("orin", profile_order(workload, modes))
    await device.read(2)
    assert device.taken == [("bert", 30), ("gpt", 20)], "the later order for bert replaces the earlier one"


async def test_an_order_to_measure_is_refused_while_too_many_are_unsent() -> None:
    device = SlowReader()
    for number in range(MAX_UNSENT_ORDERS):
        device.orders.order_profile("orin", profile_order(f"workload-{number}", 10))
    with pytest.raises(QuotaExceededError, match="has not received 32 earlier orders yet: repeat the command later"):
        device.orders.order_profile("orin", profile_order("one more", 10))
    device.orders.order_profile("orin", profile_order("workload-3", 20))
    await device.read(MAX_UNSENT_ORDERS)
    assert len(device.taken) == MAX_UNSENT_ORDERS and ("workload-3", 20) in device.taken


async def test_orders_to_measure_that_a_session_left_unsent_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    device = SlowReader()
    device.orders.order_profile("orin", profile_order("bert", 10))
    device.orders.end("orin", device.stream)
    assert "orin: its session ended before it received the order to measure 'bert': repeat the order" in caplog.text


# --- revoked certificates ---------------------------------------------------------------------------------------------


async def test_agents_hear_of_revocations_when_they_connect_and_when_there_is_a_new_one() -> None:
    revoked: list[str] = []
    heard: dict[str, list[tuple[str, ...]]] = {"orin": [], "nano": []}
    orders = Orders(Fleet(Allowance.of_site(100.0), AllDevices()), revoked=lambda: revoked)

    def connect(device_id: str) -> None:
        async def write(response: session_pb2.SessionResponse) -> None:
            heard[device_id].append(tuple(response.revoked.serials))

        orders.begin(device_id, ResponseStream(write))

    async def until_heard(device_id: str, *serials: str) -> None:
        async with asyncio.timeout(10.0):
            while serials not in heard[device_id]:
                await asyncio.sleep(0)

    connect("orin")
    revoked.append("1f")
    orders.announce_revocations()
    await until_heard("orin", "1f")
    connect("nano")
    await until_heard("nano", "1f")
    revoked.append("a0")
    orders.announce_revocations()
    await until_heard("nano", "1f", "a0")
    await until_heard("orin", "1f", "a0")
    await orders.close()
    assert heard["orin"] == [("1f",), ("1f", "a0")], "nothing was revoked when it connected"
