"""Plans rounds with the real fleet, in the same way as the coordinator's service of the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator.state.fleet import Fleet
from coordinator.state.records import RoundRecord
from tests.worlds.stored import Later, Repository
from wattfleet.errors import WattfleetError

if TYPE_CHECKING:
    from tests.worlds.world import World

Reply = Callable[[RoundRecord], None]

_CONFIRM_S, _CONFIRM_POLL_S = 2.0, 0.1
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
            self._fleet.flower.accept_plan(request, record)
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
