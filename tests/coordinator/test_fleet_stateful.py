"""Whatever happens to a fleet in whatever order, its promises hold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.errors import NoDevicesError, UnknownRecordError
from coordinator.fleet import Fleet
from coordinator.records import DeviceRecord, DeviceState, ObservedTraining, RoundObservation, RoundRecord, RunRecord
from tests.fronts import fronts
from wattfleet.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.front import Front
from wattfleet.planning.allowance import Allowance
from wattfleet.planning.policies.fastest_k import Everyone, FastestK
from wattfleet.planning.policies.policy import Policy
from wattfleet.planning.policies.random_k import RandomK

BUDGET_W = 45.0
IDS = [f"device-{k}" for k in range(4)]
devices = st.sampled_from(IDS)
numbers = st.integers(1, 4)


class FleetMachine(RuleBasedStateMachine):
    """A fleet, a store that keeps only what the fleet hands out, and a plain account of what was done to it."""

    @initialize(policy=st.sampled_from([FastestK(2), Everyone(), RandomK(2, seed=3)]))
    def begin(self, policy: Policy) -> None:
        self.policy = policy
        self.fleet = Fleet(Allowance.of_site(BUDGET_W), policy)
        self.fleet.start_run("run", "FedAvg", 4)
        self.stored_devices: dict[str, DeviceRecord] = {}
        self.stored_runs: dict[str, RunRecord] = {"run": self.fleet.run("run")}
        self.stored_rounds: dict[str, RoundRecord] = {}
        self.connected: set[str] = set()
        self.nodes: dict[int, str] = {}

    def keep(self, record: DeviceRecord) -> None:
        self.stored_devices[record.device_id] = record

    def keep_round(self, record: RoundRecord) -> None:
        self.stored_rounds[record.plan_id] = record

    @rule(device=devices)
    def connect(self, device: str) -> None:
        self.keep(self.fleet.connect(device, "orin-nx", "simulated", 5_824))
        self.connected.add(device)

    @rule(device=devices)
    def disconnect(self, device: str) -> None:
        if device in self.connected:
            self.keep(self.fleet.disconnect(device))
            self.connected.remove(device)

    @rule(device=devices, state=st.sampled_from([DeviceState.READY, DeviceState.TRAINING, DeviceState.DEGRADED]))
    def report_state(self, device: str, state: DeviceState) -> None:
        if device in self.connected:
            self.keep(self.fleet.report_state(device, state, 50, ""))

    @rule(device=devices, device_front=fronts(), idle_w=st.integers(0, 5))
    def report_front(self, device: str, device_front: Front, idle_w: int) -> None:
        if device in self.connected:
            self.keep(self.fleet.report_front(device, device_front, float(idle_w), 50, ""))

    @rule(device=devices, device_front=fronts())
    def become_ready(self, device: str, device_front: Front) -> None:
        """All that a device does before a round, so that rounds are frequent."""
        if device not in self.connected:
            self.connect(device)
        self.report_front(device, device_front, 2)
        self.report_state(device, DeviceState.READY)
        self.bind(IDS.index(device), device)

    @rule(node=st.integers(0, 5), device=devices)
    def bind(self, node: int, device: str) -> None:
        self.fleet.bind_node(node, device)
        self.nodes[node] = device

    @rule(number=numbers, nodes=st.lists(st.integers(0, 5), unique=True, max_size=6))
    def plan(self, number: int, nodes: list[int]) -> None:
        self.plan_over(number, nodes)

    @rule(number=numbers)
    def plan_all(self, number: int) -> None:
        self.plan_over(number, [*self.nodes])

    def plan_over(self, number: int, nodes: list[int]) -> None:
        known = self.stored_rounds.get(f"run/{number}")
        ready = {
            self.nodes[node]
            for node in nodes
            if node in self.nodes
            and self.nodes[node] in self.connected
            and self.stored_devices[self.nodes[node]].state is DeviceState.READY
            and self.stored_devices[self.nodes[node]].front is not None
        }
        idle_w = {
            device: self.stored_devices[device].idle_w
            for device in self.connected
            if self.stored_devices[device].front is not None
        }
        drawn_w = {
            device: watts if device in ready else self.drawn_w(device, watts or 0.0) for device, watts in idle_w.items()
        }
        try:
            record = self.fleet.plan("run", number, nodes, 1.0)
        except NoDevicesError:
            assert known is None and not ready
            return
        except InfeasibleBudgetError:
            assert known is None and ready
            return
        except InvalidInputError:
            named = [self.nodes[node] for node in nodes if node in self.nodes]
            assert known is None and len(set(named)) < len(named)
            return
        if known is not None:
            assert record == known
            return
        self.keep_round(record)
        chosen = {assignment.device_id: assignment for assignment in record.plan.assignments}
        assert {decision.device_id for decision in record.plan.decisions} == ready
        assert set(chosen) <= ready and chosen
        assert all(self.nodes[record.nodes[device]] == device and record.nodes[device] in nodes for device in chosen)
        rest_w = sum(watts or 0.0 for device, watts in drawn_w.items() if device not in chosen)
        assert record.idle_w == rest_w
        assert record.plan.planned_w == sum(part.power_limit_w for part in chosen.values()) + rest_w

    def drawn_w(self, device: str, idle_w: float) -> float:
        """What a device draws that is not offered: as much as was set aside, while it trains or is waited for."""
        taken = [record for record in self.stored_rounds.values() if device in record.nodes]
        if not taken:
            return idle_w
        is_waited_for = taken[-1].wall_s is None and device not in taken[-1].observations
        if not is_waited_for and self.stored_devices[device].state is not DeviceState.TRAINING:
            return idle_w
        [set_aside_w] = [each.power_limit_w for each in taken[-1].plan.assignments if each.device_id == device]
        return set_aside_w

    @precondition(lambda self: self.stored_rounds)
    @rule(data=st.data(), device=devices, watts=st.integers(1, 30))
    def observe(self, data: st.DataObject, device: str, watts: int) -> None:
        plan_id = data.draw(st.sampled_from(sorted(self.stored_rounds)))
        before, seen = self.stored_rounds[plan_id], ObservedTraining(device, 5.0, float(watts))
        if device not in {assignment.device_id for assignment in before.plan.assignments}:
            with pytest.raises(UnknownRecordError):
                self.fleet.observe(plan_id, seen)
            return
        kept = self.fleet.observe(plan_id, seen)
        expected = {**before.observations}
        expected.setdefault(device, seen)
        assert kept == RoundObservation(plan_id, expected[device])
        self.keep_round(replace(before, observations=expected))

    @precondition(lambda self: self.stored_rounds)
    @rule(data=st.data())
    def finish_round(self, data: st.DataObject) -> None:
        plan_id = data.draw(st.sampled_from(sorted(self.stored_rounds)))
        self.keep_round(self.fleet.finish_round(plan_id, [], 3.0))

    @rule()
    def restart(self) -> None:
        self.fleet = Fleet(
            Allowance.of_site(BUDGET_W),
            self.policy,
            list(self.stored_devices.values()),
            self.nodes,
            list(self.stored_runs.values()),
            list(self.stored_rounds.values()),
        )
        self.connected.clear()
        self.stored_devices = {
            device: replace(record, state=DeviceState.OFFLINE) for device, record in self.stored_devices.items()
        }

    @invariant()
    def nothing_changed_that_was_not_handed_out(self) -> None:
        assert self.fleet.devices == self.stored_devices
        assert self.fleet.runs == self.stored_runs
        assert self.fleet.rounds == self.stored_rounds
        assert self.fleet.nodes == self.nodes

    @invariant()
    def offline_is_who_has_no_session(self) -> None:
        for device, record in self.fleet.devices.items():
            assert (record.state is DeviceState.OFFLINE) == (device not in self.connected)

    @invariant()
    def no_round_exceeds_the_sites_watts(self) -> None:
        for record in self.fleet.rounds.values():
            assert record.plan.planned_w <= BUDGET_W == record.plan.site_budget_w

    @invariant()
    def the_site_was_observed_when_every_chosen_device_was(self) -> None:
        for record in self.fleet.rounds.values():
            chosen = {assignment.device_id for assignment in record.plan.assignments}
            if chosen == set(record.observations):
                assert record.observed_site_w is not None
                watts = [seen.power_w for seen in record.observations.values()]
                assert math.isclose(record.observed_site_w, record.idle_w + sum(watts))
            else:
                assert record.observed_site_w is None


FleetMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestFleet = FleetMachine.TestCase
