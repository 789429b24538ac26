"""A preview of the next round, planned on a copy of the fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.errors import NoDevicesError
from coordinator.state.fleet import Fleet
from coordinator.state.flower import NodePairings
from coordinator.state.names import abbreviate
from coordinator.state.records import DeviceRecord, RoundRecord
from wattfleet.core.budgets import InForce, require_watts
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Workload
from wattfleet.core.planning import Assignment, Offer, fastest_assignments
from wattfleet.core.planning.policies import Policy
from wattfleet_proto.device_state import DeviceState

# --- Node predictions -------------------------------------------------------------------------------------------------
# Predictions of a run's next round for each Flower node, for client selection in the Flower app.


@dataclass(frozen=True)
class NodePreview:
    """The prediction for one node.

    Attributes:
        node_id: Flower's id.
        device_id: the device behind it; empty if none is bound.
        assignment: the fastest mode within the device's own limit; None if nothing can be predicted.
        reason: why the node cannot be selected now; empty if it can.
    """

    node_id: int
    device_id: str = ""
    assignment: Assignment | None = None
    reason: str = ""


def predict_nodes(fleet: Fleet, run_id: str, node_ids: Sequence[int], epochs: float) -> list[NodePreview]:
    """Predict a run's next round on each node, as if that node alone was selected; nothing is reserved.

    Args:
        fleet: the fleet.
        run_id: the run.
        node_ids: Flower's nodes; duplicates are ignored.
        epochs: local epochs of each device.

    Raises:
        UnknownRecordError: the run does not exist.
        InvalidInputError: the epochs are not above zero.
    """
    workload = fleet.flower.run(run_id).workload.name
    lengths = fleet.agents.usual_lengths()
    bound = {node: fleet.flower.nodes.get(node, "") for node in node_ids}
    devices = {each: fleet.agents.devices[each] for each in bound.values() if each in fleet.agents.devices}
    offers: dict[str, Offer] = {}
    for device_id, device in devices.items():
        offer = fleet.draw.offer_of(device, workload, lengths)
        if offer is not None:
            offers[device_id] = offer
    assignments = dict(zip(offers, fastest_assignments(list(offers.values()), epochs), strict=True))
    paired = fleet.flower.paired(bound)
    excluded = fleet.operator.exclusion_reasons(offers, workload)

    def reason(device: DeviceRecord) -> str:
        device_id = device.device_id
        if device_id in excluded:
            return excluded[device_id]
        if device.state is not DeviceState.READY or device_id not in offers or fleet.rounds.grants.may_train(device_id):
            return f"it is {fleet.flower.occupation(device, run_id)}"
        if assignments[device_id] is None:
            return f"over its own limit of {offers[device_id].limit_w:g} W: no mode needs as little"
        return ""

    def prediction(node: int, device_id: str) -> NodePreview:
        if not device_id:
            return NodePreview(node, reason="no device is bound to the node yet")
        if device_id not in devices:
            return NodePreview(node, device_id, reason="its agent never connected: is it running?")
        unpaired = fleet.flower.pairings.problems.get(node) or paired.unpaired.get(device_id)
        return NodePreview(node, device_id, assignments.get(device_id), unpaired or reason(devices[device_id]))

    return [prediction(node, device_id) for node, device_id in bound.items()]


# --- Known workloads --------------------------------------------------------------------------------------------------
# All workloads that the coordinator knows, from runs and from devices' fronts.


@dataclass
class FleetWorkload:
    """One workload.

    Attributes:
        workload: as the newest run states it, or else as a device knows it.
        device_count: the number of devices with a front for it.
        profiled_modes: the number of measured modes of each device that has measured any.
        run_ids: its runs, oldest first.
        live_run_ids: its runs that have not ended.
    """

    workload: Workload
    device_count: int = 0
    profiled_modes: list[int] = field(default_factory=list)
    run_ids: list[str] = field(default_factory=list)
    live_run_ids: list[str] = field(default_factory=list)


def known_workloads(fleet: Fleet) -> list[FleetWorkload]:
    """The workloads of all runs and of all fronts, by name."""
    found: dict[str, FleetWorkload] = {}
    for run in fleet.flower.runs.values():
        known = found.setdefault(run.workload.name, FleetWorkload(run.workload))
        known.workload = run.workload
        known.run_ids.append(run.run_id)
        if not run.finished:
            known.live_run_ids.append(run.run_id)
    for device in fleet.agents.devices.values():
        for each in device.fronts:
            known = found.setdefault(each.name, FleetWorkload(each.workload))
            known.device_count += 1
            if each.profiled_modes:
                known.profiled_modes.append(each.profiled_modes)
    return [found[name] for name in sorted(found)]


# --- Preview ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preview:
    """A round as it would be planned now.

    Attributes:
        record: the round.
        not_considered: device id -> what keeps the device out of the round, for each device that the plan did not
            consider.
        assumed_ended: ids of the plans in flight whose rounds are assumed to have ended.
    """

    record: RoundRecord
    not_considered: Mapping[str, str]
    assumed_ended: Sequence[str] = ()


@dataclass(frozen=True)
class WhatIf:
    """The assumptions of a preview that differ from the fleet.

    Attributes:
        budgets_w: watts by supply; the budgets in force at all others.
        policy: the client-selection policy; None for the one in force.
    """

    budgets_w: Mapping[str, float] = field(default_factory=dict)
    policy: Policy | None = None


class RoundPreview:
    """A copy of the fleet in which a run's next round is planned; the fleet itself does not change.

    The next round begins when the one in flight has ended, so the copy assumes that. Rounds of other runs go on. The
    first round of a new run is planned as if no device trained.

    Attributes:
        fleet: the copy.
        node_ids: nodes that the plan chooses from.
    """

    def __init__(
        self,
        fleet: Fleet,
        run_id: str = "",
        all_devices: bool = False,
        workload: Workload | None = None,
        what_if: WhatIf = WhatIf(),
    ) -> None:
        """Copy the fleet as it is now.

        Args:
            fleet: the fleet.
            run_id: the run; its newest round and history must be cached. Empty for a new run.
            all_devices: include devices without a Flower node.
            workload: the workload of a new run; None for that of the newest run.
            what_if: what differs in the copy.

        Raises:
            UnknownRecordError: the run does not exist.
            NoDevicesError: no device has a node.
            InvalidInputError: the run has ended, or an assumed budget is invalid or of an unknown supply.
        """
        self.fleet = fleet.copy()
        self._assumed_ended = self.fleet.assume_ended(run_id)
        self._assume(what_if)
        self._run_id = run_id
        flower = self.fleet.flower
        if not run_id:
            newest = next(reversed(flower.runs.values()), None)
            flower.start_run(run_id, "", 1, workload=workload or (newest.workload if newest else None))
        elif flower.run(run_id).finished:
            name = flower.name_of(run_id)
            raise InvalidInputError(f"run {name} has ended: omit --run to preview the first round of a new run")
        if all_devices or not run_id:
            # A device without a node counts as paired: the preview shows the fleet once all devices have one.
            newest_nodes = {device_id: node_id for node_id, device_id in flower.nodes.items()}
            problems = flower.pairings.problems
            flower.nodes = dict(enumerate(self.fleet.agents.devices))
            flower.pairings = NodePairings(
                {k: problems.get(newest_nodes.get(each, -1), "") for k, each in flower.nodes.items()}
            )
        elif not flower.nodes:
            raise NoDevicesError(
                "no device is bound to a Flower node yet; use --all-devices to preview a plan over all devices"
            )
        # A device whose SuperNode was restarted has several nodes; the newest counts.
        self._nodes = {device_id: node_id for node_id, device_id in flower.nodes.items()}
        self.node_ids = list(self._nodes.values())

    def plan(self, epochs: float = 0.0) -> Preview:
        """Plan the next round in the copy.

        Args:
            epochs: local epochs; 0 for those of the run's last round, or 1 before its first.

        Raises:
            NoDevicesError: no device is ready.
            InfeasibleBudgetError: the site's budget is too small for any device.
            InvalidInputError: no device is left to choose, or the epochs are not above zero.
        """
        last = max(self.fleet.rounds.cache.of_run(self._run_id), key=lambda record: record.number, default=None)
        number, usual_epochs = (1, 1.0) if last is None else (last.number + 1, last.epochs)
        occupations = {device_id: self._occupation(device_id) for device_id in self.fleet.agents.devices}
        record = self.fleet.flower.plan(self._run_id, number, self.node_ids, epochs or usual_epochs)
        considered = {decision.device_id for decision in record.plan.decisions}
        not_considered = {each: text for each, text in occupations.items() if each not in considered}
        return Preview(record, not_considered, self._assumed_ended)

    def _assume(self, what_if: WhatIf) -> None:
        if what_if.policy is not None:
            self.fleet.flower.policy = what_if.policy
        supplies = self.fleet.operator.allowance.supplies
        for supply, watts in what_if.budgets_w.items():
            if supply not in supplies.names:
                raise InvalidInputError(f"unknown supply {abbreviate(supply)}: use one of {', '.join(supplies.names)}")
            require_watts(f"the assumed budget of {supply}", watts)
            self.fleet.operator.set_budget(supply, InForce(watts, "operator", False, "assumed"))

    def _occupation(self, device_id: str) -> str:
        """Describe what would keep a device out of the round."""
        device = self.fleet.agents.get(device_id)
        text = self.fleet.flower.occupation(device, self._run_id)
        if device.state is DeviceState.READY and device_id not in self._nodes:
            return f"{text}, without a SuperNode"
        return text
