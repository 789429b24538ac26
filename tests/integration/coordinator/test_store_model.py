"""For random sequences of saves, a store holds the same as a dictionary."""

from __future__ import annotations

import dataclasses
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.state.records import (
    DeviceRecord,
    DeviceResult,
    NodeRecord,
    ObservedTraining,
    RoundObservation,
    RoundRecord,
    RunRecord,
)
from coordinator.state.workload_fronts import WorkloadFront
from coordinator.store.store import Store
from tests.fakes.records_to_store import comparable, comparable_devices, old_runs_deleted, planned_round, rounds_of
from tests.fakes.workload_fronts import known_fronts
from wattfleet_proto.device_state import DeviceState

PLANNED = dataclasses.replace(planned_round(), plan=dataclasses.replace(planned_round().plan, assignments=()))
devices = st.sampled_from(["orin", "nano"])
runs = st.sampled_from(["1", "2", "3"])
numbers = st.integers(1, 2)


class StoreMachine(RuleBasedStateMachine):
    """A store, and dictionaries of its expected content."""

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
        self.started: dict[str, datetime] = {}
        self.planned: dict[str, datetime] = {}
        self.finished: dict[str, datetime] = {}

    def opened(self) -> Store:
        return Store(Path(self.folder.name, "coordinator.db"), lambda: self.now)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    @rule(
        device=devices,
        state=st.sampled_from(DeviceState),
        fronts=known_fronts(2),
        keeps_front=st.booleans(),
    )
    def save_device(
        self, device: str, state: DeviceState, fronts: tuple[WorkloadFront, ...], keeps_front: bool
    ) -> None:
        known = self.devices.get(device)
        if known is not None and keeps_front:
            fronts = known.fronts
        self.devices[device] = DeviceRecord(device, "orin-nx", "simulated", 7, state, fronts=fronts)
        self.store.save(self.devices[device])

    @rule(node=st.integers(2**64 - 2, 2**64 - 1), device=devices)
    def save_node(self, node: int, device: str) -> None:
        self.nodes[node] = device
        self.store.save(NodeRecord(node, device))

    @rule(run=runs, finished=st.booleans(), error=st.sampled_from(["", "no"]))
    def save_run(self, run: str, finished: bool, error: str) -> None:
        self.runs[run] = RunRecord(run, "FedAvg", 3, {"accuracy": 0.5}, error, finished)
        self.started.setdefault(run, self.now)
        if finished:
            self.ended.setdefault(run, self.now)
        else:
            self.ended.pop(run, None)
        self.store.save(self.runs[run])

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), number=numbers, chosen=st.sets(devices), wall_s=st.none() | st.floats(0, 9))
    def save_round(self, data: st.DataObject, number: int, chosen: set[str], wall_s: float | None) -> None:
        run = data.draw(st.sampled_from(sorted(self.runs)))
        plan_id = f"{run}/{number}"
        before = self.rounds.get(plan_id)
        self.rounds[plan_id] = dataclasses.replace(
            PLANNED,
            plan_id=plan_id,
            run_id=run,
            number=number,
            nodes={device: 1 for device in sorted(chosen)},
            observations={} if before is None else before.observations,
            results=() if wall_s is None else (DeviceResult("orin"),),
            wall_s=wall_s,
        )
        self.planned.setdefault(plan_id, self.now)
        if wall_s is None:
            self.finished.pop(plan_id, None)
        else:
            self.finished.setdefault(plan_id, self.now)
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
        old = [run for run in self.runs if self.now - self.touched(run) > timedelta(days=days)]
        assert old_runs_deleted(self.store, timedelta(days=days)) == old
        for run in old:
            del self.runs[run], self.started[run]
            self.ended.pop(run, None)
        for plan_id in [plan_id for plan_id, record in self.rounds.items() if record.run_id in old]:
            del self.rounds[plan_id], self.planned[plan_id]
            self.finished.pop(plan_id, None)

    def touched(self, run: str) -> datetime:
        """When a run ended, or was last active."""
        times = [self.finished.get(each, at) for each, at in self.planned.items() if self.rounds[each].run_id == run]
        return self.ended.get(run) or max(times, default=self.started[run])

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
        # Dictionaries keep the order in which runs and rounds began, as the store does.
        assert list(kept.runs) == list(self.runs.values())
        assert list(kept.rounds) == self.gone_on_with()
        assert kept.archived == set(self.runs)
        for run in self.runs:
            assert rounds_of(self.store, run) == [each for each in self.rounds.values() if each.run_id == run]

    def gone_on_with(self) -> list[RoundRecord]:
        """The newest rounds, and for every device in an unfinished round, the newest round that chose it."""
        newest_of = {device: record.plan_id for record in self.rounds.values() for device in record.nodes}
        waited_for = {
            device
            for record in self.rounds.values()
            if record.wall_s is None and not self.runs[record.run_id].finished
            for device in record.nodes
        }
        wanted = {*list(self.rounds)[-3:], *(newest_of[device] for device in waited_for)}
        return [record for plan_id, record in self.rounds.items() if plan_id in wanted]


StoreMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=20)
TestStoreMachine = StoreMachine.TestCase
