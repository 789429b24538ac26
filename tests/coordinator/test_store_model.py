"""Whatever is saved in whatever order, a store holds what a dictionary would."""

from __future__ import annotations

import dataclasses
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.records import (
    DeviceRecord,
    DeviceResult,
    DeviceState,
    NodeRecord,
    ObservedTraining,
    RoundObservation,
    RoundRecord,
    RunRecord,
)
from coordinator.store.store import Store
from tests.coordinator.records_to_store import comparable, comparable_devices, planned_round
from tests.fronts import fronts
from wattfleet.front import Front

PLANNED = planned_round()
devices = st.sampled_from(["orin", "nano"])
runs = st.sampled_from(["1", "2", "3"])
numbers = st.integers(1, 2)


class StoreMachine(RuleBasedStateMachine):
    """A store, and dictionaries of what it has to hold."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.now = datetime(2026, 1, 1, tzinfo=timezone.utc)
        self.store = self.opened()
        self.devices: dict[str, DeviceRecord] = {}
        self.nodes: dict[int, str] = {}
        self.runs: dict[str, RunRecord] = {}
        self.ended: dict[str, datetime] = {}
        self.rounds: dict[str, RoundRecord] = {}

    def opened(self) -> Store:
        return Store(Path(self.folder.name, "coordinator.db"), lambda: self.now)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    @rule(
        device=devices,
        state=st.sampled_from(DeviceState),
        front=st.none() | fronts(),
        keeps_front=st.booleans(),
    )
    def save_device(self, device: str, state: DeviceState, front: Front | None, keeps_front: bool) -> None:
        known = self.devices.get(device)
        if known is not None and keeps_front:
            front = known.front
        self.devices[device] = DeviceRecord(device, "orin-nx", "simulated", 7, state, front=front)
        self.store.save(self.devices[device])

    @rule(node=st.integers(2**64 - 2, 2**64 - 1), device=devices)
    def save_node(self, node: int, device: str) -> None:
        self.nodes[node] = device
        self.store.save(NodeRecord(node, device))

    @rule(run=runs, finished=st.booleans(), error=st.sampled_from(["", "no"]))
    def save_run(self, run: str, finished: bool, error: str) -> None:
        self.runs[run] = RunRecord(run, "FedAvg", 3, {"accuracy": 0.5}, error, finished)
        if finished:
            self.ended.setdefault(run, self.now)
        else:
            self.ended.pop(run, None)
        self.store.save(self.runs[run])

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), number=numbers, wall_s=st.none() | st.floats(0, 9))
    def save_round(self, data: st.DataObject, number: int, wall_s: float | None) -> None:
        run = data.draw(st.sampled_from(sorted(self.runs)))
        plan_id = f"{run}/{number}"
        before = self.rounds.get(plan_id)
        self.rounds[plan_id] = dataclasses.replace(
            PLANNED,
            plan_id=plan_id,
            run_id=run,
            number=number,
            observations={} if before is None else before.observations,
            results=() if wall_s is None else (DeviceResult("orin"),),
            wall_s=wall_s,
        )
        self.store.save(self.rounds[plan_id])

    @precondition(lambda self: self.rounds)
    @rule(data=st.data(), device=devices, watts=st.integers(1, 9))
    def save_observation(self, data: st.DataObject, device: str, watts: int) -> None:
        plan_id = data.draw(st.sampled_from(sorted(self.rounds)))
        observed, before = ObservedTraining(device, 1.0, float(watts)), self.rounds[plan_id]
        self.rounds[plan_id] = dataclasses.replace(before, observations={**before.observations, device: observed})
        self.store.save(RoundObservation(plan_id, observed))

    @rule(days=st.integers(1, 5))
    def pass_days(self, days: int) -> None:
        self.now += timedelta(days=days)

    @rule(days=st.integers(1, 9))
    def forget(self, days: int) -> None:
        old = [run for run in self.runs if run in self.ended and self.now - self.ended[run] > timedelta(days=days)]
        assert self.store.forget(timedelta(days=days)) == old
        for run in old:
            del self.runs[run], self.ended[run]
        self.rounds = {plan_id: record for plan_id, record in self.rounds.items() if record.run_id not in old}

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.opened()

    @invariant()
    def it_holds_what_was_saved(self) -> None:
        if not hasattr(self, "store"):
            return
        kept = self.store.load()
        assert comparable_devices(kept) == {name: comparable(record) for name, record in self.devices.items()}
        assert kept.nodes == self.nodes
        # Dictionaries keep the order in which things began, as the store does.
        assert list(kept.runs) == list(self.runs.values())
        current = {run for run, record in self.runs.items() if not record.finished} | {*[*self.runs][-1:]}
        assert list(kept.rounds) == [record for record in self.rounds.values() if record.run_id in current]
        assert kept.archived == set(self.runs) - current
        for run in self.runs:
            assert self.store.rounds_of(run) == [each for each in self.rounds.values() if each.run_id == run]


StoreMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=20)
TestStoreMachine = StoreMachine.TestCase
