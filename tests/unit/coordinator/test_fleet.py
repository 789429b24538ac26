"""The fleet's state machine: changes, refusals, what a plan starts from, and runs that share devices and watts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest

from coordinator.errors import NoDevicesError, UnknownRecordError
from coordinator.state.contention import WaitingRuns
from coordinator.state.fleet import Fleet
from coordinator.state.records import RoundRecord
from tests.fakes.fleets import front
from tests.fakes.small_fleet import NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN, make_ready, small_fleet
from tests.fakes.small_fleet import make_ready as make_ready_in
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError, NoCandidatesError
from wattfleet.core.modes import Workload
from wattfleet.core.planning import Allowance
from wattfleet.core.planning.policies import AllDevices
from wattfleet_proto.device_state import DeviceState, GrantPhase

# --- Fleet ------------------------------------------------------------------------------------------------------------
# The fleet's state machine: state changes, refusals, and the devices and watts that a plan starts from.


def chosen(record: RoundRecord) -> set[str]:
    return {assignment.device_id for assignment in record.plan.assignments}


def offered(record: RoundRecord) -> set[str]:
    return {decision.device_id for decision in record.plan.decisions}


# --- devices offered to a plan ------------------------------------------------------------------------------------


def test_a_round_is_planned_over_the_ready_devices() -> None:
    record = small_fleet().flower.plan(RUN, 1, NODES, 2.0)
    assert (record.run_id, record.number, record.epochs) == (RUN, 1, 2.0)
    assert chosen(record) == offered(record) == {"orin", "nano"}
    assert record.nodes == {"orin": ORIN_NODE, "nano": NANO_NODE}
    assert record.plan.duration_s == 2 * 35
    assert record.plan.site_budget_w == 100
    # Within 35 s, the Nano needs 15 W. The Orin is faster and uses its 30 W mode.
    assert record.plan.planned_w == 45


@pytest.mark.parametrize("state", [state for state in DeviceState if state is not DeviceState.READY])
def test_a_device_that_is_not_ready_is_not_offered(state: DeviceState) -> None:
    fleet = small_fleet()
    fleet.agents.report_state("orin", state, 50, "")
    assert offered(fleet.flower.plan(RUN, 1, NODES, 1.0)) == {"nano"}


def test_a_device_that_is_gone_is_not_offered_until_it_is_ready_again() -> None:
    fleet = small_fleet()
    fleet.agents.disconnect("orin")
    assert offered(fleet.flower.plan(RUN, 1, NODES, 1.0)) == {"nano"}
    fleet.flower.release(RUN, NODES)
    fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)
    assert offered(fleet.flower.plan(RUN, 2, NODES, 1.0)) == {"nano"}
    fleet.flower.release(RUN, NODES)
    fleet.agents.report_state("orin", DeviceState.READY, 50, "parked")
    assert offered(fleet.flower.plan(RUN, 3, NODES, 1.0)) == {"nano", "orin"}


def test_a_device_without_a_node_or_a_front_is_not_offered() -> None:
    fleet = small_fleet()
    make_ready_in(fleet, "unbound", ORIN_FRONT, 1.0, 99)
    fleet.agents.connect("blank", "orin-nx", "simulated", 5_824)
    fleet.agents.report_state("blank", DeviceState.READY, 50, "")
    fleet.flower.bind_node(77, "blank")
    record = fleet.flower.plan(RUN, 1, [*NODES, 77, 12345], 1.0)  # 99 is not connected to Flower, 12345 has no device
    assert chosen(record) == {"orin", "nano"}
    reasons = {each.device_id: each.reason for each in record.plan.decisions if not each.selected}
    assert reasons == {"blank": "has no prediction for the workload 'unnamed' yet"}


def test_a_device_that_comes_back_as_another_node_is_reached_there() -> None:
    fleet = small_fleet()
    fleet.flower.bind_node(6, "orin")
    assert fleet.flower.plan(RUN, 1, [6, NANO_NODE], 1.0).nodes == {"orin": 6, "nano": NANO_NODE}


def test_with_nobody_ready_every_device_is_said_to_be_what_it_is() -> None:
    fleet = small_fleet()
    fleet.agents.report_state("orin", DeviceState.PROFILING, 3, "")
    fleet.agents.disconnect("nano")
    with pytest.raises(NoDevicesError, match="no device is ready to train: orin is profiling, nano is offline$"):
        fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert not fleet.rounds.records
    fleet.agents.report_state("orin", DeviceState.READY, 50, "")
    assert chosen(fleet.flower.plan(RUN, 1, NODES, 1.0)) == {"orin"}, "it can be planned once a device is ready"


def test_a_ready_device_without_a_node_is_said_to_lack_one() -> None:
    fleet = small_fleet()
    fleet.agents.disconnect("nano")
    with pytest.raises(NoDevicesError, match=r"orin is ready, but no Flower node of this round names it"):
        fleet.flower.plan(RUN, 1, [NANO_NODE], 1.0)


def test_of_a_large_fleet_the_states_are_counted_and_a_few_devices_named() -> None:
    fleet = small_fleet()
    fleet.agents.disconnect("orin")
    fleet.agents.disconnect("nano")
    for k in range(3_000):
        fleet.agents.connect(f"device-{k:04}", "agx-orin", "simulated", 18_096)
    with pytest.raises(NoDevicesError) as refused:
        fleet.flower.plan(RUN, 1, NODES, 1.0)
    said = str(refused.value)
    assert said.startswith("no device is ready to train: 3,000 are enrolled, 2 are offline: orin is offline, nano is")
    assert said.endswith("device-0007 is enrolled, and 2,992 more")


def test_a_fleet_that_nobody_joined_says_so() -> None:
    fleet = Fleet(Allowance.of_site(100.0), AllDevices())
    fleet.flower.start_run(RUN, "FedAvg", 1)
    with pytest.raises(NoDevicesError, match="none ever connected"):
        fleet.flower.plan(RUN, 1, [], 1.0)


def test_a_run_that_never_started_has_no_rounds() -> None:
    fleet = small_fleet()
    with pytest.raises(UnknownRecordError, match="unknown run '9': it never started"):
        fleet.flower.plan("9", 1, NODES, 1.0)
    assert fleet.rounds.cache.of_run("9") == []


@pytest.mark.parametrize("epochs", [0.0, -1.0, math.nan])
def test_a_round_without_epochs_is_refused(epochs: float) -> None:
    fleet = small_fleet()
    with pytest.raises(InvalidInputError, match="needs a number of epochs above 0"):
        fleet.flower.plan(RUN, 1, NODES, epochs)
    assert not fleet.rounds.records


# --- watts --------------------------------------------------------------------------------------------------------


def with_a_third(idle_w: float, site_budget_w: float) -> Fleet:
    """The small fleet plus a third device that is connected and idles, but is degraded."""
    fleet = small_fleet(site_budget_w)
    make_ready_in(fleet, "third", front((50, 60)), idle_w, 3)
    fleet.agents.report_state("third", DeviceState.DEGRADED, 50, "")
    return fleet


def test_a_connected_device_that_is_not_ready_idles_on_the_sites_watts() -> None:
    # Two devices can train from 30 W on, in 60 s, while the third one idles at 4 W.
    assert with_a_third(4.0, 34.0).flower.plan(RUN, 1, NODES, 1.0).plan.planned_w == 34
    record = with_a_third(4.0, 33.0).flower.plan(RUN, 1, NODES, 1.0)
    assert chosen(record) == {"nano"}
    # The Nano at 15 W, the idle Orin at 5 W and the third device at 4 W.
    assert (record.plan.planned_w, record.plan.site_budget_w, record.idle_w) == (24, 33, 9)


def test_a_device_that_is_gone_may_still_idle_and_counts() -> None:
    fleet = with_a_third(4.0, 33.0)
    fleet.agents.disconnect("third")
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert (record.plan.planned_w, record.plan.site_budget_w, record.idle_w) == (24, 33, 9)


@pytest.mark.parametrize("site_budget_w", [1.0, 11.9, 18.9])
def test_too_few_watts_are_refused_with_the_watts_that_suffice(site_budget_w: float) -> None:
    # All idle at 12 W in total. Training the Nano raises its 3 W to 10 W.
    with pytest.raises(InfeasibleBudgetError) as refusal:
        with_a_third(4.0, site_budget_w).flower.plan(RUN, 1, NODES, 1.0)
    text = str(refusal.value)
    assert text.startswith(f"{site_budget_w:g} W is not enough to train one device on top of 12.0 W of idle power")
    [least_w] = re.findall(r"at least ([\d.]+) W", text)
    assert float(least_w) == 19
    assert chosen(with_a_third(4.0, float(least_w)).flower.plan(RUN, 1, NODES, 1.0)) == {"nano"}


# --- Fairness ---------------------------------------------------------------------------------------------------------
# Two runs that share devices and watts: neither waits longer than for one round of the other.

TICK_S = 1.0


class Run:
    """A Flower app that always wants every device, asks for a plan every second, and trains for `round_s` seconds."""

    def __init__(self, fleet: Fleet, run_id: str, nodes: list[int], round_s: float) -> None:
        self.fleet, self.run_id, self._nodes, self._round_s = fleet, run_id, nodes, round_s
        self.number, self.waited_s, self.longest_wait_s, self.device_seconds = 0, 0.0, 0.0, 0.0
        self.record: RoundRecord | None = None
        self._left_s = 0.0
        for each in list(fleet.agents.devices.values()):
            assert each.idle_w is not None
            own = each.fronts[0].front
            fleet.agents.report_front(each.device_id, own, each.idle_w, 50, "", Workload(run_id), 100)
        fleet.flower.start_run(run_id, "FedAvg", 1000, workload=Workload(run_id))

    def tick(self) -> None:
        if self.record is not None:
            self._left_s -= TICK_S
            self.device_seconds += TICK_S * len(self.record.nodes)
            if self._left_s > 0:
                return
            self.fleet.rounds.finish(self.record.plan_id, [], self._round_s)
            for device_id in self.record.nodes:
                grant = self.fleet.rounds.grants.of(device_id)
                assert grant is not None
                self.fleet.rounds.grants.confirm(device_id, grant.grant.grant_id, grant.plan_id, GrantPhase.OVER)
            self.record = None
        try:
            self.record = self.fleet.flower.plan(self.run_id, self.number + 1, self._nodes, 1.0)
        except (NoDevicesError, NoCandidatesError, InfeasibleBudgetError):
            self.fleet.flower.refused(self.run_id, self._nodes)
            self.waited_s += TICK_S
            self.longest_wait_s = max(self.longest_wait_s, self.waited_s)
            return
        for _, grant in self.fleet.take_orders():
            assert grant.assignment is not None
            self.fleet.rounds.grants.confirm(
                grant.assignment.device_id, grant.grant_id, grant.plan_id, GrantPhase.TRAINING
            )
        self.number, self.waited_s, self._left_s = self.number + 1, 0.0, self._round_s


def two_runs(
    devices: int, budget_w: float, round_s: tuple[float, float], weights: dict[str, float] | None = None
) -> tuple[Run, Run, Callable[[float], None]]:
    now_s = 0.0
    fleet = Fleet(Allowance.of_site(budget_w), AllDevices(), now_s=lambda: now_s, weights=weights)
    for k in range(devices):
        make_ready(fleet, f"device-{k}", front((10 + k, 20), (20 + k, 10)), 1.0, k)
    runs = Run(fleet, "a", list(range(devices)), round_s[0]), Run(fleet, "b", list(range(devices)), round_s[1])

    def live(seconds: float) -> None:
        nonlocal now_s
        until_s = now_s + seconds
        while now_s < until_s:
            now_s += TICK_S
            for run in runs:
                run.tick()
                drawn_w = sum(fleet.draw.elsewhere_w(frozenset()).values())
                assert drawn_w <= budget_w * (1 + 1e-9), "the watts hold whoever waits"

    return *runs, live


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("budget_w", [1_000.0, 45.0, 21.0])
@pytest.mark.parametrize("round_s", [(10.0, 10.0), (60.0, 7.0), (7.0, 60.0)])
def test_no_run_waits_longer_than_for_the_round_in_flight(
    devices: int, budget_w: float, round_s: tuple[float, float]
) -> None:
    a, b, live = two_runs(devices, budget_w, round_s)
    live(500.0)
    assert a.number > 5 and b.number > 5
    # One round of the other run, plus the ticks after which each app asks again.
    assert a.longest_wait_s <= round_s[1] + 2 * TICK_S
    assert b.longest_wait_s <= round_s[0] + 2 * TICK_S


def test_a_run_alone_has_all_devices() -> None:
    a, b, live = two_runs(6, 1_000.0, (10.0, 10.0))
    b.fleet.flower.finish_run("b", "")
    b.tick = lambda: None  # type: ignore[method-assign]
    live(100.0)
    assert a.record is not None and len(a.record.nodes) == 6


def test_a_run_whose_app_has_gone_is_soon_not_waited_for() -> None:
    a, b, live = two_runs(6, 1_000.0, (10.0, 10.0))
    live(5.0)  # b has asked for a plan and was refused
    b.tick = lambda: None  # type: ignore[method-assign]
    live(60.0)
    assert a.record is not None and len(a.record.nodes) == 6


def test_runs_share_by_weight() -> None:
    a, b, live = two_runs(9, 1_000.0, (10.0, 10.0), {"a": 2.0})
    live(1_000.0)
    assert a.device_seconds / b.device_seconds == pytest.approx(2.0, rel=0.15)


def test_a_device_that_is_left_to_another_run_says_so() -> None:
    a, b, live = two_runs(4, 1_000.0, (10.0, 10.0))
    live(12.0)
    assert a.record is not None
    reasons = {each.reason for each in a.record.plan.decisions if not each.selected}
    assert reasons == {"left to run b, which has waited longer"}


def test_the_run_that_has_waited_longest_leaves_nothing() -> None:
    now_s = 0.0
    waiting = WaitingRuns(lambda: now_s)
    live = {"a": "x", "b": "y", "c": "z"}
    waiting.refused("a", ["d1"])
    waiting.refused("b", ["d1"])
    waiting.refused("a", ["d1"])  # it asks again and keeps its place
    assert waiting.share_of("a", live).ahead == ()
    assert (waiting.share_of("b", live).of_all, waiting.share_of("b", live).ahead) == (0.5, ("a",))
    assert (waiting.share_of("c", live).of_all, waiting.share_of("c", live).ahead) == (1 / 3, ("a", "b"))
    now_s = 31.0
    waiting.refused("b", ["d1"])
    assert waiting.share_of("c", live).ahead == ("b",), "nobody has asked for a"


def test_a_run_that_did_not_ask_for_long_loses_its_place() -> None:
    now_s = 0.0
    waiting = WaitingRuns(lambda: now_s)
    live = {"a": "x", "b": "y"}
    waiting.refused("a", ["d1"])
    for _ in range(4):
        now_s += 10.0
        waiting.refused("b", ["d1"])
    assert waiting.share_of("a", live).ahead == ("b",), "it has stopped waiting meanwhile"
    waiting.refused("a", ["d1"])
    assert waiting.share_of("a", live).ahead == ("b",)
    assert waiting.share_of("b", live).ahead == ()


def test_a_run_that_has_ended_does_not_wait_although_its_app_asks() -> None:
    a, b, live = two_runs(1, 1_000.0, (60.0, 10.0))
    fleet = a.fleet
    live(5.0)  # a holds the device, and b has asked for it
    fleet.flower.finish_run("b", "ended by the operator")
    live(5.0)  # the app of b keeps asking
    b.tick = lambda: None  # type: ignore[method-assign]
    other = Run(fleet, "c", [0], 10.0)
    other.tick()
    fleet.flower.start_run("b", "FedAvg", 1000)
    names = {run_id: run_id for run_id in "abc"}
    assert fleet.flower.contention.waiting.share_of("c", names).ahead == ()
