"""The store of a world: its contents, what a starting coordinator loads from it, and how it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.state.fleet import Fleet
from coordinator.state.records import (
    DeviceOverrides,
    DeviceRecord,
    GivenUpTraining,
    RoundRecord,
    RunRecord,
    StoredGrants,
)
from tests.worlds.timeline import Action

if TYPE_CHECKING:
    from tests.worlds.world import World

Later = Callable[[float, Action], None]
"""Runs an action after some seconds, unless the coordinator has crashed by then."""

_NEWEST = 3


@dataclass
class Stored:
    """The contents of a store.

    Attributes:
        fails_until_s: writes fail before this time.
    """

    devices: dict[str, DeviceRecord] = field(default_factory=dict)
    runs: dict[str, RunRecord] = field(default_factory=dict)
    rounds: dict[str, RoundRecord] = field(default_factory=dict)
    overrides: dict[str, DeviceOverrides] = field(default_factory=dict)
    given_ups: dict[str, GivenUpTraining] = field(default_factory=dict)
    fails_until_s: float = 0.0

    @property
    def grants(self) -> StoredGrants:
        """The stored grants."""
        return StoredGrants(given_up={each.device_id: each for each in self.given_ups.values() if each.plan_id})

    def current(self) -> list[RoundRecord]:
        """The rounds that are loaded at a start, oldest first, chosen as `coordinator.store.store.current` does."""
        in_flight = {each.device_id for each in self.grants.given_up.values() if each.plan_id in self.rounds}
        for record in self.rounds.values():
            if record.wall_s is None and not self.runs[record.run_id].finished:
                in_flight |= record.nodes.keys()
        wanted: list[RoundRecord] = []
        for record in reversed(list(self.rounds.values())):
            if len(wanted) < _NEWEST or not in_flight.isdisjoint(record.nodes):
                wanted.append(record)
            in_flight -= record.nodes.keys()
        return wanted[::-1]


class Repository:
    """One coordinator's access to its store, like `FleetRepository`: records are written in the background.

    Attributes:
        unsaved: the records that a crash would lose now, by kind and key.
    """

    def __init__(self, world: World, fleet: Fleet, stored: Stored, later: Later) -> None:
        self._world, self._fleet, self._stored, self._later = world, fleet, stored, later
        self.unsaved: dict[tuple[str, str], Any] = {}
        self._saving: list[Action] = []
        self._is_writing = False

    def save(self, kind: str, key: str, record: Any, then: Action | None = None) -> None:
        """Save a record in the background; call `then` once it is on disk."""
        assert self._world.coordinator.fleet is self._fleet, "a coordinator that is down saves nothing"
        self.unsaved[kind, key] = record
        self.save_grants(then)

    def save_grants(self, then: Action | None = None) -> None:
        """Save what has to be stored about grants, with all that is unsaved."""
        for each in self._fleet.rounds.grants.unstored.take():
            if isinstance(each, GivenUpTraining):
                self.unsaved["given_up", each.device_id] = each
        if then is not None:
            self._saving.append(then)
        if not self._is_writing:
            self._is_writing = True
            self._later(0.05 * self._world.rng.random(), self._write)

    def save_round(self, plan_id: str, then: Action | None = None) -> None:
        """Save the current state of a round."""
        self.save("round", plan_id, self._fleet.rounds.records[plan_id], then)

    def is_known(self, plan_id: str) -> bool:
        """Whether a round exists; one that was not loaded at the start is loaded."""
        if plan_id in self._stored.rounds:
            self._fleet.rounds.cache.restore(self._stored.rounds[plan_id])
        return plan_id in self._fleet.rounds.records

    def _write(self) -> None:
        if self._world.timeline.now_s < self._stored.fails_until_s:
            self._later(1.0, self._write)
            return
        self._is_writing = False
        for (kind, key), record in self.unsaved.items():
            getattr(self._stored, f"{kind}s")[key] = record
        self.unsaved.clear()
        done, self._saving = self._saving, []
        for each in done:
            each()
