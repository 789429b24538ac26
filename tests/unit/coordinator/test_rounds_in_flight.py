"""Rounds in flight: devices that train on after the end, duties that change, and trims when budgets fall."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace

import pytest

from coordinator.errors import StoreFullError
from coordinator.repository.repository import FleetRepository
from coordinator.repository.writer import Writer
from coordinator.services.orders import Orders, Trimmer
from coordinator.services.planning import PlanningServicer, RoundPlanning
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Leases
from coordinator.state.records import (
    DeviceResult,
    GivenUpTraining,
    ObservedTraining,
    RoundRecord,
    StoredGrants,
    StoredRecord,
    parts_of,
)
from coordinator.store.tables import round_values
from tests.fakes.fleets import front
from tests.fakes.small_fleet import (
    NANO_NODE,
    NODES,
    ORIN_NODE,
    RUN,
    PlaintextContext,
    confirm_all,
    end_training,
    restarted,
    small_fleet,
    train,
)
from tests.fakes.stored_records import RecordingStore
from wattfleet.core.budgets import InForce
from wattfleet.core.choosing import Front
from wattfleet.core.duties import KeptDuty
from wattfleet.core.errors import ImplausibleError
from wattfleet.core.planning import History, Participation
from wattfleet_proto.device_state import DeviceState, GrantPhase
from wattfleet_proto.v1 import planning_pb2

# --- Late devices -----------------------------------------------------------------------------------------------------
# Devices that still train when their round ends: this is no failure, and they keep their grants.


ORIN_DONE = DeviceResult("orin", num_examples=48.0, loss=0.5)
NANO_LATE = DeviceResult("nano", share=0.0, late=True)


def late_round(fleet: Fleet, number: int = 1) -> RoundRecord:
    """A round that ends while the Nano still trains."""
    plan_id = fleet.flower.plan(RUN, number, NODES, 1.0).plan_id
    train(fleet, "orin")
    train(fleet, "nano")
    end_training(fleet, "orin")
    return fleet.rounds.finish(plan_id, [ORIN_DONE, NANO_LATE], 12.5)


def nano_w(fleet: Fleet) -> float:
    """The watts counted for the Nano's grant."""
    grant = fleet.rounds.grants.of("nano")
    return 0.0 if grant is None else grant.counted_w


def test_a_late_device_keeps_its_grant_until_its_training_is_over() -> None:
    fleet = small_fleet()
    record = late_round(fleet)
    assert (record.late, record.failed) == (("nano",), ())
    granted_w = nano_w(fleet)
    assert granted_w == 15.0 and confirm_all(fleet) == {}, "it is not called off"
    second = fleet.flower.plan(RUN, 2, [ORIN_NODE], 1.0)
    assert second.idle_w == granted_w, "the next plan leaves its watts to it"
    end_training(fleet, "nano")
    assert nano_w(fleet) == 0.0
    assert set(fleet.flower.plan(RUN, 3, [NANO_NODE], 1.0).nodes) == {"nano"}


def test_a_late_device_that_has_not_begun_may_still_begin() -> None:
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    confirm_all(fleet)
    fleet.rounds.finish(plan_id, [ORIN_DONE, NANO_LATE], 12.5)
    told = confirm_all(fleet)
    assert set(told) == {"orin"} and told["orin"].assignment is None, "nobody waits for the Orin"
    assert nano_w(fleet) == 15.0


def test_a_late_device_is_trimmed_like_one_in_flight_and_not_stopped_first() -> None:
    fleet = small_fleet()
    record = late_round(fleet)
    [trimmed] = fleet.set_budget("site", InForce(16.0, "query", False, "the meter"))
    assert trimmed.plan_id == record.plan_id and trimmed.wall_s == 12.5
    told = confirm_all(fleet)["nano"]
    assert told.assignment is not None and told.limit_w == 10.0, "it goes on in its mode with fewer watts"
    fleet.rounds.grants.unstored.take()
    fleet.check_grants()
    assert fleet.rounds.grants.unstored.take() == [], "it stays stored for a restart"


def test_a_late_device_is_observed_afterwards() -> None:
    fleet = small_fleet()
    plan_id = late_round(fleet).plan_id
    fleet.rounds.observe(plan_id, ObservedTraining("orin", 11.0, 48.0))
    fleet.rounds.observe(plan_id, ObservedTraining("nano", 36.0, 14.0))
    record = fleet.rounds.records[plan_id]
    assert (record.observed_site_w, record.observed_s) == (62.0, 36.0)
    assert record.late == ("nano",), "its round did end without it"


def test_a_late_device_that_its_server_gave_up_is_released() -> None:
    fleet = small_fleet()
    late_round(fleet)
    fleet.flower.release(RUN, NODES)
    grant = fleet.rounds.grants.of("nano")
    assert grant is not None and grant.is_given_up and grant.counted_w == 15.0, "it draws power until it has ended"


def test_the_end_of_a_run_gives_its_late_devices_up() -> None:
    fleet = small_fleet()
    late_round(fleet)
    fleet.flower.finish_run(RUN, "")
    grant = fleet.rounds.grants.of("nano")
    assert grant is not None and grant.is_given_up


def test_being_late_is_no_failure_in_the_history() -> None:
    fleet = small_fleet()
    for number in (1, 2, 3):
        late_round(fleet, number)
        end_training(fleet, "nano")
    history = fleet.rounds.cache.history(RUN)
    assert history.consecutive_failures == {}
    assert history.last_selected == {"orin": 3, "nano": 3}
    assert history.times_completed == {"orin": 3, "nano": 3}
    assert set(history.latest) == {"orin"}, "neither samples nor loss of a late device are known"
    assert fleet.flower.plan(RUN, 4, NODES, 1.0).nodes.keys() == {"orin", "nano"}


def test_being_late_forgives_no_earlier_failure() -> None:
    history = History()
    for number, part in enumerate([Participation(failed=True), Participation(late=True), Participation(failed=True)]):
        history = history.after(number + 1, {"nano": part})
    assert history.consecutive_failures == {"nano": (2, 3)}


def test_a_restart_keeps_the_grant_of_a_late_device() -> None:
    before = small_fleet()
    record = late_round(before)
    assert before.rounds.grants.unstored.take()[-1:] == [GivenUpTraining("nano", record.plan_id)]
    fleet = restarted(before, stored=StoredGrants(120.0, {"nano": GivenUpTraining("nano", record.plan_id)}))
    grant = fleet.rounds.grants.of("nano")
    assert grant is not None and grant.is_in_flight and grant.counted_w == 15.0
    fleet.check_grants()
    assert fleet.rounds.grants.unstored.take() == [], "it is still to be loaded after the next restart"
    end_training(fleet, "nano")
    fleet.check_grants()
    assert GivenUpTraining("nano", None) in fleet.rounds.grants.unstored.take()


def test_a_late_device_of_an_ended_run_is_given_up_by_a_restart() -> None:
    before = small_fleet()
    record = late_round(before)
    before.flower.finish_run(RUN, "")
    grant = restarted(
        before, stored=StoredGrants(120.0, {"nano": GivenUpTraining("nano", record.plan_id)})
    ).rounds.grants.of("nano")
    assert grant is not None and grant.is_given_up


@pytest.mark.parametrize("gives_up", [True, False], ids=["its server gave it up", "it was observed"])
def test_a_training_that_nobody_waits_for_is_stored_when_its_run_ends(gives_up: bool) -> None:
    """A restart may not load the unfinished round of an ended run, while the device still trains (world 13020551)."""
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    confirm_all(fleet)
    train(fleet, "nano")
    if gives_up:
        fleet.rounds.grants.give_up_devices(["nano"], RUN)
    else:
        fleet.rounds.grants.observed("nano", plan_id)
    fleet.rounds.grants.unstored.take()
    fleet.flower.finish_run(RUN, "")
    assert GivenUpTraining("nano", plan_id) in fleet.rounds.grants.unstored.take()


def test_results_of_earlier_versions_are_not_late() -> None:
    record = late_round(small_fleet())
    stored = round_values(record)["results"]
    assert [each["late"] for each in stored] == [False, True]
    before = [{key: value for key, value in each.items() if key != "late"} for each in stored]
    assert [DeviceResult(**each).late for each in before] == [False, False]
    assert asdict(DeviceResult(**stored[1])) == asdict(NANO_LATE)
    assert parts_of(record.results)["nano"] == Participation(late=True)


async def test_an_overdue_late_training_is_released_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 1_000.0
    fleet, writer = small_fleet(), Writer(RecordingStore())
    repository, orders = FleetRepository(fleet, writer), Orders(fleet)
    planning = RoundPlanning(repository, Leases(now_s), orders, lambda: now_s)
    service = PlanningServicer(repository, planning, orders)
    request = planning_pb2.PlanRoundRequest(run_id=RUN, round=1, node_ids=NODES, epochs=1.0)
    plan = await service.PlanRound(request, PlaintextContext())
    train(fleet, "nano")
    results = [planning_pb2.DeviceResult(device_id="nano", late=True)]
    await service.FinishRound(
        planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=1.0, results=results), PlaintextContext()
    )
    confirm_all(fleet)
    for number, waited_s in ((2, 2 * plan.duration_s + 600.0), (3, 2 * plan.duration_s + 601.0)):
        now_s = 1_000.0 + waited_s
        await service.PlanRound(
            planning_pb2.PlanRoundRequest(run_id=RUN, round=number, node_ids=[ORIN_NODE], epochs=1.0),
            PlaintextContext(),
        )
        grant = fleet.rounds.grants.of("nano")
        assert grant is not None and grant.is_given_up == (number == 3) and grant.counted_w == 15.0
        train(fleet, "orin")
        end_training(fleet, "orin")
    assert f"round {RUN}/1 is overdue and still has late trainings: its devices are released" in caplog.text
    await writer.close()


async def test_a_device_with_a_failure_is_not_late() -> None:
    fleet, writer = small_fleet(), Writer(RecordingStore())
    repository, orders = FleetRepository(fleet, writer), Orders(fleet)
    service = PlanningServicer(repository, RoundPlanning(repository, Leases(0.0), orders, lambda: 0.0), orders)
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    results = [planning_pb2.DeviceResult(device_id="nano", late=True, failure="the node is gone")]
    await service.FinishRound(
        planning_pb2.FinishRoundRequest(plan_id=plan_id, wall_s=1.0, results=results), PlaintextContext()
    )
    assert (fleet.rounds.records[plan_id].failed, fleet.rounds.records[plan_id].late) == (("nano",), ())
    await writer.close()


# --- Changed duties ---------------------------------------------------------------------------------------------------
# Rounds in flight while the duties of their devices change.

KEPT = KeptDuty("camera", 500, 0.95, 29.5, 12, 2, (*[1] * 11, *[0] * 6), 1500.0, 350.0, 4, 0.5, 1)
SLOWER = front((30, 50), (60, 30), (120, 20))
"""The Orin's front once its duty takes two thirds of it: its round of 35 s takes 60 s in its mode."""


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def in_training(clock: Clock, deadline_s: float | None = None) -> tuple[Fleet, str]:
    """A fleet in training: an Orin at up to 30 W, which has a duty, and a Nano at up to 15 W."""
    fleet = small_fleet(now_s=clock)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert record.plan.duration_s == 35.0
    fleet.rounds.cache.put(replace(record, plan=replace(record.plan, deadline_s=deadline_s)))
    confirm_all(fleet)
    for device_id in ("orin", "nano"):
        report(fleet, clock, device_id, GrantPhase.TRAINING)
        fleet.agents.report_state(device_id, DeviceState.TRAINING, 50, "")
    fleet.duties.report("orin", KEPT)
    return fleet, record.plan_id


def report(fleet: Fleet, clock: Clock, device_id: str, phase: GrantPhase) -> None:
    known = fleet.rounds.grants.of(device_id)
    assert known is not None
    fleet.rounds.grants.confirm(device_id, known.grant.grant_id, known.plan_id, phase, clock())


def report_front(fleet: Fleet, now: Front, idle_w: float = 5.0, device_id: str = "orin") -> None:
    fleet.agents.report_front(device_id, now, idle_w, 50, "d" * 64, minibatches_per_epoch=100)


def reason(record: RoundRecord) -> str:
    return next(each.reason for each in record.plan.decisions if each.device_id == "orin")


def test_a_longer_epoch_has_the_round_wait_longer() -> None:
    fleet, _ = in_training(Clock())
    before = fleet.rounds.grants.of("orin")
    assert before is not None
    report_front(fleet, SLOWER)
    [record] = fleet.trim()
    assert record.plan.duration_s == 60.0
    assert reason(record).endswith("ends later because its epochs take longer beside its duty")
    told = confirm_all(fleet)
    assert list(told) == ["orin"]
    assert before.assignment is not None and told["orin"].assignment is not None
    assert (told["orin"].assignment.mode, told["orin"].limit_w) == (before.assignment.mode, before.grant.limit_w)
    assert told["orin"].longest_s > before.grant.longest_s
    assert fleet.trim() == []


def test_a_device_without_a_duty_trains_on_as_planned() -> None:
    fleet, _ = in_training(Clock())
    fleet.duties.report("orin", None)
    report_front(fleet, SLOWER)
    assert fleet.trim() == []


def test_a_device_that_cannot_meet_the_deadline_is_left_out_and_frees_its_watts() -> None:
    clock = Clock()
    fleet, plan_id = in_training(clock, deadline_s=50.0)
    clock.now_s = 5.0  # three quarters of the training are left: 45 s
    report_front(fleet, SLOWER)
    assert [each.plan.stopped for each in fleet.trim()] == [()]
    clock.now_s = 2.0
    report_front(fleet, front((40, 50), (90, 30)))
    [record] = fleet.trim()
    assert record.plan.stopped == ("orin",)
    assert "left out: its duty leaves too little time: 83 s of training, the deadline is 50 s" in reason(record)
    assert confirm_all(fleet)["orin"].assignment is None
    assert fleet.rounds.get(plan_id).idle_w == 5.0


def test_a_duty_that_is_heard_of_after_its_front_is_reviewed_as_well() -> None:
    fleet, _ = in_training(Clock())
    fleet.duties.report("orin", None)
    report_front(fleet, SLOWER)
    assert fleet.trim() == []
    fleet.duties.report("orin", KEPT)
    assert [each.plan.duration_s for each in fleet.trim()] == [60.0]
    fleet.duties.report("orin", KEPT)
    assert fleet.trim() == []


def test_after_a_restart_nobody_is_left_out_for_its_progress() -> None:
    clock = Clock()
    fleet, _ = in_training(clock, deadline_s=50.0)
    again = restarted(fleet, now_s=clock)
    for device_id in ("orin", "nano"):
        again.agents.connect(device_id, "agx-orin", "simulated", 18_096)
        again.rounds.grants.session_began(device_id, 0.0)
        known = again.rounds.grants.of(device_id)
        assert known is not None
        again.rounds.grants.confirm(device_id, 1, known.plan_id, GrantPhase.TRAINING, 30.0)
    again.duties.report("orin", KEPT)
    report_front(again, SLOWER)
    [record] = again.trim()
    assert (record.plan.stopped, record.plan.duration_s) == ((), 60.0)


def test_the_budget_is_kept_after_a_review() -> None:
    fleet, _ = in_training(Clock())
    report_front(fleet, SLOWER)
    [record] = fleet.set_budget("site", InForce(30.0, "query", False, "the meter"))
    assert record.plan.planned_w <= 30.0
    assert "ends later" in reason(record) and "because the budget fell" in reason(record)


@pytest.mark.parametrize(("idle_w", "modes"), [(3.0, ()), (20.0, ("orin",))])
def test_more_idle_watts_at_rest_trim_the_round_in_flight(idle_w: float, modes: tuple[str, ...]) -> None:
    """The budget is used up. An idle device gets a duty and then idles in a mode that draws more power."""
    fleet = small_fleet(site_budget_w=40.0)
    record = fleet.flower.plan(RUN, 1, NODES[:1], 1.0)
    confirm_all(fleet)
    assert record.plan.planned_w <= 40.0
    report_front(fleet, front((35, 25), (60, 22)), idle_w, "nano")
    changed = fleet.trim()
    assert tuple(device for each in changed for device in each.plan.in_other_mode) == modes
    assert sum(fleet.draw.elsewhere_w(frozenset(), {"orin"}).values()) <= 40.0
    assert fleet.draw.idle_w() == {"site": 5.0 + idle_w}


def test_idle_watts_over_the_whole_budget_are_shown_as_reserved() -> None:
    fleet = small_fleet(site_budget_w=40.0)
    for device_id in ("orin", "nano"):
        fleet.agents.report_no_front(device_id, "the duty takes the whole board", 25.0)
    fleet.trim()
    assert fleet.draw.reserved_w() == {"site": 50.0}


def test_watts_at_rest_with_a_duty_may_be_those_of_a_training() -> None:
    """An AGX Orin idles at 35 W or less without a duty, and draws at most 150 W."""
    fleet = small_fleet()
    with pytest.raises(ImplausibleError, match="40 W as its idle power"):
        fleet.agents.report_front("orin", SLOWER, 40.0, 50, "", minibatches_per_epoch=100)
    fleet.agents.report_front("orin", SLOWER, 40.0, 50, "", is_idle_with_duty=True, minibatches_per_epoch=100)
    assert fleet.agents.get("orin").idle_w == 40.0
    assert fleet.agents.report_no_front("orin", "no time", 45.0, is_idle_with_duty=True).idle_w == 45.0
    with pytest.raises(ImplausibleError, match="151 W as its idle power"):
        fleet.agents.report_no_front("orin", "no time", 151.0, is_idle_with_duty=True)


# --- Trimmer ----------------------------------------------------------------------------------------------------------
# Trims of rounds in flight that may exceed the budget; devices get their orders even if the store fails.


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
