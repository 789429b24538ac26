"""What the next round would be, without planning it."""

from __future__ import annotations

from coordinator.errors import NoDevicesError
from coordinator.fleet import Fleet
from coordinator.records import RoundRecord


def preview(fleet: Fleet, run_id: str = "", epochs: float = 0.0, all_devices: bool = False) -> RoundRecord:
    """Plan a run's next round as it would be planned now; the fleet stays as it is.

    Args:
        fleet: what is known.
        run_id: the run; empty for a run that would begin now.
        epochs: local epochs; 0 for those of the run's last round, or 1 before its first.
        all_devices: take devices that no node of Flower's is tied to as well, as for a run that would begin.

    Raises:
        UnknownRecordError: no such run.
        NoDevicesError: none is ready, or those that are have no node.
        InfeasibleBudgetError: the site's watts carry none.
        InvalidInputError: nobody is left to choose, or the epochs are not above zero.
    """
    trial = fleet.copy()
    if run_id:
        trial.run(run_id)
    else:
        trial.start_run(run_id, "", 1)
    rounds = trial.rounds_of(run_id)
    number = max((record.number for record in rounds), default=0) + 1
    # A device whose SuperNode was started anew has several nodes, of which any would do.
    nodes = {device_id: node_id for node_id, device_id in trial.nodes.items()}
    if all_devices or not run_id:
        trial.nodes = dict(enumerate(trial.devices))
        nodes = {device_id: node_id for node_id, device_id in trial.nodes.items()}
    elif not nodes:
        raise NoDevicesError("no device is tied to a node of Flower's yet; --all-devices plans without")
    return trial.plan(run_id, number, list(nodes.values()), epochs or (rounds[-1].epochs if rounds else 1.0))
