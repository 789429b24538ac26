"""All workloads that the coordinator knows, from runs and from devices' fronts."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.state.fleet import Fleet
from wattfleet.modes import Workload


@dataclass
class KnownWorkload:
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


def known_workloads(fleet: Fleet) -> list[KnownWorkload]:
    """The workloads of all runs and of all fronts, by name, without fronts that count for every workload."""
    found: dict[str, KnownWorkload] = {}
    for run in fleet.flower.runs.values():
        known = found.setdefault(run.workload.name, KnownWorkload(run.workload))
        known.workload = run.workload
        known.run_ids.append(run.run_id)
        if not run.finished:
            known.live_run_ids.append(run.run_id)
    for device in fleet.agents.devices.values():
        for each in device.fronts:
            if each.workload is None:
                continue
            known = found.setdefault(each.name, KnownWorkload(each.workload))
            known.device_count += 1
            if each.profiled_modes:
                known.profiled_modes.append(each.profiled_modes)
    return [found[name] for name in sorted(found)]
