"""The contract that every policy fulfils."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.fakes.fleets import Fleet, fleets, history_of, many, modes_within_limit, tree
from tests.fakes.fronts import front
from wattfleet.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.planning import Allowance, EpochChoice, FrontTable, History, Offer, Participation, Selection, plan_round
from wattfleet.planning.policies import POLICIES, PlanningContext, Policy, policy_named

MUST_HAVE: dict[str, dict[str, object]] = {"deadline": {"deadline_s": 25.0}}
# Policies that select the number they are given, or half the devices; `progress` may select fewer.
COUNTED = [name for name in POLICIES if name not in ("all", "deadline", "progress")]

every_policy = pytest.mark.parametrize("name", POLICIES)

values = st.none() | st.sampled_from([0.0, 1e-12, 0.5, 3.0, 1e12])
participations = st.builds(Participation, st.booleans(), values, values | st.just(-2.0))
histories = st.lists(
    st.dictionaries(st.sampled_from([f"device-{k}" for k in range(4)] + ["gone"]), participations, max_size=4),
    max_size=5,
).map(lambda rounds: history_of(*rounds))


def made(name: str, **options: object) -> Policy:
    return policy_named(name, **MUST_HAVE.get(name, {}), **options)


def context_of(fleet: Fleet, history: History, server_round: int) -> PlanningContext:
    """The context that a plan passes to a policy: only devices with a mode within their limit."""
    offers = [offer for offer in fleet.offers if modes_within_limit(offer)]
    headroom = fleet.allowance.headroom(fleet.offers)
    kept = np.array([bool(modes_within_limit(offer)) for offer in fleet.offers])
    return PlanningContext(
        server_round, offers, FrontTable.of(offers), EpochChoice.fixed(1.0), headroom.of(kept), history
    )


@every_policy
@settings(max_examples=20)
@given(fleet=fleets(), history=histories, ahead=st.integers(1, 30))
def test_requests_are_complete_reasoned_and_deterministic(
    name: str, fleet: Fleet, history: History, ahead: int
) -> None:
    assume(any(modes_within_limit(offer) for offer in fleet.offers))
    context = context_of(fleet, history, len(history.rounds) + ahead)
    n = len(context.offers)
    try:
        request = made(name).request(context)
    except InfeasibleBudgetError:
        assert name == "deadline"
        return
    for mask in (request.eligible, request.priority):
        assert (mask.shape, mask.dtype) == ((n,), np.bool_)
    assert not (request.priority & ~request.eligible).any()
    assert 1 <= request.count <= request.eligible.sum()
    assert request.priority.sum() <= request.count
    assert all(request.exclusion_reasons.get(int(k)) for k in np.flatnonzero(~request.eligible))
    again = made(name).request(context)
    assert (request.count, request.exclusion_reasons, request.selection_reasons) == (
        again.count,
        again.exclusion_reasons,
        again.selection_reasons,
    )
    assert (request.eligible == again.eligible).all() and (request.priority == again.priority).all()


@every_policy
def test_a_fleet_of_one_is_planned(name: str) -> None:
    plan = plan_round(many(1), made(name), Allowance.of_site(30.0), 1.0, 1)
    assert len(plan.assignments) == 1


@every_policy
def test_devices_without_a_mode_within_their_limit_are_not_selected(name: str) -> None:
    dark = [Offer(f"dark-{k}", front((1, 30)), 2.0, limit_w=10.0) for k in range(6)]
    for server_round in range(1, 6):
        plan = plan_round([*many(2), *dark], made(name), Allowance.of_site(500.0), 1.0, server_round)
        assert 1 <= len(plan.assignments) <= 2
        assert len(plan.decisions) == 8


@every_policy
def test_a_fleet_that_always_failed_is_still_planned(name: str) -> None:
    offers = many(4)
    history = history_of(*[{offer.device_id: Participation(failed=True) for offer in offers}] * 8)
    assert plan_round(offers, made(name), Allowance.of_site(500.0), 1.0, 9, history).assignments


@every_policy
def test_devices_may_join_late_or_leave(name: str) -> None:
    history = history_of(*[{"gone": Participation(False, 10, 1.0), "device-000": Participation(False, 10, 0.3)}] * 5)
    assert plan_round(many(6), made(name), Allowance.of_site(500.0), 1.0, 6, history).assignments


@pytest.mark.parametrize("name", COUNTED)
def test_the_given_number_of_devices_is_selected(name: str) -> None:
    tier_of_all = {"tiers": 1} if name == "tiers" else {}
    for count in (1, 4, 9, 50):
        plan = plan_round(many(9), made(name, count=count, **tier_of_all), Allowance.of_site(500.0), 1.0, 1)
        assert len(plan.assignments) == min(count, 9)


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize(("devices", "half"), [(1, 1), (2, 1), (5, 3), (12, 6)])
def test_half_the_fleet_is_selected_by_default(name: str, devices: int, half: int) -> None:
    tier_of_all = {"tiers": 1} if name == "tiers" else {}
    plan = plan_round(many(devices), made(name, **tier_of_all), Allowance.of_site(1_000.0), 1.0, 1)
    assert len(plan.assignments) == half


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize(("share", "taken"), [(0.0, 4), (0.25, 5), (0.3, 6), (5.0, 9)])
def test_over_selection_adds_to_the_number(name: str, share: float, taken: int) -> None:
    tier_of_all = {"tiers": 1} if name == "tiers" else {}
    plan = plan_round(
        many(9),
        made(name, count=4, **tier_of_all),
        Allowance.of_site(500.0),
        1.0,
        1,
        selection=Selection(over_selection=share),
    )
    assert len(plan.assignments) == taken


@every_policy
def test_over_selection_applies_only_to_policies_with_a_count(name: str) -> None:
    assert made(name).has_count == (name in COUNTED)
    assert name in ("all", "deadline") or made(name, count=3).has_count


@pytest.mark.parametrize("name", [*COUNTED, "progress"])
def test_a_count_below_one_is_refused(name: str) -> None:
    for count in (0, -1):
        with pytest.raises(InvalidInputError, match=f"must be 1 or more, not {count}"):
            made(name, count=count)


@every_policy
def test_policies_are_found_by_their_names(name: str) -> None:
    assert made(name).name == name


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="unknown policy 'best': choose one of fastest-k, all, random, "):
        policy_named("best")


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="policy 'all' does not take count: it has no options"):
        policy_named("all", count=2)
    with pytest.raises(InvalidInputError, match="policy 'fair' does not take quantile: its options are count, floor"):
        policy_named("fair", quantile=0.5)


def test_missing_options_and_unused_seeds_are_ignored() -> None:
    assert policy_named("fastest-k", count=None, seed=7) == policy_named("fastest-k")
    assert policy_named("random", seed=7) != policy_named("random", seed=8)


def test_a_deadline_policy_needs_its_deadline() -> None:
    with pytest.raises(InvalidInputError, match="needs a deadline: set deadline_s, in seconds"):
        policy_named("deadline", deadline_s=None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deadline", {"deadline_s": 0.0}),
        ("deadline", {"deadline_s": float("nan")}),
        ("deadline", {"deadline_s": 5.0, "utility": "most"}),
        ("fair", {"floor": -0.1}),
        ("fair", {"floor": 1.1}),
        ("fair", {"floor": float("nan")}),
        ("tiers", {"tiers": 0}),
        ("tiers", {"seed": -1}),
        ("oort", {"seed": -1}),
        ("random", {"seed": -1}),
        ("oort", {"quantile": -0.1}),
        ("oort", {"quantile": 1.1}),
        ("oort", {"quantile": float("nan")}),
        ("progress", {"count": 0}),
        ("progress", {"half_devices": 0.0}),
        ("progress", {"half_devices": float("inf")}),
        ("progress", {"overhead_s": -1.0}),
        ("progress", {"overhead_s": float("nan")}),
    ],
)
def test_options_outside_their_range_are_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        policy_named(name, **options)


@every_policy
def test_devices_over_their_supplys_budget_take_no_place_in_a_round(name: str) -> None:
    # Most devices are behind a circuit whose budget only covers idle power, so a random draw could contain only those.
    offers = [replace(offer, supply="dim" if k < 6 else "site") for k, offer in enumerate(many(9))]
    allowance = Allowance(tree(site=None, dim="site"), {"site": 500.0, "dim": 12.0})
    for server_round in range(1, 21):
        plan = plan_round(offers, made(name), allowance, 1.0, server_round)
        chosen = {assignment.device_id for assignment in plan.assignments}
        assert chosen and not chosen & {offer.device_id for offer in offers[:6]}
        assert plan.decisions[0].reason == (
            "over its supply's budget: its lowest-power mode needs 18.0 W above idle, dim has 0.0 W"
        )
