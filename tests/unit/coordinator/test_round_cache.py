"""What of a run's rounds is kept at hand, and that what is not at hand is recalled without a difference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.state import round_cache as round_memory
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceResult, ObservedTraining, RoundRecord
from tests.fakes.records_to_store import finished_round, planned_round
from tests.fakes.small_fleet import NODES, ORIN_NODE, RUN, small_fleet
from wattfleet.planning import History
from wattfleet.planning.policies import RandomK

TWO_ROUNDS = 4


@pytest.fixture(autouse=True)
def two_rounds_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of two devices each, so that two of them stay."""
    monkeypatch.setattr(round_memory, "_DECISIONS", TWO_ROUNDS)


def train(fleet: Fleet, number: int, run_id: str = RUN) -> RoundRecord:
    """A round from its plan to its end."""
    plan_id = fleet.plan(run_id, number, NODES, 1.0).plan_id
    for device_id in fleet.rounds[plan_id].nodes:
        fleet.observe(plan_id, ObservedTraining(device_id, 20.0, 12.0))
    results = [DeviceResult(device_id, loss=1.0 / number) for device_id in fleet.rounds[plan_id].nodes]
    return fleet.finish_round(plan_id, results, 30.0)


def let_go(fleet: Fleet) -> list[str]:
    """As if all of it were stored."""
    gone = fleet.dispensable_rounds()
    fleet.memory.let_go(gone)
    return sorted(gone)


def test_rounds_that_were_used_last_stay_and_others_go() -> None:
    fleet = small_fleet()
    for number in range(1, 5):
        train(fleet, number)
    fleet.report_metrics(RUN, 1, {"accuracy": 0.5})
    assert let_go(fleet) == [f"{RUN}/2", f"{RUN}/3"]
    assert list(fleet.rounds) == [f"{RUN}/1", f"{RUN}/4"]
    assert let_go(fleet) == []


def test_a_round_in_which_somebody_is_waited_for_stays() -> None:
    fleet = small_fleet()
    fleet.start_run("other", "FedAvg", 9)
    awaited = fleet.plan("other", 1, [ORIN_NODE], 1.0).plan_id
    for number in range(1, 5):
        train(fleet, number)
    assert awaited not in fleet.dispensable_rounds()
    assert fleet.standing_order("orin") is not None and fleet.awaited_rounds()[0].plan_id == awaited
    fleet.observe(awaited, ObservedTraining("orin", 20.0, 12.0))
    for number in range(5, 8):
        train(fleet, number)
    assert awaited in let_go(fleet)


def test_the_newest_round_stays_even_where_it_alone_is_too_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_memory, "_DECISIONS", 1)
    fleet = small_fleet()
    train(fleet, 1)
    train(fleet, 2)
    assert let_go(fleet) == [f"{RUN}/1"]
    assert list(fleet.rounds) == [f"{RUN}/2"]


def test_the_rounds_of_a_run_that_is_over_or_was_given_up_go_as_others_are_used() -> None:
    fleet = small_fleet()
    given_up = fleet.plan(RUN, 1, NODES, 1.0).plan_id
    fleet.give_up(given_up)
    fleet.start_run("other", "FedAvg", 9)
    unfinished = fleet.plan("other", 1, NODES, 1.0).plan_id
    assert let_go(fleet) == []
    fleet.finish_run("other", "")
    fleet.start_run("third", "FedAvg", 9)
    train(fleet, 1, "third")
    train(fleet, 2, "third")
    assert let_go(fleet) == sorted([given_up, unfinished])


def test_what_was_let_go_of_counts_in_the_plans_to_come() -> None:
    forgetful, whole = small_fleet(policy=RandomK(1, seed=2)), small_fleet(policy=RandomK(1, seed=2))
    for number in range(1, 20):
        results = []
        for fleet in (forgetful, whole):
            planned = fleet.plan(RUN, number, NODES, 1.0)
            # A device that fails rests, the longer the more often it failed.
            failed = [DeviceResult(device_id, "no reply", share=0.0) for device_id in planned.nodes]
            results.append(fleet.finish_round(planned.plan_id, failed, 30.0))
        assert results[0] == results[1]
        let_go(forgetful)
    assert len(forgetful.rounds) <= TWO_ROUNDS < len(whole.rounds)


def test_a_history_that_is_recalled_is_brought_up_to_what_is_at_hand() -> None:
    fleet = small_fleet()
    for number in range(1, 4):
        train(fleet, number)
    let_go(fleet)
    whole = fleet.memory.history(RUN)
    assert [past.number for past in whole.rounds] == [1, 2, 3]
    assert not fleet.memory.lacks_history(RUN)
    for run_id in "abcd":
        fleet.start_run(run_id, "FedAvg", 1)
        fleet.memory.history(run_id)
    let_go(fleet)
    assert fleet.memory.lacks_history(RUN), "the others were used since"
    stored = History().after(1, {}).after(2, {})  # the third is at hand, and not stored yet
    fleet.memory.recall_history(RUN, stored)
    assert [past.number for past in fleet.memory.history(RUN).rounds] == [1, 2, 3]
    assert fleet.memory.history(RUN).latest == {"orin": whole.latest["orin"], "nano": whole.latest["nano"]}
    fleet.memory.recall_history(RUN, History())
    assert len(fleet.memory.history(RUN).rounds) == 3, "what is at hand stays"


def test_a_round_that_is_recalled_comes_before_the_newest_and_does_not_undo_what_came_since() -> None:
    fleet = small_fleet()
    first, *_, newest = [train(fleet, number) for number in range(1, 5)]
    let_go(fleet)
    assert fleet.memory.lacks(first.plan_id) and not fleet.memory.lacks(newest.plan_id)
    assert not fleet.memory.lacks("never begun/1")
    fleet.memory.recall(first)
    assert (list(fleet.rounds)[0], list(fleet.rounds)[-1]) == (first.plan_id, newest.plan_id)
    assert fleet.plan(RUN, 1, NODES, 1.0) == first, "a plan that was asked for stays"
    fleet.report_metrics(RUN, 1, {"accuracy": 0.5})
    fleet.memory.recall(first)
    assert fleet.rounds[first.plan_id].metrics == {"accuracy": 0.5}


def test_rounds_of_a_run_that_was_forgotten_meanwhile_are_not_recalled() -> None:
    fleet = small_fleet()
    for number in range(1, 5):
        train(fleet, number)
    let_go(fleet)
    fleet.forget([RUN])
    fleet.memory.recall(finished_round(1))
    assert not fleet.rounds and not fleet.memory.lacks(f"{RUN}/1")


def test_after_a_restart_rounds_are_lacked_of_runs_that_have_some_in_the_store() -> None:
    before = small_fleet()
    fleet = Fleet(before.allowance, before.policy, runs=[before.run(RUN)], archived=[RUN])
    fleet.start_run("newer", "FedAvg", 1)
    assert fleet.memory.lacks(f"{RUN}/1") and fleet.memory.lacks_history(RUN)
    assert not fleet.memory.lacks("newer/1") and not fleet.memory.lacks_history("newer")


def test_a_fleet_that_was_copied_goes_its_own_way() -> None:
    fleet = small_fleet()
    train(fleet, 1)
    copied = fleet.copy()
    train(copied, 2)
    train(copied, 3)
    let_go(copied)
    assert (list(fleet.rounds), len(fleet.memory.history(RUN).rounds)) == ([f"{RUN}/1"], 1)
    assert len(copied.memory.history(RUN).rounds) == 3


def test_a_round_that_ends_twice_is_of_the_history_as_it_ended_first() -> None:
    fleet = small_fleet()
    done = train(fleet, 1)
    fleet.memory.history(RUN)
    again = fleet.finish_round(done.plan_id, [], 31.0)
    assert (again.results, again.wall_s) == ((), 31.0)
    assert fleet.memory.history(RUN).times_completed == {"orin": 1, "nano": 1}
    assert replace(planned_round(), plan_id=done.plan_id) == planned_round()
