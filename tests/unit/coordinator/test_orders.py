"""Grants of a large plan are sent in steps, between which other requests are served and budgets may change."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from coordinator.errors import QuotaExceededError
from coordinator.services.orders import MAX_UNSENT_ORDERS, Orders, ResponseStream
from coordinator.state.fleet import Fleet
from tests.fakes.small_fleet import ORIN_FRONT, RUN, make_ready
from wattfleet.budgets import InForce
from wattfleet.planning import Allowance
from wattfleet.planning.policies import AllDevices
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import power_pb2, session_pb2

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
        self.orders.begin("orin", self.stream, knows_workloads=True)

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
    heard: dict[str, list[tuple[str, ...]]] = {"orin": [], "old": [], "nano": []}
    orders = Orders(Fleet(Allowance.of_site(100.0), AllDevices()), revoked=lambda: revoked)

    def connect(device_id: str, hears_of_revocations: bool) -> None:
        async def write(response: session_pb2.SessionResponse) -> None:
            heard[device_id].append(tuple(response.revoked.serials))

        orders.begin(device_id, ResponseStream(write), hears_of_revocations=hears_of_revocations)

    async def until_heard(device_id: str, *serials: str) -> None:
        async with asyncio.timeout(10.0):
            while serials not in heard[device_id]:
                await asyncio.sleep(0)

    connect("orin", True)
    connect("old", False)
    revoked.append("1f")
    orders.announce_revocations()
    await until_heard("orin", "1f")
    connect("nano", True)
    await until_heard("nano", "1f")
    revoked.append("a0")
    orders.announce_revocations()
    await until_heard("nano", "1f", "a0")
    await until_heard("orin", "1f", "a0")
    await orders.close()
    assert heard["orin"] == [("1f",), ("1f", "a0")], "nothing was revoked when it connected"
    assert heard["old"] == []
