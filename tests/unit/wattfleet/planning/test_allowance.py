"""The watts that supplies allow, and which values are refused."""

from __future__ import annotations

import math

import pytest

from tests.fakes.fleets import tree
from tests.fakes.fronts import front
from wattfleet.errors import InvalidInputError
from wattfleet.planning import Allowance, Offer
from wattfleet.planning.round_plan import SupplyUse

HOUSE = tree(house=None, shed="house", bench="shed", barn=None)
BUDGET_W = {"house": 100.0, "shed": 60.0, "bench": 20.0, "barn": 40.0}
FRONT = front((10, 20), (20, 10))
OFFERS = [
    Offer("a", FRONT, 1.0, "house"),
    Offer("b", FRONT, 2.0, "shed"),
    Offer("c", FRONT, 4.0, "bench"),
    Offer("d", FRONT, 8.0, "barn"),
]


def test_a_supply_counts_all_devices_below_it_at_any_level() -> None:
    allowance = Allowance(HOUSE, BUDGET_W, {"bench": 0.5, "barn": 0.25})
    assert allowance.idle_w(OFFERS) == {"house": 7.5, "shed": 6.5, "bench": 4.5, "barn": 8.25}
    assert allowance.use(OFFERS, {"c": 10.0, "a": 3.0}) == (
        SupplyUse("house", 100.0, 20.5),
        SupplyUse("shed", 60.0, 16.5),
        SupplyUse("bench", 20.0, 14.5),
        SupplyUse("barn", 40.0, 8.25),
    )
    assert allowance.headroom(OFFERS).spare_w == pytest.approx([92.5, 53.5, 15.5, 31.75])


def test_a_supply_is_exceeded_only_beyond_the_rounding_tolerance() -> None:
    allowance = Allowance(HOUSE, BUDGET_W)
    spare_w = dict(zip(HOUSE.names, allowance.headroom(OFFERS).spare_w, strict=True))
    assert allowance.exceeded(allowance.use(OFFERS, {"c": spare_w["bench"]})) == set()
    assert allowance.exceeded(allowance.use(OFFERS, {"c": spare_w["bench"] + 1e-6})) == {"bench"}
    assert allowance.exceeded(allowance.use(OFFERS, {"b": 93.0, "c": 16.5})) == {"house", "shed", "bench"}


def test_the_site_budget_is_the_sum_of_all_sites() -> None:
    assert Allowance(HOUSE, BUDGET_W).site_budget_w == 140.0
    assert Allowance.of_site(55.0, 5.0).site_budget_w == 55.0


@pytest.mark.parametrize("watts", [-5.0, math.nan, math.inf])
def test_an_invalid_budget_is_refused_with_its_supply(watts: float) -> None:
    with pytest.raises(InvalidInputError, match="supply 'shed' needs a budget of 0 or more finite watts"):
        Allowance(HOUSE, {**BUDGET_W, "shed": watts})
    with pytest.raises(InvalidInputError, match="supply 'site' needs"):
        Allowance.of_site(watts)


def test_supplies_and_budgets_must_match() -> None:
    with pytest.raises(InvalidInputError, match="supply 'barn' needs a budget"):
        Allowance(HOUSE, {name: watts for name, watts in BUDGET_W.items() if name != "barn"})
    with pytest.raises(InvalidInputError, match=r"given for unknown supplies \(attic\)"):
        Allowance(HOUSE, {**BUDGET_W, "attic": 5.0})
    with pytest.raises(InvalidInputError, match=r"given for unknown supplies \(attic\)"):
        Allowance(HOUSE, BUDGET_W, {"attic": 5.0})


@pytest.mark.parametrize("watts", [-0.1, math.nan, math.inf])
def test_watts_drawn_elsewhere_must_be_valid(watts: float) -> None:
    with pytest.raises(InvalidInputError, match="drawn elsewhere must be finite and 0 or more"):
        Allowance.of_site(50.0, watts)


@pytest.mark.parametrize("idle_w", [-0.1, math.nan, math.inf])
def test_invalid_idle_watts_are_refused_with_their_device(idle_w: float) -> None:
    with pytest.raises(InvalidInputError, match="^orin: idle watts"):
        Offer("orin", FRONT, idle_w)


@pytest.mark.parametrize("limit_w", [-1.0, math.nan, math.inf])
def test_a_limit_of_0_w_or_less_is_refused_with_its_device(limit_w: float) -> None:
    with pytest.raises(InvalidInputError, match="^orin: a device's limit must be above 0 W"):
        Offer("orin", FRONT, 1.0, limit_w=limit_w)
