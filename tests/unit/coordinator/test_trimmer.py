"""Trims of rounds in flight that may exceed the budget; devices get their orders even if the store fails."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.errors import StoreFullError
from coordinator.repository.repository import FleetRepository
from coordinator.repository.writer import Writer
from coordinator.services.orders import Orders, Trimmer
from coordinator.state.fleet import Fleet
from coordinator.state.records import RoundRecord, StoredRecord
from tests.fakes.obedient_devices import confirm_all
from tests.fakes.recording_store import RecordingStore
from tests.fakes.small_fleet import NODES, RUN, small_fleet
from wattfleet.budgets import InForce
from wattfleet_proto.device_state import DeviceState, GrantPhase


class Told(Orders):
    """Records which devices were sent orders; the devices confirm them at once."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        confirm_all(fleet)
        self.fleet = fleet
        self.device_ids: list[str] = []

    def send_due(self, only: str | None = None) -> None:
        self.device_ids += confirm_all(self.fleet)


class Unanswered(Orders):
    """Records which devices would be sent orders; none is sent."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.fleet = fleet
        self.device_ids: list[str] = []

    def send_due(self, only: str | None = None) -> None:
        changed, first = self.fleet.rounds.grants.due()
        self.device_ids += changed + first


async def looked(fleet: Fleet, writer: Writer, told: Told, times: int = 1) -> None:
    """Let the trimmer check the fleet `times` times."""
    looks = asyncio.Semaphore(times)

    async def sleep(_: float) -> None:
        await looks.acquire()

    watching = asyncio.create_task(Trimmer(FleetRepository(fleet, writer), told, sleep).watch())
    while not looks.locked():
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()


async def test_devices_are_told_that_the_watts_fell_though_nothing_can_be_stored() -> None:

    fleet, recording = small_fleet(), RecordingStore()
    recording.fails_with = StoreFullError("the disk is full")
    writer = Writer(recording, lambda _: asyncio.sleep(0.01))
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    told = Told(fleet)
    Trimmer(FleetRepository(fleet, writer), told).budget_changed("site", InForce(20.0, "query", False, "the meter"))
    assert told.device_ids == ["orin"]
    while not recording.attempts:
        await asyncio.sleep(0)
    recording.fails_with = None
    while not recording.transactions:
        await asyncio.sleep(0.01)
    await writer.close()
    assert [record for records in recording.transactions for record in records] == [fleet.rounds.records[f"{RUN}/1"]]


async def test_a_device_that_begins_to_measure_itself_is_noticed() -> None:

    fleet, recording = small_fleet(60.0), RecordingStore()
    writer = Writer(recording)
    fleet.flower.plan(RUN, 1, [NODES[1]], 1.0)
    told = Told(fleet)
    fleet.agents.report_state("orin", DeviceState.PROFILING, 50, "drift")
    await looked(fleet, writer, told)
    assert told.device_ids == ["nano"]
    await writer.close()
    stored: list[StoredRecord] = [record for records in recording.transactions for record in records]
    assert stored == [fleet.rounds.records[f"{RUN}/1"]]


async def test_what_goes_wrong_with_a_look_is_logged_once_and_it_is_looked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right, attempts = Fleet.trim, 0

    def trim(fleet: Fleet) -> list[RoundRecord]:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise ZeroDivisionError
        return right(fleet)

    fleet, writer = small_fleet(60.0), Writer(RecordingStore())
    fleet.flower.plan(RUN, 1, [NODES[1]], 1.0)
    told = Told(fleet)
    fleet.agents.report_state("orin", DeviceState.PROFILING, 50, "drift")
    monkeypatch.setattr(Fleet, "trim", trim)
    await looked(fleet, writer, told, times=5)
    await writer.close()
    assert (attempts, told.device_ids) == (5, ["nano"])
    assert caplog.text.count("rounds in flight could not be trimmed") == 1


async def test_a_confirmation_between_its_time_out_and_a_look_brings_an_order() -> None:
    """40 W, one link stalls; 10.1 s later 15 W, and at once the link is back. The next look is 0.1 s later."""
    now_s = [0.0]
    fleet, writer = small_fleet(now_s=lambda: now_s[0]), Writer(RecordingStore())
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    confirm_all(fleet)
    fleet.set_budget("site", InForce(40.0, "query", False, "the meter"))
    [(device_id, lower)] = fleet.take_orders()
    told = Unanswered(fleet)
    now_s[0] = 9.2
    await looked(fleet, writer, told)
    now_s[0] = 10.1
    fleet.set_budget("site", InForce(15.0, "query", False, "the meter"))
    confirm_all(fleet)
    fleet.rounds.grants.confirm(device_id, lower.grant_id, lower.plan_id, GrantPhase.TRAINING, now_s[0])
    assert sum(fleet.draw.elsewhere_w(frozenset()).values()) > 15.0, "it keeps to its part of the 40 W"
    now_s[0] = 10.2
    await looked(fleet, writer, told)
    assert told.device_ids == [device_id]
    confirm_all(fleet)
    assert sum(fleet.draw.elsewhere_w(frozenset()).values()) <= 15.0
    await writer.close()


def test_watts_are_looked_at_again_where_a_look_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = small_fleet()
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    monkeypatch.setattr("coordinator.state.fleet.trim_rounds", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fleet.set_budget("site", InForce(20.0, "query", False, "the meter"))
    assert fleet.untrimmed_w()["site"] > 0
    monkeypatch.undo()
    fleet.trim()
    assert fleet.untrimmed_w() == {"site": 0.0}
