"""What the next round would be, without planning it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.errors import NoDevicesError
from coordinator.fleet import Fleet
from coordinator.records import DeviceState, RoundRecord
from wattfleet.errors import InvalidInputError


@dataclass(frozen=True)
class Preview:
    """A round as it would be planned now.

    Attributes:
        record: the round.
        not_looked_at: what keeps each device from it that the plan decides nothing about, in words.
    """

    record: RoundRecord
    not_looked_at: Mapping[str, str]


def preview(
    fleet: Fleet,
    clear_way: Callable[[Fleet, Sequence[int]], None],
    run_id: str = "",
    epochs: float = 0.0,
    all_devices: bool = False,
) -> Preview:
    """Plan a run's next round as it would be planned now; the fleet stays as it is.

    Args:
        fleet: what is known.
        clear_way: what comes before every new plan (see `PlanningServicer.clear_way`).
        run_id: the run; empty for a run that would begin now.
        epochs: local epochs; 0 for those of the run's last round, or 1 before its first.
        all_devices: take devices that no node of Flower's is tied to as well, as for a run that would begin.

    Raises:
        UnknownRecordError: no such run.
        FleetReturningError: after a restart, devices are waited for still.
        NoDevicesError: none is ready, or those that are have no node.
        InfeasibleBudgetError: the site's watts carry none.
        InvalidInputError: the run is over, nobody is left to choose, or the epochs are not above zero.
    """
    trial = fleet.copy()
    if not run_id:
        trial.start_run(run_id, "", 1)
    elif trial.run(run_id).finished:
        raise InvalidInputError(f"run {run_id} is over: name no run to look at the first round of a new one")
    rounds = trial.rounds_of(run_id)
    number = max((record.number for record in rounds), default=0) + 1
    # A device whose SuperNode was started anew has several nodes, of which any would do.
    nodes = {device_id: node_id for node_id, device_id in trial.nodes.items()}
    if all_devices or not run_id:
        trial.nodes = dict(enumerate(trial.devices))
        nodes = {device_id: node_id for node_id, device_id in trial.nodes.items()}
    elif not nodes:
        raise NoDevicesError("no device is tied to a node of Flower's yet; --all-devices plans without")
    clear_way(trial, list(nodes.values()))
    kept_by = {device_id: _kept_by(trial, device_id, run_id, nodes) for device_id in trial.devices}
    record = trial.plan(run_id, number, list(nodes.values()), epochs or (rounds[-1].epochs if rounds else 1.0))
    looked_at = {decision.device_id for decision in record.plan.decisions}
    return Preview(record, {device_id: why for device_id, why in kept_by.items() if device_id not in looked_at})


def _kept_by(fleet: Fleet, device_id: str, run_id: str, nodes: Mapping[str, int]) -> str:
    """What would keep a device from a run's next round, in words."""
    device = fleet.device(device_id)
    occupation = fleet.occupation(device, run_id)
    if device.state is DeviceState.READY and device_id not in nodes:
        return f"{occupation}, without a SuperNode"
    if device.state is DeviceState.READY and device.front is None:
        return f"{occupation}, without a front"
    return occupation
