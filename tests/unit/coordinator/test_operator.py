"""What the operator sets and sees of devices: overrides, reserved watts, the plan preview, and presets of boards."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest

from coordinator.budgets.site_file import SiteFile
from coordinator.errors import NoDevicesError, UnknownRecordError
from coordinator.state.agents import DeviceRules
from coordinator.state.fleet import Fleet
from coordinator.state.operator import PresetPoints
from coordinator.state.preview import RoundPreview
from coordinator.state.records import DeviceOverrides, DeviceResult, ObservedTraining, RoundRecord
from tests.fakes.fleets import columns_of, front
from tests.fakes.small_fleet import (
    NANO_FRONT,
    NANO_NODE,
    NODES,
    ORIN_FRONT,
    ORIN_NODE,
    RUN,
    make_ready,
    small_fleet,
)
from wattfleet.core.budgets import ConstantBudget, InForce, Supplies, Supply
from wattfleet.core.choosing import Front
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.planning import Allowance, Selection
from wattfleet.core.planning.policies import AllDevices
from wattfleet_proto.convert import presets_from_messages, presets_to_messages
from wattfleet_proto.device_state import MAX_PRESETS, DeviceState, PresetPoint

# --- Device overrides -------------------------------------------------------------------------------------------------
# Device overrides of the operator, reserved watts, and the plan preview, on the fleet's state without a service.


SUPPLIES = Supplies((Supply("site"), Supply("rack", "site"), Supply("roof", "site")))
SITE = SiteFile(
    SUPPLIES,
    {name: ConstantBudget(100.0) for name in SUPPLIES.names},
    attached=(("orin*", "rack"), ("nano*", "roof")),
    rules={"orin": DeviceRules(tags=frozenset({"lab"}))},
)


def fleet_of_site(selection: Selection | None = None, overrides: tuple[DeviceOverrides, ...] = ()) -> Fleet:
    allowance = Allowance(SUPPLIES, dict.fromkeys(SUPPLIES.names, 100.0))
    fleet = Fleet(allowance, AllDevices(), placement=SITE, selection=selection, overrides=overrides)
    make_ready(fleet, "orin", ORIN_FRONT, 5.0, ORIN_NODE)
    make_ready(fleet, "nano", NANO_FRONT, 3.0, NANO_NODE)
    fleet.flower.start_run(RUN, "FedAvg", 3)
    return fleet


def look(fleet: Fleet, run_id: str = "", epochs: float = 0.0, all_devices: bool = False) -> RoundRecord:
    return RoundPreview(fleet, run_id, all_devices).plan(epochs).record


def chosen(fleet: Fleet, number: int = 1) -> set[str]:
    """The devices selected for a round, after the server stopped waiting for the round before."""
    fleet.flower.release(RUN, NODES)
    return {assignment.device_id for assignment in fleet.flower.plan(RUN, number, NODES, 1.0).plan.assignments}


def reasons(fleet: Fleet, number: int = 1) -> dict[str, str]:
    return {each.device_id: each.reason for each in fleet.flower.plan(RUN, number, NODES, 1.0).plan.decisions}


def plain(value: Any) -> Any:
    """Convert a state to lists and dicts, since arrays cannot be compared with a single `==`."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Front):
        return plain(columns_of(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return plain(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else value


# --- tags ---------------------------------------------------------------------------------------------------------


def test_tags_by_command_count_beside_those_of_the_site_file() -> None:
    fleet = fleet_of_site(Selection(include=("tag:lab",)))
    assert chosen(fleet) == {"orin"}
    assert fleet.operator.tag(["nano"], {"lab", "new"}, set()) == [DeviceOverrides("nano", frozenset({"lab", "new"}))]
    assert chosen(fleet, 2) == {"orin", "nano"}
    assert fleet.operator.tag(["nano"], set(), {"lab"}) == [DeviceOverrides("nano", frozenset({"new"}))]
    assert chosen(fleet, 3) == {"orin"}


def test_a_tag_can_exclude_a_device() -> None:
    fleet = fleet_of_site(Selection(exclude=("tag:sick",)))
    fleet.operator.tag(["orin"], {"sick"}, set())
    assert reasons(fleet)["orin"] == "excluded: matches tag:sick"


@pytest.mark.parametrize(
    ("devices", "add", "remove", "text"),
    [
        (["nano", "orin"], set(), {"lab"}, "orin has the tag lab from the site file: remove it there"),
        (["nano"], {"a"}, {"a"}, "a: either add a tag or remove it"),
        (["nano"], {" "}, set(), "a tag must have 1 to 200 printable characters and no spaces"),
        (["nano"], {"x" * 201}, set(), "a tag must have 1 to 200 printable characters and no spaces"),
        (["nano"], {"a\nb"}, set(), "a tag must have 1 to 200 printable characters and no spaces"),
        (["nano"], {"a b"}, set(), "a tag must have 1 to 200 printable characters and no spaces"),
    ],
)
def test_tags_that_cannot_be_change_nothing(devices: list[str], add: set[str], remove: set[str], text: str) -> None:
    fleet = fleet_of_site()
    with pytest.raises(InvalidInputError, match=text):
        fleet.operator.tag(devices, add, remove)
    assert fleet.operator.overrides == {}


def test_a_device_that_never_connected_is_named_and_the_others_stay_as_they_are() -> None:
    fleet = fleet_of_site()
    for say in (
        lambda: fleet.operator.tag(["orin", "none"], {"a"}, set()),
        lambda: fleet.operator.drain(["orin", "none"]),
    ):
        with pytest.raises(UnknownRecordError, match="unknown device 'none': it never connected"):
            say()
    assert fleet.operator.overrides == {}


# --- draining -----------------------------------------------------------------------------------------------------


def test_a_drained_device_is_chosen_for_no_new_round_and_the_plan_says_why() -> None:
    fleet = fleet_of_site()
    fleet.operator.drain(["orin"])
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert set(record.nodes) == {"nano"}
    assert record.idle_w == 5.0, "it idles behind the same supply"
    assert reasons(fleet)["orin"] == "drained by the operator"
    fleet.operator.drain(["orin"], is_drained=False)
    assert chosen(fleet, 2) == {"orin", "nano"}


def test_what_a_drained_device_trains_it_finishes() -> None:
    fleet = fleet_of_site()
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.operator.drain(["orin", "nano"])
    assert fleet.rounds.records[record.plan_id] == record
    fleet.rounds.observe(record.plan_id, ObservedTraining("orin", 10.0, 50.0))
    # A drained device's round is trimmed like any other.
    fleet.take_orders()
    [_trimmed] = fleet.set_budget("site", InForce(17.0, "constant", False, "always"))
    assert [device_id for device_id, _ in fleet.take_orders()] == ["nano"]


def test_with_all_devices_drained_none_is_ready() -> None:
    fleet = fleet_of_site()
    fleet.operator.drain(["orin", "nano"])
    with pytest.raises(NoDevicesError, match="orin is ready, and drained, nano is ready, and drained"):
        fleet.flower.plan(RUN, 1, NODES, 1.0)


def test_a_drained_device_keeps_its_tags_and_a_restart_keeps_both() -> None:
    fleet = fleet_of_site()
    fleet.operator.tag(["nano"], {"lab"}, set())
    says = fleet.operator.drain(["nano", "nano"])
    assert says == [DeviceOverrides("nano", frozenset({"lab"}), True)]
    after = fleet_of_site(Selection(include=("tag:lab",)), tuple(fleet.operator.overrides.values()))
    assert chosen(after) == {"orin"}
    assert reasons(after)["nano"] == "drained by the operator"


# --- reserved watts -----------------------------------------------------------------------------------------------


def test_what_is_set_aside_counts_trainings_and_idling_devices_up_to_the_site() -> None:
    fleet = fleet_of_site()
    assert fleet.draw.reserved_w() == {"site": 8.0, "rack": 5.0, "roof": 3.0}
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    limits = {assignment.device_id: assignment.power_limit_w for assignment in record.plan.assignments}
    assert fleet.draw.reserved_w() == {"site": sum(limits.values()), "rack": limits["orin"], "roof": limits["nano"]}


# --- the next plan ------------------------------------------------------------------------------------------------


def test_a_look_at_the_next_plan_shows_it_and_changes_nothing() -> None:
    fleet = fleet_of_site()
    first = fleet.flower.plan(RUN, 1, NODES, 2.0)
    for device_id in ("orin", "nano"):
        fleet.rounds.observe(first.plan_id, ObservedTraining(device_id, 10.0, 20.0))
    fleet.rounds.finish(first.plan_id, [DeviceResult("orin"), DeviceResult("nano", "it fell over")], 20.0)
    fleet.operator.drain(["nano"])
    before = plain(copy.deepcopy(vars(fleet)))
    looked = look(fleet, RUN)
    assert plain(vars(fleet)) == before
    planned = fleet.flower.plan(RUN, 2, NODES, 2.0)
    assert looked == planned, "the plan equals its preview"


def test_a_look_before_any_run_takes_all_devices_that_are_ready() -> None:
    fleet = Fleet(Allowance.of_site(100.0), AllDevices())
    for device_id, its_front, idle_w in (("orin", ORIN_FRONT, 5.0), ("nano", NANO_FRONT, 3.0)):
        make_ready(fleet, device_id, its_front, idle_w, 0)
    fleet.flower.nodes.clear()
    looked = look(fleet)
    assert (looked.number, looked.epochs, set(looked.nodes)) == (1, 1.0, {"orin", "nano"})
    assert fleet.flower.runs == {} and fleet.rounds.records == {}


def test_a_look_takes_only_devices_with_a_node_unless_told_to() -> None:
    fleet = small_fleet()
    del fleet.flower.nodes[NANO_NODE]
    assert set(look(fleet, RUN).nodes) == {"orin"}
    assert set(look(fleet, RUN, all_devices=True).nodes) == {"orin", "nano"}
    fleet.flower.nodes.clear()
    with pytest.raises(NoDevicesError, match="no device is bound to a Flower node yet"):
        look(fleet, RUN)


def test_a_device_with_an_old_node_and_a_new_one_is_looked_at_once() -> None:
    fleet = small_fleet()
    fleet.flower.bind_node(12345, "orin")
    assert set(look(fleet, RUN).nodes) == {"orin", "nano"}


def test_a_look_says_what_keeps_every_other_device() -> None:
    fleet = small_fleet()
    for device_id, state in (("off", DeviceState.OFFLINE), ("busy", DeviceState.PROFILING)):
        make_ready(fleet, device_id, NANO_FRONT, 3.0, len(device_id))
        fleet.agents.report_state(device_id, state, 5, "")
    make_ready(fleet, "alone", NANO_FRONT, 3.0, 77)
    del fleet.flower.nodes[77]
    make_ready(fleet, "away", NANO_FRONT, 3.0, 78)
    fleet.flower.start_run("other", "FedAvg", 1)
    fleet.flower.plan("other", 1, [78], 1.0)
    fleet.operator.drain(["busy"])
    looked = RoundPreview(fleet, RUN).plan()
    assert {decision.device_id for decision in looked.record.plan.decisions} == {"orin", "nano"}
    assert looked.not_considered == {
        "off": "offline",
        "busy": "profiling, and drained",
        "alone": "ready, without a SuperNode",
        "away": "ready, and part of round 1 of run other",
    }


def test_a_look_at_a_run_that_is_over_is_refused() -> None:
    fleet = small_fleet()
    fleet.flower.finish_run(RUN, "")
    with pytest.raises(InvalidInputError, match=f"run {RUN} has ended"):
        look(fleet, RUN)
    assert look(fleet).number == 1


def test_a_look_fails_as_the_plan_would() -> None:
    with pytest.raises(UnknownRecordError, match="unknown run '1': it never started"):
        look(small_fleet(), "1")
    with pytest.raises(InfeasibleBudgetError):
        look(small_fleet(9.0), RUN)
    with pytest.raises(NoDevicesError):
        look(Fleet(Allowance.of_site(9.0), AllDevices()))


# --- Preset points ----------------------------------------------------------------------------------------------------
# The presets of boards, as agents report them with their fronts.

MAXN = PresetPoint("MAXN", front((10, 50), warmup_s=2.0), True)


def test_presets_are_kept_by_device_and_workload_until_the_device_leaves() -> None:
    presets = PresetPoints()
    presets.report("orin", "digits", (MAXN,), ["digits"])
    presets.report("orin", "words", (), ["digits", "words"])
    assert (presets.of("orin", "digits"), presets.of("orin", "words"), presets.of("nano", "digits")) == (
        (MAXN,),
        (),
        (),
    )
    presets.report("orin", "words", (MAXN,), ["words"])
    assert presets.of("orin", "digits") == (), "its front of this workload is gone"
    presets.forget(["orin"])
    assert presets.of("orin", "words") == ()


def test_a_message_is_read_as_it_was_written() -> None:
    (read,) = presets_from_messages(presets_to_messages([MAXN]))
    assert (read.name, read.is_measured, read.front.mode(0)) == ("MAXN", True, MAXN.front.mode(0))
    assert (read.front.epoch_s[0], read.front.power_w[0], read.front.warmup_s[0]) == (10, 50, 2)


def test_what_no_board_can_have_is_refused() -> None:
    good = presets_to_messages([MAXN])[0]
    with pytest.raises(InvalidInputError, match=f"up to {MAX_PRESETS} presets, not {MAX_PRESETS + 1}"):
        presets_from_messages([good] * (MAX_PRESETS + 1))
    for name in ("", "two\nlines", "x" * 65):
        bad = presets_to_messages([MAXN])[0]
        bad.name = name
        with pytest.raises(InvalidInputError, match="printable characters"):
            presets_from_messages([bad])
    good.point.power_w = float("nan")
    with pytest.raises(InvalidInputError):
        presets_from_messages([good])
