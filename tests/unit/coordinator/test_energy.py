"""The energy budget of a run at the coordinator: set aside with a plan, replaced by reports, kept by restarts."""

from __future__ import annotations

import math

import pytest

from coordinator.errors import NoDevicesError
from coordinator.repository.repository import FleetRepository
from coordinator.repository.writer import Writer
from coordinator.services.orders import Orders
from coordinator.services.planning import RoundPlanning
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Leases
from coordinator.state.records import RunRecord, TrainingEnergy
from tests.fakes.small_fleet import (
    NANO_NODE,
    NODES,
    ORIN_NODE,
    confirm_all,
    end_training,
    restarted,
    small_fleet,
    train,
)
from tests.fakes.stored_records import RecordingStore
from wattfleet.core.budgets import EnergyAccount, InForce
from wattfleet.core.errors import EnergySpentError, ImplausibleError, InvalidInputError
from wattfleet.core.planning import RoundPlan
from wattfleet_proto.device_state import DeviceState, GrantPhase

RUN = "with a budget"


def fleet_with(budget_j: float, rounds: int = 3) -> Fleet:
    """A small fleet, and a run with an energy budget."""
    fleet = small_fleet()
    fleet.flower.start_run(RUN, "FedAvg", rounds, energy_budget_j=budget_j)
    return fleet


def account_of(fleet: Fleet) -> EnergyAccount:
    account = fleet.flower.energy.of(RUN)
    assert account is not None
    return account


def set_aside_j(plan: RoundPlan) -> float:
    assert plan.set_aside_j is not None
    return plan.set_aside_j


def settled(fleet: Fleet, plan_id: str) -> list[TrainingEnergy]:
    return [each for each in fleet.settle_unbegun(plan_id) if isinstance(each, TrainingEnergy)]


def test_a_plan_sets_energy_aside_and_a_report_replaces_it() -> None:
    fleet = fleet_with(1e5)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert account_of(fleet).set_aside_j == pytest.approx(set_aside_j(record.plan))
    train(fleet, "orin")
    # Its idle power of 5 W does not count.
    [stored] = fleet.report_energy("orin", record.plan_id, 400.0, 20.0)
    orin = record.plan.assignment_of("orin")
    assert orin is not None
    assert stored == TrainingEnergy(record.plan_id, "orin", 300.0, orin.set_aside_j)
    assert account_of(fleet).spent_j == 300.0
    assert account_of(fleet).set_aside_j == pytest.approx(set_aside_j(record.plan) - orin.set_aside_j)


def test_a_repeated_report_counts_once() -> None:
    fleet = fleet_with(1e5)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    first = fleet.report_energy("orin", record.plan_id, 400.0, 20.0)
    assert fleet.report_energy("orin", record.plan_id, 999.0, 20.0) == first
    assert account_of(fleet).spent_j == 300.0


@pytest.mark.parametrize(("energy_j", "lasted_s"), [(-1.0, 9.0), (math.inf, 9.0), (math.nan, 9.0), (1e9, 9.0), (9, -1)])
def test_an_impossible_report_is_refused(energy_j: float, lasted_s: float) -> None:
    fleet = fleet_with(1e5)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    before = account_of(fleet)
    with pytest.raises(ImplausibleError):
        fleet.report_energy("orin", record.plan_id, energy_j, lasted_s)
    assert account_of(fleet) == before


@pytest.mark.parametrize("budget_j", [0.0, -3.0, math.inf, math.nan])
def test_a_run_with_an_impossible_budget_is_refused(budget_j: float) -> None:
    with pytest.raises(InvalidInputError, match="an energy budget must be finite and above 0 J"):
        fleet_with(budget_j)


def test_energy_that_is_gone_before_the_first_round_is_an_error() -> None:
    with pytest.raises(EnergySpentError, match="50 J of the energy budget are left, and the training .* needs"):
        fleet_with(50.0).flower.plan(RUN, 1, NODES, 1.0)


def test_a_plan_is_outdated_if_its_energy_was_set_aside_meanwhile() -> None:
    fleet = fleet_with(1e5, rounds=0)
    request = fleet.flower.request_round(RUN, 1, NODES, 1.0)
    record = request.planned()
    assert not fleet.is_outdated(RUN, record.plan.assignments)
    fleet.flower.start_run(RUN, "FedAvg", 0, energy_budget_j=100.0)
    assert fleet.is_outdated(RUN, record.plan.assignments)
    with pytest.raises(EnergySpentError):
        fleet.flower.accept_plan(request, record)


def test_two_runs_with_budgets_have_accounts_of_their_own() -> None:
    fleet = fleet_with(1e5)
    fleet.flower.start_run("other", "FedAvg", 3, energy_budget_j=2e5)
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    other = fleet.flower.energy.of("other")
    assert other == EnergyAccount(2e5)


def test_a_run_that_continues_keeps_what_it_has_spent() -> None:
    fleet = fleet_with(1e5)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.report_energy("orin", record.plan_id, 400.0, 20.0)
    fleet.flower.start_run(RUN, "FedAvg", 3, energy_budget_j=5e4)
    assert account_of(fleet).budget_j == 5e4
    assert account_of(fleet).spent_j == 300.0


def test_a_grant_ends_before_the_energy_that_was_set_aside() -> None:
    fleet = fleet_with(1e5)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    for device_id, grant in confirm_all(fleet).items():
        assigned = record.plan.assignment_of(device_id)
        assert assigned is not None and assigned.longest_s is not None
        assert grant.counts_energy
        assert assigned.training_s(assigned.epoch_s) < grant.longest_s < assigned.longest_s


def test_a_trim_gives_no_training_more_seconds() -> None:
    fleet = fleet_with(1e5)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    before = {device_id: grant.longest_s for device_id, grant in confirm_all(fleet).items()}
    fleet.set_budget("site", InForce(30.0, "query", False, "the meter"))
    after = fleet.rounds.get(record.plan_id).plan
    assert after != record.plan, "it was trimmed"
    assert set_aside_j(after) == set_aside_j(record.plan)
    for device_id, grant in confirm_all(fleet).items():
        assert grant.longest_s == before[device_id]


def test_a_training_that_never_began_returns_its_energy_at_the_end_of_the_round() -> None:
    fleet = fleet_with(1e5)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.rounds.finish(record.plan_id, [], 9.0)  # no grant was sent
    assert {each.device_id: each.energy_j for each in settled(fleet, record.plan_id)} == {
        "nano": 0.0,
        "orin": 0.0,
    }
    assert account_of(fleet).left_j == pytest.approx(1e5)
    assert fleet.settle_unbegun(record.plan_id) == []


def test_a_training_that_may_have_begun_keeps_its_energy() -> None:
    fleet = fleet_with(1e5)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    train(fleet, "orin")
    end_training(fleet, "orin")  # it crashed, and reports nothing
    fleet.rounds.finish(record.plan_id, [], 9.0)
    assert [each.device_id for each in settled(fleet, record.plan_id)] == []
    assert account_of(fleet).set_aside_j == pytest.approx(set_aside_j(record.plan))


def test_a_training_that_outlasted_its_grant_keeps_its_energy() -> None:
    fleet = fleet_with(1e5)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    train(fleet, "orin")
    grants, trained = fleet.rounds.grants, fleet.rounds.grants.of("orin")
    assert trained is not None
    grants.renew("orin", 0.0)
    assert "orin" in grants.check(1e4)
    # It returns and trains still, but its session breaks again before the stop is sent.
    grants.session_began("orin", 1e4)
    grants.confirm("orin", trained.grant.grant_id, record.plan_id, GrantPhase.TRAINING)
    assert "orin" in grants.check(2e4)
    fleet.rounds.finish(record.plan_id, [], 9.0)
    assert "orin" not in [each.device_id for each in settled(fleet, record.plan_id)]
    [stored] = fleet.report_energy("orin", record.plan_id, 400.0, 20.0)
    assert isinstance(stored, TrainingEnergy) and stored.energy_j == 300.0


def test_a_device_whose_agent_restarted_does_not_train_again_for_the_round() -> None:
    fleet = fleet_with(1e5)
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    train(fleet, "orin")
    fleet.rounds.grants.greeted("orin")
    fleet.rounds.grants.confirm("orin", 0, "", GrantPhase.OVER)  # it knows of no grant any more
    assert not fleet.rounds.grants.may_train("orin")
    assert "orin" not in dict(fleet.take_orders())


def test_a_restarted_coordinator_grants_no_more_seconds() -> None:
    fleet = fleet_with(1e5)
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    again = restarted(fleet)
    for device_id in ("orin", "nano"):
        before, after = fleet.rounds.grants.of(device_id), again.rounds.grants.of(device_id)
        assert before is not None and after is not None
        assert after.grant.longest_s == before.grant.longest_s
        assert after.grant.counts_energy


def test_a_survey_counts_until_its_report() -> None:
    fleet = fleet_with(1e6)
    # A device that knows no mode of the workload is surveyed.
    fleet.flower.start_run(RUN, "FedAvg", 3, energy_budget_j=1e6)
    for device_id in ("orin", "nano"):
        record = fleet.agents.get(device_id)
        front = record.fronts[0].front
        fleet.agents.report_front(device_id, front, record.idle_w or 0.0, 0, "", minibatches_per_epoch=None)
    request = fleet.flower.request_measuring(RUN, NODES, 1.0, 50, 20.0)
    plan = request.planned()
    assert plan.assignments and all(each.longest_s == 70.0 for each in plan.assignments)
    plan_id = fleet.flower.accept_measuring(RUN, plan)
    counted_j = sum(each.set_aside_j for each in plan.assignments)
    assert fleet.flower.run(RUN).surveys_j == account_of(fleet).spent_j == pytest.approx(counted_j)
    [changed] = fleet.report_energy(plan.assignments[0].device_id, plan_id, 0.0, 0.0)
    assert isinstance(changed, RunRecord)
    assert account_of(fleet).spent_j == pytest.approx(counted_j - plan.assignments[0].set_aside_j)
    assert fleet.report_energy(plan.assignments[0].device_id, plan_id, 0.0, 0.0) == []


def test_nothing_is_measured_beside_the_rounds_of_a_run_with_a_budget() -> None:
    fleet = fleet_with(1e6)
    assert fleet.flower.request_measuring(RUN, NODES, 1.0, 500, None).planned().assignments == []


def test_a_survey_takes_a_fifth_of_the_energy_at_most() -> None:
    fleet = fleet_with(2_000.0)
    for device_id in ("orin", "nano"):
        record = fleet.agents.get(device_id)
        fleet.agents.report_front(device_id, record.fronts[0].front, record.idle_w or 0.0, 0, "")
    plan = fleet.flower.request_measuring(RUN, NODES, 1.0, 50, 20.0).planned()
    assert sum(each.set_aside_j for each in plan.assignments) <= 400.0


def test_all_surveys_of_a_run_together_take_a_fifth_of_its_budget_at_most() -> None:
    fleet = fleet_with(1e5)
    for device_id in ("orin", "nano"):
        record = fleet.agents.get(device_id)
        fleet.agents.report_front(device_id, record.fronts[0].front, record.idle_w or 0.0, 0, "")
    surveys = 0
    for _ in range(30):
        plan = fleet.flower.request_measuring(RUN, NODES, 1.0, 50, 20.0).planned()
        if not plan.assignments:
            break
        fleet.flower.accept_measuring(RUN, plan)
        surveys += 1
        for each in plan.assignments:  # their apps fail, and report nothing
            train(fleet, each.device_id)
            end_training(fleet, each.device_id)
    assert surveys > 1
    assert 0.1e5 < account_of(fleet).spent_j <= 0.2e5


@pytest.mark.parametrize(("before_j", "after_j"), [(1e5, None), (None, 1e5)])
def test_a_run_keeps_having_an_energy_budget_or_none(before_j: float | None, after_j: float | None) -> None:
    fleet = small_fleet()
    fleet.flower.start_run(RUN, "FedAvg", 3, energy_budget_j=before_j)
    before = fleet.flower.energy.of(RUN)
    with pytest.raises(InvalidInputError, match="keep energy_budget as it was, or start a new run"):
        fleet.flower.start_run(RUN, "FedAvg", 3, energy_budget_j=after_j)
    assert fleet.flower.energy.of(RUN) == before


@pytest.mark.parametrize("is_restarting", [False, True])
async def test_a_run_waits_a_while_for_reports_and_devices_before_it_ends(is_restarting: bool) -> None:
    now_s = 1_000.0
    fleet, writer = fleet_with(1_200.0, rounds=9), Writer(RecordingStore())
    planning = RoundPlanning(FleetRepository(fleet, writer), Leases(now_s), Orders(fleet), lambda: now_s)
    if is_restarting:
        fleet.agents.report_state("nano", DeviceState.PROFILING, 50, "")
        fleet.flower.start_run(RUN, "FedAvg", 9, energy_budget_j=50.0)
        nodes, number, why = NODES, 1, "nano may get ready, and need less"
    else:
        record = await planning.plan(RUN, 1, [ORIN_NODE], 1.0)
        train(fleet, "orin")
        fleet.flower.start_run(RUN, "FedAvg", 9, energy_budget_j=set_aside_j(record.plan) + 10.0)
        nodes, number, why = [NANO_NODE], 2, "orin may still train"
    for waited_s in (0.0, 50.0):
        now_s = 1_000.0 + waited_s
        with pytest.raises(NoDevicesError, match=f"waiting for 60 s at most: {why}"):
            await planning.plan(RUN, number, nodes, 1.0)
    now_s = 1_061.0
    with pytest.raises(EnergySpentError):
        await planning.plan(RUN, number, nodes, 1.0)
    await writer.close()
