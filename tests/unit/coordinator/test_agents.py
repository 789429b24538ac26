"""Devices in the fleet's state: sessions, states, fronts, implausible claims, and pairing with SuperNodes."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import NoDevicesError, UnknownRecordError
from coordinator.state.fleet import Fleet
from coordinator.state.preview import RoundPreview, predict_nodes
from coordinator.state.records import DeviceResult, NodeRecord, RoundRecord, RunRecord
from tests.fakes.fleets import front
from tests.fakes.small_fleet import NANO_FRONT, NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN, make_ready, small_fleet
from tests.fakes.stored_records import for_all, only_front
from wattfleet.core.budgets import InForce
from wattfleet.core.choosing import Front
from wattfleet.core.errors import ImplausibleError, InvalidInputError, NoCandidatesError
from wattfleet.core.planning import Allowance
from wattfleet.core.planning.policies import AllDevices
from wattfleet_proto.device_state import DeviceState

# --- Agents -----------------------------------------------------------------------------------------------------------
# Devices in the fleet's state: sessions, states, fronts and Flower nodes.


def test_a_device_that_connects_is_enrolled() -> None:
    fleet = Fleet(Allowance.of_site(100.0), AllDevices())
    record = fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)
    assert (record.device_id, record.board, record.provenance) == ("orin", "agx-orin", "simulated")
    assert (record.state, record.mode_count, only_front(record)) == (DeviceState.ENROLLED, 18_096, None)
    assert fleet.agents.get("orin") == record


def test_a_session_that_takes_the_place_of_another_begins_anew() -> None:
    fleet = small_fleet()
    assert fleet.agents.get("orin").state is DeviceState.READY
    assert fleet.agents.connect("orin", "agx-orin", "simulated", 18_096).state is DeviceState.ENROLLED


@pytest.mark.parametrize(("board", "provenance"), [("orin-nano", "simulated"), ("agx-orin", "hardware")])
def test_an_id_stays_with_the_board_it_was_enrolled_as(board: str, provenance: str) -> None:
    fleet = small_fleet()
    fleet.agents.disconnect("orin")
    with pytest.raises(InvalidInputError, match=f"enrolled as simulated agx-orin, not as {provenance} {board}"):
        fleet.agents.connect("orin", board, provenance, 18_096)
    fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)  # the refused connection left no session behind


@pytest.mark.parametrize(("device_id", "board", "modes"), [("", "agx-orin", 1), ("a", "", 1), ("a", "agx-orin", 0)])
def test_a_device_without_id_board_or_modes_is_refused(device_id: str, board: str, modes: int) -> None:
    fleet = Fleet(Allowance.of_site(100.0), AllDevices())
    with pytest.raises(InvalidInputError, match="must have an id, a kind of board and at least one power mode"):
        fleet.agents.connect(device_id, board, "simulated", modes)
    assert not fleet.agents.devices


def test_a_device_that_is_gone_is_offline_and_not_forgotten() -> None:
    fleet = small_fleet()
    record = fleet.agents.disconnect("orin")
    assert (record.state, record.detail) == (DeviceState.OFFLINE, "")
    assert (only_front(record), record.idle_w, record.profiled_modes) == (ORIN_FRONT, 5.0, 50)
    back = fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)
    assert (only_front(back), back.idle_w, back.state) == (ORIN_FRONT, 5.0, DeviceState.ENROLLED)


def test_a_device_says_what_it_is_doing() -> None:
    fleet = small_fleet()
    record = fleet.agents.report_state("orin", DeviceState.PROFILING, 7, "12c 2.20/1.30/3.20")
    assert (record.state, record.profiled_modes, record.detail) == (DeviceState.PROFILING, 7, "12c 2.20/1.30/3.20")
    assert only_front(record) is ORIN_FRONT


def test_a_front_comes_with_what_it_was_made_from() -> None:
    fleet = small_fleet()
    record = fleet.agents.report_front("orin", NANO_FRONT, 4.5, 20, "a" * 64, minibatches_per_epoch=100)
    [known] = record.fronts
    assert (known.front, known.profiled_modes, known.reference_digest) == (NANO_FRONT, 20, "a" * 64)
    assert (record.idle_w, record.state) == (4.5, DeviceState.READY)


@pytest.mark.parametrize(("device_front", "idle_w"), [(NANO_FRONT, 5_000.0), (front((10, 50_000), (20, 30_000)), 5.0)])
def test_watts_that_no_board_draws_stop_nobody(device_front: Front, idle_w: float) -> None:
    fleet = small_fleet()
    fleet.agents.connect("newcomer", "agx-orin", "simulated", 18_096)
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    implausible = "^newcomer reports .*,000 W as its .*, more than the .* W of any agx-orin.*agent doctor"
    with pytest.raises(InvalidInputError, match=implausible):
        fleet.agents.report_front("newcomer", device_front, idle_w, 50, "", minibatches_per_epoch=100)
    fleet.agents.report_state("newcomer", DeviceState.PROFILING, 50, "")
    assert fleet.trim() == [], "the trainings in flight go on"


@pytest.mark.parametrize("digest", ["d" * 63, "d" * 1_000_000, "g" * 64, "D" * 64, "d" * 64 + "\n"])
def test_a_digest_that_is_none_is_refused(digest: str) -> None:
    fleet = small_fleet()
    with pytest.raises(InvalidInputError, match="64 hexadecimal digits") as refused:
        fleet.agents.report_front("orin", NANO_FRONT, 5.0, 50, digest, minibatches_per_epoch=100)
    assert len(str(refused.value)) < 500
    assert fleet.agents.get("orin").fronts[0].reference_digest == "d" * 64


@pytest.mark.parametrize("idle_w", [-1.0, math.nan, math.inf])
def test_a_front_with_impossible_idle_watts_changes_nothing(idle_w: float) -> None:
    fleet = small_fleet()
    with pytest.raises(InvalidInputError, match="^orin: idle watts"):
        fleet.agents.report_front("orin", NANO_FRONT, idle_w, 50, "", minibatches_per_epoch=100)
    assert (only_front(fleet.agents.get("orin")), fleet.agents.get("orin").idle_w) == (ORIN_FRONT, 5.0)


def test_a_device_that_never_connected_has_nothing_to_report() -> None:
    fleet = small_fleet()
    for report in (
        lambda: fleet.agents.report_state("ghost", DeviceState.READY, 0, ""),
        lambda: fleet.agents.report_front("ghost", ORIN_FRONT, 5.0, 50, "", minibatches_per_epoch=100),
        lambda: fleet.agents.disconnect("ghost"),
    ):
        with pytest.raises(UnknownRecordError, match="unknown device 'ghost': it never connected"):
            report()
    assert set(fleet.agents.devices) == {"orin", "nano"}


def test_a_node_may_be_tied_before_its_agent_connects_and_is_left_out_until_then() -> None:
    fleet = small_fleet()
    fleet.flower.bind_node(99, "ghost")
    record = fleet.flower.plan(RUN, 1, [*NODES, 99], 1.0)
    assert {decision.device_id for decision in record.plan.decisions} == {"orin", "nano"}


def test_a_node_that_is_gone_is_no_trouble_for_a_newer_one_of_its_device() -> None:
    fleet = small_fleet()
    fleet.flower.bind_node(99, "orin")
    assert fleet.flower.plan(RUN, 1, [99], 1.0).nodes == {"orin": 99}


@pytest.mark.parametrize("site_budget_w", [-20.0, math.nan, math.inf])
def test_a_site_without_watts_is_refused(site_budget_w: float) -> None:
    with pytest.raises(InvalidInputError, match="needs a budget of 0 or more finite watts"):
        Fleet(Allowance.of_site(site_budget_w), AllDevices())


# --- Claims -----------------------------------------------------------------------------------------------------------
# Devices whose reports are not plausible, or whose observations contradict their predictions.

LIE = front((0.5, 45), (1, 30))
"""The front that the Nano claims; it really takes 30 s."""


def lying_fleet() -> Fleet:
    fleet = small_fleet()
    fleet.agents.report_front("nano", LIE, 3.0, 50, "", minibatches_per_epoch=100)
    return fleet


def train(fleet: Fleet, number: int, nano_s: float = 30.0) -> RoundRecord:
    """Run one round in which every device reports an observation."""
    record = fleet.flower.plan(RUN, number, NODES, 1.0)
    for device_id in record.nodes:
        fleet.observe(device_id, record.plan_id, nano_s if device_id == "nano" else 20.0, 20.0)
    return fleet.rounds.finish(record.plan_id, [DeviceResult(each) for each in record.nodes], 40.0)


def test_a_device_that_contradicts_its_claims_loses_trust_and_is_left_out() -> None:
    fleet = lying_fleet()
    trust = []
    for number in (1, 2, 3):
        assert "nano" in train(fleet, number).nodes
        trust.append(fleet.agents.claims.trust_of("nano"))
    assert trust == [0.875, 0.75, 0.625]
    record = train(fleet, 4)
    assert list(record.nodes) == ["orin"]
    [reason] = [each.reason for each in record.plan.decisions if each.device_id == "nano"]
    assert reason.startswith("left out: its predictions were contradicted in 3 of its last 3 observed rounds")
    assert fleet.agents.claims.trust_of("orin") == 1.0
    assert "and left out: its predictions" in fleet.flower.occupation(fleet.agents.get("nano"), RUN)


def test_a_front_that_agrees_with_the_observations_ends_the_exclusion() -> None:
    fleet = lying_fleet()
    for number in (1, 2, 3):
        train(fleet, number)
    fleet.agents.report_front("nano", front((29, 45), (35, 30)), 3.0, 50, "", minibatches_per_epoch=100)
    assert "nano" in train(fleet, 4).nodes


def test_seconds_of_trainings_beside_a_duty_contradict_nothing() -> None:
    fleet = lying_fleet()
    for number in range(1, 5):
        record = fleet.flower.plan(RUN, number, NODES, 1.0)
        fleet.observe("nano", record.plan_id, 30.0, 20.0, beside_duty=True)
        assert "nano" in record.nodes
        fleet.rounds.finish(record.plan_id, [DeviceResult(each) for each in record.nodes], 40.0)
    assert fleet.agents.claims.trust_of("nano") == 1.0


def test_watts_beside_a_duty_still_count() -> None:
    fleet = small_fleet()
    for number in (1, 2, 3):
        record = fleet.flower.plan(RUN, number, NODES, 1.0)
        fleet.observe("nano", record.plan_id, 35.0, 25.0, beside_duty=True)  # within 15 W, as planned
        fleet.rounds.finish(record.plan_id, [DeviceResult(each) for each in record.nodes], 40.0)
    assert fleet.agents.claims.trust_of("nano") == 0.625
    reason = fleet.agents.claims.exclusion_reason(fleet.agents.get("nano"))
    assert reason is not None and "25.0 W, at most 15.0 W planned" in reason


def test_the_operator_can_end_the_exclusion() -> None:
    fleet = lying_fleet()
    for number in (1, 2, 3):
        train(fleet, number)
    fleet.undrain(["nano"])
    assert fleet.agents.claims.trust_of("nano") is None
    assert "nano" in train(fleet, 4).nodes


def test_trust_survives_a_restart_with_the_newest_rounds() -> None:
    before = lying_fleet()
    rounds = [train(before, number) for number in (1, 2, 3)]
    rounds = [before.rounds.get(each.plan_id) for each in rounds]
    runs = [RunRecord(RUN, "FedAvg", 3)]
    devices = list(before.agents.devices.values())
    after = Fleet(Allowance.of_site(100.0), AllDevices(), devices, before.flower.nodes, runs, rounds)
    assert after.agents.claims.trust_of("nano") == before.agents.claims.trust_of("nano") == 0.625
    assert set(after.agents.left_out()) == {"nano"}


def test_that_a_device_was_included_again_survives_a_restart() -> None:
    before = lying_fleet()
    for number in (1, 2, 3):
        train(before, number)
    overrides = before.undrain(["nano"])
    train(before, 4)
    rounds, runs = list(before.rounds.records.values()), [RunRecord(RUN, "FedAvg", 3)]
    devices = list(before.agents.devices.values())
    after = Fleet(
        Allowance.of_site(100.0), AllDevices(), devices, before.flower.nodes, runs, rounds, overrides=overrides
    )
    assert after.agents.claims.trust_of("nano") == before.agents.claims.trust_of("nano") == 0.875
    assert after.agents.left_out() == {}


def test_a_repeated_observation_counts_once() -> None:
    fleet = lying_fleet()
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    for _ in range(5):
        fleet.observe("nano", record.plan_id, 30.0, 20.0)
    assert fleet.agents.claims.trust_of("nano") == 0.875


def test_a_training_whose_mode_was_trimmed_is_not_compared() -> None:
    fleet = small_fleet()
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.set_budget("site", InForce(38.0, "operator", False, ""))
    assert fleet.rounds.get(record.plan_id).plan.in_other_mode == ("orin",)
    fleet.observe("orin", record.plan_id, 300.0, 20.0)
    assert fleet.agents.claims.trust_of("orin") is None


def test_a_stored_front_that_is_not_plausible_leaves_its_device_out() -> None:
    before = small_fleet()
    devices = [
        each
        if each.device_id == "orin"
        else type(each)("nano", "orin-nano", "simulated", 7, fronts=for_all(NANO_FRONT), idle_w=999)
        for each in before.agents.devices.values()
    ]
    after = Fleet(Allowance.of_site(100.0), AllDevices(), devices, before.flower.nodes)
    assert "999 W as its idle power, more than the 18 W of any orin-nano" in after.agents.left_out()["nano"]


def test_one_device_of_an_unknown_kind_cannot_claim_a_small_site() -> None:
    fleet = small_fleet(site_budget_w=60.0)
    fleet.agents.connect("odd", "toaster", "simulated", 7)
    with pytest.raises(ImplausibleError, match="odd reports 61 W as its idle power, more than the 20 W"):
        fleet.agents.report_front("odd", NANO_FRONT, 61.0, 50, "", minibatches_per_epoch=100)
    assert fleet.flower.plan(RUN, 1, NODES, 1.0).nodes


def test_the_last_device_that_is_left_out_is_named() -> None:
    fleet = small_fleet()
    for device_id in ("orin", "nano"):
        fleet.agents.refuse_front(device_id, "its front is refused")
    with pytest.raises(NoCandidatesError, match="nano: left out: its front is refused; orin: left out: its front"):
        fleet.flower.plan(RUN, 1, NODES, 1.0)


@given(
    st.sampled_from(["agx-orin", "host", "unknown"]), st.floats(), st.floats(), st.floats(), st.floats(), st.floats()
)
def test_any_front_is_taken_or_refused_and_others_are_planned(
    board: str, epoch_s: float, power_w: float, epoch_log_sd: float, power_log_sd: float, idle_w: float
) -> None:
    fleet = small_fleet(site_budget_w=2_000.0)
    fleet.agents.connect("odd", board, "simulated", 7)
    fleet.agents.report_state("odd", DeviceState.READY, 50, "")
    fleet.flower.bind_node(99, "odd")
    try:
        odd = front((epoch_s, power_w), epoch_log_sd=epoch_log_sd, power_log_sd=power_log_sd)
        fleet.agents.report_front("odd", odd, idle_w, 50, "", minibatches_per_epoch=100)
    except ImplausibleError as error:
        fleet.agents.refuse_front("odd", str(error))
    except InvalidInputError:
        pass
    record = fleet.flower.plan(RUN, 1, [*NODES, 99], 1.0)
    assert {"orin", "nano"} <= set(record.nodes)
    assert 0 < record.plan.duration_s < 1e10 and record.plan.planned_w <= 2_000.0


@given(st.floats(), st.floats())
def test_any_observation_is_taken_or_refused(epoch_s: float, power_w: float) -> None:
    fleet = small_fleet()
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    try:
        fleet.observe("orin", record.plan_id, epoch_s, power_w)
    except ImplausibleError as error:
        assert str(error).startswith("orin: observed")
        assert not fleet.rounds.get(record.plan_id).observations
    for observed in fleet.rounds.get(record.plan_id).observations.values():
        assert 1e-6 <= observed.epoch_s <= 1e7 and 0 < observed.power_w <= 150.0
    make_ready(fleet, "orin", ORIN_FRONT, 5.0, NODES[0])
    fleet.flower.release(RUN, NODES)
    assert fleet.flower.plan(RUN, 2, NODES, 1.0).nodes


# --- Pairing ----------------------------------------------------------------------------------------------------------
# A SuperNode that cannot train on the device it names is left out of plans, with the remedy; others are unaffected.

WRONG = "the socket /run/a.sock belongs to nano, but the SuperNode names orin: start it with another device-id"
NOW = datetime(2026, 5, 1, tzinfo=timezone.utc)


def reasons(record: RoundRecord) -> dict[str, str]:
    return {each.device_id: each.reason for each in record.plan.decisions if not each.selected}


def fleet_with_a_wrong_node() -> Fleet:
    fleet = small_fleet()
    assert fleet.flower.bind_node(ORIN_NODE, "orin", WRONG) == NodeRecord(ORIN_NODE, "orin", WRONG)
    return fleet


def test_a_wrong_node_is_left_out_with_the_remedy_and_comes_back_once_it_is_mended() -> None:
    fleet = fleet_with_a_wrong_node()
    first = fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert (first.nodes, reasons(first)) == ({"nano": NANO_NODE}, {"orin": WRONG})
    fleet.flower.release(RUN, NODES)
    fleet.rounds.finish(first.plan_id, [], 1.0)
    fleet.flower.bind_node(ORIN_NODE, "orin", "")
    assert "orin" in fleet.copy().flower.paired(NODES).nodes


def test_without_another_device_the_remedy_is_in_the_refusal() -> None:
    fleet = fleet_with_a_wrong_node()
    with pytest.raises(NoDevicesError, match="orin is ready, but its SuperNode cannot train there: the socket"):
        fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)


def test_a_node_that_names_a_wrong_device_keeps_the_right_one_from_nothing() -> None:
    fleet = small_fleet()
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.flower.bind_node(6, "orin", WRONG)
    assert "orin" not in fleet.flower.release(RUN, [6])
    assert fleet.rounds.grants.may_train("orin"), "its training goes on"
    assert fleet.flower.paired([ORIN_NODE, 6]).nodes == {"orin": ORIN_NODE}


def test_two_supernodes_on_one_device_cost_this_device_alone() -> None:
    fleet = small_fleet()
    fleet.flower.bind_node(99, "orin", "")
    planned = fleet.flower.plan(RUN, 1, [*NODES, 99], 1.0)
    assert planned.nodes == {"nano": NANO_NODE}
    assert "2 connected SuperNodes name it: give each SuperNode its own device-id" in reasons(planned)["orin"]


def test_two_connected_supernodes_on_one_device_are_known_outside_of_a_plan() -> None:
    fleet = small_fleet()
    fleet.flower.bind_node(99, "orin", "")
    pairings, nodes = fleet.flower.pairings, fleet.flower.nodes
    assert pairings.all_problems(nodes) == {99: ""}
    pairings.connected([ORIN_NODE, NANO_NODE], NOW)
    pairings.connected([99, NANO_NODE], NOW + timedelta(minutes=5))
    assert pairings.all_problems(nodes) == {99: ""}, "the one replaced the other"
    pairings.connected([99, ORIN_NODE, NANO_NODE], NOW + timedelta(minutes=6))
    assert {node for node, problem in pairings.all_problems(nodes).items() if problem} == {99, ORIN_NODE}


def test_predictions_and_previews_give_the_remedy() -> None:
    fleet = fleet_with_a_wrong_node()
    assert {each.device_id: each.reason for each in predict_nodes(fleet, RUN, NODES, 1.0)} == {
        "orin": WRONG,
        "nano": "",
    }
    for preview in (RoundPreview(fleet, RUN), RoundPreview(fleet, RUN, all_devices=True)):
        assert reasons(preview.plan().record) == {"orin": WRONG}


def test_a_forgotten_device_leaves_no_problem_behind() -> None:
    fleet = fleet_with_a_wrong_node()
    fleet.agents.disconnect("orin")
    fleet.forget(["orin"])
    assert not fleet.flower.pairings.problems
