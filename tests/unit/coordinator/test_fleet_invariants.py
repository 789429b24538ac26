"""What always holds for the fleet's state: invariants after any sequence of events, and copies of all parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from types import FunctionType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pydantic import BaseModel

from coordinator.errors import NoDevicesError, UnknownRecordError
from coordinator.settings import GrantSettings
from coordinator.state import fleet as fleet_module
from coordinator.state.fleet import Fleet
from coordinator.state.records import (
    DeviceRecord,
    DeviceResult,
    ObservedTraining,
    RoundObservation,
    RoundRecord,
    RunRecord,
)
from tests.fakes.fleets import front, fronts
from tests.fakes.small_fleet import (
    NANO_FRONT,
    NANO_NODE,
    NODES,
    ORIN_FRONT,
    ORIN_NODE,
    RUN,
    Granted,
    confirm_all,
    end_training,
    late_results,
    limits_w,
    small_fleet,
    train,
)
from tests.unit.coordinator.test_rounds_in_flight import KEPT
from wattfleet.core.budgets import InForce
from wattfleet.core.choosing import Front
from wattfleet.core.errors import InfeasibleBudgetError
from wattfleet.core.modes import Workload
from wattfleet.core.planning import Allowance
from wattfleet.core.planning.policies import AllDevices, FastestK, Policy, RandomK
from wattfleet_proto.device_state import BoardSample, DeviceState, GrantPhase, PresetPoint

# --- Fleet stateful ---------------------------------------------------------------------------------------------------
# Invariants of the fleet's state after any sequence of events.


BUDGET_W = 45.0
# Connected devices may take any time to confirm. The random-world tests have devices that never do.
GRANTS = GrantSettings(confirm_timeout_s=1e9)
LAPSED_S = 1_000.0
IDS, RUNS = [f"device-{k}" for k in range(4)], ["run", "other"]
REPORTED = [DeviceState.READY, DeviceState.TRAINING, DeviceState.PROFILING, DeviceState.DEGRADED]
devices, runs = st.sampled_from(IDS), st.sampled_from(RUNS)
numbers = st.integers(1, 4)


class FleetMachine(RuleBasedStateMachine):
    """A fleet, a store of everything that the fleet returns for storing, and a simple model of what was done to it."""

    @initialize(
        policy=st.sampled_from([FastestK(2), AllDevices(), RandomK(2, seed=3)]),
        ready=st.lists(st.tuples(devices, fronts()), unique_by=lambda pair: pair[0]),
    )
    def begin(self, policy: Policy, ready: list[tuple[str, Front]]) -> None:
        self.policy = policy
        self.budget_w = BUDGET_W
        self.now_s, self.is_starting = 0.0, True
        self.fleet = Fleet(Allowance.of_site(BUDGET_W), policy, grants=GRANTS, now_s=lambda: self.now_s)
        self.stored_devices: dict[str, DeviceRecord] = {}
        self.stored_runs: dict[str, RunRecord] = {run: self.fleet.flower.start_run(run, "FedAvg", 4) for run in RUNS}
        self.stored_rounds: dict[str, RoundRecord] = {}
        self.connected, self.profiling = set[str](), set[str]()
        self.nodes: dict[int, str] = {}
        self.granted: dict[str, Granted] = {}
        for device, device_front in ready:
            self.become_ready(device, device_front)

    def keep(self, record: DeviceRecord) -> None:
        self.stored_devices[record.device_id] = record

    def keep_round(self, record: RoundRecord) -> None:
        self.stored_rounds[record.plan_id] = record

    # --- devices ------------------------------------------------------------------------------------------------

    @rule(device=devices, is_restarted=st.booleans())
    def connect(self, device: str, is_restarted: bool) -> None:
        """Begin a session. The agent still has its grant unless it has restarted."""
        self.keep(self.fleet.agents.connect(device, "orin-nx", "simulated", 5_824))
        self.fleet.rounds.grants.session_began(device, self.now_s)
        self.connected.add(device)
        part = self.granted.get(device)
        if part is not None and part.is_confirmed and not is_restarted:
            self.confirm(device, part)
        else:
            self.fleet.rounds.grants.confirm(device, 0, "", GrantPhase.OVER)
            if part is not None and not part.is_over:
                # Nothing from an earlier session can still arrive, so the grant counts as never sent.
                part.had_w, part.is_over = 0.0, part.is_given_up
                part.was_sent = part.is_confirmed = part.has_begun = False

    @rule(unheard=st.sets(devices))
    def deliver(self, unheard: set[str]) -> None:
        """Send the grants that are due. All devices but the `unheard` ones confirm theirs."""
        for device, grant in self.fleet.take_orders():
            part = self.granted[device]
            assert device in self.connected and (grant.plan_id, grant.limit_w) == (part.plan_id, part.told_w)
            part.was_sent = True
            if device not in unheard:
                self.confirm(device, part)

    @rule(device=devices)
    def train(self, device: str) -> None:
        part = self.granted.get(device)
        if part is not None and device in self.connected and part.is_confirmed and part.told_w and not part.is_over:
            part.has_begun = True
            self.confirm(device, part)
            self.report_state(device, DeviceState.TRAINING)

    @rule(device=devices)
    def end_training(self, device: str) -> None:
        part = self.granted.get(device)
        if part is not None and device in self.connected and part.is_confirmed and part.has_begun:
            part.is_over = True
            self.confirm(device, part)
            self.report_state(device, DeviceState.READY)

    def confirm(self, device: str, part: Granted) -> None:
        """The device confirms its newest grant."""
        known = self.fleet.rounds.grants.of(device)
        assert known is not None
        part.is_over |= not part.told_w
        part.is_confirmed, part.had_w = True, 0.0
        phase = (GrantPhase.TRAINING if part.has_begun else GrantPhase.WAITING) if not part.is_over else GrantPhase.OVER
        self.fleet.rounds.grants.confirm(device, known.grant.grant_id, part.plan_id, phase)

    @rule()
    def lapse(self) -> None:
        """Let time pass, so that the grants of devices without a session lapse."""
        self.now_s, self.is_starting = self.now_s + LAPSED_S, False
        for device in self.connected:
            self.fleet.rounds.grants.renew(device, self.now_s)
        away = {device: part for device, part in self.granted.items() if device not in self.connected}
        assert set(self.fleet.check_grants()) == {device for device, part in away.items() if not part.is_over}
        for part in away.values():
            part.is_over = True

    @rule(device=devices)
    def disconnect(self, device: str) -> None:
        if device in self.connected:
            self.keep(self.fleet.agents.disconnect(device))
            self.connected.remove(device)

    @rule(device=devices, state=st.sampled_from(REPORTED))
    def report_state(self, device: str, state: DeviceState) -> None:
        if device in self.connected:
            self.keep(self.fleet.agents.report_state(device, state, 50, ""))
            (self.profiling.add if state is DeviceState.PROFILING else self.profiling.discard)(device)

    @rule(device=devices, device_front=fronts(), idle_w=st.integers(0, 5))
    def report_front(self, device: str, device_front: Front, idle_w: int) -> None:
        if device in self.connected:
            self.keep(
                self.fleet.agents.report_front(device, device_front, float(idle_w), 50, "", minibatches_per_epoch=100)
            )

    @rule(device=devices, device_front=fronts())
    def become_ready(self, device: str, device_front: Front) -> None:
        """Take all steps that a device needs before a round, so that rounds are frequent."""
        if device not in self.connected:
            self.connect(device, False)
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
        """Plan a run's next round over the nodes of some devices, so that several rounds are in flight."""
        nodes = {device: node for node, device in self.nodes.items() if device in some}
        self.release(run, some)
        self.deliver(set())
        self.plan_over(run, 5 + len(self.stored_rounds), [*nodes.values()])

    @rule(run=runs, some=st.sets(devices, min_size=1), watts=st.integers(0, 60))
    def plan_and_set_budget(self, run: str, some: set[str], watts: int) -> None:
        self.plan_next(run, some)
        self.set_budget(watts)

    def plan_over(self, run: str, number: int, nodes: list[int]) -> None:
        known = self.stored_rounds.get(f"{run}/{number}")
        named = self.paired(nodes)
        if known is None:
            self.release(run, set(named))
        ready = {each for each in named if self.is_ready(each)}
        drawn_w = {each: self.idle_w(each) if each in ready else self.drawn_w(each) for each in self.stored_devices}
        try:
            record = self.fleet.flower.plan(run, number, nodes, 1.0)
        except NoDevicesError:
            assert known is None and not ready
            return
        except InfeasibleBudgetError:
            assert known is None and ready
            return
        if known is not None:
            assert record == known
            return
        self.keep_round(record)
        chosen = {assignment.device_id: assignment for assignment in record.plan.assignments}
        shared = {self.nodes[node] for node in nodes if node in self.nodes} - set(named)
        decided = {decision.device_id for decision in record.plan.decisions}
        assert decided == ready | (shared & set(self.stored_devices)), "who shares its device is told so"
        assert set(chosen) <= ready and chosen
        assert all(self.nodes[record.nodes[device]] == device and record.nodes[device] in nodes for device in chosen)
        rest_w = sum(watts for device, watts in drawn_w.items() if device not in chosen)
        assert record.idle_w == rest_w
        assert record.plan.planned_w == sum(part.power_limit_w for part in chosen.values()) + rest_w
        assert record.plan.planned_w <= record.plan.site_budget_w == self.budget_w
        for device, part in chosen.items():
            self.granted[device] = Granted(run, record.plan_id, part.power_limit_w)
        assert self.site_w() == record.plan.planned_w, "nobody's watts are promised twice"

    def release(self, run: str, some: set[str]) -> None:
        """A run's Flower server stops waiting for some devices."""
        nodes = [node for node, device in self.nodes.items() if device in some]
        self.fleet.flower.release(run, nodes)
        for device in self.paired(nodes):
            if device in self.granted and self.granted[device].run == run:
                self.granted[device].give_up()

    def paired(self, nodes: list[int]) -> list[str]:
        """The devices of these nodes. Devices that two of the nodes name are left out."""
        claims = Counter(self.nodes[node] for node in nodes if node in self.nodes)
        return [device for device, count in claims.items() if count == 1]

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
        expected = {device: seen, **before.observations}
        assert kept == RoundObservation(plan_id, expected[device])
        self.keep_round(replace(before, observations=expected))
        self.over(plan_id, device)

    @precondition(lambda self: self.stored_rounds)
    @rule(data=st.data(), some=st.sets(devices))
    def finish_round(self, data: st.DataObject, some: set[str]) -> None:
        plan_id = data.draw(st.sampled_from(sorted(self.stored_rounds)))
        late = sorted(some & self.stored_rounds[plan_id].nodes.keys())
        self.keep_round(self.fleet.rounds.finish(plan_id, late_results(late), 3.0))
        self.over(plan_id, *set(IDS).difference(late))

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
        self.take_trim(lambda: self.fleet.set_budget("site", InForce(self.budget_w, "query", False, "the meter")))

    @rule()
    def trim(self) -> None:
        self.take_trim(self.fleet.trim)

    def take_trim(self, trim: Callable[[], list[RoundRecord]]) -> None:
        before_w, tellable, grants = self.expected_w(), self.tellable(), self.fleet.rounds.grants
        before = {device: grants.of(device) for device in self.granted}
        least_w = before_w - sum(self.expected_of_w(device) - self.idle_w(device) for device in tellable)
        changed = trim()
        told = {device for device, known in before.items() if grants.of(device) != known}
        assert told <= tellable and bool(told) == (before_w > self.budget_w and bool(tellable))
        for record in changed:
            self.keep_round(record)
        for device in told:
            known, part = grants.of(device), self.granted[device]
            assert known is not None and known.plan_id == part.plan_id
            assert known.grant.limit_w <= part.told_w, "a trim raises nothing"
            assert part.is_given_up or part.plan_id in {record.plan_id for record in changed}
            part.tell(known.grant.limit_w)
        assert self.expected_w() <= max(self.budget_w, least_w), "what can be told to keep the watts is"
        assert all(record.plan.planned_w == self.expected_w() for record in changed)

    @rule()
    def restart(self) -> None:
        self.is_starting = True
        self.fleet = Fleet(
            Allowance.of_site(self.budget_w),
            self.policy,
            list(self.stored_devices.values()),
            self.nodes,
            list(self.stored_runs.values()),
            list(self.stored_rounds.values()),
            grants=GRANTS,
            now_s=lambda: self.now_s,
        )
        self.connected.clear()
        self.profiling = {key for key, each in self.stored_devices.items() if each.state is DeviceState.PROFILING}
        self.stored_devices = {
            device: replace(record, state=DeviceState.OFFLINE) for device, record in self.stored_devices.items()
        }
        # A store does not keep confirmations, so each device may still use the highest limit that it was ever granted.
        for device, part in self.granted.items():
            record = self.stored_rounds[part.plan_id]
            told_w = limits_w(record.plan.assignments).get(device, 0.0)
            had_w = limits_w(record.plan.original.assignments)[device]
            self.granted[device] = Granted(part.run, part.plan_id, told_w, max(told_w, had_w))
            if (record.wall_s is not None and device not in record.late) or device in record.observations:
                self.granted[device].give_up()

    # --- the model of what was done -----------------------------------------------------------------------------

    def over(self, plan_id: str, *device_ids: str) -> None:
        for device in device_ids:
            if device in self.granted and self.granted[device].plan_id == plan_id:
                self.granted[device].give_up()

    def is_ready(self, device: str) -> bool:
        if device not in self.connected or (device in self.granted and not self.granted[device].is_over):
            return False
        record = self.stored_devices[device]
        return record.state is DeviceState.READY and record.front_for("unnamed") is not None

    def tellable(self) -> set[str]:
        """Devices that can be sent a lower limit."""
        return {
            device
            for device, part in self.granted.items()
            if device in self.connected
            and not part.is_over
            and part.told_w
            and (part.is_given_up or device not in self.profiling)
        }

    def idle_w(self, device: str) -> float:
        return self.stored_devices[device].idle_w or 0.0

    def drawn_w(self, device: str, granted_w: float | None = None) -> float:
        """The most that a device may draw, as far as the coordinator can know."""
        fronts, part = self.stored_devices[device].fronts, self.granted.get(device)
        if granted_w is None:
            granted_w = part.counted_w if part is not None else 0.0
        hungriest_w = float(fronts[0].front.planned_w[0]) if device in self.profiling and fronts else 0.0
        return max(granted_w, hungriest_w, self.idle_w(device))

    def expected_of_w(self, device: str) -> float:
        """What a device draws once it has obeyed. Shortly after a start, absent devices are expected to return."""
        part = self.granted.get(device)
        if part is None or (device not in self.connected and (part.was_sent or not self.is_starting)):
            return self.drawn_w(device)
        return self.drawn_w(device, 0.0 if part.is_over else part.told_w)

    def expected_w(self) -> float:
        return sum(map(self.expected_of_w, self.stored_devices))

    def site_w(self) -> float:
        return sum(map(self.drawn_w, self.stored_devices))

    # --- invariants ---------------------------------------------------------------------------------------------

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
    def a_device_counts_with_all_that_it_may_act_on(self) -> None:
        for device in IDS:
            part, known = self.granted.get(device), self.fleet.rounds.grants.of(device)
            assert (part is None) == (known is None)
            if part is not None and known is not None:
                assert (known.plan_id, known.is_over, known.counted_w) == (part.plan_id, part.is_over, part.counted_w)
                assert part.is_over or known.is_given_up == part.is_given_up

    @invariant()
    def an_excess_that_a_trim_would_end_is_shown(self) -> None:
        excess_w = max(0.0, self.expected_w() - self.budget_w) if self.tellable() else 0.0
        assert self.fleet.untrimmed_w()["site"] == pytest.approx(excess_w)

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


FleetMachine.TestCase.settings = settings(stateful_step_count=30)
TestFleet = FleetMachine.TestCase


# --- Fleet parts ------------------------------------------------------------------------------------------------------
# Every part of the fleet's state is copied with it, and forgets the devices that it forgets.

WAITING = "a run that waits"
PRESETS = (PresetPoint("MAXN", front((10, 50)), True),)


def fleet_with_much_in_it() -> Fleet:
    """A fleet whose every part knows the Orin, which trains for a second round."""
    fleet = small_fleet()
    fleet.agents.report_front("nano", NANO_FRONT, 3.0, 50, "", Workload("digits"), 100)
    for run_id in (RUN, WAITING):
        fleet.flower.start_run(run_id, "FedAvg", 3, workload=Workload("digits"))
    fleet.operator.place("orin", "site", {"lab"})
    fleet.operator.set_budget("site", InForce(90.0, "query", False, "the meter"))
    fleet.agents.report_front("orin", ORIN_FRONT, 5.0, 50, "", Workload("digits"), 100)
    fleet.agents.refuse_front("orin", "no board draws this", "words")
    fleet.agents.report_state("orin", DeviceState.PROFILING, 50, "")
    fleet.agents.report_state("orin", DeviceState.READY, 50, "")
    fleet.flower.bind_node(ORIN_NODE, "orin", "")
    fleet.flower.pairings.connected(NODES, datetime(2026, 1, 1, tzinfo=UTC))
    fleet.duties.report("orin", KEPT)
    fleet.duties.reviewed("orin", f"{RUN}/1", fleet.agents.get("orin").fronts)
    fleet.samples.report("orin", BoardSample(power_w=5.0))
    fleet.presets.report("orin", "digits", PRESETS, ["digits"])
    fleet.rounds.cache.history(RUN)
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    train(fleet, "orin")
    end_training(fleet, "orin")
    fleet.observe("orin", plan_id, 20.5, 25.0)
    fleet.rounds.finish(plan_id, [DeviceResult("orin", loss=1.0)], 30.0)
    fleet.rounds.report_metrics(plan_id, {"accuracy": 0.5})
    fleet.rounds.since_s[plan_id] = 0.0
    confirm_all(fleet)
    fleet.rounds.grants.session_began("orin", 0.0)
    fleet.flower.plan(RUN, 2, [ORIN_NODE], 1.0)
    fleet.rounds.grants.pending.hold_back(f"{RUN}/2")
    fleet.rounds.grants.pending.reviewed({"orin"}, {"orin"})
    fleet.rounds.grants.unstored.note(["orin"], lambda _: f"{RUN}/2")
    fleet.flower.refused(WAITING, NODES)
    return fleet


def inner_of(value: object) -> dict[str, object] | None:
    """What an object holds, by how it is reached; None if the object cannot change."""
    if isinstance(value, dict):
        return {f"[{key!r}]": each for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return {f"[{k}]": each for k, each in enumerate(value)}
    is_record = is_dataclass(value) and value.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if is_record or isinstance(value, type | FunctionType | Enum | BaseModel) or not hasattr(value, "__dict__"):
        return None
    return {f".{name}": each for name, each in vars(value).items()}


def parts(fleet: Fleet) -> dict[str, object]:
    """All objects of a fleet that can change, by where they were found first."""
    found: dict[str, object] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("fleet", fleet)]
    while waiting:
        path, value = waiting.pop()
        inner = inner_of(value)
        if inner is None or id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, tuple):
            found[path] = value
        waiting += [(path + name, each) for name, each in inner.items()]
    return found


def picture(fleet: Fleet) -> dict[str, list[object]]:
    """What every part of a fleet holds now. Records are named by their identity."""

    def name(value: object) -> object:
        return value if isinstance(value, str | int | float | bool) else id(value)

    return {
        path: sorted(map(str, part)) if isinstance(part, set) else [(k, name(v)) for k, v in inner_of(part).items()]  # type: ignore[union-attr]
        for path, part in parts(fleet).items()
    }


def change(part: object) -> None:
    """Add something to a part."""
    if isinstance(part, dict):
        part["added"] = "added"
    elif isinstance(part, list):
        part.append("added")
    elif isinstance(part, set):
        part.add("added")
    else:
        vars(part)["added"] = "added"


def test_no_change_of_a_copy_shows_in_the_fleet() -> None:
    fleet = fleet_with_much_in_it()
    copied, before = fleet.copy(), picture(fleet)
    found = parts(copied)
    for part in found.values():
        change(part)
    assert picture(fleet) == before
    assert len(found) > 70, "it walks through all parts"
    assert copied.agents.devices.keys() - fleet.agents.devices.keys() == {"added"}


def test_a_part_that_a_copy_shares_would_be_found() -> None:
    for path in parts(fleet_with_much_in_it()):
        fleet = fleet_with_much_in_it()
        shared, before = parts(fleet)[path], picture(fleet)
        copied = fleet_module._copied(fleet, {id(shared): shared})  # noqa: SLF001 - a copy that is not independent
        for part in parts(copied).values():
            change(part)
        assert picture(fleet) != before, path


def test_the_parts_of_a_copy_belong_together() -> None:
    copied = fleet_with_much_in_it().copy()
    copied.agents.disconnect("orin")
    assert copied.rounds.grants.counted_on(copied.agents.is_connected, 0.0).reachable == set()
    copied.operator.set_budget("site", InForce(1.0, "command", False, "set"))
    assert copied.untrimmed_w() == {"site": 0.0}
    assert copied.flower.request_round(WAITING, 1, [NANO_NODE], 1.0).allowance.budget_w == {"site": 1.0}


def test_no_part_keeps_what_is_forgotten() -> None:
    fleet = fleet_with_much_in_it()

    def mentions() -> list[str]:
        found = []
        for path, part in parts(fleet).items():
            inner = [*part, *part.values()] if isinstance(part, dict) else part if isinstance(part, list | set) else ()
            if "orin" in [each for each in inner if isinstance(each, str)]:
                found.append(path)
        return found

    assert len(mentions()) > 20, "all parts know the device"
    fleet.rounds.grants.pending.let_go(f"{RUN}/2")
    fleet.flower.finish_runs([RUN], "")
    fleet.rounds.grants.confirm("orin", 0, "", GrantPhase.OVER)
    fleet.agents.disconnect("orin")
    fleet.forget(["orin"])
    fleet.check_grants()
    assert mentions() == []
    assert replace(fleet.rounds.get(f"{RUN}/1")).nodes.keys() == {"orin", "nano"}, "the records of rounds stay"
