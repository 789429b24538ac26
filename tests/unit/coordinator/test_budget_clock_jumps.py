"""Budget overrides when the system date jumps, in virtual time."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest

from tests.fakes.watched_budgets import NOON, Watched, run
from wattfleet.budgets import ConstantBudget, Override


@pytest.mark.parametrize("hours", [24, -1])
def test_an_override_lasts_as_long_as_it_was_set_for_if_the_clock_jumps(
    hours: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(w: Watched) -> None:
        w.watch.override("site", Override(80, w.clock.now() + timedelta(hours=2)))
        await w.clock.advance(1800)
        w.clock.jump(hours=hours)
        await w.clock.advance(5399)
        assert w.watts("site") == 80
        until = w.watch.status("site").override
        assert until is not None and until.until == w.clock.now() + timedelta(seconds=1)
        await w.clock.advance(2)
        assert w.watts("site") == 300

    run(scenario, Watched({"site": ConstantBudget(300)}))
    assert "the clock was put" in caplog.text


@pytest.mark.parametrize(("set_w", "in_force_w"), [(80, 80), (500, 300)])
def test_a_doubtful_override_lowers_the_watts_and_never_raises_them(set_w: float, in_force_w: float) -> None:
    watched = Watched({"site": ConstantBudget(300)})
    overrides = {"site": Override(set_w, NOON + timedelta(hours=1))}
    watched.watch = watched.new_watch({"site": ConstantBudget(300)}, overrides, is_doubtful=True)

    async def scenario(w: Watched) -> None:
        assert w.watts("site") == in_force_w
        assert w.watch.override("site", Override(500)).in_force.watts == 500, "a new one is the operator's word"

    run(scenario, watched)


def test_the_end_of_an_override_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator.budgets.budget_watch")
    watched = Watched({"site": ConstantBudget(300)})
    watched.watch = watched.new_watch({"site": ConstantBudget(300)}, {"site": Override(80, NOON - timedelta(hours=1))})

    async def scenario(w: Watched) -> None:
        assert w.watts("site") == 300

    run(scenario, watched)
    assert "supply site: the override of 80 W ended at 2026-06-01T11:00:00+00:00" in caplog.text
