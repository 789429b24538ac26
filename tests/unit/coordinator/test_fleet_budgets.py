"""How the fleet handles supplies, device settings of the operator, and budgets that change."""

from __future__ import annotations

import pytest

from coordinator.budgets.site_file import SiteFile
from coordinator.state.agents import DeviceRules
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceResult, ObservedTraining
from tests.fakes.obedient_devices import confirm_all, end_training, train
from tests.fakes.small_fleet import (
    NANO_FRONT,
    NANO_NODE,
    NODES,
    ORIN_FRONT,
    ORIN_NODE,
    RUN,
    make_ready,
    small_fleet,
)
from wattfleet.budgets import ConstantBudget, InForce, Supplies, Supply
from wattfleet.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.planning import Allowance, Selection
from wattfleet.planning.policies import AllDevices

SUPPLIES = Supplies((Supply("site"), Supply("rack", "site"), Supply("roof", "site")))
SITE = SiteFile(
    SUPPLIES,
    {name: ConstantBudget(100.0) for name in SUPPLIES.names},
    attached=(("orin*", "rack"), ("nano*", "roof"), ("*-both", "rack"), ("*-both*", "roof")),
    rules={"orin": DeviceRules(limit_w=25.0, tags=frozenset({"lab"}))},
)


def two_circuits(selection: Selection | None = None, rack_w: float = 100.0) -> Fleet:
    allowance = Allowance(SUPPLIES, {"site": 100.0, "rack": rack_w, "roof": 100.0})
    fleet = Fleet(allowance, AllDevices(), placement=SITE, selection=selection)
    make_ready(fleet, "orin", ORIN_FRONT, 5.0, ORIN_NODE)
    make_ready(fleet, "nano", NANO_FRONT, 3.0, NANO_NODE)
    fleet.flower.start_run(RUN, "FedAvg", 3)
    return fleet


def watts(amount: float) -> InForce:
    return InForce(amount, "query", False, "the meter")


def modes_of(fleet: Fleet, plan_id: str) -> dict[str, float]:
    return {a.device_id: a.power_w for a in fleet.rounds.records[plan_id].plan.assignments}


def test_a_device_keeps_its_own_limit_and_its_circuit() -> None:
    record = two_circuits().flower.plan(RUN, 1, NODES, 1.0)
    # The Orin's faster modes exceed its own limit of 25 W.
    assert {a.device_id: a.power_w for a in record.plan.assignments} == {"orin": 20, "nano": 15}
    assert {use.supply: use.planned_w for use in record.plan.supplies} == {"site": 35, "rack": 20, "roof": 15}
    with pytest.raises(InfeasibleBudgetError, match="rack: 12 W is not enough to train one device on top of 5.0 W"):
        two_circuits(Selection(exclude=("site:roof",)), rack_w=12.0).flower.plan(RUN, 1, NODES, 1.0)


def test_the_operator_chooses_by_tag() -> None:
    record = two_circuits(Selection(include=("tag:lab",))).flower.plan(RUN, 1, NODES, 1.0)
    assert [a.device_id for a in record.plan.assignments] == ["orin"]
    assert record.plan.decisions[0].reason == "not included: matches none of tag:lab"


def test_a_device_that_hangs_behind_two_supplies_is_refused_alone() -> None:
    fleet = two_circuits()
    with pytest.raises(InvalidInputError, match="x-both"):
        fleet.agents.connect("x-both", "agx-orin", "simulated", 100)
    assert fleet.flower.plan(RUN, 1, NODES, 1.0).plan.assignments


def test_watts_that_fall_trim_the_round_in_flight_and_a_rise_leaves_it() -> None:
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    before = modes_of(fleet, plan_id)
    confirm_all(fleet)
    assert fleet.set_budget("site", watts(200.0)) == []
    [record] = fleet.set_budget("site", watts(33.0))
    assert record == fleet.rounds.records[plan_id]
    assert record.plan.planned_w <= 33
    assert set(confirm_all(fleet)) == {"orin", "nano"} - {
        d for d in before if before[d] == modes_of(fleet, plan_id).get(d)
    }
    assert fleet.set_budget("site", watts(33.0)) == []
    fleet.set_budget("site", watts(20.0))
    stop = confirm_all(fleet)["orin"]
    assert (stop.plan_id, stop.assignment) == (plan_id, None)


def test_a_device_that_is_done_is_not_told_anything() -> None:
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    for device_id in ("orin", "nano"):
        train(fleet, device_id)
    end_training(fleet, "orin")
    fleet.rounds.observe(plan_id, ObservedTraining("orin", 12.0, 30.0))
    changed = fleet.set_budget("site", watts(17.0))
    told = confirm_all(fleet)
    assert [(device_id, each.assignment is not None) for device_id, each in told.items()] == [("nano", True)]
    assert {a.device_id for a in changed[0].plan.assignments} == {"orin", "nano"}


def test_a_round_that_is_over_is_not_trimmed() -> None:
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    fleet.rounds.finish(plan_id, [], 50.0)
    assert fleet.set_budget("site", watts(10.0)) == []


def test_the_next_round_keeps_the_watts_as_they_are_then() -> None:
    fleet = small_fleet()
    fleet.set_budget("site", watts(0.0))
    with pytest.raises(InfeasibleBudgetError, match="0 W is not enough"):
        fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.set_budget("site", watts(100.0))
    assert len(fleet.flower.plan(RUN, 1, NODES, 1.0).plan.assignments) == 2


def test_a_straggler_counts_with_the_watts_that_were_set_aside_for_it() -> None:
    fleet = small_fleet()
    first = fleet.flower.plan(RUN, 1, NODES, 1.0)
    set_aside_w = {a.device_id: a.power_limit_w for a in first.plan.assignments}["orin"]
    train(fleet, "orin")
    train(fleet, "nano")
    end_training(fleet, "nano")
    fleet.rounds.finish(first.plan_id, [DeviceResult("orin", "no reply within 90 s"), DeviceResult("nano")], 90.0)
    second = fleet.flower.plan(RUN, 2, NODES, 1.0)
    assert [a.device_id for a in second.plan.assignments] == ["nano"]
    assert second.plan.planned_w == set_aside_w + second.plan.assignments[0].power_limit_w


def test_a_device_whose_training_was_sent_for_counts_before_it_begins() -> None:
    fleet = small_fleet()
    [assignment] = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0).plan.assignments
    second = fleet.flower.plan(RUN, 2, [NANO_NODE], 1.0)  # as asynchronous strategies do, during the first
    assert second.plan.planned_w == assignment.power_limit_w + second.plan.assignments[0].power_limit_w


def test_a_device_that_failed_twice_in_a_row_is_left_out_of_a_round() -> None:
    fleet = small_fleet()
    for number in (1, 2):
        plan_id = fleet.flower.plan(RUN, number, NODES, 1.0).plan_id
        fleet.rounds.finish(plan_id, [DeviceResult("orin", "the app raised: OOM"), DeviceResult("nano")], 50.0)
        confirm_all(fleet)
    third = fleet.flower.plan(RUN, 3, NODES, 1.0)
    assert [a.device_id for a in third.plan.assignments] == ["nano"]
    assert "failed 2 times in a row: excluded until round 4" in [d.reason for d in third.plan.decisions]
    fleet.rounds.finish(third.plan_id, [DeviceResult("nano")], 50.0)
    confirm_all(fleet)
    assert len(fleet.flower.plan(RUN, 4, NODES, 1.0).plan.assignments) == 2
