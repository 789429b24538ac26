"""The devices' side of the grants, for tests of the fleet's state: each device confirms immediately."""

from __future__ import annotations

from coordinator.state.fleet import Fleet
from coordinator.state.rounds.grants import Grant
from wattfleet_proto.device_state import DeviceState, GrantPhase


def confirm_all(fleet: Fleet) -> dict[str, Grant]:
    """Deliver all grants that are due and have the devices confirm them; returns them by device."""
    orders = dict(fleet.take_orders())
    for device_id, grant in orders.items():
        known = fleet.rounds.grants.of(device_id)
        assert known is not None, "it was just told"
        phase = GrantPhase.OVER if grant.assignment is None else known.phase
        fleet.rounds.grants.confirm(device_id, grant.grant_id, grant.plan_id, phase)
    return orders


def train(fleet: Fleet, device_id: str) -> None:
    """Begin the training that a device was granted."""
    confirm_all(fleet)
    _report(fleet, device_id, GrantPhase.TRAINING)
    fleet.agents.report_state(device_id, DeviceState.TRAINING, 50, "")


def end_training(fleet: Fleet, device_id: str) -> None:
    """End a device's training."""
    _report(fleet, device_id, GrantPhase.OVER)
    fleet.agents.report_state(device_id, DeviceState.READY, 50, "parked")


def _report(fleet: Fleet, device_id: str, phase: GrantPhase) -> None:
    known = fleet.rounds.grants.of(device_id)
    assert known is not None, f"{device_id} was granted nothing"
    fleet.rounds.grants.confirm(device_id, known.grant.grant_id, known.plan_id, phase)
