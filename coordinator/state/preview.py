"""A preview of the next round, planned on a copy of the fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.errors import NoDevicesError
from coordinator.state.fleet import Fleet
from coordinator.state.names import abbreviate
from coordinator.state.pairing import NodePairings
from coordinator.state.records import RoundRecord
from wattfleet.budgets import InForce, require_watts
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Workload
from wattfleet.planning.policies import Policy
from wattfleet_proto.device_state import DeviceState


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
