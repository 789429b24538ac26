"""The policy `progress`: which devices and epochs it selects, compared with the best of all possible plans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.fakes.fleets import (
    Fleet,
    done_s,
    drawn_w,
    fleet_on_racks,
    front,
    history_of,
    many,
    planned_w,
    points_of,
    run,
)
from tests.fakes.short_forms import first
from wattfleet.core.planning import (
    Allowance,
    EpochChoice,
    History,
    Offer,
    Participation,
    RoundPlan,
    Selection,
    curves_of,
    plan_round,
)
from wattfleet.core.planning.policies import Progress
from wattfleet.core.planning.policies.progress import device_worth
from wattfleet.core.prediction import normal_quantile

# --- Policy `progress` ------------------------------------------------------------------------------------------------
# The devices that the policy `progress` selects, and how many.


PLENTY_W = 1_000.0


def chosen(plan: RoundPlan) -> list[str]:
    return [assignment.device_id for assignment in plan.assignments]


def twins(count: int, *points: tuple[float, float]) -> list[Offer]:
    return [Offer(f"device-{k}", front(*points), 2.0) for k in range(count)]


@pytest.mark.parametrize("seed", first(6, range(20)))
def test_among_equals_the_number_and_duration_are_optimal(seed: int) -> None:
    chance = np.random.default_rng(seed)
    fleet = fleet_on_racks(chance, 8)
    policy = Progress(half_devices=float(chance.uniform(0.5, 6)), overhead_s=float(chance.uniform(0, 30)))

    def progress(devices: int, duration_s: float) -> float:
        needed = devices + policy.half_devices * (8 - devices) / 7
        return devices / needed / (duration_s + policy.overhead_s)

    # With equal devices, the most devices that fit into a duration are best for it. All durations are tried.
    curves, headroom = curves_of(fleet.offers, 1.0), fleet.allowance.headroom(fleet.offers)
    best = max(
        progress(len(headroom.largest_set(curves.extra_at(curves.steps_within(limit_s)))), limit_s)
        for limit_s in np.unique(curves.time_s)
    )
    plan = plan_round(fleet.offers, policy, fleet.allowance, 1.0, 1)
    assert progress(len(plan.assignments), plan.duration_s) >= 0.99 * best


def test_low_budgets_select_few_fast_devices_rather_than_many_slow_ones() -> None:
    offers = twins(10, (10, 12), (200, 3))  # 10 W or 1 W above idle power
    plan = plan_round(offers, Progress(overhead_s=5.0), Allowance.of_site(10 * 2.0 + 30.0), 1.0, 1)
    assert (len(plan.assignments), plan.duration_s) == (3, 10.0)
    # If all devices can be fast, all train.
    assert len(plan_round(offers, Progress(), Allowance.of_site(PLENTY_W), 1.0, 1).assignments) == 10


def test_devices_of_the_run_that_are_busy_or_away_still_have_data() -> None:
    """Four of four make all of the progress, in 25 s instead of 20 s; of 44, they make little more than three."""
    offers = [*twins(3, (10, 12)), Offer("slow", front((15, 12)), 2.0)]
    allowance = Allowance.of_site(PLENTY_W)
    alone = plan_round(offers, Progress(), allowance, 1.0, 2)
    assert "slow" in chosen(alone)
    elsewhere = history_of({f"elsewhere-{k}": Participation(num_examples=100) for k in range(40)})
    assert "slow" not in chosen(plan_round(offers, Progress(), allowance, 1.0, 2, elsewhere))


def test_two_devices_of_which_one_waited_longer_and_one_has_more_data_count_alike() -> None:
    offers = twins(2, (10, 12))
    history = history_of(
        {"device-0": Participation(num_examples=100)}, {}, {"device-1": Participation(num_examples=300)}
    )
    worth = device_worth(offers, 4, history)
    assert worth.tolist() == pytest.approx([1.0, 1.0])


def test_a_straggler_is_selected_at_regular_intervals() -> None:
    offers = [*twins(6, (10, 12)), Offer("slow", front((25, 12)), 2.0)]
    history = History()
    turns = []
    for server_round in range(1, 31):
        plan = plan_round(offers, Progress(), Allowance.of_site(PLENTY_W), 1.0, server_round, history)
        history = history.after(
            server_round, {device_id: Participation(num_examples=100) for device_id in chosen(plan)}
        )
        if "slow" in chosen(plan):
            turns.append(server_round)
    assert 3 <= len(turns) <= 10
    assert np.ptp(np.diff(turns)) <= 2  # evenly


def test_every_device_is_selected_at_some_time_on_a_low_budget() -> None:
    offers = [*twins(4, (10, 12)), Offer("hungry", front((10, 22)), 2.0)]
    history = History()
    for server_round in range(1, 21):
        plan = plan_round(offers, Progress(), Allowance.of_site(5 * 2.0 + 20.0), 1.0, server_round, history)
        history = history.after(
            server_round, {device_id: Participation(num_examples=100) for device_id in chosen(plan)}
        )
    assert set(history.last_selected) == {offer.device_id for offer in offers}


@pytest.mark.parametrize("budget_w", [24.0, 34.0, 54.0, PLENTY_W])
def test_every_device_trains_within_the_first_rounds(budget_w: float) -> None:
    # Six times as slow as the others, and hungrier: by progress per second alone it would wait for fifty rounds.
    offers = [*twins(5, (10, 12), (40, 4)), Offer("slow", front((60, 14), (90, 6)), 2.0)]
    history, first, rounds = History(), {}, 0
    for server_round in range(1, 9):
        plan = plan_round(offers, Progress(), Allowance.of_site(budget_w), 1.0, server_round, history)
        if server_round == 1:
            rounds = math.ceil(len(offers) / len(chosen(plan))) + 2
        for device_id in chosen(plan):
            first.setdefault(device_id, server_round)
        history = history.after(server_round, {device_id: Participation() for device_id in chosen(plan)})
    assert first.keys() == {offer.device_id for offer in offers}
    assert max(first.values()) <= rounds
    due = first["slow"]
    assert due > 1 or budget_w == PLENTY_W


def test_a_device_that_is_excluded_by_a_rule_is_not_forced_to_train() -> None:
    offers = [*twins(3, (10, 12)), Offer("slow", front((400, 14)), 2.0)]
    history = run(offers[:3], Progress(), rounds=10, site_w=PLENTY_W)
    without = Selection(exclude=("id:slow",))
    plan = plan_round(offers, Progress(), Allowance.of_site(PLENTY_W), 1.0, 11, history, without)
    assert "slow" not in chosen(plan)
    plan = plan_round(offers, Progress(), Allowance.of_site(PLENTY_W), 1.0, 11, history)
    [reason] = [decision.reason for decision in plan.decisions if decision.device_id == "slow"]
    assert "it has not trained in this run yet" in reason


def test_a_device_that_is_due_does_not_wait_for_the_watts_of_others() -> None:
    """Together they take 600 s within 12 W above idle, and the slow one alone 60 s."""
    offers = [Offer("fast", front((10, 12), (100, 6)), 2.0), Offer("slow", front((60, 14), (600, 10)), 2.0)]
    history = run(offers[:1], Progress(), rounds=1, site_w=PLENTY_W)
    plan = plan_round(offers, Progress(), Allowance.of_site(2 * 2.0 + 12.0), 1.0, 2, history)
    assert (chosen(plan), plan.duration_s) == (["slow"], 60.0)
    # Where the watts suffice for both, both train.
    plan = plan_round(offers, Progress(), Allowance.of_site(2 * 2.0 + 22.0), 1.0, 2, history)
    assert (chosen(plan), plan.duration_s) == (["fast", "slow"], 60.0)


def test_watts_that_are_left_go_to_devices_that_finish_within_the_round() -> None:
    # The slow device is due and takes 60 s; the others need 1 W each to finish within that, and 40 W are there.
    offers = [*twins(8, (10, 12), (55, 3)), Offer("slow", front((60, 14)), 2.0)]
    history = run(offers[:8], Progress(), rounds=10, site_w=PLENTY_W)
    plan = plan_round(offers, Progress(), Allowance.of_site(9 * 2.0 + 40.0), 1.0, 11, history)
    assert len(chosen(plan)) == 9


def test_of_two_devices_the_less_certain_one_is_tried() -> None:
    # One of both can train. They are equally fast at the planning quantile, and one has hardly been measured.
    certain = Offer("certain", front((30, 12), epoch_log_sd=0.02), 2.0)
    median_s = 30 * math.exp(normal_quantile(0.9) * (0.02 - 0.5))
    uncertain = Offer("uncertain", front((median_s, 12), epoch_log_sd=0.5), 2.0)
    plan = plan_round([certain, uncertain], Progress(), Allowance.of_site(2.0 + 12.0), 1.0, 1)
    assert chosen(plan) == ["uncertain"]


def uneven() -> list[Offer]:
    """Nine devices, each a little slower than the one before, and one that is twice as fast as the first."""
    return [
        *(Offer(f"device-{k}", front((10 + 3 * k, 12)), 2.0) for k in range(9)),
        Offer("quick", front((5, 12)), 2.0),
    ]


def test_a_newcomer_to_a_long_run_does_not_train_alone() -> None:
    *known, newcomer = uneven()
    history = run(known, Progress(), rounds=30, site_w=PLENTY_W)
    plan = plan_round([*known, newcomer], Progress(), Allowance.of_site(PLENTY_W), 1.0, 31, history)
    assert "quick" in chosen(plan) and len(chosen(plan)) >= 3


def test_a_device_that_always_fails_is_never_selected_alone() -> None:
    history = run(
        uneven(), Progress(), rounds=25, part=lambda device_id, _: Participation(device_id == "quick"), site_w=PLENTY_W
    )
    with_it = [past.device_ids for past in history.rounds if "quick" in past.device_ids]
    assert len(with_it) >= 5 and min(map(len, with_it)) >= 3
    # The failing device costs the others no trainings, and none of them much more than a fifth.
    healthy = run(uneven(), Progress(), rounds=25, site_w=PLENTY_W).times_completed
    others = [f"device-{k}" for k in range(9)]
    assert sum(history.times_completed[each] for each in others) >= sum(healthy[each] for each in others)
    assert all(history.times_completed[each] >= 0.75 * healthy[each] for each in others)


def test_failed_rounds_do_not_raise_the_weight() -> None:
    participations = {f"device-{k}": Participation(num_examples=10) for k in range(3)}
    history = history_of(participations, {}, {}, {"device-0": Participation(failed=True)})
    # The other devices were tried four rounds ago, and device 0 in the last round.
    plan = plan_round(twins(3, (10, 12)), Progress(), Allowance.of_site(3 * 2.0 + 20.0), 1.0, 5, history)
    assert chosen(plan) == ["device-1", "device-2"]


def small_ones_and_a_big_one() -> tuple[list[Offer], History]:
    """Three devices that need 1 W above idle power, and one that needs 12 W and has ten times as many samples."""
    offers = [*(Offer(f"small-{k}", front((10, 3)), 2.0) for k in range(3)), Offer("big", front((10, 14)), 2.0)]
    participations = {
        offer.device_id: Participation(num_examples=100 if offer.device_id == "big" else 10) for offer in offers
    }
    return offers, history_of(participations)


@pytest.mark.parametrize("count", [None, 1, 2])
def test_small_devices_do_not_displace_one_worth_more_than_all(count: int | None) -> None:
    offers, history = small_ones_and_a_big_one()
    plan = plan_round(offers, Progress(count), Allowance.of_site(4 * 2.0 + 12.0), 1.0, 2, history)
    assert chosen(plan) == ["big"]


def test_few_places_go_to_the_most_worthwhile_devices_that_fit() -> None:
    offers, history = small_ones_and_a_big_one()
    plan = plan_round(offers, Progress(2), Allowance.of_site(4 * 2.0 + 13.0), 1.0, 2, history)
    assert chosen(plan) == ["big", "small-0"]


def test_of_equally_fast_devices_those_with_more_samples_are_selected() -> None:
    offers = twins(4, (10, 12))
    history = history_of({f"device-{k}": Participation(num_examples=100 if k == 2 else 10) for k in range(4)})
    plan = plan_round(offers, Progress(), Allowance.of_site(4 * 2.0 + 10.0), 1.0, 2, history)
    assert chosen(plan) == ["device-2"]


@pytest.mark.parametrize("told", [None, 0.0])
def test_without_reported_samples_devices_alternate(told: float | None) -> None:
    history = history_of({f"device-{k}": Participation(num_examples=told) for k in range(3)})
    plan = plan_round(twins(4, (10, 12)), Progress(), Allowance.of_site(4 * 2.0 + 10.0), 1.0, 2, history)
    assert chosen(plan) == ["device-3"]


def test_more_overhead_per_round_selects_more_devices() -> None:
    offers = [Offer(f"device-{k}", front((10.0 + 5 * k, 12)), 2.0) for k in range(12)]
    sizes = [
        len(plan_round(offers, Progress(overhead_s=seconds), Allowance.of_site(PLENTY_W), 1.0, 1).assignments)
        for seconds in (0.0, 10.0, 60.0, 600.0)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == 12


@pytest.mark.parametrize("count", [1, 4, 9, 50])
def test_a_count_is_the_maximum_number_of_devices(count: int) -> None:
    for watts in (40.0, 150.0, PLENTY_W):
        plan = plan_round(many(9), Progress(count=count), Allowance.of_site(watts), 1.0, 1)
        assert 1 <= len(plan.assignments) <= count
    # With equal devices and enough watts, each device up to the count adds progress.
    plan = plan_round(twins(9, (10, 12)), Progress(count=count), Allowance.of_site(PLENTY_W), 1.0, 1)
    assert len(plan.assignments) == min(count, 9)


@pytest.mark.parametrize(("share", "taken"), [(0.0, 4), (0.25, 5), (0.3, 6), (5.0, 9)])
def test_over_selection_adds_to_a_count(share: float, taken: int) -> None:
    more = Selection(over_selection=share)
    plan = plan_round(twins(9, (10, 12)), Progress(count=4), Allowance.of_site(PLENTY_W), 1.0, 1, selection=more)
    assert len(plan.assignments) == taken


def test_every_device_that_is_not_selected_has_a_reason() -> None:
    offers = [*twins(3, (10, 12)), Offer("slow", front((900, 12)), 2.0)]
    plan = plan_round(offers, replace(Progress(), overhead_s=0.0), Allowance.of_site(PLENTY_W), 1.0, 1)
    assert {each.device_id: each.reason for each in plan.decisions}[
        "slow"
    ] == "other devices make more progress per second"


# --- Epochs of the policy `progress` ----------------------------------------------------------------------------------
# Plans of the policy `progress` that choose epochs and devices, compared with the best of all possible plans.


def choice_of(chance: np.random.Generator, is_per_device: bool) -> EpochChoice:
    """Three numbers of epochs, more of which make more progress; two of them state `half_devices`."""
    numbers = np.sort(chance.choice(np.arange(1, 11), 3, replace=False)).tolist()
    progress = np.cumsum(chance.uniform(0.2, 1.0, 3)).tolist()
    half = {numbers[0]: float(chance.uniform(0.5, 4)), numbers[2]: float(chance.uniform(1, 8))}
    return EpochChoice.of(dict(zip(numbers, progress, strict=True)), half, is_per_device)


def worth_of(fleet: Fleet, history: History, server_round: int) -> NDArray[np.float64]:
    """The worth of each device: samples times rounds since its last selection, relative to the mean."""
    samples = np.array([history.latest[offer.device_id][1].num_examples or 0.0 for offer in fleet.offers])
    away = server_round - np.array([history.last_selected[offer.device_id] for offer in fleet.offers])
    worth = samples * away
    return np.asarray(worth / worth.mean(), dtype=np.float64)


def random_history(chance: np.random.Generator, devices: int) -> History:
    """Six rounds in which each device trained once, some longer ago than others."""
    last = chance.integers(1, 7, devices)
    return history_of(
        *(
            {
                f"device-{k}": Participation(num_examples=float(chance.integers(50, 200)))
                for k in range(devices)
                if last[k] == number
            }
            for number in range(1, 7)
        )
    )


def value(
    policy: Progress, choice: EpochChoice, worth: Sequence[float], level: Sequence[int], duration_s: float, n: int
) -> float:
    """Progress per second of a set of `n` devices, given each one's worth and the index of its number of epochs."""
    options = [choice.options[k] for k in level]
    mean = sum(w * option.progress for w, option in zip(worth, options, strict=True)) / sum(worth)
    devices = min(sum(worth), len(worth))
    stated = choice.options[max(level)].half_devices
    half = policy.half_devices if stated is None else stated
    return mean / (1 + half / devices * (n - devices) / (n - 1)) / (duration_s + policy.overhead_s)


def best_of_all(fleet: Fleet, policy: Progress, choice: EpochChoice, worth: NDArray[np.float64]) -> float:
    """The most progress per second over all sets, numbers of epochs and durations that the watts allow."""
    n, options = len(fleet.offers), choice.options
    # All combinations: for each device -1 for no training, or the index of an option.
    every = np.array(list(itertools.product(range(-1, len(options)), repeat=n)), dtype=np.int8)
    if not choice.is_per_device:
        every = every[[len(set(row[row >= 0].tolist())) == 1 for row in every]]
    every = every[(every >= 0).any(axis=1)]
    chosen = every >= 0
    weight, count = chosen @ worth, chosen.sum(axis=1)
    progress = np.append([option.progress for option in options], 0.0)[every]  # index -1 is the appended 0
    half = np.array([policy.half_devices if o.half_devices is None else o.half_devices for o in options])
    devices = np.minimum(weight, count)
    gain = (progress @ worth) / weight / (1 + half[every.max(axis=1)] / devices * (n - devices) / (n - 1))
    seconds = np.array(
        [[[done_s(o, p, option.epochs) for p in range(len(o.front))] for o in fleet.offers] for option in options]
    )
    extra_w = np.array([[planned_w(o, p) - o.idle_w for p in range(len(o.front))] for o in fleet.offers])
    names = fleet.allowance.supplies.names
    idle_w = drawn_w(fleet, {})
    spare_w = np.array([fleet.allowance.budget_w[name] - idle_w[name] for name in names])
    feeds = np.array([[name in fleet.allowance.supplies.path(o.supply) for o in fleet.offers] for name in names])
    best, left = 0.0, np.ones(len(every), dtype=np.bool_)
    for limit_s in np.unique(seconds):  # ascending: a set that fits within a duration is not tried again
        least_w = np.where(seconds <= limit_s, extra_w[None], np.inf).min(axis=2)  # [option, device]
        watts = np.vstack([least_w, np.zeros(n)])[every, np.arange(n)]
        able = left & (gain / (limit_s + policy.overhead_s) > best) & np.isfinite(watts).all(axis=1)
        rows = np.flatnonzero(able)
        fits = ((watts[rows] @ feeds.T.astype(float)) <= spare_w + 1e-9).all(axis=1)
        rows = rows[fits]
        left[rows] = False
        best = max(best, float((gain[rows] / (limit_s + policy.overhead_s)).max(initial=0.0)))
    return best


@pytest.mark.parametrize(
    ("is_per_device", "devices", "least"),
    [(False, 8, 1 - 1e-6), (True, 6, 0.99), (True, 2, 0.9)],
    ids=["equal", "own", "own, fewer than make half the progress"],
)
@pytest.mark.parametrize("seed", first(2, range(12)))
def test_a_small_fleet_is_planned_as_well_as_by_trying_all(
    seed: int, is_per_device: bool, devices: int, least: float
) -> None:
    chance = np.random.default_rng(seed)
    fleet = fleet_on_racks(chance, devices, points=4, most_warmup_s=5.0)
    policy = Progress(half_devices=float(chance.uniform(0.5, 6)), overhead_s=float(chance.uniform(0, 40)))
    choice, history = choice_of(chance, is_per_device), random_history(chance, devices)
    plan = plan_round(fleet.offers, policy, fleet.allowance, choice, 7, history)
    worth = dict(zip((o.device_id for o in fleet.offers), worth_of(fleet, history, 7), strict=True))
    numbers = [option.epochs for option in choice.options]
    level = [numbers.index(assignment.epochs) for assignment in plan.assignments]
    assert is_per_device or len(set(level)) == 1
    own = [worth[each.device_id] for each in plan.assignments]
    made = value(policy, choice, own, level, plan.duration_s, devices)
    best = best_of_all(fleet, policy, choice, np.array(list(worth.values())))
    assert least * best <= made <= best * (1 + 1e-9), "nothing is better than all, so the oracle knows all"

    points = points_of(plan, fleet)
    total_w = drawn_w(fleet, points)
    assert all(total_w[name] <= fleet.allowance.budget_w[name] + 1e-6 for name in total_w)
    assert {use.supply: use.planned_w for use in plan.supplies} == pytest.approx(total_w)
    by_id = {offer.device_id: offer for offer in fleet.offers}
    epochs = {assignment.device_id: assignment.epochs for assignment in plan.assignments}
    slowest_s = max(done_s(by_id[each], points[each], own) for each, own in epochs.items())
    assert plan.duration_s == pytest.approx(slowest_s), "each device's own epochs count"
