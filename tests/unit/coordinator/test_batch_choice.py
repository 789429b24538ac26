"""Plans that choose a batch size and a mode for each device: assignments, grants and trims."""

from __future__ import annotations

import pytest

from coordinator.errors import NoDevicesError
from coordinator.services.orders import grant_to_message
from coordinator.state.fleet import Fleet
from tests.fakes.fronts import front, of_batches
from tests.fakes.obedient_devices import confirm_all, train
from tests.fakes.small_fleet import ORIN_NODE, RUN
from wattfleet.budgets import InForce
from wattfleet.choosing import Front
from wattfleet.errors import InfeasibleBudgetError
from wattfleet.modes import BatchOptions, Workload, WorkloadFacts
from wattfleet.planning import Allowance, Assignment
from wattfleet.planning.policies import AllDevices
from wattfleet_proto.convert import plan_from_message, plan_to_message
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.v1 import planning_pb2, session_pb2

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


def planned(fleet: Fleet) -> Assignment:
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
    assigned = planned(fleet_within(budget_w))
    assert seen(assigned) == min(point for point in POINTS if point[1] <= budget_w)
    at = [point[0] for point in POINTS].index(assigned.epoch_s)
    assert assigned.mode == with_batches(*POINTS).mode(at), "the mode of the same point"


def test_watts_that_no_batch_keeps_select_nobody() -> None:
    with pytest.raises((NoDevicesError, InfeasibleBudgetError)):
        planned(fleet_within(11.0))


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
        assert plan_from_message(to_app, 1.0) == record.plan


def test_without_a_choice_the_grant_states_the_batch_that_the_device_has_seen() -> None:
    fleet = fleet_within(100.0)
    report(fleet, front((10, 50), (20, 30)), Workload("digits", WorkloadFacts(batch=48)))
    assert planned(fleet).batch == 48
    [(_, grant)] = fleet.take_orders()
    assert grant_to_message(grant).batch == 48


def test_a_device_that_knows_no_batch_is_granted_none() -> None:
    fleet = fleet_within(100.0)
    report(fleet, front((10, 50), (20, 30)), Workload("digits"))
    assert planned(fleet).batch is None
    [(_, grant)] = fleet.take_orders()
    assert grant_to_message(grant).batch == 0


# --- in flight ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trains", [False, True], ids=["waits", "trains"])
@pytest.mark.parametrize("first_w", [100.0, 45.0, 35.0])
@pytest.mark.parametrize("then_w", [45.0, 35.0, 25.0, 19.0, 12.0, 11.0])
def test_a_trim_lowers_the_mode_and_keeps_the_batch(first_w: float, then_w: float, trains: bool) -> None:
    fleet = fleet_within(first_w)
    assigned = planned(fleet)
    confirm_all(fleet)
    if trains:
        train(fleet, "orin")
    set_budget(fleet, then_w)
    affordable = [point for point in POINTS if point[2] == assigned.batch and point[1] <= min(first_w, then_w)]
    assert in_flight(fleet) == (min(affordable) if affordable else None)


def test_a_trim_is_granted_with_the_batch() -> None:
    fleet = fleet_within(100.0)
    planned(fleet)
    confirm_all(fleet)
    fleet.set_budget("site", InForce(35.0, "query", False, "the meter"))
    [(_, grant)] = fleet.take_orders()
    message = grant_to_message(grant)
    assert (message.power_limit_w, message.batch) == (20.0, 64), "not the faster mode with the other batch"


def test_a_batch_that_left_the_front_meanwhile_is_trained_as_assigned_or_not_at_all() -> None:
    for then_w, expected in ((50.0, (10.0, 50.0, 64)), (45.0, None)):
        fleet = fleet_within(100.0)
        planned(fleet)
        confirm_all(fleet)
        report(fleet, with_batches((30.0, 30.0, 16), (80.0, 12.0, 16)))
        set_budget(fleet, then_w)
        assert in_flight(fleet) == expected


def test_a_new_front_in_flight_is_planned_with_in_the_batch_that_trains() -> None:
    fleet = fleet_within(100.0)
    planned(fleet)
    confirm_all(fleet)
    report(fleet, with_batches((11.0, 48.0, 64), (12.0, 33.0, 16), (13.0, 32.0, 64)))
    set_budget(fleet, 35.0)
    assert in_flight(fleet) == (13.0, 32.0, 64)
