"""Measures how long a coordinator takes to plan a round if its devices know several workloads."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

import numpy as np

from coordinator.state.fleet import Fleet
from wattfleet.core.choosing import Front
from wattfleet.core.modes import Workload
from wattfleet.core.planning import Allowance
from wattfleet.core.planning.policies import FastestK
from wattfleet_proto.device_state import DeviceState

_W_PER_DEVICE = 20.0

MakeFront = Callable[[np.random.Generator], Front]


def coordinator_plan_ms(devices: int, workloads: int, repeats: int, make_front: MakeFront) -> tuple[float, float]:
    """Return the milliseconds of one core for a plan of half the devices, with one workload and with several.

    The time includes the snapshot of the fleet, the offers and the plan itself. The two fleets are planned alternately,
    so that a busy machine slows down both. Each time is the minimum of several repeats.

    Args:
        devices: number of devices in the fleet, all ready.
        workloads: number of fronts of each device, and of runs that are planned in turn.
        repeats: plans of each fleet.
        make_front: returns a random front.
    """
    one, several = (_fleet(devices, count, make_front) for count in (1, workloads))
    nodes = list(range(devices))
    times_ms = [
        (_plan_ms(one, _name(0), nodes), _plan_ms(several, _name(repeat % workloads), nodes))
        for repeat in range(repeats)
    ]
    of_one, of_several = zip(*times_ms, strict=True)
    return min(of_one), min(of_several)


def snapshots_of(devices: int, make_front: MakeFront) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the calls that take each form of a snapshot of a fleet, for whose time the coordinator's loop is held.

    Returns:
        the copy of the fleet, which is taken, and the request made from the fleet, which would be the alternative.
    """
    fleet, nodes = _fleet(devices, 1, make_front), list(range(devices))
    return fleet.copy, lambda: fleet.flower.request_round(_name(0), 1, nodes, 1.0)


def _fleet(devices: int, workloads: int, make_front: MakeFront) -> Fleet:
    chance = np.random.default_rng(devices)
    fleet = Fleet(Allowance.of_site(_W_PER_DEVICE * devices), FastestK((devices + 1) // 2))
    for number in range(devices):
        device_id = f"device-{number:06}"
        fleet.agents.connect(device_id, "agx-orin", "simulated", 18_096)
        front = make_front(chance)
        for workload in range(workloads):
            known = Workload(_name(workload))
            fleet.agents.report_front(device_id, front.scaled(1.0 + workload), 5.0, 50, "", known, 500)
        fleet.agents.report_state(device_id, DeviceState.READY, 50, "")
        fleet.flower.bind_node(number, device_id)
    for workload in range(workloads):
        fleet.flower.start_run(_name(workload), "FedAvg", 100, workload=Workload(_name(workload)))
    return fleet


def _name(workload: int) -> str:
    return f"workload-{workload}"


def _plan_ms(fleet: Fleet, run_id: str, nodes: list[int]) -> float:
    begun_s = process_time()
    fleet.copy().flower.request_round(run_id, 1, nodes, 1.0).planned()
    return 1e3 * (process_time() - begun_s)
