"""Predictions of a run's next round for each Flower node, for client selection in the Flower app."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceRecord
from wattfleet.planning import Assignment, Offer, fastest_assignments
from wattfleet_proto.device_state import DeviceState


@dataclass(frozen=True)
class NodePrediction:
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


def predict_nodes(fleet: Fleet, run_id: str, node_ids: Sequence[int], epochs: float) -> list[NodePrediction]:
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

    def prediction(node: int, device_id: str) -> NodePrediction:
        if not device_id:
            return NodePrediction(node, reason="no device is bound to the node yet")
        if device_id not in devices:
            return NodePrediction(node, device_id, reason="its agent never connected: is it running?")
        unpaired = fleet.flower.pairings.problems.get(node) or paired.unpaired.get(device_id)
        return NodePrediction(node, device_id, assignments.get(device_id), unpaired or reason(devices[device_id]))

    return [prediction(node, device_id) for node, device_id in bound.items()]
