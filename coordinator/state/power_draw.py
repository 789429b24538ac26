"""What each device can be planned with, and what it draws while it is not part of a plan."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from coordinator.state.agents import Agents
from coordinator.state.operator import OperatorSettings
from coordinator.state.records import DeviceRecord
from coordinator.state.rounds.device_grant import DeviceGrant
from coordinator.state.rounds.grants import Grants
from wattfleet.errors import InvalidInputError
from wattfleet.planning import Offer


class PowerDraw:
    """The watts of every device: those that a plan may use, and those that it must leave to others."""

    def __init__(self, agents: Agents, operator: OperatorSettings, grants: Grants) -> None:
        """Account for one fleet.

        Args:
            agents: known devices.
            operator: their supplies, limits and tags.
            grants: what they may draw beyond idling.
        """
        self._agents = agents
        self._operator = operator
        self._grants = grants

    def is_offered(self, device: DeviceRecord) -> bool:
        """Whether a device can be planned with: it is connected and has reported its front."""
        return device.front is not None and device.idle_w is not None and self._agents.is_connected(device.device_id)

    def offer_of(self, device: DeviceRecord) -> Offer | None:
        """What a device can be planned with; None while it is disconnected or has reported no front."""
        if not self.is_offered(device):
            return None
        assert device.front is not None and device.idle_w is not None, "an offered device has both"
        rules = self._operator.rules_of(device.device_id)
        supply = self._operator.supply_of(device.device_id)
        tags = self._operator.tags_of(device.device_id)
        return Offer(device.device_id, device.front, device.idle_w, supply, rules.limit_w, tags)

    def elsewhere_w(self, offered: Set[str], expected: Set[str] = frozenset()) -> dict[str, float]:
        """Watts by supply that devices outside a plan may draw.

        Every device counts with its idle watts, also a disconnected one, since it may still be on. Beyond that, it
        counts with the highest limit of the grants that it may act on. A device that profiles, or that trains without
        a grant, counts with the largest power of its front. Devices without a reported front do not count.

        Args:
            offered: ids of the devices that are offered to the plan.
            expected: ids of devices that count with what they are told, although they have not confirmed it yet.
        """
        elsewhere_w = dict.fromkeys(self._operator.allowance.supplies.names, 0.0)
        for device in self._agents.devices.values():
            if device.device_id in offered:
                continue
            grant = self._grants.of(device.device_id)
            granted_w = 0.0
            if grant is not None:
                granted_w = grant.granted_w if device.device_id in expected else grant.counted_w
            if not (drawn_w := self._drawn_w(device, grant, granted_w)):
                continue
            try:
                elsewhere_w[self._operator.supply_of(device.device_id)] += drawn_w
            except InvalidInputError:
                # Disconnected since a restart, and the site file no longer places it: it would be refused.
                continue
        return elsewhere_w

    def plan_holding(self, device_id: str) -> str | None:
        """The plan that still holds watts for a device, beyond those of idling."""
        grant = self._grants.of(device_id)
        return None if grant is None or grant.is_over else grant.plan_id

    def reserved_w(self) -> dict[str, float]:
        """Watts by supply that are reserved now, for trainings and for idling devices."""
        allowance = replace(self._operator.allowance, elsewhere_w=self.elsewhere_w(frozenset()))
        return {use.supply: use.planned_w for use in allowance.use([], {})}

    def _drawn_w(self, device: DeviceRecord, grant: DeviceGrant | None, granted_w: float) -> float:
        """What a device outside a plan may draw, as far as it is known."""
        if device.front is None or device.idle_w is None:
            return granted_w
        is_hungriest = self._agents.is_profiling(device.device_id) or (grant is not None and grant.is_rogue)
        hungriest_w = float(device.front.planned_w[0]) if is_hungriest else 0.0
        return max(granted_w, hungriest_w, device.idle_w)
