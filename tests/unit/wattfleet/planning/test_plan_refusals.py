"""Rounds that cannot be planned, and the errors that state what to change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.fakes.fleets import (
    tree,
)
from tests.fakes.plans import (
    NANO,
    ORIN,
    THREE,
    site,
)
from wattfleet.errors import InfeasibleBudgetError, InvalidInputError, NoCandidatesError
from wattfleet.planning import Allowance, Selection, plan_round
from wattfleet.planning.policies import AllDevices


def test_a_round_without_devices_or_with_duplicates_is_refused() -> None:
    for offers in ([], [ORIN, NANO, ORIN]):
        with pytest.raises(InvalidInputError, match="1 or more devices, each listed once"):
            plan_round(offers, AllDevices(), site(50.0), 1.0, 1)


@pytest.mark.parametrize("epochs", [0.0, -1.0, math.nan, math.inf])
def test_epochs_must_be_above_zero(epochs: float) -> None:
    with pytest.raises(InvalidInputError, match="epochs above 0"):
        plan_round(THREE, AllDevices(), site(50.0), epochs, 1)


def test_a_device_behind_an_unknown_supply_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown supplies \(attic\): use site"):
        plan_round([ORIN, replace(NANO, supply="attic")], AllDevices(), site(50.0), 1.0, 1)


def test_a_budget_below_idle_power_is_refused_with_a_sufficient_one() -> None:
    with pytest.raises(
        InfeasibleBudgetError, match=r"13 W is not enough .* on top of 14\.0 W of idle .* least 21\.0 W"
    ):
        plan_round(THREE, AllDevices(), site(13.0), 1.0, 1)


def test_the_circuit_with_too_low_a_budget_is_named() -> None:
    allowance = Allowance(tree(house=None, shed="house"), {"house": 500.0, "shed": 10.0})
    offers = [replace(offer, supply="shed") for offer in THREE]
    with pytest.raises(InfeasibleBudgetError, match=r"^shed: 10 W is not enough .* allow at least 21\.0 W"):
        plan_round(offers, AllDevices(), allowance, 1.0, 1)


def test_a_round_without_candidates_states_each_devices_reason() -> None:
    with pytest.raises(NoCandidatesError, match=r"nano: excluded: matches id:nano; orin: over its own limit of 6 W"):
        plan_round(
            [NANO, replace(ORIN, limit_w=6.0)],
            AllDevices(),
            site(50.0),
            1.0,
            1,
            selection=Selection(exclude=("id:nano",)),
        )
