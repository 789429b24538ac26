"""Passes the coordinator's grants on to the device's trainings."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from wattfleet.common.clock import boot_time_s
from wattfleet.common.tasks import with_timeout
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import PowerMode, require_workload_name
from wattfleet_proto.convert import mode_from_message, phase_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.limits import MAX_PLAN_ID_CHARACTERS, MeasuringLimits
from wattfleet_proto.names import is_to_measure, plan_in_words
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)


# --- Held grant -------------------------------------------------------------------------------------------------------
# The grant that a device holds: a pure state machine, whose caller passes the time.
#
# Its counterpart in the coordinator is `coordinator/state/rounds/grants.py`.


# A coordinator that restarts grants only plans in flight again. These are among the newest, since a run has one at a
# time and overdue ones are abandoned.
_MOST_OVER = 1000


class NoGrantError(WattfleetError):
    """The coordinator has granted no watts for a training, so it may not begin."""


@dataclass(frozen=True)
class AgentGrant:
    """The power that the device may draw beyond idling, for its training of one plan.

    Attributes:
        grant_id: the grant's name in confirmations.
        plan_id: the plan's name.
        mode: the power mode to train in; None if the training has to stop or may not begin.
        power_limit_w: watts that the device may draw.
        longest_s: maximum duration of the training, s.
        workload: the workload's name; empty if the run does not name it.
        batch: batch size chosen by the plan, samples; 0 if the plan chose none.
        measuring: limits of a training that is run in order to measure; None for a training of a round.
        planned_s: seconds that the round is planned to take; 0 if unknown.
        counts_energy: whether to report the energy of the training, because its run has an energy budget.
    """

    grant_id: int
    plan_id: str
    mode: PowerMode | None
    power_limit_w: float
    longest_s: float
    workload: str = ""
    batch: int = 0
    measuring: MeasuringLimits | None = None
    planned_s: float = 0.0
    counts_energy: bool = False


class HeldGrant:
    """The grant in force, and a newer one that the device has not yet put in force.

    All grants of a plan together serve one training. A restarted coordinator may not know that this training is over,
    and grant it again, although other plans have come in between. Such a grant is over when it arrives; the next lease
    states this, and the coordinator frees the watts.

    A grant lapses when its lifetime has passed since the agent sent the last message with which the coordinator renewed
    it. Before the first renewal, this is the last message that the coordinator answered before it sent the grant. A
    lapsed grant cannot be renewed.

    Args:
        never_began: called with a grant that was stopped or has lapsed before its training began. This process begins
            no training of its plan any more.

    Attributes:
        in_force: the grant that limits the device; None before the first.
        phase: how far the training of the grant has progressed.
        lapses_s: when the grant lapses, in seconds of the caller's clock.
    """

    def __init__(self, never_began: Callable[[AgentGrant], None] = lambda grant: None) -> None:
        self.in_force: AgentGrant | None = None
        self.phase = GrantPhase.OVER
        self.lapses_s = -float("inf")
        self._newest: AgentGrant | None = None
        # The newest plans whose trainings are over, or were stopped or lapsed before they began.
        self._over: deque[str] = deque(maxlen=_MOST_OVER)
        self._next_lapses_s = -float("inf")
        self._began_s = 0.0
        self._stop_reason: str | None = None
        self._never_began = never_began

    def receive(self, grant: AgentGrant) -> None:
        """Store a grant from the coordinator; a training in progress has to put it in force with `apply`."""
        self.lapses_s = self._next_lapses_s
        if self.phase is GrantPhase.TRAINING:
            self._newest = grant
        else:
            self._put_in_force(grant)

    def welcome(self, sent_s: float, lifetime_s: float) -> None:
        """Note that the coordinator has answered a Hello, which starts the lifetime of the grants that follow.

        An earlier grant is not renewed: the coordinator may have replaced it with one that did not arrive.

        Args:
            sent_s: when the Hello was sent.
            lifetime_s: how long grants last after that.
        """
        self._next_lapses_s = sent_s + lifetime_s

    def renew(self, sent_s: float, lifetime_s: float, now_s: float) -> None:
        """Renew the grant after the coordinator has acknowledged a lease that names it.

        Args:
            sent_s: when the lease was sent.
            lifetime_s: how long the grant lasts after that.
            now_s: the current time.
        """
        self.lapse(now_s)
        self._next_lapses_s = sent_s + lifetime_s
        if self.phase is not GrantPhase.TRAINING or now_s < self.lapses_s:  # a lapsed grant cannot be renewed
            self.lapses_s = self._next_lapses_s

    def lapse(self, now_s: float) -> None:
        """Drop a grant that has lapsed before its training began."""
        if self.in_force is not None and self.phase is GrantPhase.WAITING and now_s >= self.lapses_s:
            self.phase = GrantPhase.OVER
            self._never_began(self.in_force)

    def may_begin(self, plan_id: str, now_s: float) -> bool:
        """Return whether the training of a plan may begin."""
        return self.awaits_training(now_s) and self.in_force is not None and self.in_force.plan_id == plan_id

    def awaits_training(self, now_s: float) -> bool:
        """Whether a granted training has not begun yet."""
        self.lapse(now_s)
        return self.phase is GrantPhase.WAITING

    def begin(self, plan_id: str, now_s: float) -> AgentGrant:
        """Begin the training of a plan, and return its grant.

        Raises:
            NoGrantError: there is no grant, a training has already used it, or it has lapsed.
        """
        if not self.may_begin(plan_id, now_s) or self.in_force is None:
            run_id = plan_id.rpartition("/")[0]
            what = plan_in_words(plan_id, run_id) if is_to_measure(plan_id) else f"the training of round {plan_id}"
            raise NoGrantError(
                f"the coordinator has granted no watts for {what}: its plan was abandoned or trimmed, or the agent has"
                " lost its connection to the coordinator"
            )
        self.phase, self._began_s, self._stop_reason = GrantPhase.TRAINING, now_s, None
        return self.in_force

    def change(self) -> AgentGrant | None:
        """Return the newest grant, if the training has not yet put it in force."""
        return self._newest

    def stop(self, reason: str) -> None:
        """Stop the training for a reason of the device's own, such as its watts or its duty."""
        self._stop_reason = reason

    def must_stop(self, now_s: float) -> str | None:
        """Return why the training has to stop now; None if it may continue."""
        if self.phase is not GrantPhase.TRAINING or self.in_force is None:
            return None
        if self._newest is not None and self._newest.plan_id != self.in_force.plan_id:
            return "the coordinator has withdrawn its watts"
        if self._newest is not None and self._newest.mode is None:
            return "its watts were withdrawn: the budget fell, its duty leaves too little time, or its round is over"
        if now_s >= self.lapses_s:
            return "the agent could not reach the coordinator for too long"
        if now_s - self._began_s >= self.in_force.longest_s:
            return f"it took longer than {self.in_force.longest_s:.0f} s"
        return self._stop_reason

    def next_check_s(self) -> float:
        """Return when to check the training again even if nothing is received, in seconds of the caller's clock."""
        longest_s = self.in_force.longest_s if self.in_force else 0.0
        return min(self.lapses_s, self._began_s + longest_s)

    def apply(self, grant: AgentGrant) -> None:
        """Note that the training continues under another grant of its plan."""
        self.in_force = grant
        if self._newest is grant:
            self._newest = None

    def end(self) -> None:
        """Note that the training has ended and that the device is parked."""
        if self.phase is not GrantPhase.TRAINING:
            return
        self.phase = GrantPhase.OVER
        newest, self._newest = self._newest, None
        if newest is not None:
            self._put_in_force(newest)

    def _put_in_force(self, grant: AgentGrant) -> None:
        before, phase = self.in_force, self.phase
        if before is not None and phase is GrantPhase.OVER and before.plan_id not in self._over:
            self._over.append(before.plan_id)
        is_over = grant.mode is None or grant.plan_id in self._over
        self.in_force = grant
        self.phase = GrantPhase.OVER if is_over else GrantPhase.WAITING
        if before is not None and phase is GrantPhase.WAITING and is_over and before.plan_id == grant.plan_id:
            self._never_began(before)


# --- Grants -----------------------------------------------------------------------------------------------------------

_MIN_LIFETIME_S, _MAX_LIFETIME_S = 1.0, 86_400.0
# Needed because the event loop's timers do not count the time while the board is suspended.
_LONGEST_WAIT_S = 1.0


class GrantKeeper:
    """Holds the device's grant, renews it with every acknowledged lease, and notifies trainings of changes.

    Args:
        now_s: the clock, s; it has to count the time while the board is suspended.

    Attributes:
        on_change: called when the grant in force or its phase changes.
        on_never_began: called with the plan of a training whose energy counts, if its grant was stopped or has lapsed
            before it began.
    """

    def __init__(self, now_s: Callable[[], float] = boot_time_s) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.on_never_began: Callable[[str], None] = lambda plan_id: None
        self._now_s = now_s
        self._held = HeldGrant(self._never_began)
        self._changed = asyncio.Condition()
        self._lifetime_s = 0.0
        self._sent_s: dict[int, float] = {}
        self._last_number = 0

    # --- the session's side -------------------------------------------------------------------------------------

    def greeting(self) -> None:
        """Note that a Hello is about to be sent: it counts as the session's first lease."""
        self._sent_s = {0: self._now_s()}

    async def welcomed(self, lifetime_s: float) -> None:
        """Note that the Hello was answered."""
        if (sent_s := self._sent(0, lifetime_s)) is not None:
            self._held.welcome(sent_s, self._lifetime_s)

    def lease(self) -> session_pb2.Lease:
        """Return the next lease to send, which also states the grant in force."""
        self._last_number += 1
        self._sent_s[self._last_number] = self._now_s()
        self._held.lapse(self._now_s())
        in_force = self._held.in_force
        return session_pb2.Lease(
            number=self._last_number,
            grant_id=in_force.grant_id if in_force else 0,
            plan_id=in_force.plan_id if in_force else "",
            phase=phase_to_message(self._held.phase),
        )

    async def acknowledged(self, number: int, lifetime_s: float, is_renewed: bool) -> None:
        """Note that the coordinator has acknowledged a lease, which may renew the grant named in it."""
        sent_s = self._sent(number, lifetime_s)
        if sent_s is None or not is_renewed:
            return
        async with self._changed:
            self._held.renew(sent_s, self._lifetime_s, self._now_s())
            self._changed.notify_all()

    async def receive(self, message: session_pb2.Grant) -> None:
        """Process a grant from the coordinator; an invalid one allows no training."""
        try:
            grant = _grant(message)
        except InvalidInputError as error:
            _log.error("the coordinator sent an invalid grant, so this device may not train: %s", error)
            grant = AgentGrant(message.id, message.plan_id[:MAX_PLAN_ID_CHARACTERS], None, 0.0, 0.0)
        async with self._changed:
            self._held.receive(grant)
            self._changed.notify_all()
        self.on_change()

    # --- the trainings' side ------------------------------------------------------------------------------------

    async def wait_for(self, plan_id: str, timeout_s: float) -> None:
        """Wait for the grant of a plan, at most until the timeout."""

        async def granted() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: self._held.may_begin(plan_id, self._now_s()))

        with suppress(asyncio.TimeoutError):
            await with_timeout(timeout_s, granted())

    @property
    def awaits_training(self) -> bool:
        """Whether a granted training has not begun yet. Measuring now would make its round fail."""
        return self._held.awaits_training(self._now_s())

    @property
    def granted_w(self) -> float:
        """The watts that the training in progress, or the one that may begin, may draw; 0 without one."""
        in_force = self._held.in_force
        return 0.0 if in_force is None or self._held.phase is GrantPhase.OVER else in_force.power_limit_w

    def begin(self, plan_id: str) -> AgentGrant:
        """Begin the training of a plan.

        Raises:
            NoGrantError: there is no grant for the plan.
        """
        grant = self._held.begin(plan_id, self._now_s())
        self.on_change()
        return grant

    async def next_change(self) -> AgentGrant | str:
        """Wait for a change of the training in progress; return its new grant, or the reason why it has to stop."""
        while True:
            async with self._changed:
                if (reason := self._held.must_stop(self._now_s())) is not None:
                    return reason
                if (grant := self._held.change()) is not None:
                    return grant
                left_s = max(0.0, self._held.next_check_s() - self._now_s())
                with suppress(asyncio.TimeoutError):
                    await with_timeout(min(left_s, _LONGEST_WAIT_S), self._changed.wait())

    @property
    def training_w(self) -> float | None:
        """Watts that the training in progress may draw; None if there is none."""
        held = self._held
        return held.in_force.power_limit_w if held.in_force and held.phase is GrantPhase.TRAINING else None

    def must_stop(self) -> str | None:
        """Return why the training in progress has to stop now; None if it may continue."""
        return self._held.must_stop(self._now_s())

    async def stop(self, reason: str) -> None:
        """Stop the training for a reason of the device's own, such as its duty; `next_change` returns the reason."""
        async with self._changed:
            self._held.stop(reason)
            self._changed.notify_all()

    def applied(self, grant: AgentGrant) -> None:
        """Note that the training continues under another grant."""
        self._held.apply(grant)
        self.on_change()

    def ended(self) -> None:
        """Note that the training has ended and the device is parked."""
        self._held.end()
        self.on_change()

    def _never_began(self, grant: AgentGrant) -> None:
        if grant.counts_energy:
            self.on_never_began(grant.plan_id)

    def _sent(self, number: int, lifetime_s: float) -> float | None:
        """Return when the answered lease or Hello (number 0) was sent, in seconds of the clock; None if unknown."""
        if 0 < lifetime_s < math.inf:
            self._lifetime_s = min(max(lifetime_s, _MIN_LIFETIME_S), _MAX_LIFETIME_S)
        sent_s = self._sent_s.pop(number, None)
        if sent_s is not None:
            self._sent_s = {later: at_s for later, at_s in self._sent_s.items() if later > number}
        return sent_s


def _grant(message: session_pb2.Grant) -> AgentGrant:
    """Convert a grant message."""
    if len(message.plan_id) > MAX_PLAN_ID_CHARACTERS:  # every lease repeats it
        raise InvalidInputError(f"its plan's id has more than {MAX_PLAN_ID_CHARACTERS} characters")
    measuring = (
        MeasuringLimits(message.measuring.modes, message.measuring.longest_s) if message.HasField("measuring") else None
    )
    seconds = (message.longest_s, message.planned_s, 0.0 if measuring is None else measuring.longest_s)
    if not all(0 <= value < math.inf for value in (message.power_limit_w, *seconds)):
        raise InvalidInputError("its power limit and its times must be finite and at least 0")
    mode = mode_from_message(message.mode) if message.HasField("mode") else None
    if message.workload:
        require_workload_name(message.workload)
    return AgentGrant(
        message.id,
        message.plan_id,
        mode,
        message.power_limit_w,
        message.longest_s,
        message.workload,
        message.batch,
        measuring,
        message.planned_s,
        message.counts_energy,
    )
