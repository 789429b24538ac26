"""The faults that the campaign's observer detects."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.runtime.readiness import parked_mode
from tests.chaos.observer import Acknowledged, SiteWatch, StoredFacts
from tests.fakes.lasting_agent import MODE_FILE
from tests.fakes.ledger import Ledger
from tests.fakes.polling import until
from tests.fakes.process_fleet import BOARD, FleetFolder
from wattfleet.modes import BOARDS, PowerMode, Workload
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.v1 import planning_pb2

HIGHEST, PARKED = BOARDS[BOARD].space.highest, parked_mode(SimulatedDevice(BOARD, 1))


@pytest.fixture
def acknowledged(tmp_path: Path) -> Acknowledged:
    """One round that is planned, observed and finished, and one that is only planned."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.note(planned="a/1", devices=["nano-0"])
    ledger.note(observed="a/1", device="nano-0", epoch_s=4.5)
    ledger.note(finished="a/1")
    ledger.note(planned="a/2", devices=["nano-0"])
    known = Acknowledged(tmp_path / "ledger.jsonl")
    known.look()
    return known


def stored(tmp_path: Path, *statements: str) -> StoredFacts:
    """A store with these two rounds, changed by SQL statements."""
    path = tmp_path / "coordinator.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE round (plan_id, run_id, number, wall_s)")
        database.execute("CREATE TABLE observation (plan_id, device_id, epoch_s)")
        database.execute("INSERT INTO round VALUES ('a/1', 'a', 1, 3.0), ('a/2', 'a', 2, NULL)")
        database.execute("INSERT INTO observation VALUES ('a/1', 'nano-0', 4.5)")
        for statement in statements:
            database.execute(statement)
    return StoredFacts(path)


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("SELECT 1", []),
        ("DELETE FROM round WHERE number = 2", ["a/2 is not stored"]),
        ("UPDATE round SET wall_s = NULL", ["a/1 is not finished"]),
        ("INSERT INTO round VALUES ('b/2', 'a', 2, NULL)", ["('a', 2) is stored 2 times"]),
        ("DELETE FROM observation", ["('a/1', 'nano-0') took 4.5 s, but None is stored"]),
        ("UPDATE observation SET epoch_s = 4.6", ["('a/1', 'nano-0') took 4.5 s, but 4.6 is stored"]),
    ],
)
def test_it_notices_what_is_lost(acknowledged: Acknowledged, tmp_path: Path, statement: str, found: list[str]) -> None:
    assert acknowledged.lost(stored(tmp_path, statement), with_observations=True) == found


def test_it_notices_an_observation_that_is_given_twice(acknowledged: Acknowledged, tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.jsonl").note(observed="a/1", device="nano-0", epoch_s=4.5)
    with pytest.raises(AssertionError, match="twice"):
        acknowledged.look()


def planned(tmp_path: Path, **limits_w: float) -> StoredFacts:
    """A store with a plan that assigns each device the highest mode within a limit in watts; each idles at 6 W."""
    plan = planning_pb2.PlanRoundResponse(
        assignments=[
            planning_pb2.Assignment(device_id=name, mode=mode_to_message(HIGHEST), power_limit_w=limit_w)
            for name, limit_w in limits_w.items()
        ]
    )
    path = tmp_path / "coordinator.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute('CREATE TABLE round ("order" INTEGER PRIMARY KEY, plan BLOB)')
        database.execute("INSERT INTO round (plan) VALUES (?)", [plan.SerializeToString()])
        database.execute("CREATE TABLE device (device_id, idle_w)")
        database.executemany("INSERT INTO device VALUES (?, 6.0)", [["nano0"], ["nano1"]])
    return StoredFacts(path)


@pytest.mark.parametrize(
    ("modes", "limits_w", "found"),
    [
        ((HIGHEST, PARKED), {"nano0": 20.0}, ""),
        ((HIGHEST, HIGHEST), {"nano0": 15.0, "nano1": 11.0}, ""),
        ((HIGHEST, PARKED), {"nano0": 20.1}, "26.10 W are allowed of 26.00 W: nano0 at"),
        ((HIGHEST, HIGHEST), {"nano0": 15.0, "nano1": 15.0}, "30.00 W are allowed of 26.00 W"),
        ((HIGHEST, HIGHEST), {"nano0": 15.0}, "which no plan gave it"),
    ],
)
def test_it_notices_what_no_plan_allows(
    short_folder: Path, modes: tuple[PowerMode, ...], limits_w: dict[str, float], found: str
) -> None:
    fleet = FleetFolder(short_folder, ["nano0", "nano1"])
    for device_id, mode in zip(fleet.device_ids, modes, strict=True):
        (fleet.board(device_id) / MODE_FILE).write_text(json.dumps(mode))
    watch = SiteWatch(fleet, Workload("digits"), planned(short_folder, **limits_w), budget_w=26.0)
    watch.start()
    until(lambda: watch.looks >= 3)
    watch.end()
    assert bool(watch.excess) is bool(found)
    assert all(found in each for each in watch.excess)
