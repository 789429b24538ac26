"""Fronts by workload: what a run is planned with, how watts are counted, and devices that have no front."""

from __future__ import annotations

import pytest

from coordinator.errors import NoDevicesError
from coordinator.settings import GrantSettings
from coordinator.state.fleet import Fleet
from coordinator.state.preview import predict_nodes
from coordinator.state.records import RoundRecord
from coordinator.state.workload_fronts import UNNAMED
from tests.fakes.fleets import front
from tests.fakes.small_fleet import NANO_FRONT, NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN, small_fleet
from wattfleet.core.budgets import InForce
from wattfleet.core.choosing import Front
from wattfleet.core.errors import ImplausibleError, InvalidInputError
from wattfleet.core.modes import Workload, WorkloadFacts
from wattfleet.core.planning import Allowance
from wattfleet.core.planning.policies import AllDevices, Deadline
from wattfleet_proto.device_state import DeviceState, GrantPhase

# --- Workloads --------------------------------------------------------------------------------------------------------
# Fronts by workload: which front a run is planned with, how watts are counted, and what is predicted.


BERT_ON_ORIN, BERT_ON_NANO = front((100, 40), (200, 25)), front((300, 12))


def report(fleet: Fleet, device_id: str, device_front: Front, workload: str, minibatches: int | None = 100) -> None:
    idle_w = {"orin": 5.0, "nano": 3.0}.get(device_id, 1.0)
    of = Workload(workload, WorkloadFacts(batch=16))
    fleet.agents.report_front(device_id, device_front, idle_w, 5, "", of, minibatches)


def fleet_of_two_workloads() -> Fleet:
    """Both devices have a front for bert and one for runs that state no workload."""
    fleet = small_fleet()
    report(fleet, "orin", ORIN_FRONT, "unnamed")
    report(fleet, "nano", NANO_FRONT, "unnamed")
    report(fleet, "orin", BERT_ON_ORIN, "bert")
    report(fleet, "nano", BERT_ON_NANO, "bert")
    fleet.flower.start_run("b", "FedAvg", 3, workload=Workload("bert"))
    return fleet


def times(record: RoundRecord) -> dict[str, float]:
    return {each.device_id: each.epoch_s for each in record.plan.assignments}


# --- the front that a run is planned with ---------------------------------------------------------------------------


def test_each_run_is_planned_with_the_fronts_of_its_own_workload() -> None:
    fleet = fleet_of_two_workloads()
    assert times(fleet.copy().flower.plan("b", 1, NODES, 1.0)) == {"orin": 200, "nano": 300}
    assert times(fleet.copy().flower.plan(RUN, 1, NODES, 1.0)) == {"orin": 20, "nano": 35}


def test_a_plan_says_what_its_predictions_hold_for() -> None:
    [nano, orin] = fleet_of_two_workloads().flower.plan("b", 1, NODES, 1.0).plan.assignments
    assert (nano.batch, nano.profiled_modes, nano.is_length_assumed) == (16, 5, False)
    assert (orin.epoch_log_sd, orin.power_log_sd) == (0.0, 0.0)


def test_a_device_without_a_prediction_for_the_workload_is_left_out_with_the_reason() -> None:
    fleet = Fleet(Allowance.of_site(100.0), AllDevices())
    for device_id, node in (("orin", ORIN_NODE), ("nano", NANO_NODE)):
        fleet.agents.connect(device_id, "agx-orin", "simulated", 7)
        fleet.agents.report_state(device_id, DeviceState.READY, 0, "")
        fleet.flower.bind_node(node, device_id)
    fleet.flower.start_run("b", "FedAvg", 3, workload=Workload("bert"))
    report(fleet, "orin", ORIN_FRONT, "resnet18")
    report(fleet, "nano", BERT_ON_NANO, "bert")
    assert fleet.flower.unpredicted("b", NODES) == ["orin"]
    record = fleet.flower.plan("b", 1, NODES, 1.0)
    assert {each.device_id: each.reason for each in record.plan.decisions if not each.selected} == {
        "orin": "has no prediction for the workload 'bert' yet"
    }
    fleet.flower.start_run("c", "FedAvg", 3, workload=Workload("gpt"))
    with pytest.raises(NoDevicesError, match="orin is ready, but has no prediction for the workload 'gpt' yet"):
        fleet.flower.plan("c", 1, NODES, 1.0)


def test_a_run_that_continues_without_a_workload_keeps_the_one_it_stated() -> None:
    fleet = fleet_of_two_workloads()
    assert fleet.flower.start_run("b", "FedAvg", 5).workload == Workload("bert")


# --- epochs of unknown length ---------------------------------------------------------------------------------------


def test_an_epoch_of_unknown_length_is_as_long_as_those_of_other_devices() -> None:
    fleet = fleet_of_two_workloads()
    for k, minibatches in enumerate((500, 700, 900)):
        fleet.agents.connect(f"other-{k}", "agx-orin", "simulated", 7)
        report(fleet, f"other-{k}", front((1, 2)), "bert", minibatches)
    report(fleet, "nano", BERT_ON_NANO, "bert", None)
    report(fleet, "orin", BERT_ON_ORIN, "bert", 100)  # the median of the four known lengths is 600
    record = fleet.flower.plan("b", 1, NODES, 1.0)
    assert times(record)["nano"] == 6 * 300
    [nano, orin] = record.plan.assignments
    assert (nano.is_length_assumed, orin.is_length_assumed) == (True, False)


def test_lengths_that_a_front_cannot_be_scaled_to_do_not_stop_the_plan() -> None:
    fleet = fleet_of_two_workloads()
    report(fleet, "orin", BERT_ON_ORIN, "bert", 2**32 - 1)
    report(fleet, "nano", BERT_ON_NANO, "bert", None)
    assert times(fleet.flower.plan("b", 1, NODES, 1.0))["nano"] == 300


def test_a_training_of_unknown_length_is_not_ended_soon() -> None:
    settings = GrantSettings(longest_unknown_s=5_000.0)
    known = small_fleet()
    fleet = Fleet(
        Allowance.of_site(100.0),
        Deadline(400.0),
        list(known.agents.devices.values()),
        known.flower.nodes,
        grants=settings,
    )
    for device_id in ("orin", "nano"):
        fleet.agents.connect(device_id, "agx-orin", "simulated", 18_096)
        fleet.agents.report_state(device_id, DeviceState.READY, 50, "")
    report(fleet, "orin", BERT_ON_ORIN, "bert")
    report(fleet, "nano", BERT_ON_NANO, "bert", None)
    fleet.flower.start_run("b", "FedAvg", 3, workload=Workload("bert"))
    fleet.flower.plan("b", 1, NODES, 1.0)
    longest_s = {device_id: grant.longest_s for device_id, grant in fleet.take_orders()}
    assert longest_s == {"orin": 2 * 400 + 600, "nano": 5_000}


def test_an_observation_contradicts_no_assumed_length_but_its_watts() -> None:
    fleet = fleet_of_two_workloads()
    report(fleet, "nano", BERT_ON_NANO, "bert", None)
    record = fleet.flower.plan("b", 1, NODES, 1.0)
    fleet.observe("nano", record.plan_id, 9_999.0, 12.0)
    assert fleet.agents.claims.trust_of("nano") == 1.0
    fleet.rounds.finish(record.plan_id, [], 1.0)
    fleet.flower.release("b", NODES)
    again = fleet.flower.plan("b", 2, NODES, 1.0)
    fleet.observe("nano", again.plan_id, 300.0, 19.0)
    assert fleet.agents.claims.trust_of("nano") == 0.875


# --- watts ----------------------------------------------------------------------------------------------------------


def test_a_device_that_profiles_counts_with_the_hungriest_of_its_workloads() -> None:
    fleet = fleet_of_two_workloads()
    fleet.agents.report_state("orin", DeviceState.PROFILING, 5, "")
    assert fleet.draw.elsewhere_w({"nano"}) == {"site": 50.0}
    report(fleet, "orin", front((1, 55)), "gpt")
    assert fleet.draw.elsewhere_w({"nano"}) == {"site": 55.0}


def test_a_lower_budget_moves_a_training_to_a_mode_of_its_own_workload() -> None:
    fleet = fleet_of_two_workloads()
    record = fleet.flower.plan("b", 1, [ORIN_NODE], 1.0)
    assert record.plan.assignments[0].power_limit_w == 40
    fleet.set_budget("site", InForce(30.0, "operator", False, ""))
    [orin] = fleet.rounds.get(record.plan_id).plan.assignments
    assert (orin.epoch_s, orin.power_limit_w) == (200, 25)


@pytest.mark.parametrize("budget_w", [30.0, 60.0])
def test_a_training_whose_workload_was_removed_still_keeps_to_the_watts(budget_w: float) -> None:
    fleet = Fleet(Allowance.of_site(100.0), AllDevices())
    fleet.agents.connect("orin", "agx-orin", "simulated", 7)
    report(fleet, "orin", BERT_ON_ORIN, "bert")
    fleet.agents.report_state("orin", DeviceState.READY, 0, "")
    fleet.flower.bind_node(ORIN_NODE, "orin")
    fleet.flower.start_run("b", "FedAvg", 3, workload=Workload("bert"))
    before = fleet.flower.plan("b", 1, [ORIN_NODE], 1.0).plan.assignments
    [(_, grant)] = fleet.take_orders()
    fleet.rounds.grants.confirm("orin", grant.grant_id, grant.plan_id, GrantPhase.TRAINING)
    assert fleet.agents.remove_workload("orin", "bert").fronts == ()
    fleet.set_budget("site", InForce(budget_w, "operator", False, ""))
    kept = fleet.rounds.get("b/1").plan.assignments
    assert kept == (before if budget_w == 60.0 else ())


# --- what is stored -------------------------------------------------------------------------------------------------


def test_of_too_many_workloads_the_one_reported_longest_ago_goes() -> None:
    fleet = Fleet(Allowance.of_site(100.0), AllDevices(), max_workloads=3)
    fleet.agents.connect("orin", "agx-orin", "simulated", 7)
    for name in ("a", "b", "c", "a", "d"):
        report(fleet, "orin", ORIN_FRONT, name)
    assert [each.name for each in fleet.agents.get("orin").fronts] == ["c", "a", "d"]


def test_an_implausible_front_leaves_a_device_out_of_its_workload_only() -> None:
    fleet = fleet_of_two_workloads()
    with pytest.raises(ImplausibleError) as refused:
        report(fleet, "nano", front((1, 9_000)), "bert")
    fleet.agents.refuse_front("nano", str(refused.value), "bert")
    assert set(fleet.agents.left_out("bert")) == set(fleet.agents.left_out()) == {"nano"}
    assert fleet.agents.left_out("resnet18") == {}
    report(fleet, "nano", BERT_ON_NANO, "bert")
    assert fleet.agents.left_out() == {}


def test_a_device_loses_trust_in_the_workload_that_it_mispredicts() -> None:
    fleet = fleet_of_two_workloads()
    for number in (1, 2, 3):
        record = fleet.flower.plan("b", number, NODES, 1.0)
        fleet.observe("nano", record.plan_id, 9_999.0, 12.0)
        fleet.rounds.finish(record.plan_id, [], 1.0)
        fleet.flower.release("b", NODES)
    assert fleet.agents.claims.trust_of("nano", "bert") == fleet.agents.claims.trust_of("nano") == 0.625
    assert fleet.agents.claims.trust_of("nano", "unnamed") is None
    assert set(fleet.copy().flower.plan(RUN, 1, NODES, 1.0).nodes) == {"orin", "nano"}, "a run of another workload"
    assert set(fleet.flower.plan("b", 4, NODES, 1.0).nodes) == {"orin"}


@pytest.mark.parametrize("minibatches", [0, -1])
def test_an_epoch_without_minibatches_is_refused(minibatches: int) -> None:
    fleet = small_fleet()
    with pytest.raises(InvalidInputError, match="orin: an epoch has 1 or more minibatches"):
        report(fleet, "orin", ORIN_FRONT, "bert", minibatches)


# --- predictions ----------------------------------------------------------------------------------------------------


def test_each_node_is_predicted_in_its_fastest_mode_with_what_hinders_it() -> None:
    fleet = fleet_of_two_workloads()
    fleet.agents.report_state("nano", DeviceState.PROFILING, 5, "")
    fleet.flower.bind_node(7, "absent")
    known = {each.node_id: each for each in predict_nodes(fleet, "b", [*NODES, 7, 8], 2.0)}
    orin, nano = known[ORIN_NODE], known[NANO_NODE]
    assert orin.assignment is not None and nano.assignment is not None
    assert (orin.assignment.epoch_s, orin.assignment.power_limit_w, orin.reason) == (100, 40, "")
    assert (nano.assignment.epoch_s, nano.reason) == (300, "it is profiling")
    assert (known[7].assignment, known[7].reason) == (None, "its agent never connected: is it running?")
    assert (known[8].device_id, known[8].reason) == ("", "no device is bound to the node yet")
    assert fleet.take_orders() == [] and not fleet.rounds.records, "nothing is reserved"


def test_a_prediction_agrees_with_the_plan_of_a_device_alone() -> None:
    fleet = fleet_of_two_workloads()
    for node in NODES:
        [predicted] = predict_nodes(fleet, "b", [node], 1.0)
        [planned] = fleet.copy().flower.plan("b", 1, [node], 1.0).plan.assignments
        assert predicted.assignment == planned


def test_a_node_whose_prediction_is_missing_or_excluded_says_so() -> None:
    fleet = fleet_of_two_workloads()
    fleet.operator.drain(["nano"])
    fleet.agents.connect("blank", "orin-nx", "simulated", 7)
    fleet.agents.report_state("blank", DeviceState.READY, 0, "")
    fleet.flower.bind_node(9, "blank")
    nano, blank = predict_nodes(fleet, "b", [NANO_NODE, 9], 1.0)
    assert nano.reason == "drained by the operator" and nano.assignment is not None
    assert blank.reason == "it is ready, but has no prediction for the workload 'bert' yet"
    assert blank.assignment is None


# --- Devices without fronts -------------------------------------------------------------------------------------------
# Devices that report why they have no front, for example because their duty takes the whole board.

WHY = "the duty takes the whole board: 95 % of 30 requests a second within 50 ms"


def reasons(fleet: Fleet, number: int = 1) -> dict[str, str]:
    decisions = fleet.flower.plan(RUN, number, NODES, 1.0).plan.decisions
    return {decision.device_id: decision.reason for decision in decisions if not decision.selected}


def test_the_reason_reaches_the_plan_and_ends_with_the_next_front() -> None:
    fleet = small_fleet()
    after = fleet.agents.report_no_front("nano", WHY, 4.5)
    assert (after.fronts, fleet.agents.claims.exclusion_reason(after)) == ((), WHY)
    assert reasons(fleet) == {"nano": WHY}
    assert fleet.flower.unpredicted(RUN, NODES) == [], "nobody waits for a front that does not come"
    fleet.flower.release(RUN, NODES)
    fleet.agents.report_front("nano", NANO_FRONT, 4.5, 20, "", minibatches_per_epoch=100)
    assert fleet.agents.left_out() == {}


def test_without_any_front_the_round_is_refused_with_the_reasons() -> None:
    fleet = small_fleet()
    for device_id in ("nano", "orin"):
        fleet.agents.report_no_front(device_id, WHY, 4.5)
    with pytest.raises(NoDevicesError, match=f"nano is ready, and left out: {WHY}"):
        fleet.flower.plan(RUN, 1, NODES, 1.0)


def test_a_reason_for_one_workload_leaves_the_others() -> None:
    fleet = small_fleet()
    fleet.agents.report_no_front("nano", WHY, 4.5, "speech")
    nano = fleet.agents.get("nano")
    assert [each.name for each in nano.fronts] == [UNNAMED.name]
    assert fleet.agents.left_out("digits") == {}
    assert fleet.agents.left_out("speech") == {"nano": WHY}


def test_a_round_in_flight_goes_on_as_it_was_planned() -> None:
    fleet = small_fleet()
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.agents.report_no_front("nano", WHY, 4.5)
    assert fleet.trim() == []


def test_a_long_reason_is_cut() -> None:
    fleet = small_fleet()
    fleet.agents.report_no_front("nano", "x" * 1_000_000, 4.5)
    assert len(fleet.agents.left_out()["nano"]) <= 2_000


@pytest.mark.parametrize("idle_w", [-1.0, float("nan"), float("inf"), 1e6])
def test_no_device_takes_watts_that_its_board_cannot_draw(idle_w: float) -> None:
    fleet = small_fleet()
    before = fleet.agents.get("nano")
    with pytest.raises(InvalidInputError, match="idle power"):
        fleet.agents.report_no_front("nano", WHY, idle_w)
    assert fleet.agents.get("nano") == before
    assert fleet.agents.report_no_front("nano", WHY, 6.5).idle_w == 6.5
