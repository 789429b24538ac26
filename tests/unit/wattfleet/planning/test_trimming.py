"""Rounds in flight when the watts fall, by hand and against what a trimmed plan must never do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.fakes.fronts import front, fronts
from wattfleet.budgets import Supplies, Supply
from wattfleet.errors import InfeasibleBudgetError
from wattfleet.planning import Allowance, InFlight, Offer, RoundPlan, TrimmedPlan, plan_round, trim_rounds
from wattfleet.planning.policies import Everyone

ORIN = Offer("orin", front((10, 50), (20, 30), (40, 20)), 5.0, "rack")
NANO = Offer("nano", front((15, 25), (35, 15), (60, 10)), 3.0, "roof")
SUPPLIES = Supplies((Supply("site"), Supply("rack", "site"), Supply("roof", "site")))


def allowed(site_w: float, rack_w: float = 500.0, roof_w: float = 500.0) -> Allowance:
    return Allowance(SUPPLIES, {"site": site_w, "rack": rack_w, "roof": roof_w})


def planned(site_w: float) -> RoundPlan:
    return plan_round([ORIN, NANO], Everyone(), allowed(site_w), 2.0, 1)


def trimmed_alone(plan: RoundPlan, offers: Sequence[Offer], allowance: Allowance, epochs: float) -> TrimmedPlan | None:
    [trim] = trim_rounds([InFlight(plan, epochs, offers)], allowance)
    return trim


def modes_of(plan: RoundPlan) -> dict[str, tuple[float, float]]:
    return {assignment.device_id: (assignment.epoch_s, assignment.power_w) for assignment in plan.assignments}


def test_a_plan_that_keeps_the_watts_stays_as_it_is() -> None:
    plan = planned(75.0)
    assert modes_of(plan) == {"orin": (10, 50), "nano": (15, 25)}
    assert trimmed_alone(plan, [ORIN, NANO], allowed(plan.planned_w), 2.0) is None


def test_less_watts_put_devices_into_the_thriftier_modes_that_are_done_soonest() -> None:
    plan = planned(75.0)
    assert plan.duration_s == 30.0
    trim = trimmed_alone(plan, [ORIN, NANO], allowed(47.0), 2.0)
    assert trim is not None
    assert modes_of(trim.plan) == {"orin": (20, 30), "nano": (35, 15)}
    assert (trim.plan.duration_s, trim.plan.planned_w, trim.plan.site_budget_w) == (70.0, 45.0, 47.0)
    assert (set(trim.changed), trim.ended) == ({"orin", "nano"}, ())
    assert all("in another mode since the watts fell" in decision.reason for decision in trim.plan.decisions)


def test_a_trimmed_plan_keeps_what_was_planned_first_and_says_what_became_of_it() -> None:
    plan = planned(75.0)
    assert (plan.at_first, plan.in_other_mode, plan.stopped) == (plan, (), ())
    once = trimmed_alone(plan, [ORIN, NANO], allowed(47.0), 2.0)
    assert once is not None
    assert (once.plan.in_other_mode, once.plan.stopped) == (("nano", "orin"), ())
    twice = trimmed_alone(once.plan, [ORIN, NANO], allowed(20.0), 2.0)
    assert twice is not None
    # The Nano's mode is that of the first trim.
    assert (twice.plan.in_other_mode, twice.plan.stopped) == (("nano",), ("orin",))
    for trim in (once, twice):
        assert trim.plan.first_planned == trim.plan.at_first == replace(plan, decisions=())


def test_a_circuit_that_falls_concerns_only_what_hangs_behind_it() -> None:
    plan = planned(75.0)
    trim = trimmed_alone(plan, [ORIN, NANO], allowed(75.0, roof_w=12.0), 2.0)
    assert trim is not None
    assert modes_of(trim.plan)["nano"] == (60, 10)
    assert trim.ended == ()
    # Nobody waits for the Orin any more, so that it may as well take its time.
    assert modes_of(trim.plan)["orin"] == (40, 20)


def test_what_the_watts_cannot_carry_at_all_is_ended() -> None:
    trim = trimmed_alone(planned(75.0), [ORIN, NANO], allowed(20.0), 2.0)
    assert trim is not None
    assert (modes_of(trim.plan), trim.ended) == ({"nano": (35, 15)}, ("orin",))
    assert [d.reason.endswith("ended early, as the watts fell") for d in trim.plan.decisions] == [False, True]


def test_no_watts_at_all_end_everybody() -> None:
    trim = trimmed_alone(planned(75.0), [ORIN, NANO], allowed(0.0), 2.0)
    assert trim is not None
    assert (trim.plan.assignments, set(trim.ended)) == ((), {"orin", "nano"})


def test_decimal_watts_that_the_planner_allows_trim_nothing() -> None:
    offers = [
        Offer(name, front((10, w)), idle_w) for name, w, idle_w in (("a", 6, 1.1), ("b", 7.5, 1.3), ("c", 6, 1.7))
    ]
    plan = plan_round(offers, Everyone(), Allowance.of_site(19.5), 1.0, 1)
    assert len(plan.assignments) == 3 and plan.planned_w > 19.5, "in binary"
    assert trimmed_alone(plan, offers, Allowance.of_site(19.5), 1.0) is None


def apart(epochs: tuple[float, float] = (2.0, 2.0)) -> list[InFlight]:
    """A round of the Orin in the rack, and one of the Nano on the roof."""
    return [
        InFlight(plan_round([offer], Everyone(), allowed(75.0), passes, 1), passes, [offer])
        for offer, passes in zip((ORIN, NANO), epochs, strict=True)
    ]


def test_a_round_that_does_not_hang_behind_what_fell_stays() -> None:
    orin, nano = trim_rounds(apart(), allowed(75.0, roof_w=12.0))
    assert orin is None
    assert nano is not None and modes_of(nano.plan) == {"nano": (60, 10)}
    # With the Orin's 50 W.
    assert (nano.plan.planned_w, nano.plan.duration_s) == (60.0, 120.0)


def test_all_rounds_behind_what_fell_pay_for_it() -> None:
    orin, nano = trim_rounds(apart(), allowed(47.0))
    assert orin is not None and nano is not None
    assert (modes_of(orin.plan), modes_of(nano.plan)) == ({"orin": (20, 30)}, {"nano": (35, 15)})
    assert (orin.plan.duration_s, nano.plan.duration_s) == (40.0, 70.0)
    assert orin.plan.planned_w == nano.plan.planned_w == 45.0


def test_rounds_of_more_epochs_are_longer() -> None:
    # Eight of the Orin's epochs last as long as two of the Nano's do in its thriftiest mode and more.
    orin, nano = trim_rounds(apart((8.0, 2.0)), allowed(60.0))
    assert orin is None or modes_of(orin.plan) == {"orin": (10, 50)}
    assert nano is not None and modes_of(nano.plan) == {"nano": (60, 10)}


def test_a_device_of_a_round_that_cannot_be_told_keeps_what_it_has() -> None:
    plan = planned(75.0)
    [trim] = trim_rounds([InFlight(plan, 2.0, [NANO])], replace(allowed(75.0, roof_w=12.0), elsewhere_w={"rack": 50.0}))
    assert trim is not None
    assert modes_of(trim.plan) == {"orin": (10, 50), "nano": (60, 10)}
    assert (trim.changed, trim.ended, trim.plan.planned_w) == (("nano",), (), 60.0)


@given(
    st.lists(st.tuples(fronts(power_log_sd=0.05), st.floats(0, 4)), min_size=1, max_size=5),
    st.floats(5, 100),
    st.floats(0, 100),
)
def test_a_trimmed_plan_keeps_the_watts_it_can_and_loses_nobody(
    devices: list[tuple[object, float]], before_w: float, after_w: float
) -> None:
    offers = [Offer(f"device-{k}", training, idle_w) for k, (training, idle_w) in enumerate(devices)]  # type: ignore[arg-type]
    try:
        plan = plan_round(offers, Everyone(), Allowance.of_site(before_w), 1.0, 1)
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
