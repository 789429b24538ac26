"""The policy `random`: a uniform draw."""

from __future__ import annotations

from tests.fakes.fleets import many
from wattfleet.planning import Allowance, plan_round
from wattfleet.planning.policies import RandomK

MANY = many(12)


def drawn(seed: int, server_round: int) -> set[str]:
    plan = plan_round(MANY, RandomK(5, seed), Allowance.of_site(1_000.0), 1.0, server_round)
    return {assignment.device_id for assignment in plan.assignments}


def test_draws_repeat_only_with_the_same_seed_and_round() -> None:
    rounds = [drawn(seed=1, server_round=number) for number in range(1, 30)]
    assert rounds == [drawn(seed=1, server_round=number) for number in range(1, 30)]
    assert all(len(devices) == 5 for devices in rounds)
    assert len({frozenset(devices) for devices in rounds}) > 20
    assert set().union(*rounds) == {offer.device_id for offer in MANY}
    assert rounds != [drawn(seed=2, server_round=number) for number in range(1, 30)]


def test_slow_devices_are_drawn_as_often_as_fast_ones() -> None:
    taken = [device for number in range(300) for device in drawn(seed=7, server_round=number)]
    for offer in MANY:  # 300 draws of 5 in 12: 125 selections expected, with a standard deviation of 8.5
        assert 85 < taken.count(offer.device_id) < 165


def test_the_budget_still_holds() -> None:
    # 24 W are idle power, and a training device needs 18 W more: 70 W are enough for two of the five.
    plan = plan_round(MANY, RandomK(5, 1), Allowance.of_site(70.0), 1.0, 3)
    assert len(plan.assignments) == 2
    assert plan.planned_w <= 70
    assert {assignment.device_id for assignment in plan.assignments} <= drawn(1, 3)
    assert [decision.reason for decision in plan.decisions].count("not drawn") == 7
