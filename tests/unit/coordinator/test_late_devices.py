"""Devices that still train when their round ends: this is no failure, and they keep their grants."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from coordinator.repository.repository import FleetRepository
from coordinator.repository.writer import Writer
from coordinator.services.orders import Orders
from coordinator.services.planning import PlanningServicer, RoundPlanning
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Leases
from coordinator.state.records import (
    DeviceResult,
    GivenUpTraining,
    ObservedTraining,
    RoundRecord,
    StoredGrants,
    parts_of,
)
from coordinator.store.tables import round_values
from tests.fakes.obedient_devices import confirm_all, end_training, train
from tests.fakes.plaintext_context import PlaintextContext
from tests.fakes.recording_store import RecordingStore
from tests.fakes.small_fleet import NANO_NODE, NODES, ORIN_NODE, RUN, restarted, small_fleet
from wattfleet.budgets import InForce
from wattfleet.planning import History, Participation
from wattfleet_proto.v1 import planning_pb2

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
    assert (record.observed_site_w, record.observed_duration_s) == (62.0, 36.0)
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
