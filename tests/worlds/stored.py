"""What a store holds in a world, and what a coordinator that starts loads of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceOverrides, DeviceRecord, RoundRecord, RunRecord
from coordinator.state.stored_grants import GivenUpTraining, StoredGrants

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


def given_up(fleet: Fleet) -> dict[tuple[str, str], GivenUpTraining]:
    """What is stored about trainings that were given up with the next records, by kind and key."""
    unstored = fleet.rounds.grants.unstored.take()
    return {("given_up", each.device_id): each for each in unstored if isinstance(each, GivenUpTraining)}
