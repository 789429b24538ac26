"""One device's grant, and what the coordinator knows about its state."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wattfleet.planning import Assignment
from wattfleet_proto.device_state import GrantPhase


@dataclass(frozen=True, slots=True)
class Measuring:
    """The limits of the measurements in a training that is run in order to measure.

    Attributes:
        modes: the most modes to measure; 0 to learn only the facts of the app's loader.
        longest_s: no measurement continues after this many seconds.
    """

    modes: int
    longest_s: float


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
    """

    grant_id: int
    plan_id: str
    assignment: Assignment | None
    longest_s: float
    measuring: Measuring | None = None
    planned_s: float = 0.0

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
        if self.is_over:
            return DeviceGrant(grant, is_on_its_way=self.is_on_its_way)
        is_of_plan = grant.plan_id == self.plan_id
        return DeviceGrant(
            grant,
            superseded_w=max(self.superseded_w, self.granted_w if self.was_sent else 0.0),
            phase=self.phase if is_of_plan else GrantPhase.WAITING,
            is_on_its_way=self.is_on_its_way,
            is_given_up=is_of_plan and self.is_given_up,
            is_rogue=self.is_rogue,
            is_late=is_of_plan and self.is_late,
            began_s=self.began_s if is_of_plan else None,
        )

    def sent(self, now_s: float) -> DeviceGrant:
        """The device's state after this grant was sent in its current session."""
        return replace(self, was_sent=True, is_on_its_way=True, sent_s=now_s)

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
        is_over = is_of_plan or (self.is_given_up and not self.is_first)
        phase = GrantPhase.OVER if is_over else GrantPhase.WAITING
        return replace(self, superseded_w=0.0, phase=phase, was_sent=False, is_confirmed=False, is_rogue=False)

    def _began_s(self, phase: GrantPhase, now_s: float | None) -> float | None:
        is_begun_now = phase is GrantPhase.TRAINING and self.phase is GrantPhase.WAITING and self.was_sent
        return now_s if is_begun_now else self.began_s
