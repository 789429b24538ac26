"""Every part of the fleet's state is copied with it, and forgets the devices that it forgets."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from types import FunctionType

from pydantic import BaseModel

from coordinator.state import fleet as fleet_module
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceResult
from tests.fakes.fronts import front
from tests.fakes.obedient_devices import confirm_all, end_training, train
from tests.fakes.small_fleet import NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN, small_fleet
from tests.unit.coordinator.test_changed_duties import KEPT
from wattfleet.budgets import InForce
from wattfleet.modes import Workload
from wattfleet_proto.device_state import BoardSample, DeviceState, GrantPhase, PresetPoint

WAITING = "a run that waits"
PRESETS = (PresetPoint("MAXN", front((10, 50)), True),)


def fleet_with_much_in_it() -> Fleet:
    """A fleet whose every part knows the Orin, which trains for a second round."""
    fleet = small_fleet()
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
