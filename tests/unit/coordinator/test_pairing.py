"""A SuperNode that cannot train on the device it names is left out of plans, with the remedy; others are unaffected."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from coordinator.errors import NoDevicesError
from coordinator.state.fleet import Fleet
from coordinator.state.preview import RoundPreview, predict_nodes
from coordinator.state.records import NodeRecord, RoundRecord
from tests.fakes.small_fleet import NANO_NODE, NODES, ORIN_NODE, RUN, small_fleet

WRONG = "the socket /run/a.sock belongs to nano, but the SuperNode names orin: start it with another device-id"
NOW = datetime(2026, 5, 1, tzinfo=timezone.utc)


def reasons(record: RoundRecord) -> dict[str, str]:
    return {each.device_id: each.reason for each in record.plan.decisions if not each.selected}


def fleet_with_a_wrong_node() -> Fleet:
    fleet = small_fleet()
    assert fleet.flower.bind_node(ORIN_NODE, "orin", WRONG) == NodeRecord(ORIN_NODE, "orin", WRONG)
    return fleet


def test_a_wrong_node_is_left_out_with_the_remedy_and_comes_back_once_it_is_mended() -> None:
    fleet = fleet_with_a_wrong_node()
    first = fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert (first.nodes, reasons(first)) == ({"nano": NANO_NODE}, {"orin": WRONG})
    fleet.flower.release(RUN, NODES)
    fleet.rounds.finish(first.plan_id, [], 1.0)
    fleet.flower.bind_node(ORIN_NODE, "orin", "")
    assert "orin" in fleet.copy().flower.paired(NODES).nodes


def test_without_another_device_the_remedy_is_in_the_refusal() -> None:
    fleet = fleet_with_a_wrong_node()
    with pytest.raises(NoDevicesError, match="orin is ready, but its SuperNode cannot train there: the socket"):
        fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)


def test_a_node_that_names_a_wrong_device_keeps_the_right_one_from_nothing() -> None:
    fleet = small_fleet()
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.flower.bind_node(6, "orin", WRONG)
    assert "orin" not in fleet.flower.release(RUN, [6])
    assert fleet.rounds.grants.may_train("orin"), "its training goes on"
    assert fleet.flower.paired([ORIN_NODE, 6]).nodes == {"orin": ORIN_NODE}


def test_two_supernodes_on_one_device_cost_this_device_alone() -> None:
    fleet = small_fleet()
    fleet.flower.bind_node(99, "orin", "")
    planned = fleet.flower.plan(RUN, 1, [*NODES, 99], 1.0)
    assert planned.nodes == {"nano": NANO_NODE}
    assert "2 connected SuperNodes name it: give each SuperNode its own device-id" in reasons(planned)["orin"]


def test_two_connected_supernodes_on_one_device_are_known_outside_of_a_plan() -> None:
    fleet = small_fleet()
    fleet.flower.bind_node(99, "orin", "")
    pairings, nodes = fleet.flower.pairings, fleet.flower.nodes
    assert pairings.all_problems(nodes) == {99: ""}
    pairings.connected([ORIN_NODE, NANO_NODE], NOW)
    pairings.connected([99, NANO_NODE], NOW + timedelta(minutes=5))
    assert pairings.all_problems(nodes) == {99: ""}, "the one replaced the other"
    pairings.connected([99, ORIN_NODE, NANO_NODE], NOW + timedelta(minutes=6))
    assert {node for node, problem in pairings.all_problems(nodes).items() if problem} == {99, ORIN_NODE}


def test_predictions_and_previews_give_the_remedy() -> None:
    fleet = fleet_with_a_wrong_node()
    assert {each.device_id: each.reason for each in predict_nodes(fleet, RUN, NODES, 1.0)} == {
        "orin": WRONG,
        "nano": "",
    }
    for preview in (RoundPreview(fleet, RUN), RoundPreview(fleet, RUN, all_devices=True)):
        assert reasons(preview.plan().record) == {"orin": WRONG}


def test_a_forgotten_device_leaves_no_problem_behind() -> None:
    fleet = fleet_with_a_wrong_node()
    fleet.agents.disconnect("orin")
    fleet.forget(["orin"])
    assert not fleet.flower.pairings.problems
