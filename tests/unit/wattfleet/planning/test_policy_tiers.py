"""The policy `tiers`: rounds of devices with similar speed."""

from __future__ import annotations

import re

from tests.fakes.fleets import history_of, many
from tests.fakes.runs import run
from wattfleet.planning import Allowance, History, Participation, plan_round
from wattfleet.planning.policies import Tiers

OFFERS = many(12)
TIERS = [{offer.device_id for offer in OFFERS[3 * tier : 3 * tier + 3]} for tier in range(4)]


def tiers_of(history: History) -> list[int]:
    """The tier that each round drew from; all devices of a round must be of one tier."""
    turns = []
    for past in history.rounds:
        [tier] = [tier for tier, members in enumerate(TIERS) if members & set(past.device_ids)]
        assert set(past.device_ids) <= TIERS[tier]
        turns.append(tier)
    return turns


def by_tier(losses: list[float]) -> dict[str, float]:
    return {device: loss for members, loss in zip(TIERS, losses, strict=True) for device in members}


def test_a_round_has_one_tier_and_every_tier_gets_rounds() -> None:
    turns = tiers_of(run(OFFERS, Tiers(2, 4), rounds=80))
    assert all(turns.count(tier) >= 8 for tier in range(4))


def test_a_tier_with_a_higher_loss_gets_more_rounds() -> None:
    losses = by_tier([0.2, 0.2, 0.2, 2.0])
    history = run(OFFERS, Tiers(3, 4), rounds=120, part=lambda device, _: Participation(False, 10, losses[device]))
    turns = tiers_of(history)
    assert turns.count(3) > 1.4 * max(turns.count(tier) for tier in range(3))


def test_no_tier_gets_more_than_twice_its_even_share() -> None:
    losses = by_tier([1e6, 1e-6, 1e-6, 1e-6])
    history = run(OFFERS, Tiers(3, 4), rounds=100, part=lambda device, _: Participation(False, 10, losses[device]))
    turns = tiers_of(history)
    for number in range(1, 101):
        assert turns[:number].count(0) <= 2 * number / 4 + 2
    assert turns.count(0) >= 45  # and it does take part that often


def test_different_seeds_draw_different_tiers() -> None:
    assert tiers_of(run(OFFERS, Tiers(2, 4, seed=1), 20)) != tiers_of(run(OFFERS, Tiers(2, 4, seed=2), 20))


def test_the_reasons_name_the_tier_of_the_round() -> None:
    plan = plan_round(OFFERS, Tiers(1, 4), Allowance.of_site(500.0), 1.0, 1)
    [taken] = [assignment.device_id for assignment in plan.assignments]
    turn = next(tier for tier, members in enumerate(TIERS) if taken in members)
    for decision in plan.decisions:
        own = next(tier for tier, members in enumerate(TIERS) if decision.device_id in members)
        if decision.selected:
            continue
        if own == turn:
            assert decision.reason == f"not drawn from its tier {turn + 1}"
        else:
            assert re.findall(r"\d+", decision.reason) == [str(own + 1), str(turn + 1)]


def test_half_a_tier_is_the_default_and_small_fleets_have_fewer_tiers() -> None:
    assert len(plan_round(many(20), Tiers(tiers=4), Allowance.of_site(500.0), 1.0, 1).assignments) == 3
    assert len(plan_round(many(2), Tiers(tiers=5), Allowance.of_site(500.0), 1.0, 1).assignments) == 1


def test_tiers_without_reported_losses_are_drawn_evenly() -> None:
    silent = history_of({device: Participation() for device in TIERS[0]})
    drawn = set()
    for number in range(2, 30):
        plan = plan_round(OFFERS, Tiers(2, 4), Allowance.of_site(500.0), 1.0, number, silent)
        drawn |= {tier for tier, members in enumerate(TIERS) if members & {a.device_id for a in plan.assignments}}
    assert drawn == {0, 1, 2, 3}
