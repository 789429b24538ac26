"""Policies: the contract that each one fulfils, packages that provide more, and what each of them selects."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.fakes.fleets import Fleet, every_plan, fleets, front, history_of, many, modes_within_limit, run, tree
from tests.fakes.short_forms import examples
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError, NoCandidatesError
from wattfleet.core.planning import (
    Allowance,
    EpochChoice,
    FrontTable,
    History,
    Offer,
    Participation,
    RoundPlan,
    Selection,
    plan_round,
)
from wattfleet.core.planning.policies import (
    POLICIES,
    Deadline,
    Fair,
    FastestK,
    Oort,
    PlanningContext,
    Policy,
    RandomK,
    SelectionRequest,
    Tiers,
    any_devices,
    policy_named,
    policy_names,
    registry,
)

# --- Policy contract --------------------------------------------------------------------------------------------------
# The contract that every policy fulfils.


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
@examples(20)
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


# --- Policy registry --------------------------------------------------------------------------------------------------
# Policies that installed packages provide, and the errors for defective ones.


@dataclass(frozen=True)
class Own:
    """A user-defined policy."""

    count: int | None = None
    name: str = "own"
    has_count: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.count == 13:
            raise ValueError("13 is unlucky")

    def request(self, context: PlanningContext) -> SelectionRequest:
        return any_devices(context, self.count)


class NoPolicy:
    """A class that is not a policy."""


def install(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str, str]) -> None:
    """Register entry points for policies, each given as name, value and distribution."""
    found = []
    for name, value, package in entries:
        entry = EntryPoint(name, value, "wattfleet.policies")
        vars(entry).update(dist=cast(Distribution, SimpleNamespace(name=package)))
        found.append(entry)
    monkeypatch.setattr(registry, "_entries", lambda path: tuple(found))
    monkeypatch.setitem(
        __import__("sys").modules, "own_policies", SimpleNamespace(Own=Own, NoPolicy=NoPolicy, word="a")
    )


def test_a_policy_of_an_installed_package_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("own", "own_policies:Own", "acme"), ("aardvark", "own_policies:Own", "acme"))
    assert policy_names() == (*POLICIES, "aardvark", "own"), "the built-in ones come first"
    assert policy_named("own", count=3, seed=1, floor=None) == Own(3)
    with pytest.raises(InvalidInputError, match="policy 'own' does not take floor: its options are count"):
        policy_named("own", floor=0.5)


def test_a_package_that_is_found_twice_on_the_path_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("own", "own_policies:Own", "acme"), ("own", "own_policies:Own", "acme"))
    assert policy_named("own") == Own()


@pytest.mark.parametrize(
    ("entries", "asked", "reason"),
    [
        ([("own", "own_policies:Own", "acme")], "oracle", "unknown policy 'oracle': choose one of .*, progress, own$"),
        (
            [("own", "own_policies:Own", "acme"), ("own", "own_policies:Own", "zenith")],
            "own",
            "'own' is provided 2 times, by acme and zenith: rename one of the entry points, or uninstall one of",
        ),
        (
            [("all", "own_policies:Own", "acme")],
            "all",
            "'all' is built in, and acme provides another one of this name: rename its entry point, or uninstall acme",
        ),
        (
            [("own", "no_such_module:Own", "acme")],
            "own",
            "'own' of acme cannot be loaded from 'no_such_module:Own' .ModuleNotFoundError: No module named",
        ),
        ([("own", "own_policies:Absent", "acme")], "own", "'own' of acme cannot be loaded .* .AttributeError: "),
        ([("own", "own_policies:word", "acme")], "own", "'own' of acme cannot be loaded .* .TypeError: 'a' is not a"),
        ([("own", "own_policies:NoPolicy", "acme")], "own", "'own' of acme lacks name, has_count or request"),
    ],
)
def test_a_defective_policy_is_refused_with_its_package(
    monkeypatch: pytest.MonkeyPatch, entries: list[Any], asked: str, reason: str
) -> None:
    install(monkeypatch, *entries)
    with pytest.raises(InvalidInputError, match=reason):
        policy_named(asked)
    assert policy_named("progress"), "the others can be used"


def test_a_policy_that_rejects_its_options_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("own", "own_policies:Own", "acme"))
    with pytest.raises(InvalidInputError, match=re.escape("'own' of acme cannot be built (ValueError: 13 is unlucky)")):
        policy_named("own", count=13)


# --- Policy `deadline` ------------------------------------------------------------------------------------------------
# The most devices or utility within a deadline, compared with all sets in all modes.


@examples(40)
@given(fleets(), st.integers(1, 30).map(float), st.sampled_from([0.5, 2.0]))
def test_the_most_devices_that_meet_the_deadline_are_selected(fleet: Fleet, deadline_s: float, epochs: float) -> None:
    in_time = [(len(devices), -s) for devices, s in every_plan(fleet, epochs) if s <= deadline_s]
    if not in_time:
        with pytest.raises((InvalidInputError, NoCandidatesError)):
            plan_round(fleet.offers, Deadline(deadline_s), fleet.allowance, epochs, 1)
        return
    plan = plan_round(fleet.offers, Deadline(deadline_s), fleet.allowance, epochs, 1)
    count, least_s = max(in_time)
    assert len(plan.assignments) == count
    # As many devices as possible finish by the deadline, and these finish as early as possible.
    assert plan.duration_s <= deadline_s * (1 + 1e-12)
    assert plan.duration_s >= -least_s * (1 - 1e-12)
    assert plan.deadline_s == deadline_s


@examples(40)
@given(
    fleets(),
    st.integers(2, 30).map(float),
    st.lists(st.none() | st.integers(0, 9), min_size=4, max_size=4),
)
def test_the_most_useful_set_that_meets_the_deadline_is_selected(
    fleet: Fleet, deadline_s: float, losses: list[int | None]
) -> None:
    known = {f"device-{k}": loss for k, loss in enumerate(losses[: len(fleet.offers)])}
    history = history_of(
        {device: Participation(False, 10, float(loss)) for device, loss in known.items() if loss is not None}
    )
    able = [offer.device_id for offer in fleet.offers if modes_within_limit(offer)]
    # A device that never trained counts as much as the best of the others.
    most = max((known[device] or 0 for device in able), default=0) or 0
    nobody_known = all(known[device] is None for device in able)
    worth = {
        device: (1 if nobody_known or most == 0 else most) if loss is None else loss for device, loss in known.items()
    }
    reachable = [sum(worth[d] for d in devices) for devices, s in every_plan(fleet) if s <= deadline_s]
    if not reachable:
        return
    plan = plan_round(fleet.offers, Deadline(deadline_s, "loss"), fleet.allowance, 1.0, 2, history)
    assert sum(worth[a.device_id] for a in plan.assignments) >= max(reachable) * (1 - 1e-3)
    assert plan.duration_s <= deadline_s * (1 + 1e-12)


def test_reasons_name_slow_devices_and_those_with_too_much_power() -> None:
    offers = [
        Offer("late", front((40, 5)), 1.0),
        Offer("dear", front((10, 60)), 1.0),
        Offer("good", front((20, 15)), 1.0),
    ]
    plan = plan_round(offers, Deadline(30.0), Allowance.of_site(63.0), 1.0, 1)
    said = {decision.device_id: (decision.selected, decision.reason) for decision in plan.decisions}
    assert said["good"][0]
    assert said["late"] == (False, "too slow: 40.0 s in its fastest mode, the deadline is 30 s")
    assert said["dear"][1].startswith("too much power: meeting the deadline needs 59.0 W above idle")


@pytest.mark.parametrize("utility", ["equal", "loss"])
@pytest.mark.parametrize("site_w", [30.0, 500.0])
def test_an_impossible_deadline_is_refused_with_a_possible_one(utility: str, site_w: float) -> None:
    # 30 W only allow the slow mode.
    offers = [Offer("a", front((10, 50), (20, 20)), 2.0)]
    # With more watts a round of 15 s is possible, but none of 9 s.
    deadline_s, error = (9.0, NoCandidatesError) if site_w == 500.0 else (15.0, InfeasibleBudgetError)
    with pytest.raises(error, match=f"within {deadline_s:g} s.*: allow at least") as refusal:
        plan_round(offers, Deadline(deadline_s, utility), Allowance.of_site(site_w), 1.5, 1)
    least_s = float(re.findall(r"at least (\d+) s", str(refusal.value))[0])
    assert least_s == (15 if site_w == 500.0 else 30)
    assert plan_round(offers, Deadline(least_s, utility), Allowance.of_site(site_w), 1.5, 1).duration_s <= least_s


def test_a_budget_too_low_for_any_device_is_reported_before_the_deadline() -> None:
    with pytest.raises(InfeasibleBudgetError, match="5 W is not enough to train one device"):
        plan_round(many(2), Deadline(500.0), Allowance.of_site(5.0), 1.0, 1)


def test_a_fleet_without_utility_still_trains() -> None:
    history = history_of({offer.device_id: Participation(False, 10, 0.0) for offer in many(3)})
    assert plan_round(many(3), Deadline(30.0, "loss"), Allowance.of_site(500.0), 1.0, 2, history).assignments


# --- Policy `fair` ----------------------------------------------------------------------------------------------------
# The policy `fair`: a lower limit on how often each device takes part.


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


# --- Policy `oort` ----------------------------------------------------------------------------------------------------
# The policy `oort`: prefers useful devices that are not too slow, and explores unknown ones.

ALIKE = [Offer(f"device-{k:02}", front((10, 30)), 2.0) for k in range(12)]


def taken(history: History, after: int = 0) -> Counter[str]:
    """How often each device was selected after a given round."""
    return Counter(device for past in history.rounds if past.number > after for device in past.device_ids)


def test_devices_with_a_higher_loss_are_selected_more_often() -> None:
    rich = {"device-00", "device-05", "device-11"}
    history = run(
        ALIKE, Oort(3), rounds=80, part=lambda device, _: Participation(False, 100, 5.0 if device in rich else 0.5)
    )
    counts = taken(history, after=20)
    assert min(counts[device] for device in rich) > 2 * max(
        counts[o.device_id] for o in ALIKE if o.device_id not in rich
    )


def test_devices_with_more_samples_are_selected_more_often() -> None:
    history = run(
        ALIKE,
        Oort(1),
        rounds=60,
        part=lambda device, _: Participation(False, 900 if device == "device-07" else 90, 1.0),
    )
    counts = taken(history, after=20)
    assert counts.most_common(1)[0][0] == "device-07"


def test_slow_devices_are_selected_less_often() -> None:
    offers = [Offer(f"device-{k:02}", front((10 if k < 9 else 60, 30)), 2.0) for k in range(12)]
    history = run(offers, Oort(4), rounds=80, part=lambda device, _: Participation(False, 100, 1.0))
    counts = taken(history, after=20)
    assert max(counts[f"device-{k:02}"] for k in (9, 10, 11)) < min(counts[f"device-{k:02}"] for k in range(9))


def test_all_devices_are_explored() -> None:
    offers = many(40)
    history = run(offers, Oort(4), rounds=40, part=lambda device, _: Participation(False, 10, 1.0))
    assert set(taken(history)) == {offer.device_id for offer in offers}


def test_early_rounds_explore_more_than_late_ones() -> None:
    offers = many(200)
    ids = [offer.device_id for offer in offers]
    known = {device: Participation(False, 10, 1.0) for device in ids[:100]}

    def unknown_at(server_round: int) -> int:
        plan = plan_round(offers, Oort(20), Allowance.of_site(99_999.0), 1.0, server_round, history_of(known))
        return len({assignment.device_id for assignment in plan.assignments} - set(known))

    assert [unknown_at(number) for number in (2, 40, 500)] == [18, 8, 4]


def test_devices_absent_for_long_are_preferred_to_recent_ones() -> None:
    long_ago, just_now = {f"device-{k:02}" for k in range(6)}, {f"device-{k:02}" for k in range(6, 12)}
    history = history_of(
        {device: Participation(False, 10, 1.0) for device in long_ago},
        *[{device: Participation(False, 10, 1.0) for device in just_now}] * 60,
    )
    plan = plan_round(ALIKE, Oort(6), Allowance.of_site(999.0), 1.0, 62, history)
    assert {assignment.device_id for assignment in plan.assignments} == long_ago


def test_falling_utility_makes_the_pacer_accept_slower_devices() -> None:
    # The last device has three times the loss and takes 1.7 times as long as the median.
    offers = [Offer(f"device-{k:02}", front((10 + 5 * k, 30)), 2.0) for k in range(11)]

    def plan_after(gains: list[float]) -> RoundPlan:
        rounds = [
            {o.device_id: Participation(False, 10, gain * (3.0 if k == 10 else 1.0)) for k, o in enumerate(offers)}
            for gain in gains
        ]
        return plan_round(
            offers, Oort(1, quantile=0.0), Allowance.of_site(999.0), 1.0, len(gains) + 1, history_of(*rounds)
        )

    def chosen(gains: list[float]) -> str:
        [assignment] = plan_after(gains).assignments
        return assignment.device_id

    assert chosen([1.0] * 240) == "device-00"
    falling = [12.0 - window for window in range(12) for _ in range(20)]
    assert chosen(falling) == "device-10"


def test_one_outlier_does_not_win_every_draw() -> None:
    offers = [Offer(f"device-{k:02}", front((10, 30)), 2.0) for k in range(40)]
    participations = {offer.device_id: Participation(False, 10, 1.0) for offer in offers} | {
        "device-03": Participation(False, 10, 1e9)
    }
    drawn = [
        plan_round(
            offers, Oort(1, seed=seed), Allowance.of_site(999.0), 1.0, 2, history_of(participations)
        ).assignments[0]
        for seed in range(30)
    ]
    assert sum(assignment.device_id == "device-03" for assignment in drawn) < 10


def test_devices_without_a_reported_loss_are_still_selected() -> None:
    assert len(taken(run(ALIKE, Oort(3), rounds=30))) == 12


def test_negative_losses_are_accepted() -> None:
    history = history_of({offer.device_id: Participation(False, 10_000, -5.0 - k) for k, offer in enumerate(ALIKE)})
    assert len(plan_round(ALIKE, Oort(5), Allowance.of_site(999.0), 1.0, 500, history).assignments) == 5


# --- Policy `random` --------------------------------------------------------------------------------------------------
# The policy `random`: a uniform draw.

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


# --- Policy `tiers` ---------------------------------------------------------------------------------------------------
# The policy `tiers`: rounds of devices with similar speed.

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
