"""Devices in the fleet's state: sessions, states, fronts and Flower nodes."""

from __future__ import annotations

import math

import pytest

from coordinator.errors import UnknownRecordError
from coordinator.state.fleet import Fleet
from tests.fakes.fronts import front
from tests.fakes.small_fleet import NANO_FRONT, NODES, ORIN_FRONT, RUN, small_fleet
from tests.fakes.workload_fronts import only_front
from wattfleet.choosing import Front
from wattfleet.errors import InvalidInputError
from wattfleet.planning import Allowance
from wattfleet.planning.policies import AllDevices
from wattfleet_proto.device_state import DeviceState


def test_a_device_that_connects_is_enrolled() -> None:
    fleet = Fleet(Allowance.of_site(100.0), AllDevices())
    record = fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)
    assert (record.device_id, record.board, record.provenance) == ("orin", "agx-orin", "simulated")
    assert (record.state, record.mode_count, only_front(record)) == (DeviceState.ENROLLED, 18_096, None)
    assert fleet.agents.get("orin") == record


def test_a_session_that_takes_the_place_of_another_begins_anew() -> None:
    fleet = small_fleet()
    assert fleet.agents.get("orin").state is DeviceState.READY
    assert fleet.agents.connect("orin", "agx-orin", "simulated", 18_096).state is DeviceState.ENROLLED


@pytest.mark.parametrize(("board", "provenance"), [("orin-nano", "simulated"), ("agx-orin", "hardware")])
def test_an_id_stays_with_the_board_it_was_enrolled_as(board: str, provenance: str) -> None:
    fleet = small_fleet()
    fleet.agents.disconnect("orin")
    with pytest.raises(InvalidInputError, match=f"enrolled as simulated agx-orin, not as {provenance} {board}"):
        fleet.agents.connect("orin", board, provenance, 18_096)
    fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)  # the refused connection left no session behind


@pytest.mark.parametrize(("device_id", "board", "modes"), [("", "agx-orin", 1), ("a", "", 1), ("a", "agx-orin", 0)])
def test_a_device_without_id_board_or_modes_is_refused(device_id: str, board: str, modes: int) -> None:
    fleet = Fleet(Allowance.of_site(100.0), AllDevices())
    with pytest.raises(InvalidInputError, match="must have an id, a kind of board and at least one power mode"):
        fleet.agents.connect(device_id, board, "simulated", modes)
    assert not fleet.agents.devices


def test_a_device_that_is_gone_is_offline_and_not_forgotten() -> None:
    fleet = small_fleet()
    record = fleet.agents.disconnect("orin")
    assert (record.state, record.detail) == (DeviceState.OFFLINE, "")
    assert (only_front(record), record.idle_w, record.profiled_modes) == (ORIN_FRONT, 5.0, 50)
    back = fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)
    assert (only_front(back), back.idle_w, back.state) == (ORIN_FRONT, 5.0, DeviceState.ENROLLED)


def test_a_device_says_what_it_is_doing() -> None:
    fleet = small_fleet()
    record = fleet.agents.report_state("orin", DeviceState.PROFILING, 7, "12c 2.20/1.30/3.20")
    assert (record.state, record.profiled_modes, record.detail) == (DeviceState.PROFILING, 7, "12c 2.20/1.30/3.20")
    assert only_front(record) is ORIN_FRONT


def test_a_front_comes_with_what_it_was_made_from() -> None:
    fleet = small_fleet()
    record = fleet.agents.report_front("orin", NANO_FRONT, 4.5, 20, "a" * 64)
    assert (only_front(record), record.idle_w, record.profiled_modes) == (NANO_FRONT, 4.5, 20)
    assert (record.fronts[0].reference_digest, record.state) == ("a" * 64, DeviceState.READY)


@pytest.mark.parametrize(("device_front", "idle_w"), [(NANO_FRONT, 5_000.0), (front((10, 50_000), (20, 30_000)), 5.0)])
def test_watts_that_no_board_draws_stop_nobody(device_front: Front, idle_w: float) -> None:
    fleet = small_fleet()
    fleet.agents.connect("newcomer", "agx-orin", "simulated", 18_096)
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    implausible = "^newcomer reports .*,000 W as its .*, more than the .* W of any agx-orin.*agent doctor"
    with pytest.raises(InvalidInputError, match=implausible):
        fleet.agents.report_front("newcomer", device_front, idle_w, 50, "")
    fleet.agents.report_state("newcomer", DeviceState.PROFILING, 50, "")
    assert fleet.trim() == [], "the trainings in flight go on"


@pytest.mark.parametrize("digest", ["d" * 63, "d" * 1_000_000, "g" * 64, "D" * 64, "d" * 64 + "\n"])
def test_a_digest_that_is_none_is_refused(digest: str) -> None:
    fleet = small_fleet()
    with pytest.raises(InvalidInputError, match="64 hexadecimal digits") as refused:
        fleet.agents.report_front("orin", NANO_FRONT, 5.0, 50, digest)
    assert len(str(refused.value)) < 500
    assert fleet.agents.get("orin").fronts[0].reference_digest == "d" * 64


@pytest.mark.parametrize("idle_w", [-1.0, math.nan, math.inf])
def test_a_front_with_impossible_idle_watts_changes_nothing(idle_w: float) -> None:
    fleet = small_fleet()
    with pytest.raises(InvalidInputError, match="^orin: idle watts"):
        fleet.agents.report_front("orin", NANO_FRONT, idle_w, 50, "")
    assert (only_front(fleet.agents.get("orin")), fleet.agents.get("orin").idle_w) == (ORIN_FRONT, 5.0)


def test_a_device_that_never_connected_has_nothing_to_report() -> None:
    fleet = small_fleet()
    for report in (
        lambda: fleet.agents.report_state("ghost", DeviceState.READY, 0, ""),
        lambda: fleet.agents.report_front("ghost", ORIN_FRONT, 5.0, 50, ""),
        lambda: fleet.agents.disconnect("ghost"),
    ):
        with pytest.raises(UnknownRecordError, match="unknown device 'ghost': it never connected"):
            report()
    assert set(fleet.agents.devices) == {"orin", "nano"}


def test_a_node_may_be_tied_before_its_agent_connects_and_is_left_out_until_then() -> None:
    fleet = small_fleet()
    fleet.flower.bind_node(99, "ghost")
    record = fleet.flower.plan(RUN, 1, [*NODES, 99], 1.0)
    assert {decision.device_id for decision in record.plan.decisions} == {"orin", "nano"}


def test_a_node_that_is_gone_is_no_trouble_for_a_newer_one_of_its_device() -> None:
    fleet = small_fleet()
    fleet.flower.bind_node(99, "orin")
    assert fleet.flower.plan(RUN, 1, [99], 1.0).nodes == {"orin": 99}


@pytest.mark.parametrize("site_budget_w", [-20.0, math.nan, math.inf])
def test_a_site_without_watts_is_refused(site_budget_w: float) -> None:
    with pytest.raises(InvalidInputError, match="needs a budget of 0 or more finite watts"):
        Fleet(Allowance.of_site(site_budget_w), AllDevices())
