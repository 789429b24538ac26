"""The power that devices may draw beyond idle power: a pure state machine; callers pass the time.

A grant is a lease (Gray and Cheriton 1989): the device may act on it while it is in contact with the coordinator, and
for a stated time afterwards. Every acknowledged lease of its session renews it. The coordinator counts the time from
its acknowledgement and the device from its earlier request, so the device's grant lapses first.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from coordinator.settings import GrantSettings
from coordinator.state.records import (
    NOTHING_STORED,
    GivenUpTraining,
    RoundRecord,
    RunRecord,
    StoredGrants,
    UnstoredGrants,
    run_of,
)
from wattfleet.core.planning import Assignment, RoundPlan, granted_s
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.limits import MeasuringLimits
from wattfleet_proto.names import plan_id_to_measure

# --- Device grant -----------------------------------------------------------------------------------------------------
# One device's grant, and what the coordinator knows about its state.


@dataclass(frozen=True, slots=True)
class Grant:
    """A device's permission to draw more than idle power, for its training of one plan.

    Attributes:
        grant_id: its name in confirmations.
        plan_id: the plan; empty if the device is to stop a training without a plan.
        assignment: mode and power limit; None if the training has to stop or may not begin.
        longest_s: the training ends after this many seconds.
        measuring: limits of a training that is run in order to measure; None for a training of a round.
        planned_s: seconds that the round is planned to take, so that its measurements end in time; 0 outside of rounds.
        counts_energy: whether the run has an energy budget. The training then ends within the seconds for which energy
            was set aside, and begins once.
    """

    grant_id: int
    plan_id: str
    assignment: Assignment | None
    longest_s: float
    measuring: MeasuringLimits | None = None
    planned_s: float = 0.0
    counts_energy: bool = False

    @property
    def limit_w(self) -> float:
        """Watts that the device may draw; 0 if it may only idle."""
        return 0.0 if self.assignment is None else self.assignment.power_limit_w


@dataclass(frozen=True, slots=True)
class DeviceGrant:
    """The newest grant of a device, with the earlier grants that it may still act on.

    Attributes:
        grant: the newest grant.
        superseded_w: the highest limit of the grants before it that the device may still act on.
        phase: the last known progress of the device's training.
        was_sent: the device may have received the grant.
        is_confirmed: the device has put the grant in force.
        sent_s: when it was sent in the device's current session; None before.
        is_on_its_way: this grant or an earlier one was sent in the current session and may still arrive.
        is_given_up: nobody waits for the training: its round or run has ended, or it is run in order to measure. It
            counts until it is known to be over.
        is_rogue: the device acts on an unknown grant until it confirms this one.
        is_late: the round has ended without the training, and a later round uses its update.
        began_s: when the device was first known to train by the plan; None before, and if an earlier process of the
            coordinator may have sent the grant.
        may_have_begun: whether the device may ever have received a grant of the plan, so that it may have trained.
    """

    grant: Grant
    superseded_w: float = 0.0
    phase: GrantPhase = GrantPhase.WAITING
    was_sent: bool = False
    is_confirmed: bool = False
    sent_s: float | None = None
    is_on_its_way: bool = False
    is_given_up: bool = False
    is_rogue: bool = False
    is_late: bool = False
    began_s: float | None = None
    may_have_begun: bool = False

    @property
    def plan_id(self) -> str:
        """The plan of the newest grant."""
        return self.grant.plan_id

    @property
    def assignment(self) -> Assignment | None:
        """The assignment of the newest grant; None if the device has to stop."""
        return self.grant.assignment

    @property
    def is_first(self) -> bool:
        """Whether the device has not received this grant and cannot act on an earlier one."""
        return not self.was_sent and not self.superseded_w

    @property
    def is_in_flight(self) -> bool:
        """Whether somebody waits for the training."""
        return bool(self.plan_id) and not self.is_over and not self.is_given_up

    @property
    def is_over(self) -> bool:
        """Whether the device can no longer act on any grant."""
        return self.phase is GrantPhase.OVER and not self.superseded_w and not self.is_rogue

    @property
    def holds_watts(self) -> bool:
        """Whether the device may draw more than its idle power under any grant, known or unknown."""
        return not self.is_over and (self.counted_w > 0 or self.is_rogue)

    @property
    def granted_w(self) -> float:
        """The watts that the newest grant allows; 0 if the device may only idle."""
        return 0.0 if self.phase is GrantPhase.OVER else self.grant.limit_w

    @property
    def counted_w(self) -> float:
        """The most watts that the device may draw under any grant that it may act on; 0 if it can only idle."""
        return max(self.granted_w, self.superseded_w)

    @property
    def confirmed_w(self) -> float | None:
        """The watts of the newest grant if the device has confirmed it, or else None."""
        return self.granted_w if self.is_confirmed else None

    def followed_by(self, grant: Grant) -> DeviceGrant:
        """The device's state after a newer grant was issued. Until the device confirms it, it may act on both."""
        is_of_plan = grant.plan_id == self.plan_id
        may_have_begun = is_of_plan and self.may_have_begun
        if self.is_over:
            return DeviceGrant(grant, is_on_its_way=self.is_on_its_way, may_have_begun=may_have_begun)
        return DeviceGrant(
            grant,
            superseded_w=max(self.superseded_w, self.granted_w if self.was_sent else 0.0),
            phase=self.phase if is_of_plan else GrantPhase.WAITING,
            is_on_its_way=self.is_on_its_way,
            is_given_up=is_of_plan and self.is_given_up,
            is_rogue=self.is_rogue,
            is_late=is_of_plan and self.is_late,
            began_s=self.began_s if is_of_plan else None,
            may_have_begun=may_have_begun,
        )

    def sent(self, now_s: float) -> DeviceGrant:
        """The device's state after this grant was sent in its current session."""
        return replace(self, was_sent=True, is_on_its_way=True, sent_s=now_s, may_have_begun=True)

    def in_new_session(self) -> DeviceGrant:
        """The device's state after a new session has begun: what was sent in the earlier one may not have arrived."""
        return replace(self, sent_s=None, is_on_its_way=False)

    def elapsed_s(self, now_s: float) -> float | None:
        """Seconds since the training began, 0 before it; None if that is unknown."""
        if self.began_s is not None:
            return now_s - self.began_s
        return 0.0 if self.phase is GrantPhase.WAITING and self.was_sent else None

    def confirmed(self, phase: GrantPhase, now_s: float | None = None) -> DeviceGrant:
        """The device's state after a lease that names this grant.

        Args:
            phase: the progress of the device's training.
            now_s: the time now; None if the start of trainings is not recorded.
        """
        is_stopped = self.assignment is None and phase is not GrantPhase.TRAINING
        return replace(
            self,
            superseded_w=0.0,
            phase=GrantPhase.OVER if is_stopped else phase,
            began_s=self._began_s(phase, now_s),
            was_sent=True,
            is_confirmed=True,
            is_on_its_way=False,
            is_rogue=False,
        )

    def not_in_force(self, plan_id: str, phase: GrantPhase, now_s: float | None = None) -> DeviceGrant:
        """The device's state after a lease that names no grant, or another one.

        The other grant is older than this one, or an earlier process sent it without storing it.

        Args:
            plan_id: the plan of the grant that the lease names.
            phase: the progress of the training of that plan.
            now_s: the time now; None if the start of trainings is not recorded.
        """
        is_of_plan = plan_id == self.plan_id
        if phase is not GrantPhase.OVER:
            is_begun = is_of_plan and phase is GrantPhase.TRAINING
            if is_begun:
                return replace(self, phase=phase, began_s=self._began_s(phase, now_s))
            return replace(self, is_rogue=self.is_rogue or not is_of_plan)
        if self.is_on_its_way:
            return self
        # It acts on no grant, and none is on its way: a trim may lower this one as if it had never been sent. Its
        # training of this plan is over, or must not begin. Only a training to measure is given up before it is sent.
        # Nor may it begin if energy is counted: the device may have trained before its agent restarted.
        is_unwanted = self.is_given_up or self.grant.counts_energy
        is_over = is_of_plan or (is_unwanted and not self.is_first)
        phase = GrantPhase.OVER if is_over else GrantPhase.WAITING
        return replace(self, superseded_w=0.0, phase=phase, was_sent=False, is_confirmed=False, is_rogue=False)

    def _began_s(self, phase: GrantPhase, now_s: float | None) -> float | None:
        is_begun_now = phase is GrantPhase.TRAINING and self.phase is GrantPhase.WAITING and self.was_sent
        return now_s if is_begun_now else self.began_s


# --- Pending grants ---------------------------------------------------------------------------------------------------
# A state machine of which grants have yet to be sent, and which wait before they are sent or renewed.


class PendingGrants:
    """What remains to be done about the devices' newest grants; the grants themselves are elsewhere.

    Reviews compare all grants with the budgets, and trim where necessary. A review passes over the devices that could
    not be sent a lower limit, because they were disconnected or did not confirm in time. Their grants are neither sent
    nor renewed until a later review has included them. Otherwise, a grant from before a cut of the budget could outlast
    the stated time.
    """

    def __init__(self) -> None:
        """Start with nothing to send, before the first review."""
        self._unsent: dict[str, None] = {}  # in the order in which they became due
        self._held_back: set[str] = set()
        self._passed_over: set[str] = set()
        self._too_much: set[str] = set()

    # --- sending ------------------------------------------------------------------------------------------------

    def due(self, grants: Mapping[str, DeviceGrant], only: Collection[str] | None = None) -> list[str]:
        """The devices whose grants may be sent now. A grant that stops a training never waits.

        Args:
            grants: the newest grant of each device.
            only: restricts the result to these devices; None for all.
        """
        unsent = self._unsent if only is None else [each for each in only if each in self._unsent]
        return [each for each in unsent if grants[each].assignment is None or not self._waits(each, grants[each])]

    def _waits(self, device_id: str, known: DeviceGrant) -> bool:
        is_for_review = device_id in self._passed_over or device_id in self._too_much
        return is_for_review or known.plan_id in self._held_back

    def send(self, device_id: str) -> None:
        """Send a device's grant as soon as possible."""
        self._unsent[device_id] = None

    def sent(self, device_id: str) -> None:
        """Record that a device's grant was sent."""
        del self._unsent[device_id]

    def issued(self, device_id: str) -> None:
        """Schedule a device's new grant for sending; it already respects the budgets."""
        self._passed_over.discard(device_id)
        self._too_much.discard(device_id)
        self.send(device_id)

    def hold_back(self, plan_id: str) -> None:
        """Send no grant of a plan until `let_go`, because a restarted coordinator must know what was granted."""
        self._held_back.add(plan_id)

    def let_go(self, plan_id: str) -> None:
        """Allow sending the grants of a plan, because it is stored."""
        self._held_back.discard(plan_id)

    # --- reviews ------------------------------------------------------------------------------------------------

    def reviewed(self, passed_over: Iterable[str], too_much: Set[str] = frozenset()) -> None:
        """Record that all grants were compared with the budgets, and trimmed where necessary.

        Args:
            passed_over: devices that could not be sent a lower limit.
            too_much: devices whose first grants have to wait until others have confirmed lower limits.
        """
        self._passed_over, self._too_much = set(passed_over), set(too_much)

    def is_passed_over(self, device_id: str) -> bool:
        """Whether the last review could not have lowered a device's grant."""
        return device_id in self._passed_over

    def ended(self, device_id: str) -> None:
        """Cancel sending and reviewing, because the grant is over or forgotten."""
        self._unsent.pop(device_id, None)
        self._passed_over.discard(device_id)
        self._too_much.discard(device_id)


# --- Grants -----------------------------------------------------------------------------------------------------------

_DRIFT = 0.01
"""Relative error between two clocks: a hundred times that of a poor quartz."""

_LONGEST_FACTOR, _LONGEST_EXTRA_S = 2.0, 600.0
"""A training is ended after its planned duration or deadline times this factor, plus the additional seconds."""


@dataclass(frozen=True)
class CountedOn:
    """The devices that are believed to keep to their newest grants, among those that may act on one.

    Attributes:
        reachable: the connected ones, which can be sent a lower limit. They have confirmed their grant, or have not yet
            failed to do so in time.
        absent: those that are expected to return. The coordinator was just restarted, and an earlier process had sent
            them the grant.
    """

    reachable: Set[str]
    absent: Set[str]

    @property
    def believed(self) -> Set[str]:
        """All of them."""
        return self.reachable | self.absent


class Grants:
    """The newest grant of every device that a plan has chosen.

    Attributes:
        pending: which grants have yet to be sent, and which have to be reviewed first.
        unstored: what has to be stored, so that a restarted coordinator does not free watts too early.
    """

    def __init__(
        self,
        rounds: Iterable[RoundRecord] = (),
        runs: Mapping[str, RunRecord] | None = None,
        settings: GrantSettings = GrantSettings(),
        started_s: float = 0.0,
        first_id: int | None = None,
        stored: StoredGrants = NOTHING_STORED,
    ) -> None:
        """Start from what a store holds.

        An earlier process may have sent a device more than the store knows. So a device counts with the highest limit
        that its newest plan ever had, until the device has reported its grant, or its grant must have lapsed.

        Args:
            rounds: oldest first.
            runs: the runs of these rounds, by id.
            settings: how long grants and trainings last.
            started_s: the time now.
            first_id: the id of the first grant; None for a random id, so that it differs from those of earlier
                processes.
            stored: what an earlier process has stored about its grants.
        """
        self._settings = settings
        self._started_s = started_s
        self._next_id = secrets.randbits(62) if first_id is None else first_id
        self._grants: dict[str, DeviceGrant] = {}
        self._lapses_s: dict[str, float] = {}
        self.pending = PendingGrants()
        # Devices that have sent no lease in their session yet.
        self._unheard: set[str] = set()
        # Until then, a device may hold a grant with the lifetime of an earlier process.
        self._earlier_until_s = started_s + self._lasts_s(stored.lifetime_s) if stored.lifetime_s else -math.inf
        self.unstored = UnstoredGrants(stored, settings.lifetime_s)
        for record in rounds:
            for device_id in record.nodes:
                self._grants.pop(device_id, None)  # a device is planned once its previous grant is over
            self._commit(record)
            original = {each.device_id: each.power_limit_w for each in record.plan.original.assignments}
            for device_id in record.nodes:
                known = self._grants[device_id]
                before_w = max(original.get(device_id, 0.0), known.grant.limit_w)
                self._grants[device_id] = replace(known, superseded_w=before_w, may_have_begun=True)
            for device_id in record.observations:
                self.observed(device_id, record.plan_id)
            if (runs or {})[record.run_id].finished:
                for device_id in record.nodes:
                    self._give_up(device_id, record.plan_id)
            elif record.wall_s is not None:
                self._end_round(record)
        for training in stored.given_up.values():
            if training.limit_w is not None:
                self._continue_stopping(training, training.limit_w)
        for device_id in self._grants:
            self.renew(device_id, started_s)
        self.pending.reviewed(self.of_training())  # nothing is renewed before the first review

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def lifetime_s(self) -> float:
        """Seconds for which a device may act on its grant after its last acknowledged lease."""
        return self._settings.lifetime_s

    @property
    def longest_unknown_s(self) -> float:
        """Seconds after which a training ends if its device does not know the length of its epoch."""
        return self._settings.longest_unknown_s

    def of(self, device_id: str) -> DeviceGrant | None:
        """A device's newest grant; None if no plan has chosen it."""
        return self._grants.get(device_id)

    def of_training(self) -> Iterator[str]:
        """The devices that may act on a grant."""
        return (device_id for device_id, each in self._known() if not each.is_over)

    def of_measuring(self) -> Iterator[tuple[str, str]]:
        """The devices whose newest grant is one to measure, each with the id that the grant names as its plan."""
        return ((device_id, each.plan_id) for device_id, each in self._grants.items() if each.grant.measuring)

    def in_flight(self) -> Iterator[tuple[str, DeviceGrant]]:
        """The grants of trainings that a Flower server waits for, each with its device's id."""
        return ((device_id, each) for device_id, each in self._known() if each.is_in_flight)

    def given_up(self) -> Iterator[tuple[str, DeviceGrant]]:
        """The grants of trainings that draw power but are no longer waited for, each with its device's id."""
        return ((device_id, each) for device_id, each in self._known() if each.is_given_up and each.granted_w)

    def never_began(self, device_id: str, plan_id: str) -> bool:
        """Whether a device's training of a plan was cancelled before the device could have received its grant."""
        known = self._grants.get(device_id)
        return known is not None and known.plan_id == plan_id and known.is_over and not known.may_have_begun

    def counting_energy(self, run_id: str) -> list[str]:
        """The devices that may still train for a run, and then report their energy."""
        return [
            device_id
            for device_id, known in self._known()
            if known.grant.counts_energy and not known.is_over and run_of(known.plan_id) == run_id
        ]

    def plans_of_trainings(self) -> set[str]:
        """The ids of the plans by which some device may still train."""
        known = (self.of(device_id) for device_id in self.of_training())
        return {each.plan_id for each in known if each is not None}

    def plans_in_flight(self) -> set[str]:
        """The ids of the plans that a Flower server waits for."""
        return {each.plan_id for _, each in self.in_flight()}

    def counted_on(self, is_connected: Callable[[str], bool], now_s: float) -> CountedOn:
        """Which devices can be counted on. This is the only place that decides it.

        Args:
            is_connected: whether a device has a session.
            now_s: the time now.
        """
        sent_after_s = now_s - self._settings.confirm_timeout_s
        is_starting = now_s - self._started_s < self._settings.lifetime_s
        reachable, absent = set(), set()
        for device_id, known in self._known():
            if known.is_over:
                continue
            if is_connected(device_id) and (known.sent_s is not None or device_id not in self._unheard):
                if known.is_confirmed or known.sent_s is None or known.sent_s > sent_after_s:
                    reachable.add(device_id)
            elif is_starting and not known.was_sent:
                absent.add(device_id)
        return CountedOn(reachable, absent)

    @property
    def lowered_count(self) -> int:
        """The number of devices that have not confirmed a lower limit yet."""
        return sum(each.was_sent and each.superseded_w > each.granted_w for each in self._grants.values())

    def lapses_in_s(self, device_id: str, now_s: float) -> float:
        """Seconds until a device's grant must have lapsed if the device is without contact from now on."""
        return max(0.0, self._lapses_s.get(device_id, now_s) - now_s)

    def may_train(self, device_id: str) -> bool:
        """Whether a device may still act on a grant."""
        known = self._grants.get(device_id)
        return known is not None and not known.is_over

    # --- plans --------------------------------------------------------------------------------------------------

    def commit(self, record: RoundRecord) -> None:
        """Issue the grants of a new plan's assignments."""
        self._commit(record)
        # Stored with the round: a restarted coordinator would take an earlier training of its devices for the newer.
        self.unstored.check(self._leftover)

    def reassign(self, record: RoundRecord, device_ids: Collection[str]) -> None:
        """Issue a trimmed plan's grants to the given devices in flight; devices that it no longer contains stop."""
        assignments = {assignment.device_id: assignment for assignment in record.plan.assignments}
        for device_id in device_ids:
            assignment, grant = assignments.get(device_id), self._grants[device_id].grant
            # If energy is counted, no more of it is set aside.
            more_s = 0.0 if grant.counts_energy else self._longest_s(record.plan, assignment)
            self._issue(
                device_id,
                record.plan_id,
                assignment,
                max(grant.longest_s, more_s),
                planned_s=_planned_s(record.plan),
                counts_energy=grant.counts_energy,
            )

    def measure(self, run_id: str, assignments: Sequence[Assignment], measuring: Mapping[str, MeasuringLimits]) -> str:
        """Issue grants to measure; each training may also go on to its end.

        Args:
            run_id: the run whose app is trained.
            assignments: mode and watts of each device, one or more.
            measuring: the limits of its measurements, by device id.

        Returns:
            The id that the grants name in place of a round's plan.
        """
        plan_id = plan_id_to_measure(run_id, self._next_id)
        for each in assignments:
            device_id, is_counted = each.device_id, each.longest_s is not None
            longest_s = self._settings.longest_unknown_s if each.longest_s is None else granted_s(each.longest_s)
            self._issue(device_id, plan_id, each, longest_s, measuring[device_id], counts_energy=is_counted)
            self._grants[device_id] = replace(self._grants[device_id], is_given_up=True)
        self.unstored.note(measuring, self._leftover)
        return plan_id

    def stop_measuring(self, device_ids: Iterable[str]) -> None:
        """Stop the trainings of some devices that are run in order to measure."""
        for device_id in device_ids:
            known = self._grants[device_id]
            if known.grant.measuring is None or known.is_over:
                continue
            if known.is_first:
                self._cancel(device_id)  # the device cannot have received it
            elif known.assignment is not None:
                self.stop(device_id)

    def stop_measuring_of(self, plan_id: str) -> None:
        """Stop the trainings of one plan to measure, or cancel them before they begin."""
        self.stop_measuring([each for each, of in self.of_measuring() if of == plan_id])

    def stop(self, device_id: str) -> None:
        """Stop a device's training, or cancel it before it begins."""
        known = self._grants[device_id]
        self._issue(
            device_id,
            known.plan_id,
            None,
            known.grant.longest_s,
            known.grant.measuring,
            counts_energy=known.grant.counts_energy,
        )

    def assume_over(self, device_id: str) -> None:
        """In a copy for a preview, assume that a device can no longer act on any grant."""
        known = self._grants[device_id]
        self._grants[device_id] = replace(known, phase=GrantPhase.OVER, superseded_w=0.0, is_rogue=False)

    def end_round(self, record: RoundRecord) -> None:
        """Stop waiting for the devices of a finished round, except for late ones."""
        self._end_round(record)
        self.unstored.note(record.nodes, self._leftover)

    def give_up_round(self, record: RoundRecord) -> None:
        """Stop waiting for the devices of an abandoned round."""
        for device_id in record.nodes:
            self._give_up(device_id, record.plan_id)
        self.unstored.note(record.nodes, self._leftover)

    def give_up_runs(self, run_ids: Collection[str]) -> None:
        """Stop waiting for the devices of finished runs, and stop those that measure for them."""
        self.stop_measuring([each for each, plan_id in self.of_measuring() if run_of(plan_id) in run_ids])
        # Those that were given up earlier, too: from now on, their rounds may not be loaded by a restart.
        of_runs = {device_id: each.plan_id for device_id, each in self._known() if run_of(each.plan_id) in run_ids}
        for device_id, plan_id in of_runs.items():
            self._give_up(device_id, plan_id)
        self.unstored.note(of_runs, self._leftover)

    def stop_runs(self, run_ids: Collection[str]) -> None:
        """Stop all trainings of finished runs, or cancel them before they begin."""
        for device_id, known in self._known():
            if run_of(known.plan_id) in run_ids and known.granted_w:
                self._give_up(device_id, known.plan_id)
                if self._grants[device_id].granted_w:
                    self.stop(device_id)

    def give_up_devices(self, device_ids: Iterable[str], run_id: str) -> None:
        """Stop waiting for the given devices of a run, because its Flower server does not wait for them."""
        for device_id in device_ids:
            known = self._grants.get(device_id)
            if known is None or known.is_given_up or known.is_over or not known.plan_id:
                continue
            if run_of(known.plan_id) == run_id:
                self._give_up(device_id, known.plan_id)

    def forget(self, device_ids: Collection[str]) -> None:
        """Remove the grants of some devices."""
        for device_id in device_ids:
            self.pending.ended(device_id)
            self._unheard.discard(device_id)
            self._grants.pop(device_id, None)
            self._lapses_s.pop(device_id, None)

    def remove_runs(self, run_ids: Collection[str]) -> None:
        """Remove those grants of deleted runs that are over."""
        for device_id, known in list(self._grants.items()):
            if known.is_over and run_of(known.plan_id) in run_ids:
                self.forget([device_id])

    # --- devices ------------------------------------------------------------------------------------------------

    def greeted(self, device_id: str) -> None:
        """Note that a device's session begins: its first lease will state which grant it has in force.

        What was sent in its previous session may not have arrived.
        """
        self._unheard.add(device_id)
        if (known := self._grants.get(device_id)) is not None:
            self._grants[device_id] = known.in_new_session()

    def session_began(self, device_id: str, now_s: float) -> None:
        """Begin a device's session, once its greeting was answered: grants are sent in the new session from now on."""
        self.renew(device_id, now_s)
        self.greeted(device_id)

    def never_sent(self) -> list[str]:
        """The devices whose trainings cannot begin yet, because no grant of the plan was sent."""
        return [device_id for device_id, each in self._grants.items() if each.granted_w and each.is_first]

    def may_be_renewed(self, device_id: str) -> bool:
        """Whether a device's grant may be renewed.

        A grant that is older than the newest one must lapse, however often its device connects. So must a grant that
        the last review passed over, because its device could not be informed of a lower budget.
        """
        known = self._grants.get(device_id)
        return known is None or known.is_over or (known.is_confirmed and not self.pending.is_passed_over(device_id))

    def renew(self, device_id: str, now_s: float) -> None:
        """Restart the lifetime of a device's grant; call this before the renewal is acknowledged to the device."""
        self._lapses_s[device_id] = max(now_s + self._lasts_s(self._settings.lifetime_s), self._earlier_until_s)

    def confirm(
        self, device_id: str, grant_id: int, plan_id: str, phase: GrantPhase, now_s: float | None = None
    ) -> None:
        """Record which grant a device reports as in force, and its progress.

        Args:
            device_id: the device.
            grant_id: the grant in force; 0 for none.
            plan_id: the plan of that grant.
            phase: how far the device is with its training.
            now_s: the time now; None if nobody asks when trainings began.
        """
        self._unheard.discard(device_id)
        known = self._grants.get(device_id)
        if known is None or known.is_over:
            if phase is not GrantPhase.OVER:  # it may have lapsed while the device could not be parked
                self._issue(device_id, plan_id, None, 0.0)
                issued = self._grants[device_id]
                self._grants[device_id] = replace(issued, is_rogue=True, is_given_up=True, may_have_begun=True)
        elif grant_id == known.grant.grant_id:
            self._grants[device_id] = known.confirmed(phase, now_s)
            is_unwanted = known.is_given_up and known.grant.measuring is None
            if is_unwanted and phase is GrantPhase.WAITING and known.assignment is not None:
                self.stop(device_id)
        else:
            self._grants[device_id] = known = known.not_in_force(plan_id, phase, now_s)
            if known.sent_s is None and not known.is_over:
                self.pending.send(device_id)

    def observed(self, device_id: str, plan_id: str) -> None:
        """Stop waiting for a device that has reported its observation of a plan.

        The observation frees no watts: an agent that restarts repeats it, and may have received the grant again by
        then. The device's leases state whether its training is over.
        """
        self._give_up(device_id, plan_id)

    def check(self, now_s: float) -> list[str]:
        """End the grants that must have lapsed, and return the ids of their devices."""
        lapsed = []
        for device_id, lapses_s in self._lapses_s.items():
            if now_s < lapses_s or (known := self._grants.get(device_id)) is None or known.is_over:
                continue
            lapsed.append(device_id)
            self._grants[device_id] = replace(known, phase=GrantPhase.OVER, superseded_w=0.0, is_rogue=False)
            self.pending.ended(device_id)
        self.unstored.check(self._leftover)
        if now_s >= self._earlier_until_s:
            self.unstored.earlier_lapsed()
        return lapsed

    def due(self) -> tuple[list[str], list[str]]:
        """Devices whose grants may be sent now: first those that may act on an older grant, then those without one."""
        changed: list[str] = []
        first: list[str] = []
        for device_id in self.pending.due(self._grants):
            known = self._grants[device_id]
            (first if known.is_first and known.assignment is not None else changed).append(device_id)
        return changed, first

    def take_orders(
        self, is_reachable: Callable[[str], bool], now_s: float, only: Collection[str] | None = None
    ) -> list[tuple[str, Grant]]:
        """Return the grants to send to reachable devices now, each with its device's id, and mark them as sent.

        A grant that is older than the device's session is reviewed before it is sent. A grant of a plan that is held
        back waits, unless it stops the training.

        Args:
            is_reachable: returns whether a grant can be sent to a device.
            now_s: the time now.
            only: restricts the result to these devices; None for all.
        """
        orders = []
        for device_id in filter(is_reachable, self.pending.due(self._grants, only)):
            self.pending.sent(device_id)
            if not (known := self._grants[device_id]).is_over:
                self._grants[device_id] = known.sent(now_s)
                orders.append((device_id, known.grant))
        return orders

    # --- internal -----------------------------------------------------------------------------------------------

    def _known(self) -> list[tuple[str, DeviceGrant]]:
        """The newest grant of each device; a copy, because metrics are read in another thread."""
        return list(self._grants.items())

    def _lasts_s(self, lifetime_s: float) -> float:
        """Seconds after a device's last renewal by which it must be parked."""
        return lifetime_s * (1 + _DRIFT) + self._settings.stop_margin_s

    def _commit(self, record: RoundRecord) -> None:
        assignments = {assignment.device_id: assignment for assignment in record.plan.assignments}
        for device_id in record.nodes:
            assignment = assignments.get(device_id)
            first = record.plan.original.assignment_of(device_id)
            counted_s = None if first is None else first.longest_s
            longest_s = self._longest_s(record.plan, assignment) if counted_s is None else granted_s(counted_s)
            self._issue(
                device_id,
                record.plan_id,
                assignment,
                longest_s,
                planned_s=_planned_s(record.plan),
                counts_energy=counted_s is not None,
            )

    def _leftover(self, device_id: str) -> GivenUpTraining | None:
        """A device's training that no round waits for; None if there is none."""
        known = self._grants.get(device_id)
        if known is None or known.is_over or not (known.is_given_up or known.is_late):
            return None
        return GivenUpTraining(device_id, known.plan_id, known.counted_w if known.grant.measuring else None)

    def _continue_stopping(self, training: GivenUpTraining, limit_w: float) -> None:
        """Stop a training that an earlier process let measure; it counts with its watts until it is over."""
        assert training.plan_id is not None, "only trainings that are not over are stored"
        self._issue(training.device_id, training.plan_id, None, 0.0, MeasuringLimits(0, 0.0))
        issued = self._grants[training.device_id]
        self._grants[training.device_id] = replace(issued, superseded_w=limit_w, is_given_up=True)

    def _end_round(self, record: RoundRecord) -> None:
        late = set(record.late)
        for device_id in record.nodes:
            known = self._grants.get(device_id)
            if device_id not in late:
                self._give_up(device_id, record.plan_id)
            elif known is not None and known.plan_id == record.plan_id and known.is_in_flight:
                self._grants[device_id] = replace(known, is_late=True)

    def _longest_s(self, plan: RoundPlan, assignment: Assignment | None) -> float:
        longest_s = _LONGEST_FACTOR * _planned_s(plan) + _LONGEST_EXTRA_S
        is_assumed = assignment is not None and assignment.is_length_assumed
        return max(longest_s, self._settings.longest_unknown_s) if is_assumed else longest_s

    def _issue(
        self,
        device_id: str,
        plan_id: str,
        assignment: Assignment | None,
        longest_s: float,
        measuring: MeasuringLimits | None = None,
        planned_s: float = 0.0,
        counts_energy: bool = False,
    ) -> None:
        grant = Grant(self._next_id, plan_id, assignment, longest_s, measuring, planned_s, counts_energy)
        known = self._grants.get(device_id)
        self._grants[device_id] = DeviceGrant(grant) if known is None else known.followed_by(grant)
        self._next_id += 1
        self._lapses_s.setdefault(device_id, math.inf)  # until its session sends its first lease
        self.pending.issued(device_id)

    def _give_up(self, device_id: str, plan_id: str) -> None:
        """Stop waiting for a device, and cancel its training if it may not have begun."""
        known = self._grants.get(device_id)
        if known is None or known.plan_id != plan_id or known.is_given_up or known.is_over:
            return
        self._grants[device_id] = replace(known, is_given_up=True)
        if known.is_first:
            self._cancel(device_id)  # the device cannot have received it
        elif known.phase is GrantPhase.WAITING and known.assignment is not None:
            self.stop(device_id)

    def _cancel(self, device_id: str) -> None:
        """End a grant that its device has not received."""
        self._grants[device_id] = replace(self._grants[device_id], phase=GrantPhase.OVER)
        self.pending.ended(device_id)


def _planned_s(plan: RoundPlan) -> float:
    return max(plan.duration_s, plan.deadline_s or 0.0)
