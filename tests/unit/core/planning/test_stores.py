"""Batteries and energy budgets of supplies in a round's plan: who trains, who does not, why, and when again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from tests.fakes.fleets import front, reason_of, site, tree
from wattfleet.core.budgets import (
    NOT_MEASURED,
    Battery,
    DatedHarvest,
    Harvest,
    HourlyHarvest,
    MeasuredHarvest,
    NoHarvest,
)
from wattfleet.core.errors import EnergySpentError, NoCandidatesError
from wattfleet.core.planning import (
    Allowance,
    BatteryLevel,
    BatteryStore,
    EnergyLimit,
    EnergyStores,
    History,
    Offer,
    PeriodStore,
    RoundPlan,
    Selection,
    battery_stores,
    left_j,
    plan_round,
)
from wattfleet.core.planning.policies import AllDevices
from wattfleet.core.planning.stores import StoreRoom

WH = 3600.0
NOON = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)
SUN = HourlyHarvest(ZoneInfo("UTC"), (0.0,) * 8 + (10.0,) * 8 + (0.0,) * 8)
"""10 W from 8 to 16 o'clock."""


def battery(harvest: Harvest | None = None, parked_h: float = 0.0, reserve: float = 0.2) -> Battery:
    return Battery(100 * WH, reserve, harvest or NoHarvest(), 0.0, parked_h * 3600.0)


def store(kind: Battery, held_wh: float, now: datetime = NOON, idle_w: float = 2.0) -> BatteryStore:
    [found] = battery_stores([BatteryLevel("its battery", kind, held_wh * WH, idle_w)], now)
    return found


# --- What a battery leaves --------------------------------------------------------------------------------------------


def test_a_battery_leaves_what_it_holds_above_its_reserve() -> None:
    assert left_j(store(battery(), 50), 0.0) == pytest.approx(30 * WH)


def test_idle_power_during_the_round_is_left_too() -> None:
    assert left_j(store(battery(), 50), 3600.0) == pytest.approx((30 - 2) * WH)


def test_a_battery_keeps_what_its_idle_devices_draw_at_night() -> None:
    # From 16 to 8 o'clock, 2 W draw 32 Wh; its need at 16 o'clock is therefore 52 Wh.
    dusk = NOON.replace(hour=16)
    assert left_j(store(battery(SUN, parked_h=24), 60, dusk), 0.0) == pytest.approx(8 * WH)
    assert left_j(store(battery(SUN, parked_h=24), 50, dusk), 0.0) == 0.0


def test_a_battery_counts_on_the_afternoon_before_the_night() -> None:
    # Until 15:30, it gains 8 W. The half hour in which the sun sets counts as dark. 52 Wh are needed at 16 o'clock.
    assert left_j(store(battery(SUN, parked_h=24), 50), 0.0) == pytest.approx((50 - (52 + 1 - 28)) * WH)


def test_a_full_battery_leaves_less_until_dusk_than_at_noon() -> None:
    full = store(battery(SUN, parked_h=24), 100)
    assert left_j(full, 0.0) == pytest.approx(75 * WH)
    # Whatever it spends in the evening is missing in the night.
    assert left_j(full, 6 * 3600.0) == pytest.approx((99 - 52) * WH)


def test_what_is_left_keeps_the_reserve_whenever_it_is_spent() -> None:
    rng = np.random.default_rng(7)
    for _ in range(200):
        sun = HourlyHarvest(ZoneInfo("UTC"), tuple(rng.uniform(0, 12, 24) * (rng.random(24) < 0.5)))
        held_wh, idle_w, hours = rng.uniform(20, 100), rng.uniform(0.2, 3), int(rng.integers(1, 12))
        kind = battery(sun, parked_h=24)
        spare_j = left_j(store(kind, held_wh, idle_w=idle_w), hours * 3600.0)
        if not spare_j:
            continue
        when = int(rng.integers(0, 2 * hours + 1))  # the half hour in which all of it is spent
        level_j = held_wh * WH
        for step in range(48 + 2 * hours):
            level_j -= spare_j * (step == when)
            at = NOON + timedelta(minutes=30 * step)
            watts = min(sun.watts(at), sun.watts(at + timedelta(minutes=30)))
            assert level_j >= kind.reserve_j - 1e-6
            level_j = min(level_j + (watts - idle_w) * 1800, kind.capacity_j)


def test_a_battery_that_is_too_small_for_a_night_leaves_nothing_even_if_it_is_full() -> None:
    hungry = store(battery(SUN, parked_h=24), 100, idle_w=6.0)
    assert left_j(hungry, 0.0) == 0.0
    assert hungry.again(1.0, 0.0) is None


def test_the_sun_fills_a_battery_again() -> None:
    dusk = NOON.replace(hour=16)
    empty = store(battery(SUN, parked_h=24), 40, dusk)
    again = empty.again(5 * WH, 0.0)
    assert again is not None
    # The night leaves 8 Wh; from 8 o'clock, 8 W need 17/8 hours for the 25 Wh of reserve and training.
    assert again == NOON.replace(day=2, hour=10, minute=30)


def test_a_long_training_waits_for_a_day_that_is_long_enough() -> None:
    # The longer a training lasts, the more of the night its battery has to feed after it has begun.
    dusk, needed_j = NOON.replace(hour=16), 20 * WH
    low = store(battery(SUN), 40, dusk)
    for hours in (1, 6, 20):
        again = low.again(needed_j, hours * 3600.0)
        assert again is not None
        # Until then, nothing trains: what is left is judged by the same battery followed to that time.
        steps = int((again - dusk).total_seconds() / 1800)
        held_wh, at = 40.0, dusk
        for _ in range(steps):
            watts = min(SUN.watts(at), SUN.watts(at + timedelta(minutes=30)))
            held_wh, at = min(100.0, max(0.0, held_wh + (watts - 2.0) / 2)), at + timedelta(minutes=30)
        assert left_j(store(battery(SUN), held_wh, again), hours * 3600.0) >= needed_j - 1e-6
        if hours < 20:
            held_wh -= (min(SUN.watts(again - timedelta(minutes=30)), SUN.watts(again)) - 2.0) / 2
            earlier = store(battery(SUN), held_wh, again - timedelta(minutes=30))
            assert left_j(earlier, hours * 3600.0) < needed_j


def test_batteries_of_a_kind_are_followed_together() -> None:
    kind = battery(SUN, parked_h=24)
    levels = [BatteryLevel(f"battery {k}", kind, k * WH, 0.1 * k) for k in (30, 10, 60)]
    alone = [battery_stores([level], NOON)[0] for level in levels]
    for together, one in zip(battery_stores(levels, NOON), alone, strict=True):
        assert together.name == one.name
        assert together.spare_j == pytest.approx(one.spare_j)


# --- Plans ------------------------------------------------------------------------------------------------------------

QUICK = front((10.0, 20.0), (12.0, 6.0))
IDLE_W = 2.0


def board(name: str, supply: str = "site") -> Offer:
    return Offer(name, QUICK, IDLE_W, supply)


def planned(
    stores: EnergyStores, *offers: Offer, allowance: Allowance | None = None, budget_w: float = 1000.0
) -> RoundPlan:
    return plan_round(offers, AllDevices(), allowance or site(budget_w), 1.0, 1, stores=stores)


def with_left(**joules: float) -> EnergyStores:
    """Devices with batteries that leave so many joules."""
    return EnergyStores(devices={name: BatteryStore("its battery", NOON, np.full(97, j)) for name, j in joules.items()})


def aside_j(plan: RoundPlan) -> Mapping[str, float]:
    return {each.device_id: each.set_aside_j for each in plan.assignments}


def test_a_board_whose_battery_suffices_trains_as_without_one() -> None:
    plan = planned(with_left(a=1e6), board("a"), board("b"))
    free = plan_round([board("a"), board("b")], AllDevices(), site(1000.0), 1.0, 1)
    assert [each.mode for each in plan.assignments] == [each.mode for each in free.assignments]
    [a, b] = plan.assignments
    assert a.longest_s is not None
    assert b.longest_s is None, "nothing limits its energy"


def test_a_board_that_would_run_dry_is_left_out_with_the_reason_and_the_time() -> None:
    dusk = NOON.replace(hour=16)
    low = store(battery(SUN, parked_h=24), 52.01, dusk, IDLE_W)
    plan = planned(EnergyStores(devices={"a": low}), board("a"), board("b"))
    assert [each.device_id for each in plan.assignments] == ["b"]
    reason = reason_of(plan, "a")
    assert reason.startswith("too little energy: its training needs up to ")
    assert "its battery has" in reason
    assert "it may train again from about 2026-06-02 0" in reason


def test_a_slower_mode_is_taken_if_the_battery_suffices_for_no_faster_one() -> None:
    fast = aside_j(planned(with_left(a=1e6), board("a")))["a"]
    slow = replace(board("a"), front=front((12.0, 6.0)))
    needed_j = aside_j(planned(with_left(a=1e6), slow))["a"]
    assert needed_j < fast
    plan = planned(with_left(a=needed_j * 1.01), board("a"))
    assert plan.assignments[0].epoch_s == 12.0


def test_a_battery_of_a_supply_limits_its_devices_together() -> None:
    supplies = tree(site=None, shed="site")
    allowance = Allowance(supplies, {"site": 1000.0, "shed": 1000.0})
    boards = [board("a", "shed"), board("b", "shed"), board("c")]
    one_j = aside_j(planned(with_left(a=1e6), board("a")))["a"]
    shed = PeriodStore("the energy budget of shed per day", 1.5 * one_j, 1e6, NOON + timedelta(hours=12))
    plan = planned(EnergyStores({"shed": (shed,)}), *boards, allowance=allowance)
    assert sum(aside_j(plan)[each] for each in ("a", "b") if each in aside_j(plan)) <= 1.5 * one_j
    assert "c" in aside_j(plan)


def test_a_run_waits_for_the_next_period() -> None:
    spent = PeriodStore("the energy budget of site per day", 1.0, 1e6, NOON + timedelta(hours=12))
    with pytest.raises(
        NoCandidatesError, match="the energy budget of site per day has 1 J to spare; it may train again"
    ):
        planned(EnergyStores({"site": (spent,)}), board("a"))


def test_a_run_whose_batteries_are_never_charged_ends() -> None:
    with pytest.raises(EnergySpentError, match="no time is foreseen when it has enough"):
        planned(with_left(a=1.0), board("a"))


def test_a_run_waits_at_night_if_its_harvest_is_measured() -> None:
    dark = MeasuredHarvest(0.0, NOON, NOON + timedelta(hours=1))
    [low] = battery_stores([BatteryLevel("its battery", battery(parked_h=24), 20 * WH, IDLE_W, dark)], NOON)
    before = store(battery(NOT_MEASURED, parked_h=24), 20)  # its query has not returned anything yet
    for each in (low, before):
        with pytest.raises(NoCandidatesError, match="its battery has 0 J to spare; no time is foreseen"):
            planned(EnergyStores(devices={"a": each}), board("a"))


@pytest.mark.parametrize("ends_h", [-1, 24, 47])
def test_a_run_waits_for_the_next_table_of_its_harvest(ends_h: int) -> None:
    table = DatedHarvest((NOON - timedelta(hours=99), NOON + timedelta(hours=ends_h - 1)), (0.0, 0.0))
    with pytest.raises(NoCandidatesError, match="no time is foreseen"):
        planned(EnergyStores(devices={"a": store(battery(table), 20)}), board("a"))


def test_a_run_waits_for_a_battery_that_fills_over_many_days() -> None:
    slow = HourlyHarvest(ZoneInfo("UTC"), (2.1,) * 24)
    with pytest.raises(NoCandidatesError, match="no time is foreseen"):
        planned(EnergyStores(devices={"a": store(battery(slow), 10)}), board("a"))


def test_a_run_does_not_end_while_another_of_its_boards_may_train() -> None:
    flat = with_left(a=0.0)
    with pytest.raises(EnergySpentError):
        planned(flat, board("a"))
    for history, selection in (
        (None, Selection(drained=frozenset("b"))),
        (History(consecutive_failures={"b": (3, 1)}), None),
    ):
        with pytest.raises(NoCandidatesError, match="a: too little energy"):
            plan_round([board("a"), board("b")], AllDevices(), site(1000.0), 1.0, 2, history, selection, stores=flat)
    away = replace(flat, paths={"a": ["site"], "b": ["site"]})
    with pytest.raises(NoCandidatesError, match="a: too little energy"):
        planned(away, board("a"))


def test_a_run_ends_if_its_other_boards_are_without_energy_as_well() -> None:
    flat = BatteryStore("the battery of site", NOON, np.zeros(97))
    stores = EnergyStores({"site": (flat,)}, paths={"a": ["site"], "b": ["site"], "c": ["site"]})
    with pytest.raises(EnergySpentError):  # b is drained, and c is offline
        plan_round(
            [board("a"), board("b")],
            AllDevices(),
            site(1000.0),
            1.0,
            1,
            selection=Selection(drained=frozenset("b")),
            stores=stores,
        )


def test_a_run_waits_if_only_a_mode_beyond_the_watts_takes_few_joules() -> None:
    # The fast mode takes the fewest joules, and fits the battery; the watts allow the slow one only.
    steep = Offer("a", front((10.0, 30.0), (100.0, 12.0)), IDLE_W, "site")
    stores = with_left(a=900.0)
    assert planned(stores, steep).assignments[0].epoch_s == 10.0
    for energy in (None, EnergyLimit(1e6)):
        with pytest.raises(NoCandidatesError, match="allow more watts or time, or wait until batteries hold more"):
            plan_round([steep], AllDevices(), site(20.0), 1.0, 1, energy=energy, stores=stores)
    with pytest.raises(EnergySpentError, match="raise energy_budget"):
        plan_round([steep], AllDevices(), site(20.0), 1.0, 1, energy=EnergyLimit(950.0), stores=stores)


@pytest.mark.parametrize(
    ("spare_j", "needed", "spare"),
    [(699.6, "700 J", "699 J"), (1_249_990.0, "1.25 MJ", "1.24 MJ"), (12_340.0, "12.4 kJ", "12.3 kJ")],
)
def test_a_refusal_never_states_more_to_spare_than_is_needed(spare_j: float, needed: str, spare: str) -> None:
    stores = with_left(a=spare_j)
    room = StoreRoom(stores, np.empty((0, 97)), np.empty((0, 1), dtype=np.intp), np.empty((1, 97)))
    reason = room.shortage("a", [], spare_j * (1 + 1e-6) + 0.1, 60.0)
    assert f"its training needs up to {needed}, its battery has {spare} to spare" in reason


def test_no_plan_sets_aside_more_than_any_store_leaves() -> None:
    rng = np.random.default_rng(3)
    supplies = tree(site=None, shed="site", roof="site")
    for _ in range(150):
        allowance = Allowance(
            supplies, {"site": float(rng.uniform(60, 300)), "shed": 200.0, "roof": float(rng.uniform(40, 200))}
        )
        offers = [board(f"b{k}", str(rng.choice(["site", "shed", "roof"]))) for k in range(8)]
        shared = {
            name: (PeriodStore(name, float(rng.uniform(100, 3000)), 1e9, NOON),)
            for name in ("site", "shed", "roof")
            if rng.random() < 0.6
        }
        own = with_left(**{offer.device_id: float(rng.uniform(50, 900)) for offer in offers if rng.random() < 0.5})
        stores = EnergyStores(shared, own.devices)
        try:
            plan = planned(stores, *offers, allowance=allowance)
        except NoCandidatesError:
            continue
        supply_of = {offer.device_id: offer.supply for offer in offers}
        for name, (limit,) in shared.items():
            behind = [j for device, j in aside_j(plan).items() if name in supplies.path(supply_of[device])]
            assert sum(behind) <= limit.rest_j * (1 + 1e-6)
        for device, j in aside_j(plan).items():
            if device in own.devices:
                assert j <= left_j(own.devices[device], 0.0) * (1 + 1e-6)
