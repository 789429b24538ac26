"""The policy `oort`: prefers useful devices that are not too slow, and explores unknown ones."""

from __future__ import annotations

from collections import Counter

from tests.fakes.fleets import history_of, many
from tests.fakes.fronts import front
from tests.fakes.runs import run
from wattfleet.planning import Allowance, History, Offer, Participation, RoundPlan, plan_round
from wattfleet.planning.policies import Oort

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
