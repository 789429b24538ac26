"""The binary search for a mode within budgets: the modes it measures, and where it ends."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from math import ceil, log2

import pytest

from wattfleet.choosing import search_within_budgets
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BOARDS, ModeSpace, PowerMode

ORIN = BOARDS["agx-orin"].space
ONE_KNOB = ModeSpace(cores=(1,), cpu_khz=tuple(range(100_000, 3_100_000, 100_000)), gpu_hz=(10**9,), mem_hz=(10**9,))


def power_mw(mode: PowerMode) -> float:
    """Power that rises with every knob."""
    return 8e3 + 500 * mode.cores + mode.cpu_khz / 400 + mode.gpu_hz / 8e4 + mode.mem_hz / 4e5


def searched(space: ModeSpace, budgets_mw: list[float], power: Callable[[PowerMode], float | None]) -> list[PowerMode]:
    asked: list[PowerMode] = []

    def power_of(mode: PowerMode) -> float | None:
        asked.append(mode)
        return power(mode)

    search_within_budgets(space.array(), budgets_mw, power_of)
    return asked


@pytest.mark.parametrize("budget_khz", [150_000, 1_000_000, 1_555_000, 2_999_999, 9_000_000])
def test_with_one_knob_the_search_ends_where_bisection_does(budget_khz: int) -> None:
    asked = searched(ONE_KNOB, [float(budget_khz)], lambda mode: float(mode.cpu_khz))
    best = ONE_KNOB.cpu_khz[bisect.bisect_right(ONE_KNOB.cpu_khz, budget_khz) - 1]
    assert max(mode.cpu_khz for mode in asked if mode.cpu_khz <= budget_khz) == best


def test_a_search_halves_each_knob_and_comes_near_the_budget() -> None:
    asked = searched(ORIN, [30e3], power_mw)
    halvings = sum(ceil(log2(len(values))) for values in (ORIN.cores, ORIN.cpu_khz, ORIN.gpu_hz, ORIN.mem_hz))
    assert len(set(asked)) <= halvings + 1
    assert 27e3 <= max(power for mode in asked if (power := power_mw(mode)) <= 30e3)
    assert all(mode in ORIN for mode in asked)


def test_searches_side_by_side_measure_the_modes_of_searches_in_turn() -> None:
    budgets = [15e3, 22e3, 31e3, 40e3]
    in_turn = set(searched(ORIN, budgets, power_mw))
    known: dict[PowerMode, float] = {}
    while missing := [mode for mode in searched(ORIN, budgets, known.get) if mode not in known]:
        known |= {mode: power_mw(mode) for mode in missing}
    assert set(known) == in_turn


def test_a_mode_that_is_not_sustained_counts_as_over_the_budget() -> None:
    first = searched(ONE_KNOB, [1e9], lambda mode: None)[0]
    asked = searched(ONE_KNOB, [1e9], lambda mode: float("inf") if mode == first else 1.0)
    assert max(asked[1:]).cpu_khz < first.cpu_khz


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan"), float("inf")])
def test_budgets_that_are_no_watts_are_refused(budget: float) -> None:
    with pytest.raises(InvalidInputError, match="budgets must be finite and above zero"):
        searched(ORIN, [30e3, budget], power_mw)


def test_no_modes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no modes to search"):
        search_within_budgets(ORIN.array()[:0], [30e3], power_mw)
