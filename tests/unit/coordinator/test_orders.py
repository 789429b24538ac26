"""Grants of a large plan are sent in steps, between which other devices are answered and budgets may change."""

from __future__ import annotations

import asyncio
from functools import partial

from coordinator.services.orders import Orders, ResponseStream
from coordinator.state.fleet import Fleet
from tests.fakes.small_fleet import ORIN_FRONT, RUN, make_ready
from wattfleet.budgets import InForce
from wattfleet.planning import Allowance
from wattfleet.planning.policies import AllDevices
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import session_pb2

COUNT = 60
IDLE_W = 5.0
LARGEST_STEP = 5


class ConnectedFleet:
    """A fleet of ready devices, each with a stream; `sent` lists what they were sent, in order."""

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
            await asyncio.sleep(0)  # a turn of the event loop, in which others are answered
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
    await asyncio.sleep(0.2)  # for steps that should not come
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
    await asyncio.sleep(0.2)  # for steps that should not come
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
