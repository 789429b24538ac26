"""Two runs that share devices and watts: neither waits longer than for one round of the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.errors import NoDevicesError
from coordinator.state.contention import WaitingRuns
from coordinator.state.fleet import Fleet
from coordinator.state.records import RoundRecord
from tests.fakes.fronts import front
from tests.fakes.small_fleet import make_ready
from wattfleet.errors import InfeasibleBudgetError, NoCandidatesError
from wattfleet.modes import Workload
from wattfleet.planning import Allowance
from wattfleet.planning.policies import AllDevices
from wattfleet_proto.device_state import GrantPhase

TICK_S = 1.0


class Run:
    """A Flower app that always wants every device, asks for a plan every second, and trains for `round_s` seconds."""

    def __init__(self, fleet: Fleet, run_id: str, nodes: list[int], round_s: float) -> None:
        self.fleet, self.run_id, self._nodes, self._round_s = fleet, run_id, nodes, round_s
        self.number, self.waited_s, self.longest_wait_s, self.device_seconds = 0, 0.0, 0.0, 0.0
        self.record: RoundRecord | None = None
        self._left_s = 0.0
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
