"""Which devices measure with the watts that are left, computed by hand and compared with the budgets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.fleets import fleet_on_racks
from tests.fakes.fronts import front
from wattfleet.budgets import Supplies, Supply
from wattfleet.planning import Allowance, Offer, plan_measuring

# 2 W of idle power; 2, 4, 8 and 16 W above it.
POINTS = ((80, 4), (40, 6), (20, 10), (10, 18))


def offer(name: str, modes: int = 0, supply: str = "site") -> Offer:
    return Offer(name, front(*reversed(POINTS)), 2.0, supply, profiled_modes=modes)


def limits(offers: list[Offer], allowance: Allowance) -> dict[str, float]:
    return {each.device_id: each.power_limit_w for each in plan_measuring(offers, allowance, 1.0)}


def test_with_plenty_of_watts_every_device_may_measure_its_hungriest_mode() -> None:
    assert limits([offer("a"), offer("b")], Allowance.of_site(100.0)) == {"a": 18.0, "b": 18.0}
    assert plan_measuring([], Allowance.of_site(100.0), 1.0) == []


def test_a_device_trains_in_its_fastest_mode_within_its_watts() -> None:
    [planned] = plan_measuring([offer("a")], Allowance.of_site(2.0 + 9.0), 1.0)
    assert (planned.epoch_s, planned.power_w, planned.power_limit_w) == (20, 10, pytest.approx(11.0, abs=0.01))


def test_devices_with_the_fewest_modes_come_first() -> None:
    # 4 W are half of a device's modes; 10 W are enough for two devices, and 2 W remain for the first.
    offers = [offer("a", 20), offer("b"), offer("c", 5)]
    assert limits(offers, Allowance.of_site(3 * 2.0 + 10.0)) == pytest.approx(
        {"b": 2.0 + 6.0, "c": 2.0 + 4.0}, abs=0.01
    )


def test_without_watts_for_half_of_the_modes_the_lowest_ones_are_measured() -> None:
    assert limits([offer("a"), offer("b")], Allowance.of_site(2 * 2.0 + 3.0)) == pytest.approx(
        {"a": 2.0 + 3.0}, abs=0.01
    )
    assert limits([offer("a"), offer("b")], Allowance.of_site(2 * 2.0 + 1.9)) == {}


def test_what_others_draw_is_not_given_away() -> None:
    supplies = Supplies((Supply("site"), Supply("rack", "site")))
    allowance = Allowance(supplies, {"site": 60.0, "rack": 10.0}, {"site": 30.0, "rack": 2.0})
    found = limits([offer("a"), offer("b", supply="rack")], allowance)
    assert found == {"a": 18.0, "b": pytest.approx(10.0 - 2.0, abs=0.01)}


@given(st.integers(0, 10_000))
def test_no_supply_is_ever_exceeded(seed: int) -> None:
    chance = np.random.default_rng(seed)
    fleet = fleet_on_racks(chance, int(chance.integers(1, 12)))
    planned = plan_measuring(fleet.offers, fleet.allowance, 1.0)
    idle_w = {each.device_id: each.idle_w for each in fleet.offers}
    extra_w = {each.device_id: each.power_limit_w - idle_w[each.device_id] for each in planned}
    use = fleet.allowance.use(fleet.offers, extra_w)
    idle = fleet.allowance.exceeded(fleet.allowance.use(fleet.offers, {}))
    assert fleet.allowance.exceeded(use) <= idle
    assert all(each.power_w <= each.power_limit_w for each in planned)
