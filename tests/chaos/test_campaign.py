"""All processes of a fleet are killed at random: the budget holds, no acknowledged data is lost, and rounds resume.

Two coordinators (one on standby), four agents, Flower's server and its nodes run over mutual TLS on one store. Some of
them are killed at a random moment and started again, repeatedly. A short form runs with all tests; `make chaos` kills
200 times on each store. CHAOS_SEED repeats the victims and pauses of an earlier run; CHAOS_S ends the campaign after
that many seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import URL

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.paths import BACKUP_FILE, device_folder
from edge_agent.runtime.readiness import parked_mode
from tests.chaos.observer import Acknowledged, SiteWatch, StoredFacts, undelivered
from tests.fakes.lasting_agent import MODE_FILE
from tests.fakes.polling import until
from tests.fakes.process_fleet import BOARD, FACTS, OWNERS, WORKLOAD, FleetFolder, ForkedProcess, Ledger
from wattfleet.core.modes import BOARDS, PowerMode, Workload
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.v1 import planning_pb2

SEED = int(os.environ.get("CHAOS_SEED", "0"))
KILLS = int(os.environ.get("CHAOS_KILLS", "3"))
ENDS_AFTER_S = float(os.environ.get("CHAOS_S", "inf"))
DEVICES = [f"nano-{k}" for k in range(4)]
BUDGET_W = 32.0
"""They idle with 22 to 24 W, and draw up to 90 W."""
PROFILE_MODES = 6
WITHIN_S = 240.0
LONGEST_PAUSE_S = 1.5
ROUNDS, MINIBATCHES, TRAINING_S = 10, 40, 0.4
OPTIONS = f"""
[rounds]
overdue_s = 2
[policy]
name = "random"
clients = 2
[profiling]
modes = {PROFILE_MODES}
"""


class Campaign:
    """A fleet, and a record of which of its processes were killed."""

    def __init__(self, folder: Path, location: Path | URL) -> None:
        self.fleet = FleetFolder(folder, DEVICES)
        self.acknowledged = Acknowledged(self.fleet.ledger)
        self.facts = StoredFacts(location)
        self._chance = random.Random(SEED)
        self._store = str(location) if isinstance(location, Path) else location.render_as_string(hide_password=False)
        self._config = folder / "coordinator.toml"
        self._config.write_text(OPTIONS)
        self.story: list[str] = []
        self.kills = 0
        self.takeovers = 0
        self.back_s: list[float] = []
        self.processes = {"first": self._coordinator("first", "127.0.0.1:0")}
        self._until(lambda: self.fleet.announced("first").exists(), "the first coordinator serves")
        self._address = self.fleet.address("first")
        self.processes["second"] = self._coordinator("second", self._address)
        for device_id in DEVICES:
            self.processes[device_id] = self.fleet.agent(device_id, self._address)
        for each in self.fleet.flower(self._address, ROUNDS, MINIBATCHES, TRAINING_S):
            self.processes[each.name] = each

    def _coordinator(self, name: str, address: str) -> ForkedProcess:
        options = ("--standby", "--config", str(self._config), "--site-budget-w", str(BUDGET_W))
        return self.fleet.coordinator(name, self._store, address, *options)

    def profiled(self) -> None:
        """Wait until no device is measuring modes, since that needs no grant."""
        fronts = "SELECT profiled_modes FROM workload_front WHERE workload = 'digits'"
        self._until(
            lambda: [modes for (modes,) in self.facts.rows(fronts)] == [PROFILE_MODES] * len(DEVICES),
            "all devices are profiled",
        )

    @property
    def serving(self) -> str | None:
        """The coordinator that is serving."""
        serving = [each for each in ("first", "second") if self.fleet.announced(each).exists()]
        return max(serving, key=lambda each: self.fleet.announced(each).stat().st_mtime_ns, default=None)

    def require_all_running(self) -> None:
        for process in self.processes.values():
            assert process.is_running, process.last_words

    def rounds_go_on(self) -> None:
        """Wait until a round has ended that was not planned before this call."""
        self.acknowledged.look()
        before = set(self.acknowledged.planned)
        begun_s = time.monotonic()

        def has_ended() -> bool:
            self.require_all_running()
            self.acknowledged.look()
            return not self.acknowledged.finished <= before

        self._until(has_ended, "a further round has ended")
        self.back_s.append(time.monotonic() - begun_s)

    def kill_some(self) -> None:
        """Kill one or more processes at a random moment, and restart them after a random pause."""
        time.sleep(self._chance.uniform(0, LONGEST_PAUSE_S))
        victims = self._victims()
        if self.serving in victims:
            self.takeovers += len({"first", "second"} & set(victims)) == 1
        self.story.append(" ".join(victims))
        for name in victims:
            assert self.processes[name].is_running, self.processes[name].last_words
            self.processes[name].kill()
            self.fleet.announced(name).unlink(missing_ok=True)
            self.kills += 1
        self._chance.shuffle(victims)
        for name in victims:
            time.sleep(self._chance.uniform(0, 0.2))
            if name in ("first", "second"):
                self.processes[name] = self._coordinator(name, self._address)
            else:
                self.processes[name].start()

    def _victims(self) -> list[str]:
        serving = self.serving or "first"
        kind = self._chance.random()
        if kind < 0.3:
            return [serving]
        if kind < 0.55:
            return self._chance.sample(DEVICES, self._chance.randint(1, 2))
        if kind < 0.7:
            return ["flower"]
        if kind < 0.8:
            return ["nodes"]
        if kind < 0.9:
            return [serving, "flower", self._chance.choice(DEVICES)]
        if kind < 0.95:
            return ["first", "second"]
        return list(self.processes)

    def lost(self, with_observations: bool = False) -> list[str]:
        self.acknowledged.look()
        return self.acknowledged.lost(self.facts, with_observations)

    def end(self) -> None:
        """Wait until everything in progress is delivered, and stop all processes as an operator does."""
        self.rounds_go_on()
        for name in ("flower", "nodes"):
            self.processes.pop(name).kill()
        self._until(lambda: not undelivered(self.fleet), "everything observed is delivered")
        for device_id in DEVICES:
            self._until(partial(self.fleet.answers, device_id), f"{device_id} has started")
            assert self.processes.pop(device_id).stop() == 0
        serving = self.serving
        assert serving is not None
        standby = self.processes.pop("second" if serving == "first" else "first")
        assert standby.stop() in (0, -signal.SIGTERM), standby.last_words  # no transaction is open while it waits
        last = self.processes.pop(serving)
        assert last.stop() == 0, last.last_words

    def kill_all(self) -> None:
        for process in self.processes.values():
            process.kill()

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        give_up_s = time.monotonic() + WITHIN_S
        while not condition():
            if time.monotonic() > give_up_s:
                logs = {name: process.log.read_text()[-1500:] for name, process in self.processes.items()}
                raise AssertionError(
                    f"within {WITHIN_S:g} s, not so: {what}\n" + "\n".join(f"{n}: {t}" for n, t in logs.items())
                )
            time.sleep(0.02)


# `test_coordinator_chaos.py` has a short form for PostgreSQL.
@pytest.mark.parametrize("location", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.timeout(600 + 30 * KILLS)
def test_whatever_is_killed_nothing_is_lost_and_no_watt_is_drawn_too_many(
    short_folder: Path, location: Path | URL
) -> None:
    campaign = Campaign(short_folder, location)
    watch = SiteWatch(campaign.fleet, Workload(WORKLOAD, FACTS), campaign.facts, BUDGET_W)
    try:
        campaign.profiled()
        campaign.rounds_go_on()
        watch.start()
        chance, begun_s = random.Random(SEED + 1), time.monotonic()
        while campaign.kills < KILLS and time.monotonic() - begun_s < ENDS_AFTER_S:
            campaign.kill_some()
            if chance.random() < 0.5:  # otherwise the next processes are killed while these are still starting
                campaign.rounds_go_on()
                assert campaign.lost() == []
            assert watch.excess == []
        campaign.end()
        assert campaign.lost(with_observations=True) == []
        assert watch.excess == []
        for device_id in DEVICES:
            assert campaign.fleet.mode(device_id) == OWNERS
            assert not (device_folder(campaign.fleet.state(device_id)) / BACKUP_FILE).exists()
        if isinstance(location, Path):
            assert campaign.facts.rows("PRAGMA integrity_check") == [("ok",)]
    except BaseException:
        print(f"CHAOS_SEED={SEED}; the last that were killed: {campaign.story[-8:]}")
        raise
    finally:
        campaign.kill_all()
        if watch.is_alive():
            watch.end()
    back_s, known = sorted(campaign.back_s), campaign.acknowledged
    print(f"{campaign.kills} kills at {len(campaign.story)} moments, {campaign.takeovers} takeovers by the standby")
    print(f"{len(known.planned)} rounds planned, {len(known.finished)} finished, {len(known.observed)} observations")
    print(f"the next round ended after {back_s[len(back_s) // 2]:.1f} s in the median, {back_s[-1]:.1f} s at most")
    print(f"all limits held in {watch.looks} looks; at most {watch.highest_w:.1f} W were drawn of {BUDGET_W:g} W")


# --- Test observer ----------------------------------------------------------------------------------------------------
# The faults that the campaign's observer detects.

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
