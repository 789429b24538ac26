"""The number of replies that end a round whose plan selects more devices than its policy requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from tests.fakes.fleets import many
from tests.fakes.fronts import front
from wattfleet.planning import Allowance, InFlight, Offer, RoundPlan, Selection, plan_round, trim_rounds
from wattfleet.planning.policies import (
    FastestK,
    PlanningContext,
    Policy,
    Progress,
    SelectionRequest,
    policy_named,
)
from wattfleet_proto.convert import plan_from_message, plan_to_message

COUNTED = ["random", "fastest-k", "fair", "oort", "tiers"]
PLENTY_W = 500.0


def planned(policy: Policy, share: float, site_w: float = PLENTY_W) -> RoundPlan:
    return plan_round(many(9), policy, Allowance.of_site(site_w), 1.0, 1, selection=Selection(over_selection=share))


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize(("share", "selected", "enough"), [(0.0, 4, None), (0.1, 5, 4), (0.5, 6, 4), (5.0, 9, 4)])
def test_the_policys_own_number_of_replies_is_enough(
    name: str, share: float, selected: int, enough: int | None
) -> None:
    tier_of_all = {"tiers": 1} if name == "tiers" else {}
    plan = planned(policy_named(name, count=4, **tier_of_all), share)
    assert (len(plan.assignments), plan.enough_replies) == (selected, enough)


def test_progress_wants_what_is_useful_of_its_count() -> None:
    plain, more = planned(Progress(3), 0.0), planned(Progress(3), 1.0)
    assert plain.enough_replies is None
    assert len(more.assignments) > len(plain.assignments)
    assert more.enough_replies == len(plain.assignments)


def test_all_replies_are_needed_if_the_watts_suffice_for_no_more_than_wanted() -> None:
    alone = planned(FastestK(1), 0.0).planned_w
    plan = planned(FastestK(4), 1.0, alone + 1.0)
    assert len(plan.assignments) <= 4
    assert plan.enough_replies is None


def test_half_is_enough_if_the_policy_fails() -> None:
    @dataclass(frozen=True)
    class Broken:
        name: str = "broken"
        has_count: ClassVar[bool] = True

        def request(self, context: PlanningContext) -> SelectionRequest:
            raise ZeroDivisionError

    plan = planned(Broken(), 0.5)
    assert (len(plan.assignments), plan.enough_replies) == (8, 5)


ORIN = Offer("orin", front((10, 50)), 5.0)
NANO = Offer("nano", front((15, 25)), 3.0)
XAVIER = Offer("xavier", front((15, 30)), 4.0)
THREE = [ORIN, NANO, XAVIER]


@pytest.mark.parametrize(("site_w", "remaining", "enough"), [(200.0, 3, 2), (65.0, 2, None), (35.0, 1, None)])
def test_a_trim_leaves_no_more_replies_enough_than_devices(site_w: float, remaining: int, enough: int | None) -> None:
    plenty = Allowance.of_site(PLENTY_W)
    plan = plan_round(THREE, FastestK(2), plenty, 1.0, 1, selection=Selection(over_selection=0.5))
    assert (len(plan.assignments), plan.enough_replies) == (3, 2)
    [trim] = trim_rounds([InFlight(plan, THREE)], Allowance.of_site(site_w))
    after = plan if trim is None else trim.plan
    assert (len(after.assignments), after.enough_replies) == (remaining, enough)
    assert after.original.enough_replies == 2


def test_the_number_travels_and_is_stored_with_the_plan() -> None:
    nodes = {offer.device_id: k for k, offer in enumerate(many(9))}
    for share in (0.0, 0.5):
        plan = planned(FastestK(4), share)
        message = plan_to_message("4711/1", plan, nodes)
        assert message.enough_replies == (plan.enough_replies or 0)
        assert plan_from_message(message, 1.0) == plan
