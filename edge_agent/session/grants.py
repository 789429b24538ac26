"""Passes the coordinator's grants on to the device's trainings."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress

from edge_agent.session.held_grant import Grant, HeldGrant, Measuring
from wattfleet.errors import InvalidInputError
from wattfleet.modes import require_workload_name
from wattfleet_io.clock import boot_time_s
from wattfleet_io.tasks import with_timeout
from wattfleet_proto.convert import mode_from_message, phase_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.message_sizes import MAX_PLAN_ID_CHARACTERS
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)

_MIN_LIFETIME_S, _MAX_LIFETIME_S = 1.0, 86_400.0
# Needed because the event loop's timers do not count the time while the board is suspended.
_LONGEST_WAIT_S = 1.0


class Grants:
    """Holds the device's grant, renews it with every acknowledged lease, and notifies trainings of changes.

    Args:
        now_s: the clock, s; it has to count the time while the board is suspended.
    """

    def __init__(self, now_s: Callable[[], float] = boot_time_s) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._now_s = now_s
        self._held = HeldGrant()
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
            grant = Grant(message.id, message.plan_id[:MAX_PLAN_ID_CHARACTERS], None, 0.0, 0.0)
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

    def begin(self, plan_id: str) -> Grant:
        """Begin the training of a plan.

        Raises:
            NoGrantError: there is no grant for the plan.
        """
        grant = self._held.begin(plan_id, self._now_s())
        self.on_change()
        return grant

    async def next_change(self) -> Grant | str:
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

    def applied(self, grant: Grant) -> None:
        """Note that the training continues under another grant."""
        self._held.apply(grant)
        self.on_change()

    def ended(self) -> None:
        """Note that the training has ended and the device is parked."""
        self._held.end()
        self.on_change()

    def _sent(self, number: int, lifetime_s: float) -> float | None:
        """Return when the answered lease or Hello (number 0) was sent, in seconds of the clock; None if unknown."""
        if 0 < lifetime_s < math.inf:
            self._lifetime_s = min(max(lifetime_s, _MIN_LIFETIME_S), _MAX_LIFETIME_S)
        sent_s = self._sent_s.pop(number, None)
        if sent_s is not None:
            self._sent_s = {later: at_s for later, at_s in self._sent_s.items() if later > number}
        return sent_s


def _grant(message: session_pb2.Grant) -> Grant:
    """Convert a grant message.

    Raises:
        InvalidInputError: its plan's id, its mode or its numbers cannot be used.
    """
    if len(message.plan_id) > MAX_PLAN_ID_CHARACTERS:  # every lease repeats it
        raise InvalidInputError(f"its plan's id has more than {MAX_PLAN_ID_CHARACTERS} characters")
    measuring = (
        Measuring(message.measuring.modes, message.measuring.longest_s) if message.HasField("measuring") else None
    )
    seconds = (message.longest_s, message.planned_s, 0.0 if measuring is None else measuring.longest_s)
    if not all(0 <= value < math.inf for value in (message.power_limit_w, *seconds)):
        raise InvalidInputError("its power limit and its times must be finite and at least 0")
    mode = mode_from_message(message.mode) if message.HasField("mode") else None
    if message.workload:
        require_workload_name(message.workload)
    return Grant(
        message.id,
        message.plan_id,
        mode,
        message.power_limit_w,
        message.longest_s,
        message.workload,
        message.batch,
        measuring,
        message.planned_s,
    )
