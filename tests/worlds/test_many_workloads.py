"""Many workloads in any order: plans use each workload's own fronts, and devices keep what they have learned.

`WORKLOADS_MINUTES=60 WORKLOADS_DEVICES=100 pytest -s tests/worlds/test_many_workloads.py` is the long form
(`make workloads`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.state import records
from coordinator.state.rounds.grants import Grants
from coordinator.state.workload_fronts import WorkloadFront
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.learning.workloads import Workloads
from edge_agent.profiling.known_workload import KnownWorkload
from tests.fakes.short_forms import first
from tests.worlds.learning_device import LearningDevice
from tests.worlds.many_workloads import ManyWorkloads
from tests.worlds.oracle import BrokenPromiseError
from wattfleet.core.planning import Curves, Headroom, min_makespan
from wattfleet.core.planning.curves import Allocation, Mask

# ruff: noqa: SLF001 - mutants break internals

DEVICES = int(os.environ.get("WORKLOADS_DEVICES", "10"))
MINUTES = float(os.environ.get("WORKLOADS_MINUTES", "6"))


def lived(folder: Path, seed: int = 0, minutes: float = MINUTES) -> ManyWorkloads:
    devices = DEVICES if minutes == MINUTES else 10
    if devices < 100:
        world = ManyWorkloads(seed, folder, devices, workloads=8, servers=4, max_workloads=3)
        world.live(minutes, trouble_every_s=20.0)
    else:
        world = ManyWorkloads(seed, folder, devices, workloads=20, servers=5)
        world.live(minutes, trouble_every_s=5.0)
    return world


@pytest.mark.timeout(120 + 100 * MINUTES)
def test_devices_learn_any_workloads_and_plans_use_them(tmp_path: Path) -> None:
    counts = lived(tmp_path).counts
    print("\n" + "\n".join(f"{what}: {count:,}" for what, count in sorted(counts.items())))
    for what in ("trainings", "measured modes", "workloads removed", "plans tried by brute force"):
        assert counts[what] > 5, f"a world of {counts[what]} {what} shows nothing"


def an_observation_is_written_to_the_journal_of_another_workload(patch: pytest.MonkeyPatch) -> None:
    find, observe = Workloads.learner, OnlineLearner.observe
    others: dict[int, OnlineLearner] = {}

    def learner(self: Workloads, name: str) -> OnlineLearner:
        found = find(self, name)
        others[id(found)] = next((each for each in self.opened if each is not found), found)
        return found

    patch.setattr(Workloads, "learner", learner)
    patch.setattr(OnlineLearner, "observe", lambda self, observed: observe(others[id(self)], observed))


def another_batch_is_written_as_the_one_before(patch: pytest.MonkeyPatch) -> None:
    def take_known(self: OnlineLearner, known: KnownWorkload) -> None:
        self.known = known
        self._note(known)

    patch.setattr(OnlineLearner, "_take_known", take_known)


def a_plan_takes_the_front_that_was_reported_last(patch: pytest.MonkeyPatch) -> None:
    def latest(fronts: tuple[WorkloadFront, ...], workload: str) -> WorkloadFront | None:
        return fronts[-1] if fronts else None

    patch.setattr(records, "front_for", latest)


def a_removal_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LearningDevice, "_report_removed", lambda self, workload: None)


def nothing_is_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Workloads, "_remove_least_used", lambda self, opened: None)


def a_plan_has_a_device_less_than_is_possible(patch: pytest.MonkeyPatch) -> None:
    most = min_makespan

    def fewer(curves: Curves, headroom: Headroom, count: int, *masks: Mask) -> Allocation | None:
        return most(curves, headroom, max(1, count - 1), *masks)

    patch.setattr("wattfleet.core.planning.plan.min_makespan", fewer)


def a_device_in_a_round_counts_as_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Grants, "may_train", lambda self, device_id: False)


def a_larger_batch_is_trained_in_the_granted_mode(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OnlineLearner, "mode_within", lambda self, mode, power_limit_w: mode)


# Each with the invariant that it breaks.
MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    an_observation_is_written_to_the_journal_of_another_workload: "journal",
    another_batch_is_written_as_the_one_before: "journal",
    a_plan_takes_the_front_that_was_reported_last: "own front",
    a_removal_is_not_told: "removal told",
    nothing_is_removed: "bounded",
    a_plan_has_a_device_less_than_is_possible: "best plan",
    a_device_in_a_round_counts_as_free: "one round",
    a_larger_batch_is_trained_in_the_granted_mode: "counted",
}


@pytest.mark.parametrize("mutate", first(3, MUTANTS))
def test_a_world_finds_a_mistake(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mutate(monkeypatch)
    with pytest.raises(BrokenPromiseError) as broken:
        lived(tmp_path, minutes=8.0)
    assert broken.value.promise == MUTANTS[mutate]
