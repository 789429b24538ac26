"""Whatever happens to a fleet in whatever order, its promises hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.errors import NoDevicesError, UnknownRecordError
from coordinator.state.fleet import Fleet
from coordinator.state.records import (
    DeviceRecord,
    ObservedTraining,
    Reassignment,
    RoundObservation,
    RoundRecord,
    RunRecord,
)
from tests.fakes.fronts import fronts
from wattfleet.budgets import InForce
from wattfleet.choosing import Front
from wattfleet.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.planning import Allowance
from wattfleet.planning.policies import AllDevices, FastestK, Policy, RandomK
from wattfleet_proto.device_state import DeviceState

BUDGET_W = 45.0
IDS = [f"device-{k}" for k in range(4)]
RUNS = ["run", "other"]
REPORTED = [DeviceState.READY, DeviceState.TRAINING, DeviceState.PROFILING, DeviceState.DEGRADED]
devices = st.sampled_from(IDS)
runs = st.sampled_from(RUNS)
numbers = st.integers(1, 4)


@dataclass
class Sent:
    """A device's part in the newest round that chose it."""

    run: str
    plan_id: str
    watts: float
    is_ended: bool = False
    has_begun: bool = False
    is_over: bool = False


class FleetMachine(RuleBasedStateMachine):
    """A fleet, a store that keeps only what the fleet hands out, and a plain account of what was done to it."""

    @initialize(
        policy=st.sampled_from([FastestK(2), AllDevices(), RandomK(2, seed=3)]),
        ready=st.lists(st.tuples(devices, fronts()), unique_by=lambda pair: pair[0]),
    )
    def begin(self, policy: Policy, ready: list[tuple[str, Front]]) -> None:
        self.policy = policy
        self.budget_w = BUDGET_W
        self.fleet = Fleet(Allowance.of_site(BUDGET_W), policy)
        self.stored_devices: dict[str, DeviceRecord] = {}
        self.stored_runs: dict[str, RunRecord] = {run: self.fleet.flower.start_run(run, "FedAvg", 4) for run in RUNS}
        self.stored_rounds: dict[str, RoundRecord] = {}
        self.connected: set[str] = set()
        self.nodes: dict[int, str] = {}
        self.sent: dict[str, Sent] = {}
        for device, device_front in ready:
            self.become_ready(device, device_front)

    def keep(self, record: DeviceRecord) -> None:
        self.stored_devices[record.device_id] = record

    def keep_round(self, record: RoundRecord) -> None:
        self.stored_rounds[record.plan_id] = record

    # --- devices ------------------------------------------------------------------------------------------------

    @rule(device=devices)
    def connect(self, device: str) -> None:
        self.keep(self.fleet.agents.connect(device, "orin-nx", "simulated", 5_824))
        self.connected.add(device)

    @rule(device=devices)
    def disconnect(self, device: str) -> None:
        if device in self.connected:
            self.keep(self.fleet.agents.disconnect(device))
            self.connected.remove(device)

    @rule(device=devices, state=st.sampled_from(REPORTED))
    def report_state(self, device: str, state: DeviceState) -> None:
        if device not in self.connected:
            return
        self.keep(self.fleet.agents.report_state(device, state, 50, ""))
        if device in self.sent:
            sent = self.sent[device]
            sent.is_over |= sent.has_begun and state is DeviceState.READY
            sent.has_begun |= state is DeviceState.TRAINING

    @rule(device=devices, device_front=fronts(), idle_w=st.integers(0, 5))
    def report_front(self, device: str, device_front: Front, idle_w: int) -> None:
        if device in self.connected:
            self.keep(self.fleet.agents.report_front(device, device_front, float(idle_w), 50, ""))

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
        self.fleet.flower.bind_node(node, device)
        self.nodes[node] = device

    # --- rounds -------------------------------------------------------------------------------------------------

    @rule(run=runs, number=numbers, nodes=st.lists(st.integers(0, 5), unique=True, max_size=6))
    def plan(self, run: str, number: int, nodes: list[int]) -> None:
        self.plan_over(run, number, nodes)

    @rule(run=runs, some=st.sets(devices, min_size=1))
    def plan_next(self, run: str, some: set[str]) -> None:
        """A run's next round over the nodes of some devices, so that several are in flight."""
        nodes = {device: node for node, device in self.nodes.items() if device in some}
        self.plan_over(run, 5 + len(self.stored_rounds), [*nodes.values()])

    @rule(run=runs, some=st.sets(devices, min_size=1), watts=st.integers(0, 60))
    def plan_and_set_budget(self, run: str, some: set[str], watts: int) -> None:
        self.plan_next(run, some)
        self.set_budget(watts)

    def plan_over(self, run: str, number: int, nodes: list[int]) -> None:
        known = self.stored_rounds.get(f"{run}/{number}")
        named = [self.nodes[node] for node in nodes if node in self.nodes]
        ready = {device for device in named if self.is_ready(device) and not self.is_awaited_by_another(device, run)}
        drawn_w = {
            device: self.idle_w(device) if device in ready else self.drawn_w(device) for device in self.stored_devices
        }
        try:
            record = self.fleet.flower.plan(run, number, nodes, 1.0)
        except NoDevicesError:
            assert known is None and not ready
            return
        except InfeasibleBudgetError:
            assert known is None and ready
            return
        except InvalidInputError:
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
        rest_w = sum(watts for device, watts in drawn_w.items() if device not in chosen)
        assert record.idle_w == rest_w
        assert record.plan.planned_w == sum(part.power_limit_w for part in chosen.values()) + rest_w
        assert record.plan.planned_w <= record.plan.site_budget_w == self.budget_w
        for device in ready:
            if device in self.sent and self.sent[device].run == run:
                self.sent[device].is_over = True
        for device, part in chosen.items():
            self.sent[device] = Sent(run, record.plan_id, part.power_limit_w)
        assert self.site_w() == record.plan.planned_w, "nobody's watts are promised twice"

    @precondition(lambda self: self.stored_rounds)
    @rule(data=st.data(), device=devices, watts=st.integers(1, 30))
    def observe(self, data: st.DataObject, device: str, watts: int) -> None:
        plan_id = data.draw(st.sampled_from(sorted(self.stored_rounds)))
        before, seen = self.stored_rounds[plan_id], ObservedTraining(device, 5.0, float(watts))
        if device not in before.nodes:
            with pytest.raises(UnknownRecordError):
                self.fleet.rounds.observe(plan_id, seen)
            return
        kept = self.fleet.rounds.observe(plan_id, seen)
        expected = {**before.observations}
        expected.setdefault(device, seen)
        assert kept == RoundObservation(plan_id, expected[device])
        self.keep_round(replace(before, observations=expected))
        self.over(plan_id, device)

    @precondition(lambda self: self.stored_rounds)
    @rule(data=st.data())
    def finish_round(self, data: st.DataObject) -> None:
        plan_id = data.draw(st.sampled_from(sorted(self.stored_rounds)))
        self.keep_round(self.fleet.rounds.finish(plan_id, [], 3.0))
        self.over(plan_id, *IDS)

    @precondition(lambda self: self.stored_rounds)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        plan_id = data.draw(st.sampled_from(sorted(self.stored_rounds)))
        self.fleet.rounds.abandon(plan_id)
        self.over(plan_id, *IDS)

    # --- watts --------------------------------------------------------------------------------------------------

    @rule(watts=st.integers(0, 60))
    def set_budget(self, watts: int) -> None:
        self.budget_w = float(watts)
        self.take_trim(*self.fleet.set_budget("site", InForce(self.budget_w, "query", False, "the meter")))

    @rule()
    def trim(self) -> None:
        before_w = self.site_w()
        changed, told = self.fleet.trim()
        assert (before_w > self.budget_w and bool(self.tellable())) == bool(told)
        self.take_trim(changed, told)

    def take_trim(self, changed: list[RoundRecord], told: list[Reassignment]) -> None:
        least_w = self.site_w() - sum(self.drawn_w(device) - self.idle_w(device) for device in self.tellable())
        assert {each.device_id for each in told} <= self.tellable()
        for record in changed:
            self.keep_round(record)
        for each in told:
            sent = self.sent[each.device_id]
            assert sent.plan_id == each.plan_id in {record.plan_id for record in changed}
            sent.is_ended = each.assignment is None
            sent.watts = 0.0 if each.assignment is None else each.assignment.power_limit_w
        assert self.site_w() <= max(self.budget_w, least_w), "reachable devices keep within the budget"
        assert all(record.plan.planned_w == self.site_w() for record in changed)

    @rule()
    def restart(self) -> None:
        self.fleet = Fleet(
            Allowance.of_site(self.budget_w),
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
        # What a store does not keep: who was seen to be done, or given up.
        for device, sent in self.sent.items():
            record = self.stored_rounds[sent.plan_id]
            sent.has_begun, sent.is_over = False, record.wall_s is not None or device in record.observations

    # --- the account --------------------------------------------------------------------------------------------

    def over(self, plan_id: str, *device_ids: str) -> None:
        for device in device_ids:
            if device in self.sent and self.sent[device].plan_id == plan_id:
                self.sent[device].is_over = True

    def is_ready(self, device: str) -> bool:
        if device not in self.connected:
            return False
        record = self.stored_devices[device]
        return record.state is DeviceState.READY and record.front is not None

    def is_awaited_by_another(self, device: str, run: str) -> bool:
        return device in self.sent and not self.sent[device].is_over and self.sent[device].run != run

    def tellable(self) -> set[str]:
        """Devices that are waited for, and can be told to go on otherwise."""
        return {
            device
            for device, sent in self.sent.items()
            if device in self.connected
            and not (sent.is_over or sent.is_ended)
            and self.stored_devices[device].state is not DeviceState.PROFILING
        }

    def idle_w(self, device: str) -> float:
        return (self.stored_devices[device].idle_w or 0.0) if device in self.connected else 0.0

    def drawn_w(self, device: str) -> float:
        """What a device draws as far as it is known: what was set aside while it is waited for or trains."""
        record, sent = self.stored_devices[device], self.sent.get(device)
        is_on = sent is not None and (not sent.is_over or record.state is DeviceState.TRAINING)
        watts = [self.idle_w(device), sent.watts if sent is not None and is_on else 0.0]
        if record.state is DeviceState.PROFILING and record.front is not None:
            watts.append(float(record.front.planned_w[0]))
        return max(watts)

    def site_w(self) -> float:
        return sum(self.drawn_w(device) for device in self.stored_devices)

    # --- what always holds --------------------------------------------------------------------------------------

    @invariant()
    def nothing_changed_that_was_not_handed_out(self) -> None:
        assert self.fleet.agents.devices == self.stored_devices
        assert self.fleet.flower.runs == self.stored_runs
        assert self.fleet.rounds.records == self.stored_rounds
        assert self.fleet.flower.nodes == self.nodes

    @invariant()
    def offline_is_who_has_no_session(self) -> None:
        for device, record in self.fleet.agents.devices.items():
            assert (record.state is DeviceState.OFFLINE) == (device not in self.connected)

    @invariant()
    def a_device_is_told_what_it_is_waited_for(self) -> None:
        for device in IDS:
            sent, order = self.sent.get(device), self.fleet.rounds.reassignment_for(device)
            assert (order is not None) == (sent is not None and not sent.is_over)
            if order is not None and sent is not None:
                assert (order.plan_id, order.assignment is None) == (sent.plan_id, sent.is_ended)

    @invariant()
    def the_site_was_observed_when_every_chosen_device_was(self) -> None:
        for record in self.fleet.rounds.records.values():
            chosen = {assignment.device_id for assignment in record.plan.assignments}
            if chosen and chosen <= set(record.observations):
                assert record.observed_site_w is not None
                watts = [seen.power_w for seen in record.observations.values()]
                assert math.isclose(record.observed_site_w, record.idle_w + sum(watts))
            else:
                assert record.observed_site_w is None


FleetMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestFleet = FleetMachine.TestCase
