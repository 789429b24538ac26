"""What the campaign's observer notices."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.runtime.readiness import parked_mode
from tests.chaos.lasting_agent import MODE_FILE
from tests.chaos.observer import Acknowledged, SiteWatch, StoredFacts
from tests.fakes.ledger import Ledger
from tests.fakes.polling import until
from tests.fakes.process_fleet import BOARD, FleetFolder
from wattfleet.modes import BOARDS, PowerMode, Workload

HIGHEST, PARKED = BOARDS[BOARD].space.highest, parked_mode(SimulatedDevice(BOARD, 1))


@pytest.fixture
def acknowledged(tmp_path: Path) -> Acknowledged:
    """A round that is planned, observed and finished, and one that is planned."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.note(planned="a/1", devices=["nano-0"])
    ledger.note(observed="a/1", device="nano-0", epoch_s=4.5)
    ledger.note(finished="a/1")
    ledger.note(planned="a/2", devices=["nano-0"])
    known = Acknowledged(tmp_path / "ledger.jsonl")
    known.look()
    return known


def stored(tmp_path: Path, *statements: str) -> StoredFacts:
    """A store with all of that, changed by statements."""
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


@pytest.mark.parametrize(("modes", "is_excess"), [((HIGHEST, PARKED), False), ((HIGHEST, HIGHEST), True)])
def test_it_notices_too_many_watts(short_folder: Path, modes: tuple[PowerMode, ...], is_excess: bool) -> None:
    fleet = FleetFolder(short_folder, ["nano-0", "nano-1"])
    for device_id, mode in zip(fleet.device_ids, modes, strict=True):
        (fleet.board(device_id) / MODE_FILE).write_text(json.dumps(mode))
    watch = SiteWatch(fleet, Workload("digits"), budget_w=35.0, tolerance=0.1)
    watch.start()
    until(lambda: watch.looks >= 3)
    watch.end()
    assert bool(watch.excess) is is_excess
    assert (watch.highest_w > 35.0) is is_excess
