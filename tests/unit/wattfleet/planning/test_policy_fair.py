"""The policy `fair`: a lower limit on how often each device takes part."""

from __future__ import annotations

import math

import pytest

from tests.fakes.fleets import many
from tests.fakes.fronts import front
from tests.fakes.runs import run
from wattfleet.planning import Allowance, Offer, Participation, plan_round
from wattfleet.planning.policies import Fair, FastestK


@pytest.mark.parametrize(("n", "count", "floor"), [(9, 3, None), (10, 4, 0.1), (7, 3, 0.4), (12, 6, 0.5), (5, 5, 1.0)])
def test_no_device_falls_more_than_a_round_below_the_floor(n: int, count: int, floor: float | None) -> None:
    offers = many(n)
    history = run(offers, Fair(count, floor), rounds=200)
    share = count / n / 2 if floor is None else floor
    done = dict.fromkeys((offer.device_id for offer in offers), 0)
    for past in history.rounds:
        for device_id in past.device_ids:
            done[device_id] += 1
        assert len(past.device_ids) == count
        assert min(done.values()) > share * past.number - 1 - 1e-9


def test_the_remaining_places_go_to_the_fastest() -> None:
    offers = many(10)
    history = run(offers, Fair(4, 0.1), rounds=100)
    assert all(history.times_completed[offer.device_id] >= 9 for offer in offers)
    assert [history.times_completed[offer.device_id] for offer in offers[:3]] == [100, 100, 100]


def test_a_floor_of_zero_selects_the_fastest_only() -> None:
    offers = many(8)
    fair = plan_round(offers, Fair(3, 0.0), Allowance.of_site(500.0), 1.0, 5)
    assert fair == plan_round(offers, FastestK(3), Allowance.of_site(500.0), 1.0, 5)


def test_a_floor_above_the_even_share_gives_even_shares() -> None:
    offers = many(9)
    history = run(offers, Fair(3, 0.9), rounds=90)
    assert all(math.isclose(history.times_completed[offer.device_id], 30, abs_tol=1) for offer in offers)


def test_the_reason_states_the_participation_below_the_floor() -> None:
    offers = many(4)
    history = run(offers, Fair(2, 0.25), rounds=2)
    plan = plan_round(offers, Fair(2, 0.25), Allowance.of_site(500.0), 1.0, 3, history)
    reasons = {decision.device_id: decision.reason for decision in plan.decisions if decision.selected}
    assert reasons["device-003"].startswith(
        "selected: with priority, since it completed 0 of 2 rounds and the floor is 25%; done within"
    )


def test_failed_rounds_do_not_count_as_participation() -> None:
    offers = many(4)
    history = run(
        offers, Fair(1, 0.25), rounds=9, part=lambda device_id, _: Participation(failed=device_id == "device-000")
    )
    assert history.times_completed.get("device-000", 0) == 0
    assert sum("device-000" in past.device_ids for past in history.rounds) >= 3


def test_a_device_that_never_fits_takes_no_place_from_others() -> None:
    offers = [*many(5), Offer("a-giant", front((5, 5_000)), 2.0)]
    history = run(offers, Fair(2, 1 / 6), rounds=60, site_w=500.0)
    assert all(history.times_completed[offer.device_id] >= 9 for offer in offers[:5])
    assert "a-giant" not in history.times_completed
