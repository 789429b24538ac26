"""Round plans computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.fakes.fleets import (
    WATTS_QUANTILE,
    history_of,
    many,
    tree,
)
from tests.fakes.fronts import front
from tests.fakes.plans import (
    NANO,
    ORIN,
    THREE,
    XAVIER,
    modes_of,
    reason_of,
    site,
)
from wattfleet.choosing import predicted_front
from wattfleet.errors import InfeasibleBudgetError, NoCandidatesError
from wattfleet.planning import Allowance, Offer, Participation, Selection, plan_round
from wattfleet.planning.policies import AllDevices, Deadline, FastestK
from wattfleet.prediction import Prediction


def test_faster_devices_train_in_a_lower_power_mode() -> None:
    # All idle at 14 W. For 35 s the Orin needs 25 W more and the Nano 12 W; only the Xavier can finish within 25 s.
    plan = plan_round(THREE, FastestK(2), site(51.0), 1.0, 1)
    assert modes_of(plan) == {"nano": (35, 15), "orin": (20, 30)}
    assert (plan.duration_s, plan.planned_w, plan.deadline_s) == (35, 51, None)
    assert reason_of(plan, "xavier") == (
        "too much power: finishing within 35.0 s needs 34.0 W above idle, more than site has left"
    )


def test_fewer_watts_make_a_longer_round() -> None:
    # With one watt less, the Orin must use its 40 s mode. The Nano still needs its 35 s mode.
    assert modes_of(plan_round(THREE, FastestK(2), site(50.0), 1.0, 1)) == {"nano": (35, 15), "orin": (40, 20)}


def test_the_reason_for_an_unneeded_device_names_what_others_need() -> None:
    plan = plan_round(THREE, FastestK(2), site(500.0), 1.0, 1)
    assert modes_of(plan) == {"orin": (20, 30), "xavier": (25, 40)}
    assert reason_of(plan, "nano") == "too slow: 35.0 s in its fastest mode, the round lasts 25.0 s"
    plan = plan_round([ORIN, replace(ORIN, device_id="twin", idle_w=1.0)], FastestK(1), site(500.0), 1.0, 1)
    assert reason_of(plan, "twin") == (
        "too much power: finishing within 10.0 s needs 49.0 W above idle, the selected devices need at most 45.0 W"
    )


def test_a_budget_for_fewer_devices_is_stated_in_the_reasons() -> None:
    # All three idle at 14 W. Their lowest-power modes need 7, 15 and 19 W more.
    plan = plan_round(THREE, AllDevices(), site(54.0), 1.0, 1)
    assert set(modes_of(plan)) == {"nano", "orin"}
    assert plan.decisions[0].reason.endswith("(the budget allows 2 devices, not 3)")
    assert len(plan_round(THREE, AllDevices(), site(55.0), 1.0, 1).assignments) == 3


def test_a_circuit_bounds_its_own_devices_only() -> None:
    # The Orin and the Xavier share a circuit that idles at 11 W and can power one of them. The Nano is on another one.
    supplies = tree(house=None, shed="house", roof="house")
    offers = [replace(ORIN, supply="shed"), replace(XAVIER, supply="shed"), replace(NANO, supply="roof")]
    allowance = Allowance(supplies, {"house": 500.0, "shed": 36.0, "roof": 500.0})
    plan = plan_round(offers, AllDevices(), allowance, 1.0, 1)
    assert modes_of(plan) == {"nano": (35, 15), "orin": (20, 30)}
    assert [(use.supply, use.planned_w) for use in plan.supplies] == [("house", 51), ("shed", 36), ("roof", 15)]
    assert reason_of(plan, "xavier") == (
        "too much power: finishing within 35.0 s needs 34.0 W above idle, more than shed has left"
    )


def test_idle_power_above_training_power_stays_allocated() -> None:
    # The device may finish early and then idles while the other one still trains.
    odd = Offer("odd", front((10, 6)), 9.0)
    other = Offer("other", front((10, 20)), 1.0)
    plan = plan_round([odd, other], AllDevices(), site(29.0), 1.0, 1)
    assert (set(modes_of(plan)), plan.planned_w) == ({"odd", "other"}, 29)
    assert set(modes_of(plan_round([odd, other], AllDevices(), site(28.9), 1.0, 1))) == {"odd"}


def test_the_power_quantile_is_allocated_not_the_median() -> None:
    unsure = Offer("unsure", front((10, 50), power_log_sd=0.1), 5.0)
    needed_w = 50 * math.exp(0.1 * WATTS_QUANTILE)
    assert needed_w > 58
    with pytest.raises(InfeasibleBudgetError):
        plan_round([unsure], FastestK(1), site(58.0), 1.0, 1)
    [assignment] = plan_round([unsure], FastestK(1), site(59.0), 1.0, 1).assignments
    assert (assignment.power_w, assignment.power_limit_w) == (50, pytest.approx(needed_w))


def test_the_duration_is_the_time_quantile_not_the_median() -> None:
    unsure = Offer("unsure", front((10, 20), epoch_log_sd=0.5), 1.0)
    sure = Offer("sure", front((15, 20)), 1.0)
    plan = plan_round([unsure, sure], FastestK(1), site(500.0), 2.0, 1)
    assert (modes_of(plan), plan.duration_s) == ({"sure": (15, 20)}, 30)
    plan = plan_round([unsure], FastestK(1), site(500.0), 2.0, 1)
    assert plan.duration_s == pytest.approx(20 * math.exp(0.5 * 1.2815515655446004))


def test_a_certain_low_power_mode_replaces_a_faster_uncertain_one() -> None:
    either = Offer("either", front((10, 40), (12, 20), epoch_log_sd=[0.5, 0.0]), 1.0)
    assert modes_of(plan_round([either], FastestK(1), site(500.0), 1.0, 1)) == {"either": (12, 20)}


def test_short_trainings_get_a_high_cpu_clock_and_long_ones_a_low_one() -> None:
    # A first minibatch takes 17 s at the low clock and 3.5 s at the high one. Later ones are nearly as fast.
    modes = np.array([[4, 2_000_000, 6e8, 2e9], [4, 400_000, 6e8, 2e9]])
    prediction = Prediction(np.array([100.0, 110.0]), np.array([20_000.0, 12_000.0]), np.zeros(2), np.zeros(2))
    offer = Offer("board", predicted_front(modes, prediction, 100, first_gcycles=7.0), 2.0)
    rival = Offer("rival", front((30, 10)), 2.0)

    def clock(epochs: float) -> int:
        plan = plan_round([offer, rival], AllDevices(), site(500.0), epochs, 1)
        return {assignment.device_id: assignment.mode.cpu_khz for assignment in plan.assignments}["board"]

    assert [clock(epochs) for epochs in (0.5, 10.0)] == [2_000_000, 400_000]


def test_the_warm_up_counts_in_the_duration_and_in_the_reasons() -> None:
    quick, late = Offer("quick", front((10, 20), warmup_s=5), 1.0), Offer("late", front((30, 20), warmup_s=7), 1.0)
    plan = plan_round([quick, late], FastestK(1), site(500.0), 2.0, 1)
    assert plan.duration_s == 5 + 2 * 10
    [assignment] = plan.assignments
    assert (assignment.warmup_s, assignment.epoch_s) == (5, 10)
    assert reason_of(plan, "quick").endswith("done within 25.0 s at 19.0 W above idle")
    assert reason_of(plan, "late") == "too slow: 67.0 s in its fastest mode, the round lasts 25.0 s"
    with pytest.raises(NoCandidatesError, match="within 24 s, even in its fastest mode: allow at least 25 s"):
        plan_round([quick, late], Deadline(24.0), site(500.0), 2.0, 1)


def test_watts_that_add_up_to_the_budget_in_decimals_are_used() -> None:
    # 0.1 + 0.2 is a little more than 0.3 in binary.
    offers = [Offer("one", front((10, 0.1)), 0.0), Offer("two", front((10, 0.2)), 0.0)]
    for policy in (AllDevices(), Deadline(20.0), Deadline(20.0, utility="loss")):
        assert len(plan_round(offers, policy, site(0.3), 1.0, 1).assignments) == 2


def test_a_small_fleet_is_not_reported_as_a_low_budget() -> None:
    plan = plan_round([ORIN, NANO], FastestK(5), site(500.0), 1.0, 1)
    assert len(plan.assignments) == 2
    assert not any("the budget allows" in decision.reason for decision in plan.decisions)


def test_a_device_without_a_mode_within_its_own_limit_is_excluded() -> None:
    plan = plan_round([replace(NANO, limit_w=9.0), ORIN], AllDevices(), site(500.0), 1.0, 1)
    assert set(modes_of(plan)) == {"orin"}
    assert reason_of(plan, "nano") == "over its own limit of 9 W: its lowest-power mode needs 10.0 W"


def test_a_device_over_its_circuits_budget_is_excluded_and_not_counted() -> None:
    allowance = Allowance(tree(site=None, shed="site"), {"site": 500.0, "shed": 10.0})
    twins = [replace(ORIN, device_id="one"), replace(ORIN, device_id="two")]
    plan = plan_round([*twins, replace(XAVIER, supply="shed")], FastestK(), allowance, 1.0, 1)
    assert set(modes_of(plan)) == {"one"}
    assert reason_of(plan, "xavier") == (
        "over its supply's budget: its lowest-power mode needs 19.0 W above idle, shed has 4.0 W"
    )


def test_a_device_trains_within_its_own_limit() -> None:
    plan = plan_round([replace(ORIN, limit_w=30.0)], AllDevices(), site(500.0), 1.0, 1)
    assert modes_of(plan) == {"orin": (20, 30)}


def test_over_selection_adds_to_the_policys_number() -> None:
    offers = many(10)
    plan = plan_round(offers, FastestK(4), site(500.0), 1.0, 1, selection=Selection(over_selection=0.25))
    assert len(plan.assignments) == 5


@pytest.mark.parametrize("cannot", [{"limit_w": 1.0}, {"supply": "shed"}])
def test_the_only_trainable_device_does_not_back_off(cannot: dict[str, Any]) -> None:
    failing = history_of(*[{"orin": Participation(failed=True)}] * 3)
    allowance = Allowance(tree(site=None, shed="site"), {"site": 500.0, "shed": 3.0})
    plan = plan_round([ORIN, replace(NANO, **cannot)], AllDevices(), allowance, 1.0, 4, failing)
    assert set(modes_of(plan)) == {"orin"}
