"""Runs that wait for devices or watts held by other runs, and the share that each run leaves to those ahead of it.

A run that is refused a plan waits until it gets one. Every other run leaves a share of the devices and the watts to the
runs that have waited longer, in proportion to weights. The run that has waited longest leaves nothing, so that a plan
is always possible. A run therefore waits only for the trainings in flight, never for a later round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from wattfleet.planning import least_whole

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
