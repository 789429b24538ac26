"""Which of a run's rounds stay cached, and that the others are recalled unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceResult, ObservedTraining, RoundRecord
from coordinator.state.rounds import ledger as round_cache
from tests.fakes.records_to_store import finished_round, planned_round
from tests.fakes.small_fleet import NODES, ORIN_NODE, RUN, small_fleet
from wattfleet.planning import History
from wattfleet.planning.policies import RandomK

TWO_ROUNDS = 4


@pytest.fixture(autouse=True)
def two_rounds_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the cache to two rounds of two devices each."""
    monkeypatch.setattr(round_cache, "_DECISIONS", TWO_ROUNDS)


def train(fleet: Fleet, number: int, run_id: str = RUN) -> RoundRecord:
    """Run a round from its plan to its end."""
    plan_id = fleet.flower.plan(run_id, number, NODES, 1.0).plan_id
    for device_id in fleet.rounds.records[plan_id].nodes:
        fleet.rounds.observe(plan_id, ObservedTraining(device_id, 20.0, 12.0))
    results = [DeviceResult(device_id, loss=1.0 / number) for device_id in fleet.rounds.records[plan_id].nodes]
    return fleet.rounds.finish(plan_id, results, 30.0)


def let_go(fleet: Fleet) -> list[str]:
    """Evict all that can be evicted, as if it had been stored."""
    gone = fleet.rounds.evictable()
    fleet.rounds.cache.evict(gone)
    return sorted(gone)


def test_rounds_that_were_used_last_stay_and_others_go() -> None:
    fleet = small_fleet()
    for number in range(1, 5):
        train(fleet, number)
    fleet.flower.report_metrics(RUN, 1, {"accuracy": 0.5})
    assert let_go(fleet) == [f"{RUN}/2", f"{RUN}/3"]
    assert list(fleet.rounds.records) == [f"{RUN}/1", f"{RUN}/4"]
    assert let_go(fleet) == []


def test_a_round_in_which_somebody_is_waited_for_stays() -> None:
    fleet = small_fleet()
    fleet.flower.start_run("other", "FedAvg", 9)
    awaited = fleet.flower.plan("other", 1, [ORIN_NODE], 1.0).plan_id
    for number in range(1, 5):
        train(fleet, number)
    assert awaited not in fleet.rounds.evictable()
    assert fleet.rounds.in_flight()[0].plan_id == awaited
    fleet.rounds.observe(awaited, ObservedTraining("orin", 20.0, 12.0))
    for number in range(5, 8):
        train(fleet, number)
    assert awaited in let_go(fleet)


def test_the_newest_round_stays_even_where_it_alone_is_too_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_cache, "_DECISIONS", 1)
    fleet = small_fleet()
    train(fleet, 1)
    train(fleet, 2)
    assert let_go(fleet) == [f"{RUN}/1"]
    assert list(fleet.rounds.records) == [f"{RUN}/2"]


def test_the_rounds_of_a_run_that_is_over_or_was_given_up_go_as_others_are_used() -> None:
    fleet = small_fleet()
    given_up = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    fleet.rounds.abandon(given_up)
    fleet.flower.start_run("other", "FedAvg", 9)
    unfinished = fleet.flower.plan("other", 1, NODES, 1.0).plan_id
    assert let_go(fleet) == []
    fleet.flower.finish_run("other", "")
    fleet.flower.start_run("third", "FedAvg", 9)
    train(fleet, 1, "third")
    train(fleet, 2, "third")
    assert let_go(fleet) == sorted([given_up, unfinished])


def test_what_was_let_go_of_counts_in_the_plans_to_come() -> None:
    forgetful, whole = small_fleet(policy=RandomK(1, seed=2)), small_fleet(policy=RandomK(1, seed=2))
    for number in range(1, 20):
        results = []
        for fleet in (forgetful, whole):
            planned = fleet.flower.plan(RUN, number, NODES, 1.0)
            # A device that fails is rested, and for longer after each further failure.
            failed = [DeviceResult(device_id, "no reply", share=0.0) for device_id in planned.nodes]
            results.append(fleet.rounds.finish(planned.plan_id, failed, 30.0))
        assert results[0] == results[1]
        let_go(forgetful)
    assert len(forgetful.rounds.records) <= TWO_ROUNDS < len(whole.rounds.records)


def test_a_history_that_is_recalled_is_brought_up_to_what_is_at_hand() -> None:
    fleet = small_fleet()
    for number in range(1, 4):
        train(fleet, number)
    let_go(fleet)
    whole = fleet.rounds.cache.history(RUN)
    assert [past.number for past in whole.rounds] == [1, 2, 3]
    assert not fleet.rounds.cache.is_history_missing(RUN)
    for run_id in "abcd":
        fleet.flower.start_run(run_id, "FedAvg", 1)
        fleet.rounds.cache.history(run_id)
    let_go(fleet)
    assert fleet.rounds.cache.is_history_missing(RUN), "the others were used since"
    stored = History().after(1, {}).after(2, {})  # the third round is cached and not stored yet
    fleet.rounds.cache.restore_history(RUN, stored)
    assert [past.number for past in fleet.rounds.cache.history(RUN).rounds] == [1, 2, 3]
    assert fleet.rounds.cache.history(RUN).latest == {"orin": whole.latest["orin"], "nano": whole.latest["nano"]}
    fleet.rounds.cache.restore_history(RUN, History())
    assert len(fleet.rounds.cache.history(RUN).rounds) == 3, "cached rounds stay"


def test_a_restored_round_is_not_the_newest_and_keeps_later_changes() -> None:
    fleet = small_fleet()
    first, *_, newest = [train(fleet, number) for number in range(1, 5)]
    let_go(fleet)
    assert fleet.rounds.cache.is_missing(first.plan_id) and not fleet.rounds.cache.is_missing(newest.plan_id)
    assert not fleet.rounds.cache.is_missing("never begun/1")
    fleet.rounds.cache.restore(first)
    assert (list(fleet.rounds.records)[0], list(fleet.rounds.records)[-1]) == (first.plan_id, newest.plan_id)
    assert fleet.flower.plan(RUN, 1, NODES, 1.0) == first, "a requested plan stays"
    fleet.flower.report_metrics(RUN, 1, {"accuracy": 0.5})
    fleet.rounds.cache.restore(first)
    assert fleet.rounds.records[first.plan_id].metrics == {"accuracy": 0.5}


def test_rounds_of_a_run_that_was_forgotten_meanwhile_are_not_recalled() -> None:
    fleet = small_fleet()
    for number in range(1, 5):
        train(fleet, number)
    let_go(fleet)
    fleet.flower.remove_runs([RUN])
    fleet.rounds.cache.restore(finished_round(1))
    assert not fleet.rounds.records and not fleet.rounds.cache.is_missing(f"{RUN}/1")


def test_after_a_restart_rounds_are_lacked_of_runs_that_have_some_in_the_store() -> None:
    before = small_fleet()
    fleet = Fleet(before.operator.allowance, before.flower.policy, runs=[before.flower.run(RUN)], archived=[RUN])
    fleet.flower.start_run("newer", "FedAvg", 1)
    assert fleet.rounds.cache.is_missing(f"{RUN}/1") and fleet.rounds.cache.is_history_missing(RUN)
    assert not fleet.rounds.cache.is_missing("newer/1") and not fleet.rounds.cache.is_history_missing("newer")


def test_a_fleet_that_was_copied_goes_its_own_way() -> None:
    fleet = small_fleet()
    train(fleet, 1)
    copied = fleet.copy()
    train(copied, 2)
    train(copied, 3)
    let_go(copied)
    assert (list(fleet.rounds.records), len(fleet.rounds.cache.history(RUN).rounds)) == ([f"{RUN}/1"], 1)
    assert len(copied.rounds.cache.history(RUN).rounds) == 3


def test_a_round_that_ends_twice_is_of_the_history_as_it_ended_first() -> None:
    fleet = small_fleet()
    done = train(fleet, 1)
    fleet.rounds.cache.history(RUN)
    again = fleet.rounds.finish(done.plan_id, [], 31.0)
    assert (again.results, again.wall_s) == ((), 31.0)
    assert fleet.rounds.cache.history(RUN).times_completed == {"orin": 1, "nano": 1}
    assert replace(planned_round(), plan_id=done.plan_id) == planned_round()
