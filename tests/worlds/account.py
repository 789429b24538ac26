"""What a coordinator counts for its devices, and which of them it can count on, stated without its own rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceRecord
from coordinator.state.rounds.grants import DeviceGrant, Grant
from tests.worlds.timeouts import CONFIRM_TIMEOUT_S

if TYPE_CHECKING:
    from tests.worlds.world import World

# Events are put just at a time-out, too. By then, sums of times may differ by rounding.
_ROUNDING_S = 1e-9


class Account:
    """The account of one coordinator, from its start to its end."""

    def __init__(self, world: World, fleet: Fleet, now_s: Callable[[], float]) -> None:
        """Open the account of a coordinator that starts now.

        Args:
            world: the world.
            fleet: the coordinator's fleet.
            now_s: the coordinator's clock.
        """
        self._world, self._fleet, self._now_s = world, fleet, now_s
        self._started_s = now_s()
        self._counted: dict[str, tuple[DeviceRecord, DeviceGrant | None, float]] = {}
        # The newest grant sent in each session, with its time; and the devices whose session has brought a lease.
        self._sent: dict[str, tuple[int, float]] = {}
        self._heard: set[str] = set()

    def session_began(self, device_id: str) -> None:
        """A session begins: nothing was sent in it, and no lease has come."""
        self._sent.pop(device_id, None)
        self._heard.discard(device_id)

    def heard(self, device_id: str) -> None:
        """A session brings a lease."""
        self._heard.add(device_id)

    def sent(self, device_id: str, grant: Grant) -> None:
        """A grant is sent in a session."""
        self._sent[device_id] = grant.grant_id, self._now_s()

    def counted_w(self, device_id: str) -> float:
        """The power that the coordinator counts for a device."""
        record, grant = self._fleet.agents.devices[device_id], self._fleet.rounds.grants.of(device_id)
        before = self._counted.get(device_id)
        if before is None or before[0] is not record or before[1] is not grant:
            others = self._fleet.agents.devices.keys() - {device_id}
            before = record, grant, sum(self._fleet.draw.elsewhere_w(others).values())
            self._counted[device_id] = before
        return before[2]

    def excess(self) -> tuple[float, list[str]]:
        """The watts above the budget once every device that can be counted on keeps to its newest grant.

        A device can be counted on once its session has brought a lease or has carried this grant to it. This ends when
        the device has failed to confirm the grant in time. After a restart of the coordinator, an absent device is
        expected to return for the lifetime of a grant.

        Returns:
            The watts, negative if the budget holds, and the devices of these that could be sent a lower limit.
        """
        fleet, world = self._fleet, self._world
        if sum(map(self.counted_w, world.devices)) <= world.budget_w:
            return -1.0, []
        could_be_told = []
        for device_id in world.devices:
            record, grant = fleet.agents.devices[device_id], fleet.rounds.grants.of(device_id)
            if grant is not None and all(self._counts_on(device_id)):
                can_be_lowered = grant.is_given_up or not fleet.agents.is_profiling(device_id)
                if can_be_lowered and grant.granted_w > (record.idle_w or 0.0):
                    could_be_told.append(device_id)
        return self._expected_w() - world.budget_w, could_be_told

    def _expected_w(self) -> float:
        """The power of all devices once every device that can be counted on keeps to its newest grant."""
        fleet, total_w = self._fleet, 0.0
        for device_id in self._world.devices:
            others = fleet.agents.devices.keys() - {device_id}
            believed = {device_id} if self._counts_on(device_id)[1] else frozenset()
            total_w += sum(fleet.draw.elsewhere_w(others, believed).values())
        return total_w

    def limits_w(self) -> dict[str, float]:
        """The power that rounds grant each of their devices, idle power included."""
        return {
            device_id: max(known.granted_w, self._fleet.agents.devices[device_id].idle_w or 0.0)
            for device_id, known in self._fleet.rounds.grants.in_flight()
        }

    def spared_w(self, before_w: Mapping[str, float]) -> float:
        """The watts within the budget that are left if the rounds in flight keep the limits that they had before."""
        now_w = self.limits_w()
        lowered_w = sum(watts - now_w.get(device_id, watts) for device_id, watts in before_w.items())
        return self._world.budget_w - self._expected_w() - lowered_w

    def measuring(self) -> dict[str, str]:
        """The devices that can be counted on and may measure, each with the id of its training."""
        grants, found = self._fleet.rounds.grants, {}
        for device_id in self._world.devices:
            known = grants.of(device_id)
            if known is not None and known.grant.measuring and known.granted_w and self._counts_on(device_id)[1]:
                found[device_id] = known.plan_id
        return found

    def _counts_on(self, device_id: str) -> tuple[bool, bool]:
        """Whether a device with a grant can be sent another one, and whether it can be counted on."""
        fleet, now_s, grant = self._fleet, self._now_s(), self._fleet.rounds.grants.of(device_id)
        if grant is None or grant.is_over:
            return False, False
        sent_id, sent_s = self._sent.get(device_id, (0, 0.0))
        is_sent = sent_id == grant.grant.grant_id
        is_late = is_sent and now_s - sent_s >= CONFIRM_TIMEOUT_S - _ROUNDING_S
        is_there = fleet.agents.is_connected(device_id) and (device_id in self._heard or is_sent)
        is_expected = not grant.was_sent and now_s - self._started_s < self._world.lifetime_s
        return is_there, grant.is_confirmed or not is_late if is_there else is_expected
