"""What each device can be planned with, and what it draws while it is not part of a plan."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from coordinator.state.agents import Agents
from coordinator.state.operator import OperatorSettings
from coordinator.state.records import DeviceRecord
from coordinator.state.rounds.commitments import Commitments
from wattfleet.errors import InvalidInputError
from wattfleet.planning import Offer
from wattfleet_proto.device_state import DeviceState


class PowerDraw:
    """The watts of every device: those that a plan may use, and those that it must leave to others."""

    def __init__(self, agents: Agents, operator: OperatorSettings, commitments: Commitments) -> None:
        """Account for one fleet.

        Args:
            agents: known devices.
            operator: their supplies, limits and tags.
            commitments: what rounds have reserved for them.
        """
        self._agents = agents
        self._operator = operator
        self._commitments = commitments

    def offer_of(self, device: DeviceRecord) -> Offer | None:
        """What a device can be planned with; None while it is disconnected or has reported no front."""
        if device.front is None or device.idle_w is None or not self._agents.is_connected(device.device_id):
            return None
        rules = self._operator.rules_of(device.device_id)
        supply = self._operator.supply_of(device.device_id)
        tags = self._operator.tags_of(device.device_id)
        return Offer(device.device_id, device.front, device.idle_w, supply, rules.limit_w, tags)

    def elsewhere_w(self, offered: Set[str]) -> dict[str, float]:
        """Watts by supply that devices outside a plan draw.

        The idle watts of every connected device that has reported them count. A device in flight, or still training,
        counts with what is reserved for it. A device that profiles counts with the largest power of its front.
        Devices without a reported front do not count, and disconnected ones only while they are in flight.

        Args:
            offered: ids of the devices that are offered to the plan.
        """
        elsewhere_w = dict.fromkeys(self._operator.allowance.supplies.names, 0.0)
        for device in self._agents.devices.values():
            if device.device_id in offered or not (drawn_w := self._drawn_w(device)):
                continue
            try:
                elsewhere_w[self._operator.supply_of(device.device_id)] += drawn_w
            except InvalidInputError:
                # Disconnected since a restart, and the site file no longer places it: it would be refused.
                continue
        return elsewhere_w

    def reserved_w(self) -> dict[str, float]:
        """Watts by supply that are reserved now, for trainings and for idling devices."""
        allowance = replace(self._operator.allowance, elsewhere_w=self.elsewhere_w(frozenset()))
        return {use.supply: use.planned_w for use in allowance.use([], {})}

    def _drawn_w(self, device: DeviceRecord) -> float:
        """What a device outside a plan draws, as far as it is known."""
        commitment = self._commitments.of(device.device_id)
        # Flower takes seconds to start a planned training, and does not end one whose round was abandoned.
        is_on = commitment is not None and (not commitment.is_over or device.state is DeviceState.TRAINING)
        reserved_w = commitment.reserved_w if commitment is not None and is_on else 0.0
        if device.front is None or device.idle_w is None or not self._agents.is_connected(device.device_id):
            return reserved_w
        profiling_w = float(device.front.planned_w[0]) if device.state is DeviceState.PROFILING else 0.0
        return max(reserved_w, profiling_w, device.idle_w)
