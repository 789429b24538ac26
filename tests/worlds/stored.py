"""What a store holds in a world, and what a coordinator that starts loads of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceOverrides, DeviceRecord, RoundRecord, RunRecord
from coordinator.state.stored_grants import GivenUpTraining, StoredGrants
from tests.worlds.timeline import Action

_NEWEST = 3


@dataclass
class Stored:
    """What a store holds."""

    devices: dict[str, DeviceRecord] = field(default_factory=dict)
    runs: dict[str, RunRecord] = field(default_factory=dict)
    rounds: dict[str, RoundRecord] = field(default_factory=dict)
    overrides: dict[str, DeviceOverrides] = field(default_factory=dict)
    given_ups: dict[str, GivenUpTraining] = field(default_factory=dict)

    @property
    def grants(self) -> StoredGrants:
        """What is known of grants."""
        plans = {each.device_id: each.plan_id for each in self.given_ups.values() if each.plan_id}
        return StoredGrants(given_up=plans)

    def current(self) -> list[RoundRecord]:
        """The rounds that a start loads, oldest first: as `coordinator.store.rounds.current` chooses them."""
        in_flight = {each for each, plan_id in self.grants.given_up.items() if plan_id in self.rounds}
        for record in self.rounds.values():
            if record.wall_s is None and not self.runs[record.run_id].finished:
                in_flight |= record.nodes.keys()
        wanted: list[RoundRecord] = []
        for record in reversed(list(self.rounds.values())):
            if len(wanted) < _NEWEST or not in_flight.isdisjoint(record.nodes):
                wanted.append(record)
            in_flight -= record.nodes.keys()
        return wanted[::-1]


class Writer:
    """Writes what one coordinator saves, in one transaction after another.

    Attributes:
        unsaved: what is not on disk yet, by kind and key.
    """

    def __init__(
        self,
        stored: Stored,
        rng: random.Random,
        after: Callable[[float, Action], None],
        is_failing: Callable[[], bool],
    ) -> None:
        """Write to a store.

        Args:
            stored: what is on disk.
            rng: decides how long a transaction takes.
            after: runs an action after some seconds, unless the coordinator has crashed.
            is_failing: whether nothing can be written now.
        """
        self.unsaved: dict[tuple[str, str], Any] = {}
        self._stored, self._rng, self._after, self._is_failing = stored, rng, after, is_failing
        self._waiting: list[Action] = []
        self._is_writing = False

    def save(self, records: Mapping[tuple[str, str], Any], then: Action | None) -> None:
        """Save some records soon; call `then` once they are on disk."""
        self.unsaved.update(records)
        if then is not None:
            self._waiting.append(then)
        if not self._is_writing:
            self._is_writing = True
            self._after(0.05 * self._rng.random(), self._write)

    def _write(self) -> None:
        if self._is_failing():
            self._after(1.0, self._write)
            return
        self._is_writing = False
        for (kind, key), record in self.unsaved.items():
            getattr(self._stored, f"{kind}s")[key] = record
        self.unsaved.clear()
        done, self._waiting = self._waiting, []
        for each in done:
            each()


def given_up(fleet: Fleet) -> dict[tuple[str, str], GivenUpTraining]:
    """What is stored about trainings that were given up with the next records, by kind and key."""
    unstored = fleet.rounds.grants.unstored.take()
    return {("given_up", each.device_id): each for each in unstored if isinstance(each, GivenUpTraining)}
