"""The operator's selection of devices, and the backoff of devices that fail repeatedly."""

from __future__ import annotations

import math

import pytest

from tests.fakes.fleets import history_of, many, tree
from tests.fakes.fronts import front
from wattfleet.errors import InvalidInputError, NoCandidatesError
from wattfleet.planning import Allowance, Offer, Participation, Selection, plan_round
from wattfleet.planning.plan import backing_off
from wattfleet.planning.policies import AllDevices

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
