"""Plans rounds with the real fleet, in the same way as the coordinator's service of the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator.errors import RunEndedError
from coordinator.state.fleet import Fleet
from coordinator.state.records import RoundRecord
from tests.worlds.agent import PROFILE_MODES
from tests.worlds.stored import Later, Repository
from wattfleet.errors import WattfleetError

if TYPE_CHECKING:
    from tests.worlds.world import World

Reply = Callable[[RoundRecord], None]

MeasuringReply = Callable[[str, list[str]], None]
"""Takes the id that stands in place of a plan's, and the devices that measure."""

_CONFIRM_S, _CONFIRM_POLL_S = 2.0, 0.1
_MEASURING_ENDS_S = 10.0
_ATTEMPTS = 3


class RoundPlanning:
    """Plans one round at a time, while the fleet changes."""

    def __init__(
        self,
        world: World,
        fleet: Fleet,
        repository: Repository,
        is_returning: Callable[[list[int]], bool],
        later: Later,
        send_due: Callable[[], None],
    ) -> None:
        """Plan the rounds of one coordinator.

        Args:
            world: the world.
            fleet: the coordinator's fleet.
            repository: saves the plans.
            is_returning: whether devices of some nodes are expected to reconnect.
            later: runs an action after some seconds.
            send_due: sends the grants that may be sent.
        """
        self._world, self._fleet, self._repository = world, fleet, repository
        self._is_returning, self._later, self._send_due = is_returning, later, send_due
        self._is_planning = False

    def plan(self, run_id: str, number: int, nodes: list[int], reply: Reply) -> None:
        """Plan a round, and reply with it once it is stored."""
        if self._repository.is_known(f"{run_id}/{number}"):
            self._reply(f"{run_id}/{number}", reply)
            return
        if self._is_returning(nodes) or self._is_planning:
            return
        self._is_planning = True
        self._end_measuring(run_id, number, nodes, reply, self._world.timeline.now_s + _MEASURING_ENDS_S)

    def _end_measuring(self, run_id: str, number: int, nodes: list[int], reply: Reply, until_s: float) -> None:
        """Stop the devices that measure, and wait until they can train."""
        measuring = self._fleet.flower.stop_measuring(run_id, nodes)
        self._send_due()
        if measuring and self._world.timeline.now_s < until_s:
            self._later(_CONFIRM_POLL_S, lambda: self._end_measuring(run_id, number, nodes, reply, until_s))
        else:
            self._confirm(run_id, number, nodes, reply, self._world.timeline.now_s + _CONFIRM_S)

    def _confirm(self, run_id: str, number: int, nodes: list[int], reply: Reply, until_s: float) -> None:
        """Release the nodes' devices, and wait until they have confirmed this."""
        unconfirmed = self._fleet.flower.release(run_id, nodes)
        self._send_due()
        if unconfirmed and self._world.timeline.now_s < until_s:
            self._later(_CONFIRM_POLL_S, lambda: self._confirm(run_id, number, nodes, reply, until_s))
        else:
            self._plan(run_id, number, nodes, reply, _ATTEMPTS)

    def _plan(self, run_id: str, number: int, nodes: list[int], reply: Reply, attempts: int) -> None:
        try:
            request = self._fleet.copy().flower.request_round(run_id, number, nodes, 1.0)
            record = request.planned()
        except WattfleetError as error:
            self._world.note(f"{run_id}/{number} is not planned: {error}")
            self._fleet.flower.refused(run_id, nodes)
            self._is_planning = False
            return

        def planned() -> None:
            if self._fleet.is_outdated(record.run_id, record.plan.assignments):
                if attempts > 1:
                    self._plan(run_id, number, nodes, reply, attempts - 1)
                else:
                    self._is_planning = False
                return
            self._is_planning = False
            try:
                self._fleet.flower.accept_plan(request, record)
            except RunEndedError as error:
                self._world.note(f"{run_id}/{number} is not planned: {error}")
                return
            self._world.oracle.planned(request, record)
            parts = {each.device_id: each.power_limit_w for each in record.plan.assignments}
            self._world.note(f"planned {record.plan_id}: {parts} within {self._world.budget_w:.0f} W")
            self._fleet.rounds.grants.pending.hold_back(record.plan_id)
            self._reply(record.plan_id, reply)

        # The fleet changes in the meantime.
        self._later(0.3 * self._world.rng.random(), planned)

    def _reply(self, plan_id: str, reply: Reply) -> None:
        def saved() -> None:
            self._fleet.rounds.grants.pending.let_go(plan_id)
            self._send_due()
            reply(self._fleet.rounds.records[plan_id])

        self._repository.save_round(plan_id, saved)

    def measure(self, run_id: str, nodes: list[int], survey_s: float | None, reply: MeasuringReply) -> None:
        """Let devices measure with the watts that are left, and reply once it is stored."""
        if not self._is_returning(nodes) and not self._is_planning:
            self._is_planning = True
            self._measure(run_id, nodes, survey_s, reply, _ATTEMPTS)

    def _measure(
        self, run_id: str, nodes: list[int], survey_s: float | None, reply: MeasuringReply, attempts: int
    ) -> None:
        flower, pending = self._fleet.flower, self._fleet.rounds.grants.pending

        def planned() -> None:
            if self._fleet.is_outdated(run_id, plan.assignments):
                self._measure(run_id, nodes, survey_s, reply, attempts - 1)
                return
            self._is_planning = False
            try:
                plan_id = flower.accept_measuring(run_id, plan)
            except RunEndedError as error:
                self._world.note(f"nobody measures for {run_id}: {error}")
                return
            self._world.oracle.measures(plan_id)
            parts = {each.device_id: each.power_limit_w for each in plan.assignments}
            self._world.note(f"planned {plan_id}: {parts} within {self._world.budget_w:.0f} W")
            pending.hold_back(plan_id)

            def saved() -> None:
                pending.let_go(plan_id)
                self._send_due()
                reply(plan_id, sorted(parts))

            self._repository.save_grants(saved)

        try:
            plan = flower.request_measuring(run_id, nodes, 1.0, PROFILE_MODES, survey_s).planned()
        except RunEndedError as error:
            self._world.note(f"nobody measures for {run_id}: {error}")
            self._is_planning = False
            return
        if plan.assignments and attempts:  # the fleet changes in the meantime
            self._later(0.3 * self._world.rng.random(), planned)
        else:
            self._is_planning = False
