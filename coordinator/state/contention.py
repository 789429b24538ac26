"""How concurrent runs share devices and watts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from coordinator.state.agents import Agents
from coordinator.state.operator import OperatorSettings
from coordinator.state.power_draw import PowerDraw
from coordinator.state.records import run_of
from coordinator.state.rounds.grants import Grants
from coordinator.state.waiting_runs import Share, WaitingRuns
from wattfleet.planning import Allowance, Offer
from wattfleet_proto.device_state import DeviceState


class Contention:
    """Which runs wait for others, and the watts that a run leaves to them.

    Attributes:
        waiting: the runs that wait for what other runs hold.
    """

    def __init__(
        self, waiting: WaitingRuns, agents: Agents, operator: OperatorSettings, grants: Grants, draw: PowerDraw
    ) -> None:
        """Watch one fleet.

        Args:
            waiting: the runs that wait for what other runs hold.
            agents: the devices.
            operator: budgets, and which devices are drained.
            grants: what devices may draw.
            draw: what each device draws, and can be planned with.
        """
        self.waiting = waiting
        self._agents = agents
        self._operator = operator
        self._grants = grants
        self._draw = draw

    def refused(self, run_id: str, workload: str, device_ids: Collection[str], live: Mapping[str, str]) -> None:
        """Record that a run got no plan; it now waits if other runs hold devices or watts that it could use.

        A run that has ended does not wait, although its app may still request plans.

        Args:
            run_id: the run.
            workload: name of its workload.
            device_ids: the devices that it requested.
            live: run id -> workload name, of all runs that have not ended.
        """
        usable: list[str] = []
        if run_id in live and (self.waiting.share_of(run_id, live).ahead or self._is_held_by_others(run_id)):
            usable = [each for each in device_ids if self._is_usable(each, workload)]
        self.waiting.refused(run_id, usable)

    def leave(self, run_id: str, share: Share, allowance: Allowance, offers: Sequence[Offer]) -> Allowance:
        """The allowance of a run that leaves all watts beyond its share to the other runs.

        The share applies to the watts that trainings may draw at each supply while all other devices idle. The draw of
        the run's own current trainings counts towards it.

        Args:
            run_id: the run.
            share: the part of devices and watts that it may use.
            allowance: the watts of every supply.
            offers: the devices that it can be planned with.
        """
        names = allowance.supplies.names
        idle_w = replace(allowance, elsewhere_w=self._draw.idle_w()).idle_w([])
        own_w = replace(allowance, elsewhere_w=self._draw.trainings_w(run_id)).idle_w([])
        spare_w = dict(zip(names, allowance.headroom(offers).spare_w.tolist(), strict=True))
        share_w = {
            name: max(0.0, share.of_all * max(0.0, allowance.budget_w[name] - idle_w[name]) - own_w[name])
            for name in names
        }
        return replace(allowance, left_w={name: max(0.0, spare_w[name] - share_w[name]) for name in names})

    def _is_held_by_others(self, run_id: str) -> bool:
        """Whether devices may act on grants of other runs."""
        grants = (self._grants.of(device_id) for device_id in self._grants.of_training())
        return any(grant is not None and run_of(grant.plan_id) != run_id for grant in grants)

    def _is_usable(self, device_id: str, workload: str) -> bool:
        """Whether a device could be selected for a workload, if no other run held it."""
        device = self._agents.devices.get(device_id)
        return (
            device is not None
            and device.state in (DeviceState.READY, DeviceState.TRAINING)
            and self._draw.is_offered(device, workload)
            and not self._operator.overrides_of(device_id).drained
            and self._agents.claims.exclusion_reason(device, workload) is None
        )
