"""The fleet as the coordinator knows it: agents, the operator's settings, Flower's runs, and their rounds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from coordinator.errors import StillInUseError
from coordinator.settings import ClaimSettings, GrantSettings
from coordinator.state.agents import Agents
from coordinator.state.claims import Claims
from coordinator.state.contention import Contention
from coordinator.state.flower import FlowerRuns
from coordinator.state.kept_duties import KeptDuties
from coordinator.state.live_samples import LiveSamples
from coordinator.state.operator import OperatorSettings
from coordinator.state.pairing import NodePairings
from coordinator.state.placement import AssignedPlacement, OnlySite, Placement
from coordinator.state.power_draw import MeasuredDraw, PowerDraw
from coordinator.state.preset_points import PresetPoints
from coordinator.state.records import (
    DeviceOverrides,
    DeviceRecord,
    ForgottenDevice,
    ObservedTraining,
    RoundObservation,
    RoundRecord,
    RunRecord,
    run_of,
)
from coordinator.state.rounds.device_grant import Grant
from coordinator.state.rounds.grants import Grants
from coordinator.state.rounds.ledger import RoundLedger
from coordinator.state.rounds.unplanned import UnplannedRounds
from coordinator.state.stored_grants import NOTHING_STORED, StoredGrants
from coordinator.state.waiting_runs import WaitingRuns
from wattfleet.budgets import InForce
from wattfleet.errors import first_few
from wattfleet.planning import (
    Allowance,
    InFlight,
    InTraining,
    Offer,
    Selection,
    TrimmedPlan,
    review_epochs,
    trim_rounds,
)
from wattfleet.planning.policies import Policy


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
        self.agents = Agents(devices, placement, self.rounds, Claims(claims), max_workloads)
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
            NodePairings(dict(pairing_problems or {})),
        )

    def copy(self) -> Fleet:
        """An independent copy."""
        copied = copy.copy(self)
        copied.rounds = self.rounds.copy()
        copied.agents = self.agents.copy(copied.rounds)
        copied.operator = self.operator.copy(copied.agents)
        copied.draw = PowerDraw(copied.agents, copied.operator, copied.rounds.grants)
        copied.flower = self.flower.copy(copied.agents, copied.operator, copied.rounds, copied.draw)
        return copied

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
            The plan ids of these rounds.
        """
        ended: dict[str, None] = {}
        for device_id in [each for each in self.rounds.grants.of_training() if self.agents.is_connected(each)]:
            plan_id = self.draw.plan_holding(device_id) or ""
            if not run_id or run_of(plan_id) == run_id:
                ended[plan_id] = None
                self.rounds.grants.assume_over(device_id)
                self.agents.assume_ready(device_id)
        return sorted(filter(None, ended))

    def check_grants(self) -> list[str]:
        """End the grants that must have lapsed; returns the ids of their devices."""
        now_s = self._now_s()
        if self.rounds.grants.needs_review(now_s):
            self.rounds.is_trim_due = True
        return self.rounds.grants.check(now_s)

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
                    f"{self.flower.round_text(plan_id)} still holds watts for {device_id}: wait until the round is"
                    " over, or end its run with `wattfleet coordinator delete"
                    f" {self.flower.name_of(run_of(plan_id))} --end`"
                )
        for part in (self.agents, self.operator, self.flower, self.rounds, self.duties, self.samples):
            part.forget(ids)
        return [ForgottenDevice(device_id) for device_id in ids]

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

    def require_unused(self, run_ids: Iterable[str]) -> None:
        """Check that no device still trains for any of the given runs.

        Raises:
            StillInUseError: a round of these runs still holds watts for a device.
        """
        held: dict[str, list[str]] = {}
        for device_id in self.agents.devices:
            if plan_id := self.draw.plan_holding(device_id):
                held.setdefault(run_of(plan_id), []).append(device_id)
        for run_id in run_ids:
            if run_id in held:
                raise StillInUseError(
                    f"run {self.flower.name_of(run_id)!r} has ended, but watts are still held for"
                    f" {first_few(sorted(held[run_id]))}: delete the run when these devices have finished their"
                    " trainings"
                )

    def trim(self) -> list[RoundRecord]:
        """Adapt the rounds in flight to duties that leave less time, and to budgets that are exceeded.

        Trainings that nobody waits for are stopped first. A device's limit is never raised, because others may not have
        confirmed their lower limits yet. A device that is disconnected or does not confirm its grant cannot be changed:
        it counts with what it may draw, and the others are planned around it.

        Returns:
            The rounds that were changed.
        """
        self.rounds.trim_count += 1
        trimmed = self._review_duties()
        self._trim_to_budgets(trimmed)
        self._trimmed()
        return list(trimmed.values())

    def _trim_to_budgets(self, trimmed: dict[str, RoundRecord]) -> None:
        """Trim the rounds in flight to the budgets, and add the changed rounds to `trimmed` by plan id."""
        expected = {device_id for device_id in self.rounds.grants.of_training() if self._obeys(device_id)}
        if not (exceeded := self._exceeded(expected)):
            return
        in_flight = self._offers_in_flight()
        offered = {offer.device_id for offers in in_flight.values() for offer in offers}
        self._stop_given_up(expected, exceeded)
        if not in_flight:
            return
        rounds = [InFlight(self.rounds.records[plan_id].plan, offers) for plan_id, offers in in_flight.items()]
        allowance = replace(self.operator.allowance, elsewhere_w=self.draw.elsewhere_w(offered, expected))
        for plan_id, trim in zip(in_flight, trim_rounds(rounds, allowance), strict=True):
            if trim is not None:
                trimmed[plan_id] = self._replace_plan(plan_id, trim)

    def _review_duties(self) -> dict[str, RoundRecord]:
        """Replan the devices in flight whose duty leaves less time than their rounds assume.

        Returns:
            The rounds that were changed, by plan id.
        """
        changed: dict[str, RoundRecord] = {}
        if not self.duties.devices:
            return changed
        grants, now_s = self.rounds.grants, self._now_s()
        for plan_id, offers in self._offers_in_flight(self.duties.devices).items():
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
        return changed

    def _replace_plan(self, plan_id: str, trim: TrimmedPlan) -> RoundRecord:
        before = self.rounds.records[plan_id]
        stopped_w = sum(self.agents.devices[device_id].idle_w or 0.0 for device_id in trim.ended)
        record = replace(before, plan=trim.plan, idle_w=before.idle_w + stopped_w)
        self.rounds.replace_plan(record, trim.changed + trim.ended)
        return record

    def _trimmed(self) -> None:
        """Record that rounds were trimmed; unsent grants wait until other devices have confirmed lower ones."""
        self.rounds.is_trim_due = False
        waiting: set[str] = set()
        if never_sent := self.rounds.grants.never_sent():
            exceeded = self._exceeded(frozenset())
            waiting = {each for each in never_sent if self._is_behind(each, exceeded)}
        self.rounds.grants.pending.reviewed(waiting)

    def exceeds_budget(self, planned: RoundRecord) -> bool:
        """Whether a plan would now exceed a budget, because the fleet changed while it was planned."""
        chosen = {assignment.device_id: assignment.power_limit_w for assignment in planned.plan.assignments}
        workload = self.flower.workload_of(planned.run_id)
        for device_id in chosen:
            device = self.agents.devices[device_id]
            if self.rounds.grants.may_train(device_id) or not self.draw.is_offered(device, workload):
                return True
        drawn_w = self.draw.elsewhere_w(chosen.keys())
        for device_id, limit_w in chosen.items():
            drawn_w[self.operator.supply_of(device_id)] += limit_w
        return bool(self._exceeded_by(drawn_w))

    def _stop_given_up(self, expected: Set[str], exceeded: frozenset[str]) -> None:
        """Stop the trainings that nobody waits for behind supplies that exceed their budget."""
        for device_id in [each for each, _ in self.rounds.grants.given_up() if each in expected]:
            if self._is_behind(device_id, exceeded):
                self.rounds.grants.stop(device_id)

    def _exceeded(self, expected: Set[str]) -> frozenset[str]:
        """The supplies whose budget is exceeded once the given devices have obeyed their orders."""
        return self._exceeded_by(self.draw.elsewhere_w(frozenset(), expected))

    def _exceeded_by(self, drawn_w: Mapping[str, float]) -> frozenset[str]:
        """The supplies whose budget is exceeded, given the watts of all devices by supply."""
        allowance = replace(self.operator.allowance, elsewhere_w=drawn_w)
        return allowance.exceeded(allowance.use([], {}))

    def _is_behind(self, device_id: str, supplies: frozenset[str]) -> bool:
        """Whether any of the given supplies feeds a device."""
        path = self.operator.allowance.supplies.path(self.operator.supply_of(device_id))
        return not supplies.isdisjoint(path)

    def _obeys(self, device_id: str) -> bool:
        """Whether a device is believed to confirm its orders."""
        grants, now_s = self.rounds.grants, self._now_s()
        if self.agents.is_connected(device_id):
            return grants.is_controllable(device_id, now_s)
        return grants.is_expected_back(device_id, now_s)

    def _offers_in_flight(self, only: Collection[str] | None = None) -> dict[str, list[Offer]]:
        """The offers of the devices in flight, by plan id.

        Args:
            only: restricts the result to these devices; None for all.
        """
        offers: dict[str, list[Offer]] = {}
        lengths = self.agents.usual_lengths()
        for device_id, grant in self.rounds.grants.in_flight():
            device = self.agents.devices.get(device_id)
            # A device that profiles sets its own power modes.
            if grant.assignment is None or device is None or self.agents.is_profiling(device_id):
                continue
            if only is not None and device_id not in only:
                continue
            if not self._obeys(device_id) or not self.agents.is_connected(device_id):
                continue
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
