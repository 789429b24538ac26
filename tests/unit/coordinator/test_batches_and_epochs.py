"""Plans that choose batch size, mode and local epochs for each device: assignments, grants, trims and the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.errors import NoDevicesError
from coordinator.repository.repository import FleetRepository
from coordinator.repository.writer import Writer
from coordinator.services.orders import Orders, grant_to_message
from coordinator.services.planning import PlanningServicer, RoundPlanning
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Leases
from coordinator.state.records import ObservedTraining, RoundRecord
from coordinator.store.store import Store
from tests.fakes.fleets import front, of_batches
from tests.fakes.small_fleet import NODES, ORIN_NODE, RUN, PlaintextContext, confirm_all, small_fleet, train
from tests.fakes.stored_records import RecordingStore, rounds_of
from wattfleet.core.budgets import InForce
from wattfleet.core.choosing import Front
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.modes import BatchOptions, Workload, WorkloadFacts
from wattfleet.core.planning import Allowance, Assignment, EpochChoice
from wattfleet.core.planning.policies import AllDevices, Policy, Progress
from wattfleet_proto.convert import epoch_choice_to_message, plan_from_message, plan_to_message
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.v1 import planning_pb2, session_pb2

# --- Batch choice -----------------------------------------------------------------------------------------------------
# Plans that choose a batch size and a mode for each device: assignments, grants and trims.


WORKLOAD = Workload("digits", WorkloadFacts(batch=16), BatchOptions((16, 64), (0.5, 1.0)))
# Seconds per epoch, watts and batch size of each point.
POINTS = [(10.0, 50.0, 64), (20.0, 40.0, 64), (30.0, 30.0, 16), (60.0, 20.0, 64), (80.0, 12.0, 16)]
IDLE_W = 5.0


def with_batches(*points: tuple[float, float, int]) -> Front:
    return of_batches(front(*(point[:2] for point in points)), [batch for *_, batch in points])


def report(fleet: Fleet, reported: Front, workload: Workload = WORKLOAD) -> None:
    fleet.agents.report_front("orin", reported, IDLE_W, 50, "d" * 64, workload, 100)


def fleet_within(budget_w: float) -> Fleet:
    fleet = Fleet(Allowance.of_site(budget_w), AllDevices())
    fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)
    report(fleet, with_batches(*POINTS))
    fleet.agents.report_state("orin", DeviceState.READY, 50, "parked")
    fleet.flower.bind_node(ORIN_NODE, "orin")
    fleet.flower.start_run(RUN, "FedAvg", 3, workload=WORKLOAD)
    return fleet


def planned_assignment(fleet: Fleet) -> Assignment:
    [assignment] = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0).plan.assignments
    return assignment


def seen(assignment: Assignment) -> tuple[float, float, int | None]:
    return assignment.epoch_s, assignment.power_w, assignment.batch


def in_flight(fleet: Fleet) -> tuple[float, float, int | None] | None:
    """The current assignment of the fleet's only device; None if its training was stopped."""
    assignments = fleet.rounds.records[f"{RUN}/1"].plan.assignments
    return seen(assignments[0]) if assignments else None


def set_budget(fleet: Fleet, budget_w: float) -> None:
    fleet.set_budget("site", InForce(budget_w, "query", False, "the meter"))
    confirm_all(fleet)
    fleet.trim()


@pytest.mark.parametrize("budget_w", [100.0, 50.0, 49.0, 40.0, 35.0, 30.0, 29.0, 20.0, 15.0, 12.0])
def test_the_fastest_mode_and_batch_within_the_watts_are_assigned(budget_w: float) -> None:
    assigned = planned_assignment(fleet_within(budget_w))
    assert seen(assigned) == min(point for point in POINTS if point[1] <= budget_w)
    at = [point[0] for point in POINTS].index(assigned.epoch_s)
    assert assigned.mode == with_batches(*POINTS).mode(at), "the mode of the same point"


def test_watts_that_no_batch_keeps_select_nobody() -> None:
    with pytest.raises((NoDevicesError, InfeasibleBudgetError)):
        planned_assignment(fleet_within(11.0))


def test_the_app_and_the_agent_are_told_the_same_batch() -> None:
    for budget_w, batch in ((100.0, 64), (30.0, 16)):
        fleet = fleet_within(budget_w)
        record = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
        sent = plan_to_message(record.plan_id, record.plan, record.nodes).SerializeToString()
        to_app = planning_pb2.PlanRoundResponse.FromString(sent)
        [(_, grant)] = fleet.take_orders()
        to_agent = session_pb2.Grant.FromString(grant_to_message(grant, "digits").SerializeToString())
        assert (to_app.assignments[0].batch, to_agent.batch) == (batch, batch)
        assert to_app.assignments[0].mode == to_agent.mode
        assert plan_from_message(to_app) == record.plan


def test_without_a_choice_the_grant_states_the_batch_that_the_device_has_seen() -> None:
    fleet = fleet_within(100.0)
    report(fleet, front((10, 50), (20, 30)), Workload("digits", WorkloadFacts(batch=48)))
    assert planned_assignment(fleet).batch == 48
    [(_, grant)] = fleet.take_orders()
    assert grant_to_message(grant).batch == 48


def test_a_device_that_knows_no_batch_is_granted_none() -> None:
    fleet = fleet_within(100.0)
    report(fleet, front((10, 50), (20, 30)), Workload("digits"))
    assert planned_assignment(fleet).batch is None
    [(_, grant)] = fleet.take_orders()
    assert grant_to_message(grant).batch == 0


# --- in flight ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trains", [False, True], ids=["waits", "trains"])
@pytest.mark.parametrize("first_w", [100.0, 45.0, 35.0])
@pytest.mark.parametrize("then_w", [45.0, 35.0, 25.0, 19.0, 12.0, 11.0])
def test_a_trim_lowers_the_mode_and_keeps_the_batch(first_w: float, then_w: float, trains: bool) -> None:
    fleet = fleet_within(first_w)
    assigned = planned_assignment(fleet)
    confirm_all(fleet)
    if trains:
        train(fleet, "orin")
    set_budget(fleet, then_w)
    affordable = [point for point in POINTS if point[2] == assigned.batch and point[1] <= min(first_w, then_w)]
    assert in_flight(fleet) == (min(affordable) if affordable else None)


def test_a_trim_is_granted_with_the_batch() -> None:
    fleet = fleet_within(100.0)
    planned_assignment(fleet)
    confirm_all(fleet)
    fleet.set_budget("site", InForce(35.0, "query", False, "the meter"))
    [(_, grant)] = fleet.take_orders()
    message = grant_to_message(grant)
    assert (message.power_limit_w, message.batch) == (20.0, 64), "not the faster mode with the other batch"


def test_a_batch_that_left_the_front_meanwhile_is_trained_as_assigned_or_not_at_all() -> None:
    for then_w, expected in ((50.0, (10.0, 50.0, 64)), (45.0, None)):
        fleet = fleet_within(100.0)
        planned_assignment(fleet)
        confirm_all(fleet)
        report(fleet, with_batches((30.0, 30.0, 16), (80.0, 12.0, 16)))
        set_budget(fleet, then_w)
        assert in_flight(fleet) == expected


def test_a_new_front_in_flight_is_planned_with_in_the_batch_that_trains() -> None:
    fleet = fleet_within(100.0)
    planned_assignment(fleet)
    confirm_all(fleet)
    report(fleet, with_batches((11.0, 48.0, 64), (12.0, 33.0, 16), (13.0, 32.0, 64)))
    set_budget(fleet, 35.0)
    assert in_flight(fleet) == (13.0, 32.0, 64)


# --- Epoch choice -----------------------------------------------------------------------------------------------------
# Plans that choose the local epochs of each device: records, observations, trims and the store.

# An epoch takes 10 s on the Orin and 35 s on the Nano, and the overhead is 50 s. A round in which the Orin trains 3
# epochs and the Nano 1 makes progress (1.6 + 1) / 4 in 35 + 50 s. That is more per second than 2 / 4 in 35 + 50 s (one
# epoch each), 3.2 / 4 in 105 + 50 s (three each) or 1.6 / 3 in 30 + 50 s (three of the Orin alone).
POLICY = Progress(half_devices=2.0, overhead_s=50.0)
CHOICE = EpochChoice.of({1: 1.0, 3: 1.6}, is_per_device=True)
CHOSEN = {"nano": 1.0, "orin": 3.0}


def planned(policy: Policy = POLICY) -> tuple[Fleet, RoundRecord]:
    fleet = small_fleet(policy=policy)
    return fleet, fleet.flower.plan(RUN, 1, NODES, CHOICE)


def epochs_of(record: RoundRecord) -> dict[str, float]:
    return {assignment.device_id: assignment.epochs for assignment in record.plan.assignments}


def test_a_round_has_the_epochs_of_each_device_and_is_recorded_with_the_most() -> None:
    _, record = planned()
    assert epochs_of(record) == CHOSEN
    assert (record.epochs, record.plan.duration_s) == (3.0, 35.0)


def test_a_policy_that_chooses_none_plans_the_fewest() -> None:
    _, record = planned(AllDevices())
    assert (epochs_of(record), record.epochs) == ({"nano": 1.0, "orin": 1.0}, 1.0)


@pytest.mark.parametrize(("orin_epoch_s", "nano_epoch_s", "lasted_s"), [(11.0, 32.0, 33.0), (11.0, 34.0, 34.0)])
def test_the_observed_duration_is_of_each_devices_own_epochs(
    orin_epoch_s: float, nano_epoch_s: float, lasted_s: float
) -> None:
    fleet, record = planned()
    fleet.rounds.observe(record.plan_id, ObservedTraining("orin", orin_epoch_s, 48.0))
    assert fleet.rounds.records[record.plan_id].observed_s is None, "the Nano is not observed yet"
    fleet.rounds.observe(record.plan_id, ObservedTraining("nano", nano_epoch_s, 14.0))
    assert fleet.rounds.records[record.plan_id].observed_s == lasted_s


@pytest.mark.parametrize(
    ("budget_w", "duration_s", "left"),
    [(50.0, 60.0, CHOSEN), (31.0, 120.0, CHOSEN), (25.0, 35.0, {"nano": 1.0}), (14.0, 35.0, {})],
)
def test_a_trim_keeps_the_epochs(budget_w: float, duration_s: float, left: dict[str, float]) -> None:
    """Three epochs of the Orin take 30, 60 or 120 s at 50, 30 or 20 W; one of the Nano, 35 or 60 s at 15 or 10 W."""
    fleet, before = planned()
    confirm_all(fleet)
    fleet.set_budget("site", InForce(budget_w, "query", False, "the meter"))
    confirm_all(fleet)
    fleet.trim()
    after = fleet.rounds.records[before.plan_id]
    assert epochs_of(after) == left
    assert after.plan.duration_s == duration_s
    assert {each.device_id: each.epochs for each in after.plan.original.assignments} == CHOSEN
    assert after.epochs == 3.0


# --- the store ------------------------------------------------------------------------------------------------------


def test_the_epochs_of_each_device_are_stored(tmp_path: Path) -> None:
    fleet, record = planned()
    confirm_all(fleet)
    fleet.set_budget("site", InForce(50.0, "query", False, "the meter"))
    confirm_all(fleet)
    trimmed = fleet.rounds.records[record.plan_id]
    assert trimmed.plan.first_planned is not None
    for each in (record, trimmed):
        store = Store(tmp_path / "coordinator.db")
        store.save(fleet.flower.run(RUN), each)
        store.close()
        store = Store(tmp_path / "coordinator.db")
        assert rounds_of(store, RUN) == [each]
        store.close()


# --- the service ----------------------------------------------------------------------------------------------------


def service_of(fleet: Fleet, writer: Writer) -> PlanningServicer:
    repository, orders = FleetRepository(fleet, writer), Orders(fleet)
    return PlanningServicer(repository, RoundPlanning(repository, Leases(0.0), orders, lambda: 0.0), orders)


def asked(choice: planning_pb2.EpochChoice | None, epochs: float = 1.0) -> planning_pb2.PlanRoundRequest:
    return planning_pb2.PlanRoundRequest(run_id=RUN, round=1, node_ids=NODES, epochs=epochs, epoch_choice=choice)


def of(*options: tuple[int, float]) -> planning_pb2.EpochChoice:
    return planning_pb2.EpochChoice(
        options=[planning_pb2.EpochOption(epochs=epochs, progress=progress) for epochs, progress in options]
    )


def told(plan: planning_pb2.PlanRoundResponse) -> dict[str, float]:
    return {each.device_id: each.epochs for each in plan.assignments}


async def test_a_requested_choice_is_answered_with_the_epochs_of_each_device() -> None:
    fleet, writer = small_fleet(policy=POLICY), Writer(RecordingStore())
    service = service_of(fleet, writer)
    plan = await service.PlanRound(asked(epoch_choice_to_message(CHOICE)), PlaintextContext())
    assert told(plan) == CHOSEN
    again = await service.PlanRound(asked(of((1, 1.0), (9, 2.0))), PlaintextContext())
    assert again == plan, "a round is planned once"
    await writer.close()
    assert fleet.rounds.records[plan.plan_id].epochs == 3.0


async def test_a_request_without_a_choice_is_answered_with_its_number() -> None:
    fleet, writer = small_fleet(policy=POLICY), Writer(RecordingStore())
    plan = await service_of(fleet, writer).PlanRound(asked(None, 2.5), PlaintextContext())
    assert set(told(plan).values()) == {2.5}
    await writer.close()


@pytest.mark.parametrize(
    "choice", [of(), of((0, 1.0)), of((0, 1.0), (1, 2.0)), of((1, 2.0), (2, 1.0)), of((2, 1.0), (1, 2.0))]
)
async def test_a_choice_that_cannot_be_is_refused_and_nothing_is_planned(choice: planning_pb2.EpochChoice) -> None:
    fleet, store = small_fleet(policy=POLICY), RecordingStore()
    writer = Writer(store)
    service = service_of(fleet, writer)
    with pytest.raises(InvalidInputError):
        await service.PlanRound(asked(choice), PlaintextContext())
    assert not fleet.rounds.records and not fleet.rounds.in_flight()
    plan = await service.PlanRound(asked(epoch_choice_to_message(CHOICE)), PlaintextContext())
    assert told(plan) == CHOSEN, "the round can still be planned"
    await writer.close()
    assert len(store.transactions) == 1
