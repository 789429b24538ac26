"""Energy as text, and the account of an energy budget: no order of reports, losses and restarts creates energy."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from wattfleet.core.budgets import EnergyAccount, joules_of
from wattfleet.core.errors import EnergySpentError, InvalidInputError


@pytest.mark.parametrize(
    ("text", "joules"),
    [("2 kWh", 7.2e6), ("500Wh", 1.8e6), ("90 kJ", 9e4), ("1.5MJ", 1.5e6), (" 800 J ", 800.0), ("1e3 J", 1e3)],
)
def test_an_energy_is_a_number_with_a_unit(text: str, joules: float) -> None:
    assert joules_of("energy_budget", text) == pytest.approx(joules)


def test_a_number_counts_in_joules() -> None:
    assert joules_of("energy_budget", 250.0) == 250.0


@pytest.mark.parametrize("text", ["2", "kWh", "2 kW", "two kWh", "", "1,5 kWh", "2 KWH", "--3 J"])
def test_a_text_that_is_no_energy_names_the_units(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"energy_budget: .* is not an energy: write a number and one of J, kJ"):
        joules_of("energy_budget", text)


@pytest.mark.parametrize("energy", [0.0, -5.0, math.inf, math.nan, "-2 kWh", "0 J", "inf kJ", "nan J"])
def test_an_energy_budget_is_finite_and_above_zero(energy: str | float) -> None:
    with pytest.raises(InvalidInputError, match="energy_budget must be finite and above 0 J"):
        joules_of("energy_budget", energy)


def test_a_report_replaces_what_was_set_aside() -> None:
    account = EnergyAccount(100.0).set_aside(60.0)
    assert account.left_j == 40.0
    assert account.reported(60.0, 35.0).left_j == 65.0


def test_more_than_is_left_cannot_be_set_aside() -> None:
    with pytest.raises(EnergySpentError, match="50 J are wanted, and 40 J are left"):
        EnergyAccount(100.0).set_aside(60.0).set_aside(50.0)


def test_a_report_of_more_than_was_set_aside_counts_in_full() -> None:
    account = EnergyAccount(100.0).set_aside(60.0).reported(60.0, 90.0)
    assert account.left_j == 10.0
    assert account.set_aside(10.0).reported(10.0, 30.0).left_j == 0.0


def test_an_overspent_account_has_what_is_left_and_no_more() -> None:
    account = EnergyAccount(100.0, 100.5)
    assert account.left_j == 0.0
    assert account.has(0.0) and not account.has(0.1)
    with pytest.raises(EnergySpentError, match="raise energy_budget to at least 111 J"):
        account.set_aside(10.0)


class AccountsKeepEveryJoule(RuleBasedStateMachine):
    """Trainings begin, report late or never, and the account is loaded again, as after a kill."""

    BUDGET_J = 1_000.0

    def __init__(self) -> None:
        super().__init__()
        self.account = EnergyAccount(self.BUDGET_J)
        self.open: list[float] = []
        self.lost: list[float] = []
        self.drawn_j = 0.0

    @rule(joules=st.floats(0.0, 400.0))
    def begin(self, joules: float) -> None:
        fits = self.drawn_j + sum(self.open) + sum(self.lost) + joules <= self.BUDGET_J
        try:
            self.account = self.account.set_aside(joules)
        except EnergySpentError:
            assert not fits or math.isclose(self.account.left_j, joules, abs_tol=1e-6)
        else:
            assert fits or math.isclose(self.account.left_j, 0.0, abs_tol=1e-5)
            self.open.append(joules)

    @rule(share=st.floats(0.0, 1.0), which=st.integers(0, 100))
    def report(self, share: float, which: int) -> None:
        if self.open:
            set_aside_j = self.open.pop(which % len(self.open))
            self.drawn_j += share * set_aside_j
            self.account = self.account.reported(set_aside_j, share * set_aside_j)

    @rule(which=st.integers(0, 100))
    def lose(self, which: int) -> None:
        if self.open:
            self.lost.append(self.open.pop(which % len(self.open)))

    @rule(which=st.integers(0, 100))
    def report_late(self, which: int) -> None:
        if self.lost:
            set_aside_j = self.lost.pop(which % len(self.lost))
            self.drawn_j += set_aside_j / 2
            self.account = self.account.reported(set_aside_j, set_aside_j / 2)

    @rule()
    def restart(self) -> None:
        account = self.account
        self.account = EnergyAccount(account.budget_j, account.spent_j, account.set_aside_j)

    @invariant()
    def nothing_is_created(self) -> None:
        most_j = self.drawn_j + sum(self.open) + sum(self.lost)  # what may have been drawn by now
        assert most_j <= self.BUDGET_J + 1e-5
        assert self.account.left_j == pytest.approx(self.BUDGET_J - most_j, abs=1e-5)


TestAccountsKeepEveryJoule = AccountsKeepEveryJoule.TestCase
