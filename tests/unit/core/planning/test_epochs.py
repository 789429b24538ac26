"""The local epochs that a plan chooses: valid choices, and the epochs of each device under each policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.fleets import Fleet, fleets, front, history_of, many, reason_of
from tests.fakes.short_forms import first
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import (
    Allowance,
    EpochChoice,
    EpochOption,
    FrontTable,
    InFlight,
    Offer,
    Participation,
    RoundPlan,
    Selection,
    curves_of,
    plan_round,
    trim_rounds,
)
from wattfleet.core.planning.epoch_choice import MAX_EPOCHS
from wattfleet.core.planning.policies import (
    AllDevices,
    Deadline,
    Fair,
    FastestK,
    Oort,
    Policy,
    Progress,
    RandomK,
    Tiers,
)

# --- Epoch choice -----------------------------------------------------------------------------------------------------
# The numbers of local epochs that a plan may choose: valid choices, and the errors for invalid ones.


def stated(choice: EpochChoice) -> list[tuple[float, float, float | None]]:
    return [(option.epochs, option.progress, option.half_devices) for option in choice.options]


# --- valid choices -------------------------------------------------------------------------------------------------


def test_epochs_without_progress_count_by_their_square_root() -> None:
    choice = EpochChoice.of([9, 1, 4])
    assert stated(choice) == [(1, 1.0, None), (4, 2.0, None), (9, 3.0, None)], "by ascending epochs"
    assert not choice.is_per_device
    assert choice.fewest == 1


def test_epochs_that_can_be_read_only_once_are_read_once() -> None:
    assert EpochChoice.of(map(int, "2,8".split(","))) == EpochChoice.of((8, 2))


def test_progress_and_devices_for_half_of_it_are_as_stated() -> None:
    choice = EpochChoice.of({5: 30.0, 2: 20.0, 1: 12.0}, half_devices={5: 8.0, 1: 2.5}, is_per_device=True)
    assert stated(choice) == [(1, 12.0, 2.5), (2, 20.0, None), (5, 30.0, 8.0)]
    assert choice.is_per_device


def test_plain_numbers_may_state_the_devices_for_half_of_the_progress() -> None:
    assert stated(EpochChoice.of([1, 4], half_devices={4: 6.0})) == [(1, 1.0, None), (4, 2.0, 6.0)]


@given(st.sets(st.integers(1, 10**6), min_size=1, max_size=16))
def test_up_to_sixteen_whole_numbers_are_a_choice(numbers: set[int]) -> None:
    choice = EpochChoice.of(numbers)
    assert [option.epochs for option in choice.options] == sorted(numbers)
    assert [option.progress**2 for option in choice.options] == pytest.approx(sorted(numbers))
    assert choice.fewest == min(numbers)


def test_a_fixed_number_is_a_choice_of_one_and_need_not_be_whole() -> None:
    assert stated(EpochChoice.fixed(0.5)) == [(0.5, 1.0, None)]
    assert EpochChoice.fixed(0.5).fewest == 0.5


def test_options_may_be_given_as_any_sequence_and_are_kept() -> None:
    options = [EpochOption(1), EpochOption(2, 1.5)]
    choice = EpochChoice(options)
    options.clear()
    assert choice == EpochChoice((EpochOption(1), EpochOption(2, 1.5)))
    assert hash(choice) == hash(EpochChoice((EpochOption(1), EpochOption(2, 1.5))))


# --- invalid options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1 / MAX_EPOCHS, 1, MAX_EPOCHS])
def test_the_most_and_the_fewest_epochs_are_within_the_range(epochs: float) -> None:
    assert EpochOption(epochs).epochs == epochs


@pytest.mark.parametrize("epochs", [0, -1, 0.9 / MAX_EPOCHS, 1.1 * MAX_EPOCHS, math.inf, -math.inf, math.nan])
def test_epochs_out_of_range_are_refused_with_the_range(epochs: float) -> None:
    for refused in (EpochOption, EpochChoice.fixed):
        with pytest.raises(InvalidInputError) as error:
            refused(epochs)
        assert str(error.value) == f"a round needs a number of epochs above 0 and at most 1,000,000, not {epochs:g}"


@pytest.mark.parametrize("progress", [0.0, -1.0, math.inf, math.nan])
def test_a_progress_out_of_range_is_refused_with_its_epochs(progress: float) -> None:
    with pytest.raises(InvalidInputError, match="the progress of a round with 3 epochs must be above 0") as error:
        EpochOption(3, progress)
    assert str(error.value).endswith(f"not {progress:g}")


@pytest.mark.parametrize("half", [0.0, -2.0, math.inf, math.nan])
def test_devices_for_half_the_progress_out_of_range_are_refused_with_their_epochs(half: float) -> None:
    with pytest.raises(InvalidInputError, match="half the progress of a round with 5 epochs must be above 0") as error:
        EpochOption(5, 1.0, half)
    assert str(error.value).endswith(f"not {half:g}")


# --- invalid choices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"progress": []}, "give 1 to 16 numbers of local epochs to choose from, not 0"),
        ({"progress": {}}, "give 1 to 16 numbers of local epochs to choose from, not 0"),
        ({"progress": range(1, 18)}, "give 1 to 16 numbers of local epochs to choose from, not 17"),
        ({"progress": [1, 2, 2]}, r"state each number of local epochs once, not \(1, 2, 2\)"),
        ({"progress": [0, 1]}, "a whole number of local epochs, 1 or more, not 0"),
        ({"progress": [-3, 1]}, "a whole number of local epochs, 1 or more, not -3"),
        ({"progress": {0: 1.0}}, "a whole number of local epochs, 1 or more, not 0"),
        ({"progress": [1, 2.5]}, "a whole number of local epochs, 1 or more, not 2.5"),
        ({"progress": {0.5: 1.0, 1: 2.0}}, "a whole number of local epochs, 1 or more, not 0.5"),
        ({"progress": [1, 2 * 10**6]}, "at most 1,000,000, not 2e"),
        ({"progress": {1: 1.0, 2: -1.0}}, "the progress of a round with 2 epochs must be above 0"),
        (
            {"progress": {1: 1.0, 2: 2.0}, "half_devices": {3: 1.0}},
            "half_devices states 3 local epochs, .* not an option",
        ),
        (
            {"progress": [1, 2], "half_devices": {9: 1.0, 4: 1.0}},
            "half_devices states 4 local epochs, .* not an option",
        ),
        ({"progress": [1, 2], "half_devices": {2: 0.0}}, "half the progress of a round with 2 epochs"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_with_what_is_wrong(wrong: Mapping[str, Any], error: str) -> None:
    with pytest.raises(InvalidInputError, match=error):
        EpochChoice.of(**wrong)


@pytest.mark.parametrize("more", [2.0, 1.5])
def test_more_epochs_that_make_no_more_progress_are_named(more: float) -> None:
    with pytest.raises(InvalidInputError) as error:
        EpochChoice.of({1: 1.0, 2: 2.0, 4: more})
    assert str(error.value).startswith(f"4 local epochs with a progress of {more:g} follow 2 with 2: ")
    assert "leave out numbers that bring no more progress" in str(error.value)


@pytest.mark.parametrize("options", [((2, 1.0), (1, 2.0)), ((1, 1.0), (1, 2.0)), ((1, 2.0), (2, 1.0))])
def test_options_out_of_order_are_refused(options: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(InvalidInputError, match="by ascending epochs and progress"):
        EpochChoice([EpochOption(*option) for option in options])


def test_sixteen_options_are_not_too_many() -> None:
    assert len(EpochChoice.of(range(1, 17)).options) == 16


# --- Policy epochs ----------------------------------------------------------------------------------------------------
# The epochs that a plan chooses for devices under each policy, its reasons, and trims.

PLENTY_W = 1_000.0
CHOICE = EpochChoice.of([1, 3, 9])  # their relative progress is 1, 1.73 and 3


def epochs_of(plan: RoundPlan) -> dict[str, float]:
    return {assignment.device_id: assignment.epochs for assignment in plan.assignments}


def twins(count: int, *points: tuple[float, float]) -> list[Offer]:
    return [Offer(f"device-{k}", front(*points), 2.0) for k in range(count)]


def planned(offers: Sequence[Offer], policy: Policy, epochs: float | EpochChoice, watts: float = PLENTY_W) -> RoundPlan:
    return plan_round(offers, policy, Allowance.of_site(watts), epochs, 1)


# --- the same epochs for all ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overhead_s", "epochs"), [(0.0, 1), (30.0, 3), (1000.0, 9)])
@pytest.mark.parametrize("is_per_device", [False, True])
def test_the_more_a_round_costs_besides_the_more_its_devices_train(
    overhead_s: float, epochs: float, is_per_device: bool
) -> None:
    """With an overhead of 30 s, progress over duration is 1 / 40, 1.73 / 60 and 3 / 120."""
    choice = EpochChoice.of([1, 3, 9], is_per_device=is_per_device)
    plan = planned(twins(4, (10, 12)), Progress(overhead_s=overhead_s), choice)
    assert epochs_of(plan) == {f"device-{k}": epochs for k in range(4)}
    assert plan.duration_s == 10.0 * epochs


def test_the_scale_of_the_progress_does_not_matter() -> None:
    plans = [
        planned(many(9), Progress(overhead_s=60.0), EpochChoice.of({1: scale, 3: 1.9 * scale, 9: 2.5 * scale}), 120.0)
        for scale in (1.0, 1e-6, 1e6)
    ]
    assert plans[0] == plans[1] == plans[2]


def test_epochs_that_need_more_devices_are_chosen_where_there_are_many() -> None:
    choice = EpochChoice.of({1: 1.0, 9: 3.0}, half_devices={9: 30.0})
    # Of many devices, n make a progress of about n / (n + 3) with 1 epoch in 1010 s, and 3 n / (n + 30) with 9 epochs
    # in 1090 s.
    for count, epochs in ((2, 1), (40, 9)):
        plan = planned(twins(400, (10, 12)), Progress(overhead_s=1000.0), choice, 400 * 2.0 + count * 10.0)
        assert list(epochs_of(plan).values()) == [epochs] * count
    # All devices of a fleet make all the progress, however few they are.
    plan = planned(twins(2, (10, 12)), Progress(overhead_s=1000.0), choice)
    assert set(epochs_of(plan).values()) == {9}


def test_without_a_statement_the_devices_for_half_the_progress_are_the_policys() -> None:
    for half, epochs in ((0.5, 1), (50.0, 9)):
        # `half_devices` is stated for 9 epochs only, as 20. For 1 epoch, the policy's value counts.
        choice = EpochChoice.of({1: 1.0, 9: 2.0}, half_devices={9: 20.0})
        plan = planned(twins(200, (10, 12)), Progress(half_devices=half, overhead_s=1000.0), choice, 200 * 2.0 + 100.0)
        assert set(epochs_of(plan).values()) == {epochs}


# --- different epochs for each device -------------------------------------------------------------------------------


def fast_ones_and_a_slow_one() -> list[Offer]:
    """Five devices that train an epoch in 10 s and one that takes 50 s. Each has a slower mode at 10 W less."""
    fast = [Offer(f"fast-{k}", front((10, 22), (20, 12)), 2.0) for k in range(5)]
    return [*fast, Offer("slow", front((50, 22), (120, 12)), 2.0)]


def one_or_nine(is_per_device: bool) -> EpochChoice:
    return EpochChoice.of({1: 1.0, 9: 1.6}, is_per_device=is_per_device)


SPARING = Progress(half_devices=6.0, overhead_s=200.0)


def test_a_slow_device_trains_fewer_epochs_and_nobody_waits_for_it() -> None:
    """(5 * 1.6 + 1) / (6 + 6) in 290 s is more than 5 * 1.6 / (5 + 6)."""
    plan = planned(fast_ones_and_a_slow_one(), SPARING, one_or_nine(is_per_device=True))
    assert epochs_of(plan) == {**{f"fast-{k}": 9 for k in range(5)}, "slow": 1}
    assert plan.duration_s == 90.0, "that of the fast ones"


def test_with_the_same_epochs_for_all_a_slow_device_is_left_out() -> None:
    plan = planned(fast_ones_and_a_slow_one(), SPARING, one_or_nine(is_per_device=False))
    assert epochs_of(plan) == {f"fast-{k}": 9 for k in range(5)}
    assert reason_of(plan, "slow") == "other devices make more progress per second"


def test_many_devices_have_epochs_of_their_own_too() -> None:
    """The fleet is larger than the ones whose devices are improved one at a time."""
    fast = [Offer(f"fast-{k:02}", front((10, 22), (20, 12)), 2.0) for k in range(30)]
    slow = [Offer(f"slow-{k:02}", front((50, 22), (120, 12)), 2.0) for k in range(6)]
    policy = Progress(half_devices=36.0, overhead_s=200.0)
    # (30 * 1.6 + 6) / (36 + 36) in 290 s is more than 30 * 1.6 / (30 + 36), and than 36 / 72 in 250 s.
    plan = planned([*fast, *slow], policy, one_or_nine(is_per_device=True), 10 * PLENTY_W)
    assert epochs_of(plan) == {
        device_id: 9 if device_id.startswith("fast") else 1
        for device_id in (offer.device_id for offer in (*fast, *slow))
    }
    assert plan.duration_s == 90.0


# --- other policies -------------------------------------------------------------------------------------------------

WITHOUT_CHOICE: list[Policy] = [
    FastestK(3),
    RandomK(3, 5),
    AllDevices(),
    Fair(3),
    Oort(3),
    Tiers(3),
    Deadline(90.0),
]


@pytest.mark.parametrize("policy", WITHOUT_CHOICE, ids=lambda policy: policy.name)
@pytest.mark.parametrize("is_per_device", [False, True])
def test_policies_that_choose_none_plan_as_with_the_fewest(policy: Policy, is_per_device: bool) -> None:
    choice = EpochChoice.of([4, 2, 8], is_per_device=is_per_device)
    plan = planned(many(7), policy, choice, 150.0)
    assert plan == planned(many(7), policy, 2.0, 150.0)
    assert set(epochs_of(plan).values()) == {2}


@pytest.mark.parametrize("policy", [Progress(), FastestK(3)], ids=lambda policy: policy.name)
def test_a_choice_of_one_number_is_no_choice(policy: Policy) -> None:
    assert planned(many(7), policy, EpochChoice.of([2]), 150.0) == planned(many(7), policy, 2.0, 150.0)


@pytest.mark.parametrize("count", first(2, [2, 20, 1, 5]))
@pytest.mark.parametrize("is_per_device", [False, True])
@pytest.mark.parametrize("devices", first(1, [9, 20]))
def test_a_count_is_the_maximum_number_of_devices(count: int, is_per_device: bool, devices: int) -> None:
    choice = EpochChoice.of([1, 3, 9], is_per_device=is_per_device)
    for watts in (60.0, 150.0, PLENTY_W):
        plan = planned(many(devices), Progress(count=count, overhead_s=100.0), choice, watts)
        assert 1 <= len(plan.assignments) <= count
    # With equal devices and enough watts, each device up to the count adds progress.
    plan = planned(twins(devices, (10, 12)), Progress(count=count), choice)
    assert len(plan.assignments) == min(count, devices)


def test_over_selection_adds_to_a_count() -> None:
    more = Selection(over_selection=0.5)
    allowance = Allowance.of_site(PLENTY_W)
    plan = plan_round(twins(9, (10, 12)), Progress(count=4), allowance, CHOICE, 1, selection=more)
    assert len(plan.assignments) == 6


def test_who_was_away_for_longer_is_taken_with_any_number_of_epochs() -> None:
    history = history_of(
        {f"device-{k}": Participation(num_examples=10) for k in range(4)},
        {"device-0": Participation(num_examples=10), "device-1": Participation(num_examples=10)},
    )
    for overhead_s, epochs in ((0.0, 1), (10_000.0, 9)):
        policy = Progress(count=2, overhead_s=overhead_s)
        plan = plan_round(twins(4, (10, 12)), policy, Allowance.of_site(PLENTY_W), CHOICE, 3, history)
        assert epochs_of(plan) == {"device-2": epochs, "device-3": epochs}


# --- reasons --------------------------------------------------------------------------------------------------------


def test_the_decisions_tell_how_many_epochs_each_device_trains() -> None:
    plan = planned(fast_ones_and_a_slow_one(), SPARING, one_or_nine(is_per_device=True))
    why = "selected: in the set with the most progress per second"
    assert reason_of(plan, "fast-3") == f"{why}; done with 9 local epochs within 90.0 s at 20.0 W above idle"
    assert reason_of(plan, "slow") == f"{why}; done with 1 local epoch within 90.0 s at 20.0 W above idle"


@pytest.mark.parametrize("policy", [Progress(), FastestK(3)], ids=lambda policy: policy.name)
def test_where_nothing_was_chosen_nothing_is_told(policy: Policy) -> None:
    choices: list[float | EpochChoice] = [2.0, EpochChoice.of([2])]
    if not isinstance(policy, Progress):
        choices.append(CHOICE)
    for choice in choices:
        assert not any("epochs" in decision.reason for decision in planned(many(5), policy, choice).decisions)


# --- a trim ---------------------------------------------------------------------------------------------------------


def test_a_trim_keeps_the_epochs_of_each_device() -> None:
    offers = fast_ones_and_a_slow_one()
    plan = planned(offers, SPARING, one_or_nine(is_per_device=True))
    [trim] = trim_rounds([InFlight(plan, offers)], Allowance.of_site(6 * 12.0 + 5.0))
    assert trim is not None
    assert epochs_of(trim.plan) == epochs_of(plan)
    assert {assignment.epoch_s for assignment in trim.plan.assignments} == {20.0, 120.0}
    assert trim.plan.duration_s == 9 * 20.0, "the slow one needs 120 s for its one epoch"


def test_a_trim_of_the_slow_device_alone_takes_as_long_as_its_epochs() -> None:
    offers = fast_ones_and_a_slow_one()
    plan = planned(offers, SPARING, one_or_nine(is_per_device=True))
    of_others_w = 5 * 22.0
    [trim] = trim_rounds([InFlight(plan, offers[5:])], Allowance.of_site(of_others_w + 15.0, of_others_w))
    assert trim is not None and trim.changed == ("slow",)
    assert epochs_of(trim.plan) == epochs_of(plan)
    assert trim.plan.duration_s == 120.0


# --- power curves ---------------------------------------------------------------------------------------------------


def test_the_steps_of_devices_with_epochs_of_their_own_by_hand() -> None:
    offers = [
        # With many epochs, the second mode finishes before the first, although its warm-up is long.
        Offer("a", front((12, 30), (10, 20), warmup_s=[0.0, 20.0]), 5.0),
        Offer("b", front((12, 30), (10, 20), warmup_s=[0.0, 20.0]), 5.0),
        # The device's limit rules out the first mode. The last mode draws less than idle power.
        Offer("c", front((1, 40), (2, 25), (4, 3), warmup_s=3.0), 4.0, limit_w=30.0),
        # The device's limit rules out its only mode.
        Offer("d", front((1, 40)), 4.0, limit_w=30.0),
        Offer("e", front((7, 6)), 1.0),
    ]
    curves = FrontTable.of(offers).curves(np.array([1.0, 20.0, 10.0, 3.0, 0.5]))
    assert curves.start.tolist() == [0, 2, 4, 6, 6, 7]
    assert curves.time_s.tolist() == [12.0, 30.0, 220.0, 220.0, 23.0, 43.0, 3.5]
    assert curves.extra_w.tolist() == [25.0, 15.0, 25.0, 15.0, 21.0, 0.0, 5.0]
    assert curves.point.tolist() == [0, 1, 0, 1, 1, 2, 0]
    assert curves.idle_w.tolist() == [5.0, 5.0, 4.0, 4.0, 1.0]


@given(fleets(power_log_sd=0.1), st.lists(st.sampled_from([0.5, 1.0, 2.0, 7.0]), min_size=4, max_size=4))
def test_each_device_has_the_steps_that_it_has_alone(fleet: Fleet, epochs: list[float]) -> None:
    own = epochs[: len(fleet.offers)]
    together = FrontTable.of(fleet.offers).curves(np.array(own))
    alone = [curves_of([offer], each) for offer, each in zip(fleet.offers, own, strict=True)]
    for name in ("time_s", "extra_w", "point", "idle_w"):
        assert getattr(together, name).tolist() == [value for each in alone for value in getattr(each, name).tolist()]
    assert np.diff(together.start).tolist() == [int(each.start[1]) for each in alone]


@given(fleets(), st.sampled_from([0.5, 1.0, 7.0]))
def test_one_number_serves_for_all_devices(fleet: Fleet, epochs: float) -> None:
    table = FrontTable.of(fleet.offers)
    assert table.curves(epochs).time_s.tolist() == table.curves(np.full(len(fleet.offers), epochs)).time_s.tolist()
