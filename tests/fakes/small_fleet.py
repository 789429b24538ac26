"""A fleet of two devices that are ready to train, for tests that begin after profiling."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.settings import GrantSettings
from coordinator.state.agents import Placement
from coordinator.state.fleet import Fleet
from coordinator.state.records import NOTHING_STORED, StoredGrants
from tests.fakes.fronts import front
from wattfleet.choosing import Front
from wattfleet.planning import Allowance
from wattfleet.planning.policies import AllDevices, Policy
from wattfleet_proto.device_state import DeviceState

RUN = "4711"
RUN_NAME = "digits-night"
ORIN_FRONT = front((10, 50), (20, 30), (40, 20))
NANO_FRONT = front((35, 15), (60, 10))
# Flower's node ids use all 64 bits.
ORIN_NODE, NANO_NODE = 2**64 - 1, 2**63 + 5


def make_ready(fleet: Fleet, device_id: str, device_front: Front, idle_w: float, node_id: int) -> None:
    """Report what makes a device ready for plans, and pair Flower's node with it."""
    fleet.agents.connect(device_id, "agx-orin", "simulated", 18_096)
    fleet.agents.report_front(device_id, device_front, idle_w, 50, "d" * 64)
    fleet.agents.report_state(device_id, DeviceState.READY, 50, "parked")
    fleet.flower.bind_node(node_id, device_id)


def small_fleet(
    site_budget_w: float = 100.0, policy: Policy | None = None, now_s: Callable[[], float] = lambda: 0.0
) -> Fleet:
    """An Orin that idles at 5 W and a Nano that idles at 3 W, both ready, and a run that has begun."""
    fleet = Fleet(Allowance.of_site(site_budget_w), policy or AllDevices(), now_s=now_s)
    make_ready(fleet, "orin", ORIN_FRONT, 5.0, ORIN_NODE)
    make_ready(fleet, "nano", NANO_FRONT, 3.0, NANO_NODE)
    fleet.flower.start_run(RUN, "FedAvg", 3)
    return fleet


NODES = [ORIN_NODE, NANO_NODE]


def restarted(
    fleet: Fleet,
    placement: Placement | None = None,
    grants: GrantSettings = GrantSettings(),
    stored: StoredGrants = NOTHING_STORED,
    now_s: Callable[[], float] = lambda: 0.0,
) -> Fleet:
    """The same fleet, restored from a store; no device is connected."""
    return Fleet(
        fleet.operator.allowance,
        fleet.flower.policy,
        list(fleet.agents.devices.values()),
        fleet.flower.nodes,
        list(fleet.flower.runs.values()),
        list(fleet.rounds.records.values()),
        placement=placement,
        grants=grants,
        now_s=now_s,
        stored_grants=stored,
    )
