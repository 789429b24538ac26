"""Looks at a fleet from outside: the boards' modes and draw, and the store by plain SQL."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import URL

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.paths import OUTBOX_FILE
from edge_agent.runtime.readiness import parked_mode
from tests.fakes.ledger import LedgerReader
from tests.fakes.process_fleet import BOARD, OWNERS, FleetFolder
from wattfleet.modes import PowerMode, Workload, modes_to_array

_EVERY_S = 0.05
_TORN_READS = 3
"""Boards are read one after the other, while power may go from one to another."""


class SiteWatch(threading.Thread):
    """Watches the true draw of all boards together; a board in any mode but its parked one counts as training.

    Args:
        fleet: the boards.
        workload: what they train.
        budget_w: of the site.
        tolerance: the share by which true draw may exceed predictions.
    """

    def __init__(self, fleet: FleetFolder, workload: Workload, budget_w: float, tolerance: float) -> None:
        super().__init__(name="site watch", daemon=True)
        self._fleet = fleet
        self._boards = {each: SimulatedDevice(BOARD, fleet.seed(each)) for each in fleet.device_ids}
        self._workload = workload
        self._known_w: dict[tuple[str, PowerMode], float] = {}
        self._most_w = budget_w * (1 + tolerance)
        self._ending = threading.Event()
        self.highest_w = 0.0
        self.looks = 0
        self.excess: list[str] = []

    def run(self) -> None:
        while not self._ending.wait(_EVERY_S):
            self.looks += 1
            watts = self._site_w()
            for _ in range(_TORN_READS):
                if watts > self._most_w:
                    time.sleep(_EVERY_S)
                    watts = min(watts, self._site_w())
            self.highest_w = max(self.highest_w, watts)
            if watts > self._most_w:
                modes = {each: self._fleet.mode(each).label() for each in self._boards}
                self.excess.append(f"{watts:.1f} W of at most {self._most_w:.1f} W: {modes}")

    def end(self) -> None:
        self._ending.set()
        self.join()

    def _site_w(self) -> float:
        return sum(self._device_w(each, self._fleet.mode(each)) for each in self._boards)

    def _device_w(self, device_id: str, mode: PowerMode) -> float:
        if (device_id, mode) not in self._known_w:
            board = self._boards[device_id]
            parked = parked_mode(board)
            if mode in (OWNERS, parked):  # what the owner's mode idles with is not Wattfleet's
                watts = board.load(parked, self._workload).idle_mw / 1e3
            else:
                watts = float(board.truth(modes_to_array([mode]), self._workload)[1][0]) / 1e3
            self._known_w[device_id, mode] = watts
        return self._known_w[device_id, mode]


class StoredFacts:
    """Reads a coordinator's store by plain SQL."""

    def __init__(self, location: Path | URL) -> None:
        self._location = location

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        if isinstance(self._location, Path):
            with closing(sqlite3.connect(f"file:{self._location}?mode=ro", uri=True, timeout=30)) as database:
                return list(database.execute(sql))
        import psycopg

        url = self._location
        with psycopg.connect(
            host=url.host, port=url.port, user=url.username, password=url.password, dbname=url.database
        ) as connection:
            return list(connection.execute(sql))


class Acknowledged:
    """What Flower's server and its nodes were told is kept.

    Attributes:
        planned: plan ids.
        finished: plan ids.
        observed: plan id and device -> seconds of an epoch.
    """

    def __init__(self, ledger: Path) -> None:
        self._ledger = LedgerReader(ledger)
        self.planned: set[str] = set()
        self.finished: set[str] = set()
        self.observed: dict[tuple[str, str], float] = {}

    def look(self) -> None:
        for entry in self._ledger.look():
            if "planned" in entry:
                self.planned.add(entry["planned"])
            if "finished" in entry:
                self.finished.add(entry["finished"])
            if "observed" in entry:
                where = entry["observed"], entry["device"]
                assert where not in self.observed, f"{where} was observed twice"
                self.observed[where] = entry["epoch_s"]

    def lost(self, store: StoredFacts, with_observations: bool) -> list[str]:
        """What the store lacks, or has twice.

        Args:
            store: the store.
            with_observations: whether all observations have been delivered.
        """
        rounds = store.rows("SELECT plan_id, run_id, number, wall_s FROM round")
        stored = {plan_id: wall_s for plan_id, _, _, wall_s in rounds}
        found = [f"{plan_id} is not stored" for plan_id in sorted(self.planned - stored.keys())]
        found += [f"{plan_id} is not finished" for plan_id in sorted(self.finished) if stored.get(plan_id) is None]
        twice = Counter((run_id, number) for _, run_id, number, _ in rounds)
        found += [f"{which} is stored {count} times" for which, count in twice.items() if count > 1]
        if with_observations:
            kept = {(p, d): s for p, d, s in store.rows("SELECT plan_id, device_id, epoch_s FROM observation")}
            found += [
                f"{where} took {epoch_s} s, but {kept.get(where)} is stored"
                for where, epoch_s in sorted(self.observed.items())
                if kept.get(where) != epoch_s
            ]
        return found


def undelivered(fleet: FleetFolder) -> list[str]:
    """The observations that agents have not delivered yet."""
    paths = [fleet.state(each) / OUTBOX_FILE for each in fleet.device_ids]
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    return [line for line in lines if "observation" in json.loads(line)]
