"""How long a coordinator takes for the plan of a run, if its devices know several workloads."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np

from coordinator.state.fleet import Fleet
from wattfleet.choosing import Front
from wattfleet.modes import Workload
from wattfleet.planning import Allowance
from wattfleet.planning.policies import FastestK
from wattfleet_proto.device_state import DeviceState

_W_PER_DEVICE = 20.0

MakeFront = Callable[[np.random.Generator], Front]


def coordinator_plan_ms(devices: int, workloads: int, repeats: int, make_front: MakeFront) -> float:
    """Milliseconds for a plan of half the devices: the snapshot of the fleet, the offers and the plan itself.

    The runs of all workloads are planned in turn. Each time is the least of several repeats; the result is the largest
    of all runs.

    Args:
        devices: devices of the fleet, all ready.
        workloads: fronts of each device, and runs.
        repeats: plans of each run.
        make_front: makes a random front.
    """
    chance = np.random.default_rng(devices)
    fleet = Fleet(Allowance.of_site(_W_PER_DEVICE * devices), FastestK((devices + 1) // 2))
    for number in range(devices):
        device_id = f"device-{number:06}"
        fleet.agents.connect(device_id, "agx-orin", "simulated", 18_096)
        for workload in range(workloads):
            known = Workload(_name(workload))
            fleet.agents.report_front(device_id, make_front(chance), 5.0, 50, "", known, 500)
        fleet.agents.report_state(device_id, DeviceState.READY, 50, "")
        fleet.flower.bind_node(number, device_id)
    nodes = list(range(devices))
    for workload in range(workloads):
        fleet.flower.start_run(_name(workload), "FedAvg", 100, workload=Workload(_name(workload)))
    return max(_least_ms(fleet, _name(workload), nodes, repeats) for workload in range(workloads))


def _name(workload: int) -> str:
    return f"workload-{workload}"


def _least_ms(fleet: Fleet, run_id: str, nodes: list[int], repeats: int) -> float:
    times_s = []
    for _ in range(repeats):
        begun_s = perf_counter()
        fleet.copy().flower.request_round(run_id, 1, nodes, 1.0).planned()
        times_s.append(perf_counter() - begun_s)
    return 1e3 * min(times_s)
