"""The power that each device offers to a plan, and the power that it draws outside of plans."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from coordinator.state.agents import Agents
from coordinator.state.operator import OperatorSettings
from coordinator.state.records import DeviceRecord, run_of
from coordinator.state.rounds.grants import DeviceGrant, Grants
from coordinator.state.rounds.ledger import LatestResults
from coordinator.state.workload_fronts import UsualLengths
from wattfleet.core.choosing import Front
from wattfleet.core.duties import KeptDuty
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import Assignment, Offer
from wattfleet_proto.device_state import BoardSample, DeviceState

# --- Kept duties ------------------------------------------------------------------------------------------------------
# How devices keep their duties, as their sessions last reported it.


class KeptDuties:
    """The latest figures of every device with a duty. They are not stored: a device repeats them with every lease."""

    def __init__(self) -> None:
        self._by_device: dict[str, KeptDuty] = {}
        self._reviewed: dict[str, tuple[str, Sequence[object]]] = {}

    def report(self, device_id: str, kept: KeptDuty | None) -> None:
        """Record a device's figures; None if it has no duty."""
        if kept is None:
            self.forget([device_id])
        else:
            self._by_device[device_id] = kept

    def is_reviewed(self, device_id: str, plan_id: str, fronts: Sequence[object]) -> bool:
        """Whether a device's part in a round was reviewed with the fronts that it has beside its duty now."""
        reviewed = self._reviewed.get(device_id)
        return reviewed is not None and reviewed[0] == plan_id and reviewed[1] is fronts

    def reviewed(self, device_id: str, plan_id: str, fronts: Sequence[object]) -> None:
        """Record that a device's part in a round was reviewed with the given fronts."""
        self._reviewed[device_id] = plan_id, fronts

    @property
    def devices(self) -> Collection[str]:
        """The ids of the devices with a duty."""
        return self._by_device.keys()

    def of(self, device_id: str) -> KeptDuty | None:
        """A device's latest figures; None if it has reported no duty."""
        return self._by_device.get(device_id)

    def forget(self, device_ids: Iterable[str]) -> None:
        """Remove the figures of devices."""
        for device_id in device_ids:
            self._by_device.pop(device_id, None)
            self._reviewed.pop(device_id, None)


# --- Live samples -----------------------------------------------------------------------------------------------------
# The latest sensor readings of the boards, as reported in their sessions.


class LiveSamples:
    """The latest sample of every connected device. Samples are not stored, because each lease brings a new one."""

    def __init__(self) -> None:
        """Start without any sample."""
        self._by_device: dict[str, BoardSample] = {}

    def report(self, device_id: str, sample: BoardSample) -> bool:
        """Replace a device's sample, and return whether the board has started to throttle itself since the last one."""
        before = self._by_device.get(device_id)
        self._by_device[device_id] = sample
        if before is None or before.throttle_events is None or sample.throttle_events is None:
            return False
        return sample.throttle_events > before.throttle_events

    def of(self, device_id: str) -> BoardSample | None:
        """A device's latest sample; None while it is disconnected, or if it has sent none."""
        return self._by_device.get(device_id)

    def forget(self, device_ids: Iterable[str]) -> None:
        """Remove the samples of devices."""
        for device_id in device_ids:
            self._by_device.pop(device_id, None)


# --- Power draw -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredDraw:
    """What the devices behind a supply draw now.

    Attributes:
        drawn_w: their watts, as far as they are known.
        devices: number of devices.
        measured: number of devices whose boards have a reading.
    """

    drawn_w: float = 0.0
    devices: int = 0
    measured: int = 0


class PowerDraw:
    """The watts of every device: those that a plan may use, and those that it must leave to other devices."""

    def __init__(self, agents: Agents, operator: OperatorSettings, grants: Grants) -> None:
        """Account for the power of one fleet.

        Args:
            agents: known devices.
            operator: their supplies, limits and tags.
            grants: what they may draw beyond idle power.
        """
        self._agents = agents
        self._operator = operator
        self._grants = grants

    def is_offered(self, device: DeviceRecord, workload: str) -> bool:
        """Whether a device can be planned with: it is connected and has reported a front for the workload."""
        return self._agents.is_connected(device.device_id) and device.front_for(workload) is not None

    def offer_of(self, device: DeviceRecord, workload: str, lengths: UsualLengths) -> Offer | None:
        """A device's offer for a workload; None if it has no front for it.

        Args:
            device: the device.
            workload: name of the workload.
            lengths: the assumed epoch lengths of devices that do not know their own.
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
            known.workload.facts.batch,
            known.profiled_modes,
            known.is_length_assumed,
        )

    def offer_as_assigned(self, device: DeviceRecord, assignment: Assignment) -> Offer:
        """The offer of a device in flight that has no front for its training: only what it was assigned."""
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
        """The watts that devices outside a plan may draw, by supply.

        Every device counts with its idle watts, also a disconnected one, since it may still be on. In addition, it
        counts with the highest limit of the grants that it may act on. A device that is profiling, or training without
        a grant, counts with the largest power of all its fronts. Devices without a reported front do not count.

        Args:
            offered: ids of the devices that are offered to the plan.
            expected: ids of devices that count with their newest grant, although they have not confirmed it yet.
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

    def idle_of_devices_w(self) -> dict[str, float]:
        """The watts of each device while it does not train, by device id."""
        return {each.device_id: each.idle_w or 0.0 for each in list(self._agents.devices.values())}

    def idle_w(self) -> dict[str, float]:
        """The watts that all devices draw while none trains, by supply."""
        return self._by_supply(self.idle_of_devices_w())

    def trainings_w(self, run_id: str) -> dict[str, float]:
        """The watts that a run's trainings may draw beyond idle power, by supply."""
        drawn_w = {}
        for device_id in self._grants.of_training():
            grant, device = self._grants.of(device_id), self._agents.devices.get(device_id)
            if grant is not None and device is not None and run_of(grant.plan_id) == run_id:
                drawn_w[device_id] = max(0.0, grant.counted_w - (device.idle_w or 0.0))
        return self._by_supply(drawn_w)

    def _by_supply(self, watts: Mapping[str, float]) -> dict[str, float]:
        """Sum the watts of devices by supply."""
        found = dict.fromkeys(self._operator.allowance.supplies.names, 0.0)
        for device_id, drawn_w in watts.items():
            with suppress(InvalidInputError):  # the site file no longer places it
                found[self._operator.supply_of(device_id)] += drawn_w
        return found

    def plan_holding(self, device_id: str) -> str | None:
        """The id of the plan that still holds watts for a device beyond its idle power."""
        grant = self._grants.of(device_id)
        return grant.plan_id if grant is not None and grant.holds_watts else None

    def reserved_w(self) -> dict[str, float]:
        """The watts that are reserved now for trainings and for idling devices, by supply."""
        allowance = replace(self._operator.allowance, elsewhere_w=self.elsewhere_w(frozenset()))
        return {use.supply: use.planned_w for use in allowance.use([], {})}

    def measured(self, samples: LiveSamples, newest: LatestResults) -> dict[str, MeasuredDraw]:
        """What the devices behind each supply draw now, those behind its further supplies included.

        A device counts with what its board measures. Without a reading, it counts with the watts of its last training
        while it trains, and otherwise with its idle watts. An offline device counts with 0 W.

        Args:
            samples: the latest sensor readings.
            newest: the latest observed trainings.
        """
        supplies = self._operator.allowance.supplies
        totals = {name: [0.0, 0, 0] for name in supplies.names}
        for device in list(self._agents.devices.values()):  # also read by the thread that exports metrics
            sample, seen = samples.of(device.device_id), newest.observations.get(device.device_id)
            reading_w = None if sample is None else sample.power_w
            drawn_w = reading_w
            if drawn_w is None:
                is_training = device.state is DeviceState.TRAINING and seen is not None
                drawn_w = seen.power_w if is_training and seen is not None else device.idle_w or 0.0
                drawn_w = 0.0 if device.state is DeviceState.OFFLINE else drawn_w
            try:
                path = supplies.path(self._operator.supply_of(device.device_id))
            except InvalidInputError:  # the site file no longer places it
                continue
            for name in path:
                total = totals[name]
                total[0] += drawn_w
                total[1] += 1
                total[2] += reading_w is not None
        return {name: MeasuredDraw(watts, int(devices), int(read)) for name, (watts, devices, read) in totals.items()}

    def _drawn_w(self, device: DeviceRecord, grant: DeviceGrant | None, granted_w: float) -> float:
        """The watts that a device outside a plan may draw, as far as known."""
        if device.idle_w is None:
            return granted_w
        is_hungriest = self._agents.is_profiling(device.device_id) or (grant is not None and grant.is_rogue)
        hungriest_w = device.max_planned_w if is_hungriest else 0.0
        return max(granted_w, hungriest_w, device.idle_w)
