"""What the next round would be, without planning it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.errors import NoDevicesError
from coordinator.state.fleet import Fleet
from coordinator.state.records import RoundRecord
from wattfleet.errors import InvalidInputError
from wattfleet_proto.device_state import DeviceState


@dataclass(frozen=True)
class Preview:
    """A round as it would be planned now.

    Attributes:
        record: the round.
        not_looked_at: what keeps each device from it that the plan decides nothing about, in words.
    """

    record: RoundRecord
    not_looked_at: Mapping[str, str]


class Trial:
    """A copy of the fleet, in which a run's next round is planned: the fleet itself stays as it is.

    Attributes:
        fleet: the copy.
        node_ids: nodes that the plan is to choose from.
    """

    def __init__(self, fleet: Fleet, run_id: str = "", all_devices: bool = False) -> None:
        """Take the fleet as it is now.

        Args:
            fleet: what is known.
            run_id: the run, whose newest round and history are at hand; empty for a run that would begin now.
            all_devices: take devices that no node of Flower's is tied to as well, as for a run that would begin.

        Raises:
            UnknownRecordError: no such run.
            NoDevicesError: no device has a node.
            InvalidInputError: the run is over.
        """
        self.fleet = fleet.copy()
        self._run_id = run_id
        if not run_id:
            self.fleet.start_run(run_id, "", 1)
        elif self.fleet.run(run_id).finished:
            raise InvalidInputError(f"run {run_id} is over: name no run to look at the first round of a new one")
        if all_devices or not run_id:
            self.fleet.nodes = dict(enumerate(self.fleet.devices))
        elif not self.fleet.nodes:
            raise NoDevicesError("no device is tied to a node of Flower's yet; --all-devices plans without")
        # A device whose SuperNode was started anew has several nodes, of which any would do.
        self._nodes = {device_id: node_id for node_id, device_id in self.fleet.nodes.items()}
        self.node_ids = list(self._nodes.values())

    def planned(self, epochs: float = 0.0) -> Preview:
        """The next round as it would be planned.

        Args:
            epochs: local epochs; 0 for those of the run's last round, or 1 before its first.

        Raises:
            NoDevicesError: none is ready.
            InfeasibleBudgetError: the site's watts carry none.
            InvalidInputError: nobody is left to choose, or the epochs are not above zero.
        """
        last = max(self.fleet.rounds_of(self._run_id), key=lambda record: record.number, default=None)
        number, usual_epochs = (1, 1.0) if last is None else (last.number + 1, last.epochs)
        kept_by = {device_id: self._kept_by(device_id) for device_id in self.fleet.devices}
        record = self.fleet.plan(self._run_id, number, self.node_ids, epochs or usual_epochs)
        looked_at = {decision.device_id for decision in record.plan.decisions}
        return Preview(record, {device_id: why for device_id, why in kept_by.items() if device_id not in looked_at})

    def _kept_by(self, device_id: str) -> str:
        """What would keep a device from the round, in words."""
        device = self.fleet.device(device_id)
        occupation = self.fleet.occupation(device, self._run_id)
        if device.state is DeviceState.READY and device_id not in self._nodes:
            return f"{occupation}, without a SuperNode"
        if device.state is DeviceState.READY and device.front is None:
            return f"{occupation}, without a front"
        return occupation
