"""How concurrent runs share devices and watts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from coordinator.state.agents import Agents
from coordinator.state.operator import OperatorSettings
from coordinator.state.power_draw import PowerDraw
from coordinator.state.records import run_of
from coordinator.state.rounds.grants import Grants
from wattfleet.core.planning import Allowance, Offer, least_whole
from wattfleet_proto.device_state import DeviceState

# --- Waiting runs -----------------------------------------------------------------------------------------------------
# Runs that wait for devices or watts held by other runs, and the share that each run leaves to those ahead of it.
#
# A run that is refused a plan waits until it gets one. Every other run leaves a share of the devices and the watts to
# the runs that have waited longer, in proportion to weights. The run that has waited longest leaves nothing, so that
# a plan is always possible. A run therefore waits only for the trainings in flight, never for a later round.


_LAPSES_S = 30.0
"""A run that has not requested a plan for this long no longer waits; Flower servers request one every 1 to 10 s."""


@dataclass(frozen=True)
class Share:
    """The share that a run may use while others have waited longer.

    Attributes:
        of_all: share of the watts that the devices' trainings may draw, and of the devices that others wait for; 0 to
            1.
        ahead: the runs that have waited longer, longest first; empty if the run may use everything.
        wanted: devices that these runs wait for.
    """

    of_all: float = 1.0
    ahead: tuple[str, ...] = ()
    wanted: Set[str] = frozenset()

    def leaves(self, device_ids: Iterable[str], name_of: Callable[[str], str] = str) -> dict[str, str]:
        """Return the devices to leave to other runs, each with the reason.

        They are evenly spread over the devices that others wait for, and include the first.

        Args:
            device_ids: the run's devices, fastest first.
            name_of: returns what people call a run.
        """
        contended = [each for each in device_ids if each in self.wanted]
        left = 1.0 - self.of_all
        reason = f"left to run {', '.join(map(name_of, self.ahead))}, which has waited longer"
        return {each: reason for k, each in enumerate(contended) if least_whole((k + 1) * left) > least_whole(k * left)}


@dataclass(frozen=True)
class _Wait:
    """A waiting run: the devices that it could use, and when it last requested a plan."""

    device_ids: frozenset[str]
    asked_s: float


class WaitingRuns:
    """The waiting runs, in the order in which they began to wait."""

    def __init__(self, now_s: Callable[[], float], weights: Mapping[str, float] | None = None) -> None:
        """Start without any waiting run.

        Args:
            now_s: the time now.
            weights: weights by workload; 1 for others.
        """
        self._now_s = now_s
        self._weights = weights or {}
        self._waits: dict[str, _Wait] = {}

    def refused(self, run_id: str, device_ids: Collection[str]) -> None:
        """Record that a run got no plan, although it could use some devices.

        Args:
            run_id: the run.
            device_ids: devices that it could use if others did not hold them or the watts.
        """
        self._drop_lapsed()
        if device_ids:
            self._waits[run_id] = _Wait(frozenset(device_ids), self._now_s())
        else:
            self.served([run_id])

    def served(self, run_ids: Iterable[str]) -> None:
        """Record that the given runs got a plan or have ended."""
        for run_id in run_ids:
            self._waits.pop(run_id, None)

    def share_of(self, run_id: str, workloads: Mapping[str, str]) -> Share:
        """The share that a run may use now.

        Args:
            run_id: the run.
            workloads: run id -> workload name, of all runs that have not ended.
        """
        self._drop_lapsed()
        ahead: list[str] = []
        for other in self._waits:
            if other == run_id:
                break
            if other in workloads:
                ahead.append(other)
        if not ahead:
            return Share()
        weight = self._weights.get(workloads.get(run_id, ""), 1.0)
        total = weight + sum(self._weights.get(workloads[other], 1.0) for other in ahead)
        wanted = frozenset().union(*(self._waits[other].device_ids for other in ahead))
        return Share(weight / total, tuple(ahead), wanted)

    def _drop_lapsed(self) -> None:
        """Drop the runs that have not requested a plan for long; a later request waits behind all others."""
        now_s = self._now_s()
        self._waits = {run_id: wait for run_id, wait in self._waits.items() if now_s - wait.asked_s <= _LAPSES_S}


# --- Contention -------------------------------------------------------------------------------------------------------


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
