"""Rounds in flight when the budget falls or epochs become longer, computed by hand, with limits for every plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.fakes.fleets import columns_of, front, fronts
from wattfleet.core.budgets import Supplies, Supply
from wattfleet.core.choosing import Front
from wattfleet.core.errors import InfeasibleBudgetError
from wattfleet.core.planning import (
    Allowance,
    InFlight,
    InTraining,
    Offer,
    RoundPlan,
    TrimmedPlan,
    plan_round,
    review_epochs,
    trim_rounds,
)
from wattfleet.core.planning.policies import AllDevices

# --- Trimming ---------------------------------------------------------------------------------------------------------
# Rounds in flight when the budget falls, computed by hand, and the limits that every trimmed plan must keep.


ORIN = Offer("orin", front((10, 50), (20, 30), (40, 20)), 5.0, "rack")
NANO = Offer("nano", front((15, 25), (35, 15), (60, 10)), 3.0, "roof")
SUPPLIES = Supplies((Supply("site"), Supply("rack", "site"), Supply("roof", "site")))


def allowed(site_w: float, rack_w: float = 500.0, roof_w: float = 500.0) -> Allowance:
    return Allowance(SUPPLIES, {"site": site_w, "rack": rack_w, "roof": roof_w})


def planned(site_w: float) -> RoundPlan:
    return plan_round([ORIN, NANO], AllDevices(), allowed(site_w), 2.0, 1)


def trimmed_alone(plan: RoundPlan, offers: Sequence[Offer], allowance: Allowance, epochs: float) -> TrimmedPlan | None:
    [trim] = trim_rounds([InFlight(plan, offers)], allowance)
    return trim


def modes_of(plan: RoundPlan) -> dict[str, tuple[float, float]]:
    return {assignment.device_id: (assignment.epoch_s, assignment.power_w) for assignment in plan.assignments}


def test_a_plan_within_the_budgets_stays_unchanged() -> None:
    plan = planned(75.0)
    assert modes_of(plan) == {"orin": (10, 50), "nano": (15, 25)}
    assert trimmed_alone(plan, [ORIN, NANO], allowed(plan.planned_w), 2.0) is None


def test_fewer_watts_move_devices_to_modes_with_the_least_makespan() -> None:
    plan = planned(75.0)
    assert plan.duration_s == 30.0
    trim = trimmed_alone(plan, [ORIN, NANO], allowed(47.0), 2.0)
    assert trim is not None
    assert modes_of(trim.plan) == {"orin": (20, 30), "nano": (35, 15)}
    assert (trim.plan.duration_s, trim.plan.planned_w, trim.plan.site_budget_w) == (70.0, 45.0, 47.0)
    assert (set(trim.changed), trim.ended) == ({"orin", "nano"}, ())
    assert all("moved to another mode because the budget fell" in decision.reason for decision in trim.plan.decisions)


def test_a_trimmed_plan_keeps_the_original_and_the_changes() -> None:
    plan = planned(75.0)
    assert (plan.original, plan.in_other_mode, plan.stopped) == (plan, (), ())
    once = trimmed_alone(plan, [ORIN, NANO], allowed(47.0), 2.0)
    assert once is not None
    assert (once.plan.in_other_mode, once.plan.stopped) == (("nano", "orin"), ())
    twice = trimmed_alone(once.plan, [ORIN, NANO], allowed(20.0), 2.0)
    assert twice is not None
    # The Nano stays in the mode of the first trim.
    assert (twice.plan.in_other_mode, twice.plan.stopped) == (("nano",), ("orin",))
    for trim in (once, twice):
        assert trim.plan.first_planned == trim.plan.original == replace(plan, decisions=())


def test_a_lower_circuit_budget_affects_only_its_own_devices() -> None:
    plan = planned(75.0)
    trim = trimmed_alone(plan, [ORIN, NANO], allowed(75.0, roof_w=12.0), 2.0)
    assert trim is not None
    assert modes_of(trim.plan)["nano"] == (60, 10)
    assert trim.ended == ()
    # The round does not wait for the Orin, so it can use a slower mode.
    assert modes_of(trim.plan)["orin"] == (40, 20)


def test_devices_that_no_longer_fit_are_stopped() -> None:
    trim = trimmed_alone(planned(75.0), [ORIN, NANO], allowed(20.0), 2.0)
    assert trim is not None
    assert (modes_of(trim.plan), trim.ended) == ({"nano": (35, 15)}, ("orin",))
    assert [d.reason.endswith("stopped early because the budget fell") for d in trim.plan.decisions] == [False, True]


def test_a_budget_of_zero_stops_all_devices() -> None:
    trim = trimmed_alone(planned(75.0), [ORIN, NANO], allowed(0.0), 2.0)
    assert trim is not None
    assert (trim.plan.assignments, set(trim.ended)) == ((), {"orin", "nano"})


def test_decimal_watts_within_the_tolerance_trim_nothing() -> None:
    offers = [
        Offer(name, front((10, w)), idle_w) for name, w, idle_w in (("a", 6, 1.1), ("b", 7.5, 1.3), ("c", 6, 1.7))
    ]
    plan = plan_round(offers, AllDevices(), Allowance.of_site(19.5), 1.0, 1)
    assert len(plan.assignments) == 3 and plan.planned_w > 19.5, "in binary"
    assert trimmed_alone(plan, offers, Allowance.of_site(19.5), 1.0) is None


def apart(epochs: tuple[float, float] = (2.0, 2.0)) -> list[InFlight]:
    """One round of the Orin in the rack, and one of the Nano on the roof."""
    return [
        InFlight(plan_round([offer], AllDevices(), allowed(75.0), passes, 1), [offer])
        for offer, passes in zip((ORIN, NANO), epochs, strict=True)
    ]


def test_a_round_on_other_supplies_stays_unchanged() -> None:
    orin, nano = trim_rounds(apart(), allowed(75.0, roof_w=12.0))
    assert orin is None
    assert nano is not None and modes_of(nano.plan) == {"nano": (60, 10)}
    # This includes the Orin's 50 W.
    assert (nano.plan.planned_w, nano.plan.duration_s) == (60.0, 120.0)


def test_all_rounds_on_the_supply_are_trimmed() -> None:
    orin, nano = trim_rounds(apart(), allowed(47.0))
    assert orin is not None and nano is not None
    assert (modes_of(orin.plan), modes_of(nano.plan)) == ({"orin": (20, 30)}, {"nano": (35, 15)})
    assert (orin.plan.duration_s, nano.plan.duration_s) == (40.0, 70.0)
    assert orin.plan.planned_w == nano.plan.planned_w == 45.0


def test_rounds_of_more_epochs_are_longer() -> None:
    # In its second mode, the Orin would need 160 s for eight epochs. Two of the Nano take 120 s in its slowest mode.
    orin, nano = trim_rounds(apart((8.0, 2.0)), allowed(60.0))
    assert orin is None or modes_of(orin.plan) == {"orin": (10, 50)}
    assert nano is not None and modes_of(nano.plan) == {"nano": (60, 10)}


def test_a_device_that_cannot_be_reassigned_keeps_its_assignment() -> None:
    plan = planned(75.0)
    [trim] = trim_rounds([InFlight(plan, [NANO])], replace(allowed(75.0, roof_w=12.0), elsewhere_w={"rack": 50.0}))
    assert trim is not None
    assert modes_of(trim.plan) == {"orin": (10, 50), "nano": (60, 10)}
    assert (trim.changed, trim.ended, trim.plan.planned_w) == (("nano",), (), 60.0)


@given(
    st.lists(st.tuples(fronts(power_log_sd=0.05), st.floats(0, 4)), min_size=1, max_size=5),
    st.floats(5, 100),
    st.floats(0, 100),
)
def test_trimmed_plans_keep_feasible_budgets_and_account_for_all_devices(
    devices: list[tuple[object, float]], before_w: float, after_w: float
) -> None:
    offers = [Offer(f"device-{k}", training, idle_w) for k, (training, idle_w) in enumerate(devices)]  # type: ignore[arg-type]
    try:
        plan = plan_round(offers, AllDevices(), Allowance.of_site(before_w), 1.0, 1)
    except InfeasibleBudgetError:
        assume(False)
    taken = {assignment.device_id for assignment in plan.assignments}
    flying = [offer for offer in offers if offer.device_id in taken]
    idle_w = sum(offer.idle_w for offer in offers)
    elsewhere_w = idle_w - sum(offer.idle_w for offer in flying)
    trim = trimmed_alone(plan, flying, Allowance.of_site(after_w, elsewhere_w), 1.0)
    if trim is None:
        assert plan.planned_w <= after_w * (1 + 1e-9)
        return
    kept = {assignment.device_id for assignment in trim.plan.assignments}
    assert kept | set(trim.ended) == taken and not kept & set(trim.ended)
    assert trim.plan.planned_w <= max(after_w, idle_w) * (1 + 1e-9)
    assert {decision.device_id for decision in trim.plan.decisions} == {offer.device_id for offer in offers}


def test_a_device_whose_idle_power_has_risen_above_its_limit_draws_that_power() -> None:
    plan = planned(75.0)
    before_w = plan.planned_w - 25
    hot = replace(NANO, front=front((15, 45), (35, 40)), idle_w=33.0)
    # The other device moves to a slower mode, since 50 W and the idle 33 W are too many.
    trim = trimmed_alone(plan, [ORIN, hot], allowed(before_w + 30), 2.0)
    assert trim is not None and trim.plan.planned_w <= before_w + 30


# --- Longer epochs ----------------------------------------------------------------------------------------------------
# Rounds in flight whose devices now need longer for an epoch because of their duties, computed by hand.

LONE_ORIN = Offer("orin", front((10, 50), (20, 30), (40, 20)), 5.0)
LONE_NANO = Offer("nano", front((35, 15), (60, 10)), 3.0)
SITE = Allowance.of_site(100.0)
HELD_W = 30.0


def planned_two_epochs(deadline_s: float | None = None) -> RoundPlan:
    """Two epochs in 70 s: the Nano in its fastest mode, and the Orin in its second one at 30 W."""
    return replace(plan_round([LONE_ORIN, LONE_NANO], AllDevices(), SITE, 2.0, 1), deadline_s=deadline_s)


def beside_duty(*points: tuple[int, float, float]) -> Front:
    """A front of points, each given as the number of its mode, seconds and watts."""
    modes = np.array([[4, 1_500_000 - number, 600_000_000, 2_133_000_000] for number, _, _ in points], dtype=np.float64)
    return Front(**columns_of(front(*((seconds, watts) for _, seconds, watts in points))) | {"modes": modes})


def reviewed(plan: RoundPlan, now: Front, elapsed_s: float | None = 0.0) -> TrimmedPlan | None:
    offer = replace(LONE_ORIN, front=now, limit_w=HELD_W)
    return review_epochs(plan, [InTraining(offer, elapsed_s)], replace(SITE, elsewhere_w={"site": 15.0}))


def reason_of(trim: TrimmedPlan, device_id: str) -> str:
    return next(each.reason for each in trim.plan.decisions if each.device_id == device_id)


def test_epochs_that_still_fit_into_the_round_change_nothing() -> None:
    plan = planned_two_epochs()
    assert (plan.duration_s, plan.assignments[1].power_limit_w) == (70.0, HELD_W)
    assert reviewed(plan, beside_duty((0, 20, 50), (1, 35, 30), (2, 80, 20))) is None
    # A change interrupts the app, which is not worth it for less than a twentieth of the round.
    assert reviewed(plan, beside_duty((0, 20, 50), (1, 36.7, 30))) is None
    assert reviewed(plan, beside_duty((0, 20, 50), (1, 36.8, 30))) is not None


def test_another_mode_within_the_watts_brings_the_device_back() -> None:
    trim = reviewed(planned_two_epochs(), beside_duty((0, 20, 50), (7, 30, 29), (8, 34, 28), (9, 36, 20)))
    assert trim is not None
    [nano, orin] = trim.plan.assignments
    # The mode with the least power that is fast enough. The device keeps its power limit.
    assert (orin.epoch_s, orin.power_w, orin.power_limit_w) == (34, 28, HELD_W)
    assert (trim.plan.duration_s, trim.changed, trim.ended) == (70.0, ("orin",), ())
    assert nano == planned_two_epochs().assignments[0]
    assert "moved to another mode because its epochs take longer beside its duty" in reason_of(trim, "orin")
    assert trim.plan.in_other_mode == ("orin",)


def test_without_such_a_mode_the_training_goes_on_and_the_plan_says_how_long() -> None:
    trim = reviewed(planned_two_epochs(), beside_duty((0, 30, 50), (1, 60, 30), (2, 90, 20)))
    assert trim is not None
    [orin] = [each for each in trim.plan.assignments if each.device_id == "orin"]
    assert (orin.mode, orin.epoch_s, orin.power_limit_w) == (planned_two_epochs().assignments[1].mode, 60, HELD_W)
    assert (trim.plan.duration_s, trim.changed) == (120.0, ("orin",))
    assert "ends later because its epochs take longer beside its duty" in reason_of(trim, "orin")
    assert reviewed(trim.plan, beside_duty((0, 30, 50), (1, 60, 30), (2, 90, 20))) is None


def test_the_fastest_mode_within_the_watts_is_taken_if_none_is_fast_enough() -> None:
    trim = reviewed(planned_two_epochs(), beside_duty((0, 30, 50), (7, 50, 29), (8, 60, 28)))
    assert trim is not None
    assert (trim.plan.assignments[1].epoch_s, trim.plan.duration_s) == (50, 100.0)


def test_a_device_without_a_mode_within_its_watts_is_left_to_its_agent() -> None:
    assert reviewed(planned_two_epochs(80.0), beside_duty((0, 30, 50))) is None


def test_a_device_that_misses_the_deadline_is_left_out_with_the_reason() -> None:
    plan = planned_two_epochs(80.0)
    slower = beside_duty((0, 30, 50), (1, 60, 30))
    trim = reviewed(plan, slower)
    assert trim is not None
    assert (trim.ended, trim.plan.stopped, [each.device_id for each in trim.plan.assignments]) == (
        ("orin",),
        ("orin",),
        ["nano"],
    )
    assert "its duty leaves too little time: 120 s of training, the deadline is 80 s" in reason_of(trim, "orin")
    assert trim.plan.duration_s == plan.duration_s
    assert trim.plan.planned_w == pytest.approx(15.0 + 5.0)  # the Nano is counted elsewhere, and the Orin idles


@pytest.mark.parametrize(
    ("elapsed_s", "is_left_out"),
    [
        (0.0, True),
        (35.0, False),  # an eighth of 120 s is left after seven eighths of 40 s
        (15.0, True),  # 15 s, and then five eighths of 120 s
        (50.0, False),  # it should have finished, so the remaining time is unknown
        (None, False),
    ],
)
def test_what_should_be_done_by_then_counts_for_the_deadline(elapsed_s: float | None, is_left_out: bool) -> None:
    trim = reviewed(planned_two_epochs(80.0), beside_duty((0, 30, 50), (1, 60, 30)), elapsed_s)
    assert trim is not None
    assert bool(trim.ended) == is_left_out
