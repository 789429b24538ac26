"""The power that devices may draw beyond idle power: a pure state machine; callers pass the time.

A grant is a lease (Gray and Cheriton 1989): the device may act on it while it is in contact with the coordinator, and
for a stated time afterwards. Every acknowledged lease of its session renews it. The coordinator counts the time from
its acknowledgement and the device from its earlier request, so the device's grant lapses first.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from coordinator.settings import GrantSettings
from coordinator.state.records import RoundRecord, RunRecord, run_of
from coordinator.state.rounds.device_grant import DeviceGrant, Grant
from coordinator.state.rounds.pending_grants import PendingGrants
from coordinator.state.stored_grants import NOTHING_STORED, StoredGrants, UnstoredGrants
from wattfleet.planning import Assignment, RoundPlan
from wattfleet_proto.device_state import GrantPhase

_DRIFT = 0.01
"""Relative error between two clocks: a hundred times that of a poor quartz."""


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
        # Until then, a device may hold a grant with the lifetime of an earlier process.
        self._earlier_until_s = started_s + self._lasts_s(stored.lifetime_s) if stored.lifetime_s else -math.inf
        self.unstored = UnstoredGrants(stored, settings.lifetime_s)
        for record in rounds:
            for device_id in record.nodes:
                self._grants.pop(device_id, None)  # a device is planned once its previous grant is over
            self.commit(record)
            original = {each.device_id: each.power_limit_w for each in record.plan.original.assignments}
            for device_id in record.nodes:
                known = self._grants[device_id]
                before_w = max(original.get(device_id, 0.0), known.grant.limit_w)
                self._grants[device_id] = replace(known, superseded_w=before_w)
            for device_id in record.observations:
                self.observed(device_id, record.plan_id)
            if (runs or {})[record.run_id].finished:
                for device_id in record.nodes:
                    self._give_up(device_id, record.plan_id)
            elif record.wall_s is not None:
                self._end_round(record)
        for device_id in self._grants:
            self.renew(device_id, started_s)

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
        return (device_id for device_id, each in self._grants.items() if not each.is_over)

    def in_flight(self) -> Iterator[tuple[str, DeviceGrant]]:
        """The grants of trainings that a Flower server waits for, each with its device's id."""
        return ((device_id, each) for device_id, each in self._grants.items() if each.is_in_flight)

    def given_up(self) -> Iterator[tuple[str, DeviceGrant]]:
        """The grants of trainings that draw power but are no longer waited for, each with its device's id."""
        return ((device_id, each) for device_id, each in self._grants.items() if each.is_given_up and each.granted_w)

    def plans_in_flight(self) -> set[str]:
        """The ids of the plans that a Flower server waits for."""
        return {each.plan_id for _, each in self.in_flight()}

    def is_controllable(self, device_id: str, now_s: float) -> bool:
        """Whether a device has confirmed its newest grant, or may be expected to confirm it soon."""
        known = self._grants.get(device_id)
        if known is None or known.is_over or known.is_confirmed or not known.was_sent:
            return True
        return now_s - known.sent_s < self._settings.confirm_timeout_s

    def is_expected_back(self, device_id: str, now_s: float) -> bool:
        """Whether a disconnected device may be expected to return and keep to its newest grant.

        This is so if the coordinator was just restarted, and its previous process had sent the grant.
        """
        known = self._grants.get(device_id)
        is_starting = now_s - self._started_s < self._settings.lifetime_s
        return is_starting and known is not None and not known.was_sent and not known.is_over

    @property
    def lowered_count(self) -> int:
        """The number of devices that have not confirmed a lower limit yet."""
        return sum(each.was_sent and each.superseded_w > each.granted_w for each in self._grants.values())

    def may_train(self, device_id: str) -> bool:
        """Whether a device may still act on a grant."""
        known = self._grants.get(device_id)
        return known is not None and not known.is_over

    def copy(self) -> Grants:
        """An independent copy; its grants are never sent."""
        copied = Grants(settings=self._settings, started_s=self._started_s, first_id=self._next_id)
        copied.pending = self.pending.copy()
        copied._grants, copied._lapses_s = self._grants.copy(), self._lapses_s.copy()  # noqa: SLF001 - of this class
        return copied

    # --- plans --------------------------------------------------------------------------------------------------

    def commit(self, record: RoundRecord) -> None:
        """Issue the grants of a new plan's assignments."""
        assignments = {assignment.device_id: assignment for assignment in record.plan.assignments}
        for device_id in record.nodes:
            assignment = assignments.get(device_id)
            self._issue(device_id, record.plan_id, assignment, self._longest_s(record.plan, assignment))

    def reassign(self, record: RoundRecord, device_ids: Collection[str]) -> None:
        """Issue a trimmed plan's grants to the given devices in flight; devices that it no longer contains stop."""
        assignments = {assignment.device_id: assignment for assignment in record.plan.assignments}
        for device_id in device_ids:
            assignment = assignments.get(device_id)
            longest_s = max(self._grants[device_id].grant.longest_s, self._longest_s(record.plan, assignment))
            self._issue(device_id, record.plan_id, assignment, longest_s)

    def stop(self, device_id: str) -> None:
        """Stop a device's training, or cancel it before it begins."""
        known = self._grants[device_id]
        self._issue(device_id, known.plan_id, None, known.grant.longest_s)

    def assume_over(self, device_id: str) -> None:
        """In a copy for a preview, assume that a device can no longer act on any grant."""
        known = self._grants[device_id]
        self._grants[device_id] = replace(known, phase=GrantPhase.OVER, superseded_w=0.0, is_rogue=False)

    def end_round(self, record: RoundRecord) -> None:
        """Stop waiting for the devices of a finished round, except for late ones."""
        self._end_round(record)
        self.unstored.note(record.nodes, self._plan_of_leftover_training)

    def give_up_round(self, record: RoundRecord) -> None:
        """Stop waiting for the devices of an abandoned round."""
        for device_id in record.nodes:
            self._give_up(device_id, record.plan_id)
        self.unstored.note(record.nodes, self._plan_of_leftover_training)

    def give_up_runs(self, run_ids: Collection[str]) -> None:
        """Stop waiting for the devices of finished runs."""
        given_up = [
            (device_id, known.plan_id) for device_id, known in self.in_flight() if run_of(known.plan_id) in run_ids
        ]
        for device_id, plan_id in given_up:
            self._give_up(device_id, plan_id)
        self.unstored.note([device_id for device_id, _ in given_up], self._plan_of_leftover_training)

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
            self.pending.forget(device_id)
            self._grants.pop(device_id, None)
            self._lapses_s.pop(device_id, None)

    def remove_runs(self, run_ids: Collection[str]) -> None:
        """Remove those grants of deleted runs that are over."""
        for device_id, known in list(self._grants.items()):
            if known.is_over and run_of(known.plan_id) in run_ids:
                self.forget([device_id])

    # --- devices ------------------------------------------------------------------------------------------------

    def session_began(self, device_id: str, now_s: float) -> None:
        """Begin a device's session; what was sent in the previous session may not have arrived."""
        self.renew(device_id, now_s)
        known = self._grants.get(device_id)
        if known is not None:
            self._grants[device_id] = replace(known, is_in_session=False, is_on_its_way=False)
            if not known.is_over:
                self.pending.returned(device_id)

    def never_sent(self) -> list[str]:
        """The devices whose trainings cannot begin yet, because no grant of the plan was sent."""
        return [device_id for device_id, each in self._grants.items() if each.granted_w and each.is_first]

    def may_be_renewed(self, device_id: str) -> bool:
        """Whether a device's grant may be renewed.

        A grant that is older than the newest one must lapse, however often its device connects. So must a grant that
        was not reviewed after its device could not be informed of a lower budget.
        """
        known = self._grants.get(device_id)
        return known is None or known.is_over or (known.is_confirmed and not self.pending.is_unreviewed(device_id))

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
        self.pending.heard(device_id)
        known = self._grants.get(device_id)
        if known is None or known.is_over:
            if phase is not GrantPhase.OVER:  # it may have lapsed while the device could not be parked
                self._issue(device_id, plan_id, None, 0.0)
                self._grants[device_id] = replace(self._grants[device_id], is_rogue=True, is_given_up=True)
                self.pending.review(device_id)
        elif grant_id == known.grant.grant_id:
            self.pending.confirmed(device_id)
            self._grants[device_id] = known.confirmed(phase, now_s)
            if known.is_given_up and phase is GrantPhase.WAITING and known.assignment is not None:
                self.stop(device_id)
        else:
            self._grants[device_id] = known = known.not_in_force(plan_id, phase, now_s)
            if not known.is_in_session and not known.is_over:
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
        self.unstored.check(self._plan_of_leftover_training, now_s >= self._earlier_until_s)
        return lapsed

    def needs_review(self, now_s: float) -> bool:
        """Whether any device has returned and sent a lease, or has not confirmed its newest grant in time."""
        unconfirmed = [each for each, known in self._grants.items() if not known.is_confirmed]
        return self.pending.needs_review({each for each in unconfirmed if not self.is_controllable(each, now_s)})

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

    def _lasts_s(self, lifetime_s: float) -> float:
        """Seconds after a device's last renewal by which it must be parked."""
        return lifetime_s * (1 + _DRIFT) + self._settings.stop_margin_s

    def _plan_of_leftover_training(self, device_id: str) -> str:
        """The id of the plan whose round or run ended before a device's training; empty if there is none."""
        known = self._grants.get(device_id)
        if known is None or known.is_over or not (known.is_given_up or known.is_late):
            return ""
        return known.plan_id

    def _end_round(self, record: RoundRecord) -> None:
        late = set(record.late)
        for device_id in record.nodes:
            known = self._grants.get(device_id)
            if device_id not in late:
                self._give_up(device_id, record.plan_id)
            elif known is not None and known.plan_id == record.plan_id and known.is_in_flight:
                self._grants[device_id] = replace(known, is_late=True)

    def _longest_s(self, plan: RoundPlan, assignment: Assignment | None) -> float:
        planned_s = max(plan.duration_s, plan.deadline_s or 0.0)
        longest_s = self._settings.longest_factor * planned_s + self._settings.longest_extra_s
        is_assumed = assignment is not None and assignment.is_length_assumed
        return max(longest_s, self._settings.longest_unknown_s) if is_assumed else longest_s

    def _issue(self, device_id: str, plan_id: str, assignment: Assignment | None, longest_s: float) -> None:
        grant = Grant(self._next_id, plan_id, assignment, longest_s)
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
            self._grants[device_id] = replace(known, phase=GrantPhase.OVER)  # the device cannot have received it
            self.pending.ended(device_id)
        elif known.phase is GrantPhase.WAITING and known.assignment is not None:
            self.stop(device_id)
