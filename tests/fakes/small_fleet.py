"""A fleet of two devices that are ready to train, for tests that begin after profiling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from coordinator.settings import GrantSettings
from coordinator.state.agents import Placement
from coordinator.state.fleet import Fleet
from coordinator.state.records import NOTHING_STORED, DeviceResult, StoredGrants
from coordinator.state.rounds.grants import Grant
from tests.fakes.fleets import front
from wattfleet.core.choosing import Front
from wattfleet.core.planning import Allowance, Assignment
from wattfleet.core.planning.policies import AllDevices, Policy
from wattfleet_proto.device_state import DeviceState, GrantPhase

RUN = "4711"
RUN_NAME = "digits-night"
ORIN_FRONT = front((10, 50), (20, 30), (40, 20))
NANO_FRONT = front((35, 15), (60, 10))
# Flower's node ids use all 64 bits.
ORIN_NODE, NANO_NODE = 2**64 - 1, 2**63 + 5


def make_ready(fleet: Fleet, device_id: str, device_front: Front, idle_w: float, node_id: int) -> None:
    """Report what makes a device ready for plans, and pair Flower's node with it."""
    fleet.agents.connect(device_id, "agx-orin", "simulated", 18_096)
    fleet.agents.report_front(device_id, device_front, idle_w, 50, "d" * 64, minibatches_per_epoch=100)
    fleet.agents.report_state(device_id, DeviceState.READY, 50, "parked")
    fleet.flower.bind_node(node_id, device_id)


def small_fleet(
    site_budget_w: float = 100.0, policy: Policy | None = None, now_s: Callable[[], float] = lambda: 0.0, **others: Any
) -> Fleet:
    """An Orin that idles at 5 W and a Nano that idles at 3 W, both ready, and a run that has begun."""
    fleet = Fleet(Allowance.of_site(site_budget_w), policy or AllDevices(), now_s=now_s, **others)
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


# --- Obedient devices -------------------------------------------------------------------------------------------------
# The devices' side of the grants, for tests of the fleet's state: each device confirms immediately.


def confirm_all(fleet: Fleet) -> dict[str, Grant]:
    """Deliver all grants that are due and have the devices confirm them; returns them by device."""
    orders = dict(fleet.take_orders())
    for device_id, grant in orders.items():
        known = fleet.rounds.grants.of(device_id)
        assert known is not None, "it was just told"
        phase = GrantPhase.OVER if grant.assignment is None else known.phase
        fleet.rounds.grants.confirm(device_id, grant.grant_id, grant.plan_id, phase)
    return orders


def train(fleet: Fleet, device_id: str) -> None:
    """Begin the training that a device was granted."""
    confirm_all(fleet)
    _report(fleet, device_id, GrantPhase.TRAINING)
    fleet.agents.report_state(device_id, DeviceState.TRAINING, 50, "")


def end_training(fleet: Fleet, device_id: str) -> None:
    """End a device's training."""
    _report(fleet, device_id, GrantPhase.OVER)
    fleet.agents.report_state(device_id, DeviceState.READY, 50, "parked")


def _report(fleet: Fleet, device_id: str, phase: GrantPhase) -> None:
    known = fleet.rounds.grants.of(device_id)
    assert known is not None, f"{device_id} was granted nothing"
    fleet.rounds.grants.confirm(device_id, known.grant.grant_id, known.plan_id, phase)


# --- Granted ----------------------------------------------------------------------------------------------------------
# Tracks what one device was granted, independently of the coordinator.


@dataclass
class Granted:
    """A device's part in the newest round that chose it.

    Attributes:
        told_w: the newest limit; 0 if it has to stop.
        had_w: the highest earlier limit that it may still follow.
    """

    run: str
    plan_id: str
    told_w: float
    had_w: float = 0.0
    was_sent: bool = False
    is_confirmed: bool = False
    has_begun: bool = False
    is_given_up: bool = False
    is_over: bool = False

    def tell(self, watts: float) -> None:
        """Replace the newest limit by another one."""
        if self.was_sent:
            self.had_w = max(self.had_w, self.told_w)
        self.told_w, self.was_sent, self.is_confirmed = watts, False, False

    def give_up(self) -> None:
        """Record that nobody waits for the device any more."""
        if self.is_over or self.is_given_up:
            return
        self.is_given_up = True
        if not self.was_sent and not self.had_w:
            self.is_over = True
        elif not self.has_begun and self.told_w:
            self.tell(0.0)

    @property
    def counted_w(self) -> float:
        """The power that it may draw beyond idling."""
        return 0.0 if self.is_over else max(self.told_w, self.had_w)


def late_results(device_ids: Iterable[str]) -> list[DeviceResult]:
    """Results of devices that a round did not wait for."""
    return [DeviceResult(device_id, late=True) for device_id in device_ids]


def limits_w(assignments: Iterable[Assignment]) -> dict[str, float]:
    """The power limit of each device of a plan, in watts."""
    return {each.device_id: each.power_limit_w for each in assignments}


# --- Plaintext context ------------------------------------------------------------------------------------------------
# gRPC's context of a plaintext call, for servicers that are called directly.


class PlaintextContext:
    """The context of a caller without a certificate."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}
