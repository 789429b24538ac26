"""What each device can be planned with, and what it draws while it is not part of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import replace

import numpy as np

from coordinator.state.agents import Agents
from coordinator.state.operator import OperatorSettings
from coordinator.state.records import DeviceRecord, run_of
from coordinator.state.rounds.device_grant import DeviceGrant
from coordinator.state.rounds.grants import Grants
from coordinator.state.workload_fronts import UsualLengths
from wattfleet.choosing import Front
from wattfleet.errors import InvalidInputError
from wattfleet.planning import Assignment, Offer


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

    def is_offered(self, device: DeviceRecord, workload: str) -> bool:
        """Whether a device can be planned with: it is connected and has reported a front for the workload."""
        return self._agents.is_connected(device.device_id) and device.front_for(workload) is not None

    def offer_of(self, device: DeviceRecord, workload: str, lengths: UsualLengths) -> Offer | None:
        """What a device can be planned with for a workload; None without a front for it.

        Args:
            device: the device.
            workload: name of what is trained.
            lengths: the epochs of devices that do not know theirs.
        """
        known = device.front_for(workload)
        if known is None or device.idle_w is None:
            return None
        return Offer(
            device.device_id,
            lengths.planned(known),
            device.idle_w,
            self._operator.supply_of(device.device_id),
            self._operator.rules_of(device.device_id).limit_w,
            self._operator.tags_of(device.device_id),
            None if known.workload is None else known.workload.facts.batch,
            known.profiled_modes,
            known.is_length_assumed,
        )

    def offer_as_assigned(self, device: DeviceRecord, assignment: Assignment) -> Offer:
        """What a device in flight can be planned with that has no front for its training: what it was assigned."""
        front = Front(
            np.array([assignment.mode], dtype=np.float64),
            *(
                np.array([getattr(assignment, name)])
                for name in ("epoch_s", "power_w", "epoch_log_sd", "power_log_sd", "warmup_s")
            ),
        )
        return Offer(
            device.device_id,
            front,
            device.idle_w or 0.0,
            self._operator.supply_of(device.device_id),
            self._operator.rules_of(device.device_id).limit_w,
            self._operator.tags_of(device.device_id),
            assignment.batch,
            assignment.profiled_modes,
            assignment.is_length_assumed,
        )

    def elsewhere_w(self, offered: Set[str], expected: Set[str] = frozenset()) -> dict[str, float]:
        """Watts by supply that devices outside a plan may draw.

        Every device counts with its idle watts, also a disconnected one, since it may still be on. Beyond that, it
        counts with the highest limit of the grants that it may act on. A device that profiles, or that trains without
        a grant, counts with the largest power of all its fronts. Devices without a reported front do not count.

        Args:
            offered: ids of the devices that are offered to the plan.
            expected: ids of devices that count with what they are told, although they have not confirmed it yet.
        """
        elsewhere_w = dict.fromkeys(self._operator.allowance.supplies.names, 0.0)
        for device in list(self._agents.devices.values()):  # also read by the thread that exports metrics
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

    def idle_w(self) -> dict[str, float]:
        """Watts by supply that all devices draw while none trains."""
        return self._by_supply({each.device_id: each.idle_w or 0.0 for each in self._agents.devices.values()})

    def trainings_w(self, run_id: str) -> dict[str, float]:
        """Watts by supply that a run's trainings may draw beyond idling."""
        drawn_w = {}
        for device_id in self._grants.of_training():
            grant, device = self._grants.of(device_id), self._agents.devices.get(device_id)
            if grant is not None and device is not None and run_of(grant.plan_id) == run_id:
                drawn_w[device_id] = max(0.0, grant.counted_w - (device.idle_w or 0.0))
        return self._by_supply(drawn_w)

    def _by_supply(self, watts: Mapping[str, float]) -> dict[str, float]:
        """Watts of devices, summed for the supply that each is behind."""
        found = dict.fromkeys(self._operator.allowance.supplies.names, 0.0)
        for device_id, drawn_w in watts.items():
            with suppress(InvalidInputError):  # the site file no longer places it
                found[self._operator.supply_of(device_id)] += drawn_w
        return found

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
        if device.idle_w is None:
            return granted_w
        is_hungriest = self._agents.is_profiling(device.device_id) or (grant is not None and grant.is_rogue)
        hungriest_w = device.max_planned_w if is_hungriest else 0.0
        return max(granted_w, hungriest_w, device.idle_w)
