"""Devices whose reports are not plausible, or whose observations contradict their predictions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceResult, RoundRecord, RunRecord
from tests.fakes.fronts import front
from tests.fakes.small_fleet import NANO_FRONT, NODES, ORIN_FRONT, RUN, make_ready, small_fleet
from tests.fakes.workload_fronts import for_all
from wattfleet.budgets import InForce
from wattfleet.errors import ImplausibleError, InvalidInputError, NoCandidatesError
from wattfleet.planning import Allowance
from wattfleet.planning.policies import AllDevices
from wattfleet_proto.device_state import DeviceState

LIE = front((0.5, 45), (1, 30))
"""The front that the Nano claims; it really takes 30 s."""


def lying_fleet() -> Fleet:
    fleet = small_fleet()
    fleet.agents.report_front("nano", LIE, 3.0, 50, "")
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
    fleet.agents.report_front("nano", front((29, 45), (35, 30)), 3.0, 50, "")
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
        fleet.agents.report_front("odd", NANO_FRONT, 61.0, 50, "")
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
        fleet.agents.report_front("odd", odd, idle_w, 50, "")
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
