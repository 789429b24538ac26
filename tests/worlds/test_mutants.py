"""Mutation tests: the code is broken on purpose, and the random worlds detect each mistake."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import replace

import pytest

from coordinator.state.energy import EnergyAccounts
from coordinator.state.fleet import Fleet
from coordinator.state.flower import FlowerRuns
from coordinator.state.power_draw import PowerDraw
from coordinator.state.records import DeviceRecord, RoundRecord
from coordinator.state.rounds.grants import CountedOn, DeviceGrant, Grants, PendingGrants
from coordinator.state.stores import SharedEnergy
from edge_agent.session.grants import AgentGrant, HeldGrant
from tests.worlds.coordinator import Repository
from tests.worlds.rules import steps_of
from tests.worlds.timeline import Action
from tests.worlds.world import run
from wattfleet.core.budgets import EnergyAccount, InForce
from wattfleet_proto.device_state import GrantPhase

# ruff: noqa: SLF001 - mutants break internals

MOST_WORLDS = 4_000


def forget(grants: Grants, device_id: str) -> None:
    if (known := grants._grants.get(device_id)) is not None:
        grants._grants[device_id] = replace(known, phase=GrantPhase.OVER, superseded_w=0.0)


def an_order_counts_as_obeyed_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceGrant, "counted_w", property(lambda self: self.granted_w))


def a_disconnected_device_counts_0(patch: pytest.MonkeyPatch) -> None:
    drawn_w = PowerDraw._drawn_w

    def without(self: PowerDraw, device: DeviceRecord, grant: DeviceGrant | None, granted_w: float) -> float:
        is_there = self._agents.is_connected(device.device_id)
        return drawn_w(self, device, grant, granted_w if is_there else 0.0)

    patch.setattr(PowerDraw, "_drawn_w", without)


def a_given_up_training_counts_0(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Grants, "_give_up", lambda self, device_id, plan_id: forget(self, device_id))


def a_late_message_is_trained(patch: pytest.MonkeyPatch) -> None:
    def may_begin(self: HeldGrant, plan_id: str, now_s: float) -> bool:
        held = self.in_force
        return held is not None and held.mode is not None and held.plan_id == plan_id

    patch.setattr(HeldGrant, "may_begin", may_begin)


def a_grant_does_not_lapse_on_the_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeldGrant, "lapse", lambda self, now_s: None)
    must_stop = HeldGrant.must_stop
    patch.setattr(HeldGrant, "must_stop", lambda self, now_s: must_stop(self, min(now_s, self.lapses_s - 1.0)))


def a_renewal_counts_from_the_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    renew = HeldGrant.renew
    patch.setattr(HeldGrant, "renew", lambda self, sent_s, lifetime_s, now_s: renew(self, now_s, lifetime_s, now_s))


def a_trim_raises_limits(patch: pytest.MonkeyPatch) -> None:
    offers_in_flight = Fleet._offers_in_flight

    def unlimited(self: Fleet, among: Set[str]) -> object:
        return {
            plan_id: [replace(offer, limit_w=None) for offer in offers]
            for plan_id, offers in offers_in_flight(self, among).items()
        }

    patch.setattr(Fleet, "_offers_in_flight", unlimited)


def a_restart_forgets_given_up_trainings(patch: pytest.MonkeyPatch) -> None:
    init = Grants.__init__

    def forgetting(self: Grants, *args: object, **named: object) -> None:
        init(self, *args, **named)  # type: ignore[arg-type]
        for device_id, known in list(self._grants.items()):
            if known.is_given_up:
                forget(self, device_id)

    patch.setattr(Grants, "__init__", forgetting)


def a_restart_forgets_higher_limits(patch: pytest.MonkeyPatch) -> None:
    init = Grants.__init__

    def forgetting(self: Grants, *args: object, **named: object) -> None:
        init(self, *args, **named)  # type: ignore[arg-type]
        self._grants = {device_id: replace(known, superseded_w=0.0) for device_id, known in self._grants.items()}

    patch.setattr(Grants, "__init__", forgetting)


def a_hello_renews_an_older_grant(patch: pytest.MonkeyPatch) -> None:
    def welcome(self: HeldGrant, sent_s: float, lifetime_s: float) -> None:
        self.lapses_s = self._next_lapses_s = sent_s + lifetime_s

    patch.setattr(HeldGrant, "welcome", welcome)


def an_agent_forgets_plans_before_the_last_one(patch: pytest.MonkeyPatch) -> None:
    receive = HeldGrant.receive

    def forgetting(self: HeldGrant, grant: AgentGrant) -> None:
        self._over.clear()
        receive(self, grant)

    patch.setattr(HeldGrant, "receive", forgetting)


def an_older_grant_is_renewed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Grants, "may_be_renewed", lambda self, device_id: True)


def a_returning_grant_is_not_reviewed(patch: pytest.MonkeyPatch) -> None:
    reviewed = PendingGrants.reviewed
    patch.setattr(
        PendingGrants, "reviewed", lambda self, passed_over, too_much=frozenset(): reviewed(self, (), too_much)
    )


def a_silent_device_is_counted_on(patch: pytest.MonkeyPatch) -> None:
    counted_on = Grants.counted_on

    def all_connected(self: Grants, is_connected: Callable[[str], bool], now_s: float) -> CountedOn:
        found = counted_on(self, is_connected, now_s)
        return replace(found, reachable={each for each in self.of_training() if is_connected(each)})

    patch.setattr(Grants, "counted_on", all_connected)


def who_confirms_late_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    trim = Fleet.trim

    def only_if_nobody_was_late(self: Fleet) -> list[RoundRecord]:
        late = {each for each in self.rounds.grants.of_training() if self.rounds.grants.pending.is_passed_over(each)}
        counted_on = self.rounds.grants.counted_on(self.agents.is_connected, self._now_s())
        if late & counted_on.reachable and self.rounds.grants.of(min(late)).is_confirmed:  # type: ignore[union-attr]
            return []
        return trim(self)

    patch.setattr(Fleet, "trim", only_if_nobody_was_late)


def a_cut_waits_for_the_next_look(patch: pytest.MonkeyPatch) -> None:
    def without_trim(self: Fleet, supply: str, in_force: InForce) -> list[RoundRecord]:
        self.operator.set_budget(supply, in_force)
        grants = self.rounds.grants
        grants.pending.reviewed(set(grants.of_training()))  # nothing is sent or renewed until then
        return []

    patch.setattr(Fleet, "set_budget", without_trim)


def a_plan_is_granted_before_it_is_stored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingGrants, "hold_back", lambda self, plan_id: None)


def an_observation_frees_watts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Grants, "observed", lambda self, device_id, plan_id: forget(self, device_id))


def what_is_on_its_way_is_ignored(patch: pytest.MonkeyPatch) -> None:
    issue = Grants._issue

    def ignoring(self: Grants, device_id: str, *args: object, **more: object) -> None:
        issue(self, device_id, *args, **more)  # type: ignore[arg-type]
        self._grants[device_id] = replace(self._grants[device_id], is_on_its_way=False)

    patch.setattr(Grants, "_issue", ignoring)


def plans_count_on_unconfirmed_orders(patch: pytest.MonkeyPatch) -> None:
    elsewhere_w = PowerDraw.elsewhere_w
    patch.setattr(
        PowerDraw,
        "elsewhere_w",
        lambda self, offered, expected=frozenset(): elsewhere_w(self, offered, set(self._agents.devices)),
    )


def measuring_counts_0(patch: pytest.MonkeyPatch) -> None:
    counted_w = DeviceGrant.counted_w.fget
    assert counted_w is not None
    patch.setattr(DeviceGrant, "counted_w", property(lambda self: 0.0 if self.grant.measuring else counted_w(self)))


def measuring_outlasts_a_cut(patch: pytest.MonkeyPatch) -> None:
    given_up = Grants.given_up
    patch.setattr(Grants, "given_up", lambda self: (each for each in given_up(self) if not each[1].grant.measuring))


def rounds_are_trimmed_before_measuring_ends(patch: pytest.MonkeyPatch) -> None:
    stop_given_up, trim_to_budgets = Fleet._stop_given_up, Fleet._trim_to_budgets

    def trim_first(self: Fleet, counted_on: CountedOn, trimmed: dict[str, RoundRecord]) -> None:
        trim_to_budgets(self, counted_on, trimmed)
        stop_given_up(self, counted_on, self._exceeded(frozenset()))

    patch.setattr(Fleet, "_stop_given_up", lambda self, counted_on, exceeded: None)
    patch.setattr(Fleet, "_trim_to_budgets", trim_first)


def a_restart_forgets_who_measures(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Grants, "_continue_stopping", lambda self, training, limit_w: None)


def a_restart_stops_a_round_for_an_earlier_measuring(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Grants, "commit", Grants._commit)


def measuring_begins_before_it_is_stored(patch: pytest.MonkeyPatch) -> None:
    hold_back = PendingGrants.hold_back

    def only_rounds(self: PendingGrants, plan_id: str) -> None:
        if "measuring" not in plan_id:
            hold_back(self, plan_id)

    patch.setattr(PendingGrants, "hold_back", only_rounds)


def a_round_does_not_end_measuring(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlowerRuns, "stop_measuring", lambda self, run_id, node_ids: set())


def measuring_outlasts_its_run(patch: pytest.MonkeyPatch) -> None:
    give_up_runs = Grants.give_up_runs

    def only_rounds(self: Grants, run_ids: Collection[str]) -> None:
        with pytest.MonkeyPatch.context() as context:
            context.setattr(self, "stop_measuring", lambda device_ids: None)
            give_up_runs(self, run_ids)

    patch.setattr(Grants, "give_up_runs", only_rounds)


def an_ended_run_measures(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlowerRuns, "require_live", lambda self, run_id: None)


def a_lease_ends_an_unsent_grant_to_measure(patch: pytest.MonkeyPatch) -> None:
    not_in_force = DeviceGrant.not_in_force

    def ended(self: DeviceGrant, plan_id: str, phase: GrantPhase, now_s: float | None = None) -> DeviceGrant:
        after = not_in_force(self, plan_id, phase, now_s)
        return replace(after, phase=GrantPhase.OVER) if phase is GrantPhase.OVER and self.is_given_up else after

    patch.setattr(DeviceGrant, "not_in_force", ended)


# Each with the seed of a world that detects it; after a change of the rules, search for another seed.
MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    an_order_counts_as_obeyed_at_once: 0,
    a_disconnected_device_counts_0: 3,
    a_given_up_training_counts_0: 1,
    a_late_message_is_trained: 1,
    a_grant_does_not_lapse_on_the_device: 7,
    a_renewal_counts_from_the_acknowledgement: 157,
    a_trim_raises_limits: 1293,
    a_restart_forgets_given_up_trainings: 12,
    a_restart_forgets_higher_limits: 8,
    a_hello_renews_an_older_grant: 7,
    an_agent_forgets_plans_before_the_last_one: 13001231,
    an_older_grant_is_renewed: 36,
    a_returning_grant_is_not_reviewed: 48,
    a_plan_is_granted_before_it_is_stored: 5,
    an_observation_frees_watts: 991,
    what_is_on_its_way_is_ignored: 1510,
    plans_count_on_unconfirmed_orders: 0,
    a_silent_device_is_counted_on: 37,
    who_confirms_late_is_not_looked_at: 3,
    a_cut_waits_for_the_next_look: 18,
    measuring_counts_0: 0,
    measuring_outlasts_a_cut: 37,
    rounds_are_trimmed_before_measuring_ends: 123,
    a_restart_forgets_who_measures: 12,
    a_restart_stops_a_round_for_an_earlier_measuring: 72,
    measuring_begins_before_it_is_stored: 6,
    a_round_does_not_end_measuring: 0,
    measuring_outlasts_its_run: 21,
    an_ended_run_measures: 329,
    a_lease_ends_an_unsent_grant_to_measure: 4,
}
# A rare mistake, which is found earlier where rounds are all that happens.
ONLY_WITH_ROUNDS = {what_is_on_its_way_is_ignored}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutate", MUTANTS)
def test_the_worlds_find_a_mistake(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = [MUTANTS[mutate], *range(MOST_WORLDS)]
    mutate(monkeypatch)
    measuring = mutate not in ONLY_WITH_ROUNDS
    assert any(run(seed, steps_of(seed, measuring=measuring)) is not None for seed in seeds)


# --- Energy -----------------------------------------------------------------------------------------------------------
# Mistakes in the account of a run's energy, which worlds with energy budgets detect.


def energy_is_not_set_aside(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EnergyAccount, "set_aside", lambda self, joules: self)


def a_training_without_a_report_is_free(patch: pytest.MonkeyPatch) -> None:
    def is_over(self: Grants, device_id: str, plan_id: str) -> bool:
        known = self.of(device_id)
        return known is not None and known.plan_id == plan_id and known.is_over

    patch.setattr(Grants, "never_began", is_over)


def a_restarted_agent_trains_again(patch: pytest.MonkeyPatch) -> None:
    not_in_force = DeviceGrant.not_in_force

    def uncounted(self: DeviceGrant, plan_id: str, phase: GrantPhase, now_s: float | None = None) -> DeviceGrant:
        after = not_in_force(replace(self, grant=replace(self.grant, counts_energy=False)), plan_id, phase, now_s)
        return replace(after, grant=self.grant)

    patch.setattr(DeviceGrant, "not_in_force", uncounted)


def a_restart_forgets_what_was_spent(patch: pytest.MonkeyPatch) -> None:
    started = EnergyAccounts.__init__

    def empty(self: EnergyAccounts, accounts: Mapping[str, EnergyAccount] | None = None) -> None:
        started(self, {run_id: EnergyAccount(each.budget_j) for run_id, each in (accounts or {}).items()})

    patch.setattr(EnergyAccounts, "__init__", empty)


def a_training_lasts_longer_than_its_energy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("coordinator.state.rounds.grants.granted_s", lambda longest_s: 3 * longest_s)


def a_survey_is_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EnergyAccounts, "surveyed", lambda self, run, plan_id, assignments: run)


def a_supply_counts_no_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedEnergy, "planned", lambda self, record: None)


def a_restart_forgets_what_a_supply_has_spent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.worlds.coordinator.Repository.save_round", _saved_without_counted)


def _saved_without_counted(self: Repository, plan_id: str, then: Action | None = None) -> None:
    self.save("round", plan_id, self._fleet.rounds.records[plan_id], then)  # noqa: SLF001 - what is broken


SHARED_ENERGY_MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    a_supply_counts_no_round: 0,
    a_restart_forgets_what_a_supply_has_spent: 0,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutate", SHARED_ENERGY_MUTANTS)
def test_the_worlds_find_a_mistake_with_the_energy_of_a_supply(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = [SHARED_ENERGY_MUTANTS[mutate], *range(MOST_WORLDS)]
    mutate(monkeypatch)
    assert any(run(seed, steps_of(seed), shares_energy=True) is not None for seed in seeds)


ENERGY_MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    energy_is_not_set_aside: 0,
    a_training_without_a_report_is_free: 109,
    a_restarted_agent_trains_again: 8,
    a_restart_forgets_what_was_spent: 7,
    a_training_lasts_longer_than_its_energy: 1,
    a_survey_is_free: 27,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutate", ENERGY_MUTANTS)
def test_the_worlds_find_a_mistake_with_energy(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = [ENERGY_MUTANTS[mutate], *range(MOST_WORLDS)]
    mutate(monkeypatch)
    assert any(run(seed, steps_of(seed), has_energy=True) is not None for seed in seeds)
