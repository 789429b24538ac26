"""The fleet as the coordinator knows it: agents, the operator's settings, Flower's runs, and their rounds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import is_dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from coordinator.errors import StillInUseError, UnknownRecordError
from coordinator.settings import ClaimSettings, GrantSettings
from coordinator.state.agents import Agents, AssignedPlacement, Claims, OnlySite, Placement
from coordinator.state.contention import Contention, WaitingRuns
from coordinator.state.energy import EnergyAccounts, energy_of
from coordinator.state.flower import FlowerRuns, NodePairings
from coordinator.state.operator import OperatorSettings, PresetPoints
from coordinator.state.power_draw import KeptDuties, LiveSamples, MeasuredDraw, PowerDraw
from coordinator.state.records import (
    NOTHING_STORED,
    CountedEnergy,
    DeviceOverrides,
    DeviceRecord,
    ForgottenDevice,
    ObservedTraining,
    RoundObservation,
    RoundRecord,
    RunRecord,
    StoredGrants,
    TrainingEnergy,
    run_of,
)
from coordinator.state.rounds.grants import CountedOn, DeviceGrant, Grant, Grants
from coordinator.state.rounds.ledger import RoundLedger, UnplannedRounds
from coordinator.state.stores import OF_DEVICE, BatteryState, PlacedBattery, SharedEnergy
from wattfleet.core.budgets import Charge, EnergyAccount, InForce, PeriodBudget
from wattfleet.core.errors import InvalidInputError, first_few
from wattfleet.core.planning import (
    Allowance,
    Assignment,
    InFlight,
    InTraining,
    Offer,
    Selection,
    TrimmedPlan,
    review_epochs,
    trim_rounds,
)
from wattfleet.core.planning.policies import Policy
from wattfleet_proto.device_state import BoardSample
from wattfleet_proto.names import is_to_measure

_T = TypeVar("_T")

_NO_DATE = datetime.fromtimestamp(0, timezone.utc)


class Fleet:
    """All parts of the fleet's state, and the changes that concern several of them.

    Attributes:
        agents: devices, their sessions, states and fronts.
        operator: budgets, tags, drained devices and rules for client selection.
        flower: Flower's nodes and runs, and requests for plans.
        rounds: all planned rounds, with the devices' grants and results.
        unplanned: the rounds without a plan.
        draw: the watts of every device.
        duties: how well devices keep their duties.
        samples: the latest sensor readings of the boards.
        stores: the batteries, and the energy budgets of supplies.
    """

    def __init__(
        self,
        allowance: Allowance,
        policy: Policy,
        devices: Sequence[DeviceRecord] = (),
        nodes: Mapping[int, str] | None = None,
        runs: Sequence[RunRecord] = (),
        rounds: Sequence[RoundRecord] = (),
        archived: Collection[str] = (),
        placement: Placement | None = None,
        selection: Selection | None = None,
        overrides: Sequence[DeviceOverrides] = (),
        grants: GrantSettings = GrantSettings(),
        now_s: Callable[[], float] = lambda: 0.0,
        claims: ClaimSettings = ClaimSettings(),
        unplanned: Iterable[tuple[str, int]] = (),
        stored_grants: StoredGrants = NOTHING_STORED,
        weights: Mapping[str, float] | None = None,
        max_workloads: int = 32,
        pairing_problems: Mapping[int, str] | None = None,
        energy: Mapping[str, EnergyAccount] | None = None,
        now: Callable[[], datetime] = lambda: _NO_DATE,
        batteries: Sequence[PlacedBattery] = (),
        energy_budgets: Mapping[str, PeriodBudget] | None = None,
        counted: Sequence[CountedEnergy] = (),
        charges: Mapping[str, Charge] | None = None,
    ) -> None:
        """Start from what a store holds; no device is connected yet.

        Args:
            allowance: initial watts of every supply.
            policy: the client-selection policy.
            devices: known devices.
            nodes: Flower node id -> device id.
            runs: known runs, oldest first.
            rounds: known rounds, oldest first.
            archived: ids of the runs that have rounds only in the store.
            placement: the supply that each device is behind, and its rules; None if all are behind the only site.
            selection: the operator's rules for client selection.
            overrides: what the operator set for individual devices by command.
            grants: how long devices may draw more than their idle power without contact to the coordinator.
            now_s: the clock of the grants; by default it stands still.
            claims: limits of what devices may report.
            unplanned: run id and round number of each round without a plan.
            stored_grants: what the store holds about the grants of an earlier process.
            weights: weights of runs that wait for each other, by workload; 1 for others.
            max_workloads: the most workloads per device whose fronts are kept.
            pairing_problems: Flower node id -> why it cannot train on its device, or an empty text; only checked nodes.
            energy: the accounts of runs with an energy budget, by run id.
            now: the date and time of batteries and energy budgets; by default it stands still.
            batteries: the batteries of the site file.
            energy_budgets: the energy budgets of supplies, by supply.
            counted: what rounds count for these.
            charges: the charges that the operator has stated for batteries.
        """
        placement = AssignedPlacement(
            placement or OnlySite(allowance.supplies),
            allowance.supplies,
            {each.device_id: each.supply for each in overrides if each.supply},
        )
        self._now_s = now_s
        runs_by_id = {record.run_id: record for record in runs}
        self.rounds = RoundLedger(rounds, archived, Grants(rounds, runs_by_id, grants, now_s(), stored=stored_grants))
        self.unplanned = UnplannedRounds(unplanned)
        self.agents = Agents(devices, placement, Claims(claims), max_workloads)
        trusted_after = {each.device_id: each.trusted_after for each in overrides if each.trusted_after}
        for record in rounds:
            for observed in record.observations.values():
                if observed.device_id in self.agents.devices:
                    device, workload = self.agents.get(observed.device_id), runs_by_id[record.run_id].workload.name
                    self.agents.claims.observed(device, workload, record, observed)
            self.agents.claims.trust_again([each for each in trusted_after if trusted_after[each] == record.plan_id])
        self.operator = OperatorSettings(allowance, placement, selection or Selection(), self.agents, overrides)
        self.draw = PowerDraw(self.agents, self.operator, self.rounds.grants)
        self.duties = KeptDuties()
        self.samples = LiveSamples()
        self.presets = PresetPoints()
        self.stores = SharedEnergy(allowance.supplies, self.operator, now, batteries, energy_budgets, counted, charges)
        waiting = WaitingRuns(now_s, weights)
        contention = Contention(waiting, self.agents, self.operator, self.rounds.grants, self.draw)
        self.flower = FlowerRuns(
            policy,
            nodes or {},
            runs,
            self.agents,
            self.operator,
            self.rounds,
            self.draw,
            contention,
            self.stores,
            NodePairings(dict(pairing_problems or {})),
            EnergyAccounts(energy),
        )

    def copy(self) -> Fleet:
        """An independent copy: no change of one of them shows in the other."""
        return _copied(self, {})

    def observe(
        self, device_id: str, plan_id: str, epoch_s: float, power_w: float, beside_duty: bool = False
    ) -> RoundObservation:
        """Add a device's observation of its training; a repeated report changes nothing.

        Args:
            device_id: the device.
            plan_id: the plan that it trained by.
            epoch_s: seconds per epoch.
            power_w: mean watts while training.
            beside_duty: the device answered requests meanwhile.

        Raises:
            UnknownRecordError: the plan does not exist, or the device is not part of it.
            ImplausibleError: no board of this kind can have observed these values.
        """
        device = self.agents.get(device_id)
        self.agents.claims.require_plausible_observation(device, epoch_s, power_w)
        seen = ObservedTraining(device_id, epoch_s, power_w, beside_duty)
        is_new = device_id not in self.rounds.get(plan_id).observations
        observation = self.rounds.observe(plan_id, seen)
        if is_new:
            workload = self.flower.workload_of(run_of(plan_id))
            self.agents.claims.observed(device, workload, self.rounds.get(plan_id), seen)
        return observation

    def report_energy(
        self, device_id: str, plan_id: str, energy_j: float, lasted_s: float
    ) -> list[TrainingEnergy | CountedEnergy | RunRecord]:
        """Add what a device's training has drawn, in a round or in a survey; a repeated report changes nothing.

        Args:
            device_id: the device.
            plan_id: the plan that it trained by.
            energy_j: joules that the board has drawn, its idle power included.
            lasted_s: seconds of the training.

        Returns:
            The records to store; none if no energy was set aside for the training.

        Raises:
            UnknownRecordError: the plan does not exist, or the device is not part of it.
            ImplausibleError: no training can draw so much.
        """
        if is_to_measure(plan_id):
            run, idle_w = self.flower.run(run_of(plan_id)), self.agents.get(device_id).idle_w or 0.0
            changed = self.flower.energy.survey_reported(run, plan_id, device_id, energy_j, lasted_s, idle_w)
            if changed is None:
                return []
            self.flower.runs[run.run_id] = changed
            return [changed]
        record = self.rounds.get(plan_id)
        if device_id not in record.nodes:
            raise UnknownRecordError(f"{device_id} is not part of plan {plan_id}")
        training = energy_of(record, device_id, energy_j, lasted_s)
        return [] if training is None else self._settled(training)

    def settle_unbegun(self, plan_id: str) -> list[TrainingEnergy | CountedEnergy | RunRecord]:
        """Return the energy of a round's trainings that never began to its run; returns the records to store."""
        return [record for each in self.rounds.unbegun(plan_id) for record in self._settled(each)]

    def _settled(self, training: TrainingEnergy) -> list[TrainingEnergy | CountedEnergy | RunRecord]:
        is_new = training.device_id not in self.rounds.get(training.plan_id).energies
        counted: list[CountedEnergy] = []
        if is_new:
            self.flower.energy.reported(run_of(training.plan_id), training)
            counted = self.stores.reported(training)
        return [self.rounds.report_energy(training), *counted]

    def report_sample(self, device_id: str, sample: BoardSample) -> bool:
        """Record what a board's sensors say; returns whether it has started to throttle itself since the last time."""
        if sample.battery_share is not None:
            placed = self.stores.battery_of(device_id)
            if placed is not None and placed.source == "agent":
                self.stores.report_charge(OF_DEVICE + device_id, Charge(sample.battery_share, self.stores.now))
        return self.samples.report(device_id, sample)

    def battery_states(self) -> list[BatteryState]:
        """All batteries as operators see them."""
        return self.stores.battery_states(self.draw.idle_of_devices_w(), self.rounds.grants.plans_of_trainings())

    def undrain(self, device_ids: Collection[str]) -> list[DeviceOverrides]:
        """Include devices again that were drained by the operator or left out because of their contradictions.

        Raises:
            UnknownRecordError: a device never connected; none is changed.
        """
        self.operator.drain(device_ids, is_drained=False)
        self.agents.claims.trust_again(device_ids)
        return self.operator.trust_after(next(reversed(list(self.rounds.records)), ""), device_ids)

    def set_budget(self, supply: str, in_force: InForce) -> list[RoundRecord]:
        """Change a supply's budget for new rounds, and trim the rounds in flight to it.

        Returns:
            The rounds that were trimmed.

        Raises:
            InvalidInputError: the supply does not exist, or the watts are invalid.
        """
        self.operator.set_budget(supply, in_force)
        return self.trim()

    def measured_draw(self) -> dict[str, MeasuredDraw]:
        """What the devices behind each supply draw now, by supply."""
        return self.draw.measured(self.samples, self.rounds.latest_results)

    def assume_ended(self, run_id: str) -> list[str]:
        """In a copy for a preview, end the rounds in flight of a run, or of all runs if the id is empty.

        Only connected devices count as free afterwards: what others may draw is unknown until they return.

        Returns:
            The plan ids of these rounds. Trainings that are run in order to measure end, too, but belong to none.
        """
        ended: dict[str, None] = {}
        for device_id in [each for each in self.rounds.grants.of_training() if self.agents.is_connected(each)]:
            plan_id = self.draw.plan_holding(device_id) or ""
            if not run_id or run_of(plan_id) == run_id:
                if not is_to_measure(plan_id):
                    ended[plan_id] = None
                self.rounds.grants.assume_over(device_id)
                self.agents.assume_ready(device_id)
        return sorted(filter(None, ended))

    def check_grants(self) -> list[str]:
        """End the grants that must have lapsed; returns the ids of their devices."""
        return self.rounds.grants.check(self._now_s())

    def take_orders(
        self, is_reachable: Callable[[str], bool] | None = None, only: Collection[str] | None = None
    ) -> list[tuple[str, Grant]]:
        """Return the grants to send now, each with its device's id, and mark them as sent.

        Args:
            is_reachable: returns whether a grant can be sent to a device; None allows all connected devices.
            only: restricts the result to these devices; None for all.
        """
        return self.rounds.grants.take_orders(is_reachable or self.agents.is_connected, self._now_s(), only)

    def forget(self, device_ids: Collection[str]) -> list[ForgottenDevice]:
        """Remove devices with their overrides and node bindings; they may enrol again. On an error none is removed.

        Raises:
            UnknownRecordError: a device never connected.
            StillInUseError: a device is connected, or a round still holds watts for it.
        """
        ids = dict.fromkeys(device_ids)
        for device_id in ids:
            if self.agents.is_connected(self.agents.get(device_id).device_id):
                raise StillInUseError(f"{device_id} is connected: stop its agent, then forget the device")
            if (plan_id := self.draw.plan_holding(device_id)) is not None:
                raise StillInUseError(
                    f"watts are still held for {device_id} by {self.flower.round_text(plan_id)}: repeat the command"
                    f" when its grant has lapsed{self._longest_lapse([device_id])}"
                )
        for part in (self.agents, self.operator, self.flower, self.rounds, self.duties, self.samples, self.presets):
            part.forget(ids)
        return [ForgottenDevice(device_id) for device_id in ids]

    def runs_in_use(self) -> set[str]:
        """The runs that devices may draw power for, or whose Flower servers may wait for a round.

        These are not only runs in flight: a device may still train for a run that Flower has given up.
        """
        grants = self.rounds.grants
        held = {run_of(known.plan_id) for each in grants.of_training() if (known := grants.of(each)) is not None}
        return held | {record.run_id for record in self.rounds.awaited()}

    def require_ended(self, run_id: str) -> None:
        """Check that a run has ended.

        Raises:
            UnknownRecordError: the run never started.
            StillInUseError: the run has not ended.
        """
        if not self.flower.run(run_id).finished:
            raise StillInUseError(
                f"run {self.flower.name_of(run_id)!r} is running: stop its Flower app, or pass --end to end the run at"
                " the coordinator"
            )

    def require_unused(self, run_ids: Collection[str]) -> None:
        """Check that no device still trains for any of the given runs.

        Raises:
            StillInUseError: a round of these runs still holds watts for a device.
        """
        held = self.held_by_runs()
        for run_id in run_ids:
            if run_id in held:
                raise StillInUseError(
                    f"run {self.flower.name_of(run_id)!r} has ended, but watts are still held for"
                    f" {first_few(held[run_id])}: delete the run when these devices have finished their trainings, or"
                    " pass --end to stop them"
                )

    def require_stoppable(self, run_ids: Collection[str]) -> None:
        """Check that all trainings of the given runs can be stopped now.

        Raises:
            StillInUseError: a round of these runs holds watts for a device that cannot be reached.
        """
        grants, held = self.rounds.grants, self.held_by_runs()
        reachable = grants.counted_on(self.agents.is_connected, self._now_s()).reachable
        for run_id in run_ids:
            # A grant that was never sent is cancelled without the device.
            known = {each: grants.of(each) for each in held.get(run_id, ()) if each not in reachable}
            if away := [each for each, grant in known.items() if grant is not None and not grant.is_first]:
                raise StillInUseError(
                    f"run {self.flower.name_of(run_id)!r} holds watts for {first_few(away)}, which cannot be reached,"
                    " so nothing was changed: repeat the command when these devices are connected, or when their grants"
                    f" have lapsed{self._longest_lapse(away)}"
                )

    def held_by_runs(self) -> dict[str, list[str]]:
        """The devices that rounds hold watts for, in order, by run."""
        held: dict[str, list[str]] = {}
        for device_id in sorted(self.agents.devices):
            if plan_id := self.draw.plan_holding(device_id):
                held.setdefault(run_of(plan_id), []).append(device_id)
        return held

    def _longest_lapse(self, device_ids: Collection[str]) -> str:
        """The end of a sentence: after how many seconds the grants of absent devices have lapsed."""
        left_s = max(self.rounds.grants.lapses_in_s(each, self._now_s()) for each in device_ids)
        return f", in at most {left_s:.0f} s" if math.isfinite(left_s) else ""

    def trim(self) -> list[RoundRecord]:
        """Adapt the rounds in flight to duties that leave less time, and to budgets that are exceeded.

        Call this when a budget falls, and regularly: everything else that may make a trim necessary is found here.
        Trainings that nobody waits for are stopped first. A device's limit is never raised, because others may not have
        confirmed their lower limits yet. A device that is disconnected or does not confirm its grant cannot be changed:
        it counts with what it may draw, and the others are planned around it.

        Returns:
            The rounds that were changed.
        """
        grants = self.rounds.grants
        counted_on = grants.counted_on(self.agents.is_connected, self._now_s())
        trimmed = self._review_duties(counted_on.reachable)
        if exceeded := self._untrimmed(counted_on):
            self._stop_given_up(counted_on, exceeded)
            self._trim_to_budgets(counted_on, trimmed)
        too_much: set[str] = set()
        if never_sent := grants.never_sent():
            exceeded = self._exceeded(frozenset())
            too_much = {each for each in never_sent if self._is_behind(each, exceeded)}
        grants.pending.reviewed(set(grants.of_training()) - counted_on.reachable, too_much)
        return list(trimmed.values())

    def untrimmed_w(self) -> dict[str, float]:
        """By supply, the watts above its budget that a trim would save and that no order on its way saves.

        `trim` leaves none. They are therefore above zero only until the next trim.
        """
        counted_on = self.rounds.grants.counted_on(self.agents.is_connected, self._now_s())
        untrimmed = self._untrimmed(counted_on)
        allowance = replace(
            self.operator.allowance, elsewhere_w=self.draw.elsewhere_w(frozenset(), counted_on.believed)
        )
        uses = allowance.use([], {})
        return {use.supply: use.planned_w - use.budget_w if use.supply in untrimmed else 0.0 for use in uses}

    def _untrimmed(self, counted_on: CountedOn) -> frozenset[str]:
        """The supplies whose budget stays exceeded once all orders are obeyed, although a device could be lowered."""
        believed, grants = counted_on.believed, self.rounds.grants
        if not believed or not (exceeded := self._exceeded(believed)):
            return frozenset()
        lowerable = [each for each, _ in grants.given_up() if each in believed]
        lowerable += [
            each for each, known in grants.in_flight() if self._is_lowerable(each, known, counted_on.reachable)
        ]
        return frozenset(exceeded.intersection(supply for each in lowerable for supply in self._path(each)))

    def _is_lowerable(self, device_id: str, known: DeviceGrant, reachable: Set[str]) -> bool:
        """Whether a device in flight can be given a lower limit, or stopped."""
        # A device that profiles sets its own power modes.
        return (
            known.assignment is not None
            and device_id in reachable
            and device_id in self.agents.devices
            and not self.agents.is_profiling(device_id)
        )

    def _trim_to_budgets(self, counted_on: CountedOn, trimmed: dict[str, RoundRecord]) -> None:
        """Trim the rounds in flight to the budgets, and add the changed rounds to `trimmed` by plan id."""
        if not (in_flight := self._offers_in_flight(counted_on.reachable)):
            return
        offered = {offer.device_id for offers in in_flight.values() for offer in offers}
        rounds = [InFlight(self.rounds.records[plan_id].plan, offers) for plan_id, offers in in_flight.items()]
        allowance = replace(self.operator.allowance, elsewhere_w=self.draw.elsewhere_w(offered, counted_on.believed))
        for plan_id, trim in zip(in_flight, trim_rounds(rounds, allowance), strict=True):
            if trim is not None:
                trimmed[plan_id] = self._replace_plan(plan_id, trim)

    def _review_duties(self, reachable: Set[str]) -> dict[str, RoundRecord]:
        """Replan the devices in flight whose duty leaves less time than their rounds assume.

        Returns:
            The rounds that were changed, by plan id.
        """
        grants, now_s = self.rounds.grants, self._now_s()
        changed: dict[str, RoundRecord] = {}
        due = {each for each in self.duties.devices if each in reachable and self._is_duty_unreviewed(each)}
        if not due:
            return changed
        for plan_id, offers in self._offers_in_flight(due).items():
            known = {offer.device_id: grants.of(offer.device_id) for offer in offers}
            devices = [
                InTraining(offer, grant.elapsed_s(now_s))
                for offer in offers
                if (grant := known[offer.device_id]) is not None and not grant.is_late
            ]
            elsewhere_w = self.draw.elsewhere_w({each.offer.device_id for each in devices})
            allowance = replace(self.operator.allowance, elsewhere_w=elsewhere_w)
            if (trim := review_epochs(self.rounds.records[plan_id].plan, devices, allowance)) is not None:
                changed[plan_id] = self._replace_plan(plan_id, trim)
            for device_id in known:
                self.duties.reviewed(device_id, plan_id, self.agents.devices[device_id].fronts)
        return changed

    def _is_duty_unreviewed(self, device_id: str) -> bool:
        """Whether a device in flight has reported other fronts since its round was planned or last reviewed."""
        known, device = self.rounds.grants.of(device_id), self.agents.devices.get(device_id)
        if known is None or device is None or not known.is_in_flight:
            return False
        return not self.duties.is_reviewed(device_id, known.plan_id, device.fronts)

    def _replace_plan(self, plan_id: str, trim: TrimmedPlan) -> RoundRecord:
        before = self.rounds.records[plan_id]
        stopped_w = sum(self.agents.devices[device_id].idle_w or 0.0 for device_id in trim.ended)
        record = replace(before, plan=trim.plan, idle_w=before.idle_w + stopped_w)
        self.rounds.replace_plan(record, trim.changed + trim.ended)
        return record

    def is_outdated(self, run_id: str, assignments: Iterable[Assignment]) -> bool:
        """Whether a plan can no longer be put in force, because the fleet changed while it was planned.

        One of its devices was forgotten, disconnected or granted something else, or a budget would be exceeded.

        Args:
            run_id: the run.
            assignments: the planned trainings.
        """
        assignments = list(assignments)
        account = self.flower.energy.of(run_id)
        if account is not None and not account.has(sum(each.set_aside_j for each in assignments)):
            return True
        needed_j = {each.device_id: each.set_aside_j for each in assignments if each.longest_s is not None}
        if not self.stores.is_empty and not self.stores.has(
            needed_j, self.draw.idle_of_devices_w(), self.rounds.grants.plans_of_trainings()
        ):
            return True
        chosen = {assignment.device_id: assignment.power_limit_w for assignment in assignments}
        workload = self.flower.workload_of(run_id)
        for device_id in chosen:
            device = self.agents.devices.get(device_id)
            if device is None or self.rounds.grants.may_train(device_id):
                return True
            if not self.draw.is_offered(device, workload):
                return True
        drawn_w = self.draw.elsewhere_w(chosen.keys())
        for device_id, limit_w in chosen.items():
            drawn_w[self.operator.supply_of(device_id)] += limit_w
        return bool(self._exceeded_by(drawn_w))

    def _stop_given_up(self, counted_on: CountedOn, exceeded: frozenset[str]) -> None:
        """Stop the trainings that nobody waits for behind supplies that exceed their budget."""
        believed = counted_on.believed
        for device_id in [each for each, _ in self.rounds.grants.given_up() if each in believed]:
            if self._is_behind(device_id, exceeded):
                self.rounds.grants.stop(device_id)

    def _exceeded(self, believed: Set[str]) -> frozenset[str]:
        """The supplies whose budget is exceeded once the given devices have obeyed their orders."""
        return self._exceeded_by(self.draw.elsewhere_w(frozenset(), believed))

    def _exceeded_by(self, drawn_w: Mapping[str, float]) -> frozenset[str]:
        """The supplies whose budget is exceeded, given the watts of all devices by supply."""
        allowance = replace(self.operator.allowance, elsewhere_w=drawn_w)
        return allowance.exceeded(allowance.use([], {}))

    def _is_behind(self, device_id: str, supplies: frozenset[str]) -> bool:
        """Whether any of the given supplies feeds a device."""
        return not supplies.isdisjoint(self._path(device_id))

    def _path(self, device_id: str) -> Sequence[str]:
        """The supplies that feed a device; none if the site file does not place it, so that its session is refused."""
        try:
            return self.operator.allowance.supplies.path(self.operator.supply_of(device_id))
        except InvalidInputError:
            return ()

    def _offers_in_flight(self, among: Set[str]) -> dict[str, list[Offer]]:
        """The offers of the given devices that are in flight and can be lowered, by plan id."""
        offers: dict[str, list[Offer]] = {}
        lengths = self.agents.usual_lengths()
        for device_id, grant in self.rounds.grants.in_flight():
            if grant.assignment is None or not self._is_lowerable(device_id, grant, among):
                continue
            device = self.agents.devices[device_id]
            offer = self.draw.offer_of(device, self.flower.workload_of(run_of(grant.plan_id)), lengths)
            if offer is not None and offer.front.batch is not None:
                # Its app cannot change the batch during a training.
                front = offer.front.of_batch(grant.assignment.batch or 0)
                offer = None if front is None else replace(offer, front=front)
            if offer is None:  # its front was removed or has changed meanwhile: its training can continue or be stopped
                offer = self.draw.offer_as_assigned(device, grant.assignment)
            limit_w = grant.granted_w if offer.limit_w is None else min(offer.limit_w, grant.granted_w)
            offers.setdefault(grant.plan_id, []).append(replace(offer, limit_w=limit_w))
        return offers


def _copied(value: _T, done: dict[int, object]) -> _T:
    """Copy all parts of the state that can change. Records, policies and clocks never change and are shared.

    Args:
        value: a part of the state.
        done: the copies by the `id` of their originals, so that parts refer to each other in the copy, too.
    """
    if not _changes(type(value)):  # type: ignore[arg-type]  # a class is hashable
        return value
    if (known := done.get(id(value))) is not None:
        return cast(_T, known)
    copied: Any = copy.copy(value)
    done[id(value)] = copied
    if isinstance(value, dict):
        if any(map(_changes, set(map(type, value.values())))):
            for key, each in value.items():
                copied[key] = _copied(each, done)
    elif isinstance(value, list):
        copied[:] = [_copied(each, done) for each in value]
    elif not isinstance(value, set):
        for name, each in vars(value).items():
            setattr(copied, name, _copied(each, done))
    return cast(_T, copied)


@cache
def _changes(kind: type) -> bool:
    """Whether objects of a type can change: containers, and the parts of the state that are no records."""
    if issubclass(kind, dict | list | set):
        return True
    is_record = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]  # undocumented
    return kind.__module__.startswith(_STATE) and not (is_record or issubclass(kind, Enum))


_STATE = ("coordinator.state.", "coordinator.histograms")
