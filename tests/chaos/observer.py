"""Observes a fleet from outside: the boards' modes and power, and the store by plain SQL."""

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
from tests.fakes.process_fleet import BOARD, OWNERS, FleetFolder, LedgerReader
from wattfleet.core.modes import PowerMode, Workload, modes_to_array
from wattfleet_proto.convert import mode_from_message
from wattfleet_proto.v1 import planning_pb2

_EVERY_S = 0.05
_ROUNDING_W = 1e-6
_TORN_READS = 3
"""Boards are read one after the other, while power may go from one to another."""


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


# So many of the latest rounds may be trimmed: those in flight.
_TRIMMED = 8


class StoredLimits:
    """The power that the stored plans allow each device."""

    def __init__(self, facts: StoredFacts) -> None:
        self._facts = facts
        self._newest = -1
        self._limits_w: dict[tuple[str, PowerMode], float] = {}

    def look(self) -> None:
        """Read the new plans, and the last ones again, since a plan is stored anew when it is trimmed."""
        for order, plan in self._facts.rows(
            f'SELECT "order", plan FROM round WHERE "order" > {self._newest - _TRIMMED} ORDER BY "order"'
        ):
            self._newest = order
            for each in planning_pb2.PlanRoundResponse.FromString(bytes(plan)).assignments:
                self._limits_w[each.device_id, mode_from_message(each.mode)] = each.power_limit_w

    def of(self, device_id: str, mode: PowerMode) -> float | None:
        """The device's limit in the newest plan that assigns it this mode; None if no plan does."""
        return self._limits_w.get((device_id, mode))

    def idle_w(self) -> dict[str, float]:
        """The power that is counted for each device while it does not train."""
        return dict(self._facts.rows("SELECT device_id, idle_w FROM device"))


class SiteWatch(threading.Thread):
    """Compares the boards with the stored plans: every mode was assigned by a plan, and the sum is within the budget.

    A board counts as training in any mode other than its parked mode and its owner's mode.

    Args:
        fleet: the boards.
        workload: what they train.
        facts: the coordinator's store.
        budget_w: the site's budget.
    """

    def __init__(self, fleet: FleetFolder, workload: Workload, facts: StoredFacts, budget_w: float) -> None:
        super().__init__(name="site watch", daemon=True)
        self._fleet = fleet
        self._boards = {each: SimulatedDevice(BOARD, fleet.seed(each)) for each in fleet.device_ids}
        self._workload = workload
        self._limits = StoredLimits(facts)
        self._budget_w = budget_w
        self._ending = threading.Event()
        self.highest_w = 0.0
        self.looks = 0
        self.excess: list[str] = []

    def run(self) -> None:
        while not self._ending.wait(_EVERY_S):
            problem = self._problem()
            for _ in range(_TORN_READS):
                if problem:
                    time.sleep(_EVERY_S)
                    problem = self._problem()
            if problem:
                self.excess.append(problem)
            self.looks += 1

    def end(self) -> None:
        self._ending.set()
        self.join()

    def _problem(self) -> str:
        """What the boards do that is not allowed; empty if nothing."""
        modes = {each: self._fleet.mode(each) for each in self._boards}
        self.highest_w = max(self.highest_w, sum(self._true_w(each, mode) for each, mode in modes.items()))
        self._limits.look()
        allowed_w, training = self._limits.idle_w(), []
        for device_id, mode in modes.items():
            if mode in (OWNERS, parked_mode(self._boards[device_id])):
                continue
            limit_w = self._limits.of(device_id, mode)
            if limit_w is None:
                return f"{device_id} is in the mode {mode.label()}, which no plan gave it"
            allowed_w[device_id] = limit_w
            training.append(f"{device_id} at {mode.label()} within {limit_w:.2f} W")
        total_w = sum(allowed_w.values())
        if training and total_w > self._budget_w + _ROUNDING_W:
            return f"{total_w:.2f} W are allowed of {self._budget_w:.2f} W: {', '.join(training)}"
        return ""

    def _true_w(self, device_id: str, mode: PowerMode) -> float:
        board = self._boards[device_id]
        parked = parked_mode(board)
        if mode in (OWNERS, parked):  # the idle power of the owner's mode is not under Wattfleet's control
            return board.load(parked, self._workload).idle_mw / 1e3
        return float(board.truth(modes_to_array([mode]), self._workload)[1][0]) / 1e3


class Acknowledged:
    """What was acknowledged to Flower's server and its nodes, to compare it with the store.

    Attributes:
        planned: plan ids.
        finished: plan ids.
        observed: plan id and device -> seconds per epoch.
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
        """What is missing from the store, or stored twice.

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
