"""Which devices a plan considers: the operator's selection, backoff, over-selection, and policies that fail."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.fleets import front, history_of, many, tree
from tests.fakes.short_forms import examples
from wattfleet.core.choosing import predicted_front
from wattfleet.core.errors import ImplausibleError, InvalidInputError, NoCandidatesError, WattfleetError
from wattfleet.core.planning import (
    Allowance,
    History,
    InFlight,
    Offer,
    Participation,
    RoundPlan,
    Selection,
    plan_round,
    trim_rounds,
)
from wattfleet.core.planning.plan import backing_off
from wattfleet.core.planning.policies import (
    POLICIES,
    AllDevices,
    FastestK,
    PlanningContext,
    Policy,
    Progress,
    SelectionRequest,
    policy_named,
)
from wattfleet.core.prediction import Prediction
from wattfleet_proto.convert import plan_from_message, plan_to_message

# --- Selection --------------------------------------------------------------------------------------------------------
# The operator's selection of devices, and the backoff of devices that fail repeatedly.


SUPPLIES = tree(house=None, shed="house", barn="house")
FLEET = [
    Offer("orin-1", front((10, 20)), 1.0, "shed", tags=frozenset({"lab", "fast"})),
    Offer("orin-2", front((10, 20)), 1.0, "barn", tags=frozenset({"field"})),
    Offer("nano-1", front((10, 20)), 1.0, "house", tags=frozenset({"lab"})),
]


def chosen(selection: Selection) -> set[str]:
    allowance = Allowance(SUPPLIES, dict.fromkeys(SUPPLIES.names, 500.0))
    plan = plan_round(FLEET, AllDevices(), allowance, 1.0, 1, selection=selection)
    assert {decision.device_id for decision in plan.decisions} == {offer.device_id for offer in FLEET}
    return {assignment.device_id for assignment in plan.assignments}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), {"orin-1", "orin-2", "nano-1"}),
        (("id:orin-*",), (), {"orin-1", "orin-2"}),
        (("id:orin-1",), (), {"orin-1"}),
        (("tag:lab",), (), {"orin-1", "nano-1"}),
        (("site:shed",), (), {"orin-1"}),
        (("site:house",), (), {"orin-1", "orin-2", "nano-1"}),
        (("site:house",), ("site:barn",), {"orin-1", "nano-1"}),
        (("id:nano-1", "tag:field"), (), {"nano-1", "orin-2"}),
        ((), ("tag:f*",), {"nano-1"}),
        (("tag:lab",), ("id:nano-?",), {"orin-1"}),
    ],
)
def test_devices_match_by_id_tag_and_any_supply_that_feeds_them(
    include: tuple[str, ...], exclude: tuple[str, ...], expected: set[str]
) -> None:
    assert chosen(Selection(include, exclude)) == expected


def reason(selection: Selection, offer: Offer) -> str | None:
    return selection.exclusion_reason(offer.device_id, offer.tags, offer.supply, SUPPLIES)


def test_the_reason_names_the_pattern() -> None:
    selection = Selection(include=("tag:lab", "id:x"), exclude=("site:shed",))
    assert reason(selection, FLEET[1]) == "not included: matches none of tag:lab, id:x"
    assert reason(selection, FLEET[0]) == "excluded: matches site:shed"
    assert reason(selection, FLEET[2]) is None


def test_a_device_without_a_known_supply_matches_no_site() -> None:
    selection = Selection(exclude=("site:*",))
    assert selection.exclusion_reason("new", frozenset(), "", SUPPLIES) is None


def test_a_drained_device_is_excluded_even_if_it_is_included() -> None:
    selection = Selection(include=("id:orin-1",), drained=frozenset({"orin-1", "gone"}))
    assert reason(selection, FLEET[0]) == "drained by the operator"
    assert reason(Selection(drained=frozenset({"orin-1"})), FLEET[1]) is None
    assert "orin-1" not in chosen(Selection(drained=frozenset({"orin-1"})))


def test_patterns_match_the_whole_name_and_its_case() -> None:
    with pytest.raises(NoCandidatesError, match="no device can be selected"):
        chosen(Selection(include=("id:orin", "id:ORIN-1", "tag:la")))


def test_of_many_excluded_devices_a_few_are_named() -> None:
    offers = [Offer(f"device-{k:04}", front((10, 20)), 1.0) for k in range(1_000)]
    with pytest.raises(NoCandidatesError) as refused:
        plan_round(offers, AllDevices(), Allowance.of_site(1e5), 1.0, 1, selection=Selection(exclude=("id:*",)))
    said = str(refused.value)
    assert said.startswith(
        "no device can be selected: device-0000: excluded: matches id:*; device-0001: excluded: matches id:*; "
    )
    assert said.endswith("; and 990 more")


@pytest.mark.parametrize("pattern", ["", "orin-1", "name:orin-1", "id:", "id", ":orin"])
def test_a_pattern_of_another_form_is_refused(pattern: str) -> None:
    for selection in ({"include": (pattern,)}, {"exclude": ("id:a", pattern)}):
        with pytest.raises(InvalidInputError, match="write id:NAME, tag:NAME or site:NAME"):
            Selection(**selection)


@pytest.mark.parametrize("share", [-0.1, 10.1, 1e308, math.nan, math.inf])
def test_an_invalid_share_of_over_selection_is_refused(share: float) -> None:
    with pytest.raises(InvalidInputError, match="over-selection must be 0 to 10"):
        Selection(over_selection=share)


# --- backoff ------------------------------------------------------------------------------------------------------


def rounds_left_out(failures: int) -> int:
    """How many rounds a device is left out of after `failures` failures in a row, beside one that never fails."""
    offers = many(2)
    history = history_of(*[{offers[0].device_id: Participation(failed=True)}] * failures)
    rounds = [number for number in range(failures + 1, failures + 40) if backing_off(offers, history, number)]
    assert rounds == list(range(failures + 1, failures + 1 + len(rounds)))
    return len(rounds)


def test_backoff_grows_with_failures_up_to_a_limit() -> None:
    assert [rounds_left_out(failures) for failures in range(7)] == [0, 0, 1, 3, 7, 15, 15]


def test_a_completed_round_resets_the_failures() -> None:
    offers = many(2)
    failed, done = {"device-000": Participation(failed=True)}, {"device-000": Participation()}
    assert not backing_off(offers, history_of(failed, failed, failed, done, failed), 6)
    assert backing_off(offers, history_of(done, failed, {}, failed), 5)


def test_backoff_states_its_end_and_never_excludes_all_devices() -> None:
    offers = many(2)
    failing = history_of(*[{"device-000": Participation(failed=True)}] * 3)
    assert backing_off(offers, failing, 5) == {"device-000": "failed 3 times in a row: excluded until round 7"}
    assert backing_off(offers[:1], failing, 5) == {}
    plan = plan_round(offers, AllDevices(), Allowance.of_site(500.0), 1.0, 5, failing)
    assert [(d.selected, d.reason.startswith("failed 3 times")) for d in plan.decisions] == [
        (False, True),
        (True, False),
    ]


# --- Over-selection ---------------------------------------------------------------------------------------------------
# The number of replies that end a round whose plan selects more devices than its policy requests.

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
        assert plan_from_message(message) == plan


# --- Policy failures --------------------------------------------------------------------------------------------------
# Plans stay finite whatever devices report, and a device with which a policy fails is left out.

anything = st.floats() | st.sampled_from([5e-324, 1e-200, 800.0, 1e200, 1e300])
plausible = st.floats(1e-6, 1e7)


def named(name: str, utility: str = "equal") -> Policy:
    return policy_named("deadline", deadline_s=100.0, utility=utility) if name == "deadline" else policy_named(name)


def assert_finite(plan: RoundPlan) -> None:
    numbers = [plan.duration_s, plan.planned_w]
    for each in plan.assignments:
        numbers += [each.epoch_s, each.power_w, each.power_limit_w, each.warmup_s]
    assert plan.assignments and all(map(math.isfinite, numbers)) and plan.duration_s > 0


@given(epoch_s=anything, power_w=anything, log_sd=anything, power_log_sd=anything, warmup_s=anything, idle_w=anything)
@pytest.mark.parametrize("name", POLICIES)
@examples(15)
def test_a_front_is_refused_or_planned_with_finite_numbers(
    name: str, epoch_s: float, power_w: float, log_sd: float, power_log_sd: float, warmup_s: float, idle_w: float
) -> None:
    point = ((epoch_s, power_w),)
    try:
        odd_front = front(*point, epoch_log_sd=log_sd, power_log_sd=power_log_sd, warmup_s=warmup_s)
        odd = Offer("odd", odd_front, idle_w)
    except InvalidInputError:
        return
    try:
        assert_finite(plan_round([*many(4), odd], named(name), Allowance.of_site(2e5), 1.0, 1))
    except WattfleetError:
        assert name == "deadline"


@given(
    epoch_s=plausible,
    power_w=st.floats(1e-3, 1e3),
    log_sd=st.floats(0, 2),
    warmup_s=st.floats(0, 1e7),
    epochs=st.floats(1e-6, 1e6),
)
@pytest.mark.parametrize("name", POLICIES)
@examples(15)
def test_a_plausible_front_never_ends_the_planning_of_others(
    name: str, epoch_s: float, power_w: float, log_sd: float, warmup_s: float, epochs: float
) -> None:
    odd = Offer("odd", front((epoch_s, power_w), epoch_log_sd=log_sd, warmup_s=warmup_s), 2.0)
    try:
        assert_finite(plan_round([*many(4), odd], named(name), Allowance.of_site(150.0), epochs, 1))
    except WattfleetError:
        assert name == "deadline" and epochs > 1


@given(loss=anything, num_examples=anything, number=st.integers(1, 2**32 - 1))
@pytest.mark.parametrize("utility", ["equal", "loss"])
@pytest.mark.parametrize("name", POLICIES)
@examples(15)
def test_any_finite_results_are_planned_with(
    name: str, utility: str, loss: float, num_examples: float, number: int
) -> None:
    ordinary = Participation(num_examples=100.0, loss=2.0)
    try:
        odd = Participation(num_examples=num_examples, loss=loss)
    except InvalidInputError:
        return
    history = History()
    for past in range(1, 42):
        history = history.after(past, {"device-000": odd, "device-001": ordinary, "device-002": ordinary})
    assert_finite(plan_round(many(4), named(name, utility), Allowance.of_site(150.0), 1.0, number, history))


def test_a_claim_of_many_samples_does_not_displace_the_other_devices() -> None:
    parts = {f"device-{k:03}": Participation(num_examples=100.0, loss=2.0) for k in range(6)}
    honest = plan_round(many(6), named("progress"), Allowance.of_site(300.0), 1.0, 2, History().after(1, parts))
    parts["device-000"] = Participation(num_examples=1e9, loss=2.0)
    plan = plan_round(many(6), named("progress"), Allowance.of_site(300.0), 1.0, 2, History().after(1, parts))
    assert len(plan.assignments) == len(honest.assignments) == 6


@pytest.mark.parametrize("epochs", [math.nan, math.inf, 0.0, -1.0, 1e300, 5e-324])
def test_a_number_of_epochs_that_no_round_has_is_refused(epochs: float) -> None:
    with pytest.raises(InvalidInputError, match="number of epochs above 0 and at most 1,000,000"):
        plan_round(many(2), named("all"), Allowance.of_site(100.0), epochs, 1)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"epoch_log_sd": 800.0}, "at most 2"),
        ({"power_log_sd": 2.1}, "at most 2"),
        ({"warmup_s": 2e7}, "up to 10,000,000 s"),
    ],
)
def test_an_implausible_front_is_refused_with_its_range(values: dict[str, float], text: str) -> None:
    with pytest.raises(ImplausibleError, match=text):
        front((10, 20), **values)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Failing:
    """A policy that selects all devices and raises an error if certain devices are offered."""

    with_any_of: frozenset[str]
    name: str = "failing"
    has_count: bool = False

    def request(self, context: PlanningContext) -> SelectionRequest:
        failing = self.with_any_of & {offer.device_id for offer in context.offers}
        if failing:
            raise OverflowError("too large")
        return policy_named("all").request(context)


@pytest.mark.parametrize("bad", [{0}, {5}, {9}, {2, 7}, {0, 1, 9}])
def test_a_policy_that_fails_leaves_out_the_devices_it_fails_with(bad: set[int]) -> None:
    ids = frozenset(f"device-{k:03}" for k in bad)
    plan = plan_round(many(10), Failing(ids), Allowance.of_site(1_000.0), 1.0, 1)
    assert {each.device_id for each in plan.assignments} == {f"device-{k:03}" for k in range(10)} - ids
    for decision in plan.decisions:
        says_so = decision.reason == "left out: the policy failing fails with its values (OverflowError: too large)"
        assert says_so == (decision.device_id in ids) == (not decision.selected)


def test_a_policy_that_fails_with_all_devices_is_replaced_for_the_round() -> None:
    everyone = frozenset(f"device-{k:03}" for k in range(10))
    plan = plan_round(many(10), Failing(everyone), Allowance.of_site(1_000.0), 1.0, 1)
    assert [each.device_id for each in plan.assignments] == [f"device-{k:03}" for k in range(5)]
    assert "since the policy failing fails (OverflowError: too large)" in plan.decisions[0].reason


def test_a_device_that_is_left_out_is_not_selected_but_counts_as_idle() -> None:
    selection = Selection(left_out={"device-000": "its front is refused"})
    plan = plan_round(many(2, idle_w=2.0), named("all"), Allowance.of_site(100.0), 1.0, 1, selection=selection)
    assert [each.device_id for each in plan.assignments] == ["device-001"]
    assert plan.decisions[0].reason == "left out: its front is refused"
    assert plan.planned_w == plan.assignments[0].power_limit_w + 2.0


def test_a_prediction_is_thinned_to_its_plausible_modes() -> None:

    modes = np.array([[1 + k, 1e6, 1e9, 2e9] for k in range(3)], dtype=np.float64)
    sd = np.array([0.1, 5.0, 0.1])
    made = predicted_front(modes, Prediction(np.array([10.0, 20.0, 30.0]), np.array([30e3, 20e3, 10e3]), sd, sd), 100)
    assert made.modes[:, 0].tolist() == [1, 3]
    with pytest.raises(ImplausibleError, match="standard deviation"):
        predicted_front(modes, Prediction(np.ones(3), np.ones(3), sd + 5, sd), 100)
