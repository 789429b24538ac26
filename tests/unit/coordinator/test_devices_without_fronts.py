"""Devices that report why they have no front, for example because their duty takes the whole board."""

from __future__ import annotations

import pytest

from coordinator.errors import NoDevicesError
from coordinator.state.fleet import Fleet
from coordinator.state.workload_fronts import EVERY_WORKLOAD
from tests.fakes.small_fleet import NANO_FRONT, NODES, RUN, small_fleet
from wattfleet.errors import InvalidInputError

WHY = "the duty takes the whole board: 95 % of 30 requests a second within 50 ms"


def reasons(fleet: Fleet, number: int = 1) -> dict[str, str]:
    decisions = fleet.flower.plan(RUN, number, NODES, 1.0).plan.decisions
    return {decision.device_id: decision.reason for decision in decisions if not decision.selected}


def test_the_reason_reaches_the_plan_and_ends_with_the_next_front() -> None:
    fleet = small_fleet()
    after = fleet.agents.report_no_front("nano", WHY, 4.5)
    assert (after.fronts, fleet.agents.claims.exclusion_reason(after)) == ((), WHY)
    assert reasons(fleet) == {"nano": WHY}
    assert fleet.flower.unpredicted(RUN, NODES) == [], "nobody waits for a front that does not come"
    fleet.flower.release(RUN, NODES)
    fleet.agents.report_front("nano", NANO_FRONT, 4.5, 20, "")
    assert fleet.agents.left_out() == {}


def test_without_any_front_the_round_is_refused_with_the_reasons() -> None:
    fleet = small_fleet()
    for device_id in ("nano", "orin"):
        fleet.agents.report_no_front(device_id, WHY, 4.5)
    with pytest.raises(NoDevicesError, match=f"nano is ready, and left out: {WHY}"):
        fleet.flower.plan(RUN, 1, NODES, 1.0)


def test_a_reason_for_one_workload_leaves_the_others() -> None:
    fleet = small_fleet()
    fleet.agents.report_no_front("nano", WHY, 4.5, "speech")
    nano = fleet.agents.get("nano")
    assert [each.name for each in nano.fronts] == [EVERY_WORKLOAD]
    assert fleet.agents.left_out("digits") == {}
    assert fleet.agents.left_out("speech") == {"nano": WHY}


def test_a_round_in_flight_goes_on_as_it_was_planned() -> None:
    fleet = small_fleet()
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.agents.report_no_front("nano", WHY, 4.5)
    assert fleet.trim() == []


def test_a_long_reason_is_cut() -> None:
    fleet = small_fleet()
    fleet.agents.report_no_front("nano", "x" * 1_000_000, 4.5)
    assert len(fleet.agents.left_out()["nano"]) <= 2_000


@pytest.mark.parametrize("idle_w", [-1.0, float("nan"), float("inf"), 1e6])
def test_no_device_takes_watts_that_its_board_cannot_draw(idle_w: float) -> None:
    fleet = small_fleet()
    before = fleet.agents.get("nano")
    with pytest.raises(InvalidInputError, match="idle power"):
        fleet.agents.report_no_front("nano", WHY, idle_w)
    assert fleet.agents.get("nano") == before
    assert fleet.agents.report_no_front("nano", WHY, 6.5).idle_w == 6.5
