"""The workloads of a device: opened concurrently, kept while in use, and removed in order of last use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edge_agent.learning.workloads import Workloads
from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.profiling.stored_profile import WorkloadFolders
from edge_agent.settings import WorkloadSettings
from wattfleet.modes import Workload

WITHIN_S = 60.0


class Learner:
    """A learner that does not learn."""

    profiled_modes = 7

    def __init__(self, known: KnownWorkload) -> None:
        self.known = known
        self.is_closed = False

    def announced(self, workload: Workload) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@contextmanager
def workloads_of(
    folder: Path,
    max_workloads: int = 3,
    fit: Callable[[str], object] = lambda name: None,
    opened: Callable[[Learner], object] = lambda learner: None,
) -> Iterator[tuple[Workloads, list[str]]]:
    """Yield workloads and the names of removed ones. `fit` is called for each fit, `opened` with each learner."""
    removed: list[str] = []

    def open_learner(known: KnownWorkload, folder: Path) -> Any:
        fit(known.workload.name)
        learner = Learner(known)
        opened(learner)
        return learner

    default = KnownWorkload(Workload("default"))
    settings = WorkloadSettings(max_workloads=max_workloads)
    workloads = Workloads(WorkloadFolders(folder), default, open_learner, removed.append, settings)
    try:
        yield workloads, removed
    finally:
        workloads.close()


class SlowFit:
    """A fit that, for one workload, lasts until `may_end` is set."""

    def __init__(self, slow: str) -> None:
        self._slow = slow
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        if name == self._slow:
            self.has_begun.set()
            assert self.may_end.wait(WITHIN_S)


def stored(folder: Path) -> list[str]:
    return [each.name for each in WorkloadFolders(folder).stored()]


def test_nothing_waits_for_the_fit_of_another_workload(tmp_path: Path) -> None:
    fit = SlowFit("slow")
    with workloads_of(tmp_path, fit=fit) as (workloads, _), ThreadPoolExecutor(2) as beside:
        trained = workloads.learner("trained")
        workloads.trains(trained)
        slow = beside.submit(workloads.announced, Workload("slow"))
        assert fit.has_begun.wait(WITHIN_S)
        try:
            # In another thread, so that the test fails instead of waiting forever.
            seen = beside.submit(lambda: (workloads.latest, workloads.profiled_modes, workloads.learner("other")))
            latest, profiled_modes, other = seen.result(WITHIN_S)
        finally:
            fit.may_end.set()
        assert latest is trained and profiled_modes == 7
        assert slow.result(WITHIN_S).known.workload.name == "slow" and other.known.workload.name == "other"


def test_a_workload_is_opened_once_for_all_who_ask_at_the_same_time(tmp_path: Path) -> None:
    fit = SlowFit("asked")
    with workloads_of(tmp_path, fit=fit) as (workloads, _), ThreadPoolExecutor(2) as beside:
        asking = [beside.submit(workloads.learner, "asked") for _ in range(2)]
        assert fit.has_begun.wait(WITHIN_S)
        fit.may_end.set()
        first, second = (each.result(WITHIN_S) for each in asking)
    assert first is second


def test_a_workload_that_is_opened_while_all_are_closed_is_closed_too(tmp_path: Path) -> None:
    fit = SlowFit("late")
    opened: list[Learner] = []
    with workloads_of(tmp_path, fit=fit, opened=opened.append) as (workloads, _), ThreadPoolExecutor(1) as beside:
        late = beside.submit(workloads.learner, "late")
        assert fit.has_begun.wait(WITHIN_S)
        workloads.close()
        fit.may_end.set()
        with pytest.raises(StoppedError):
            late.result(WITHIN_S)
    assert opened[0].is_closed


def test_workloads_of_live_runs_are_never_removed(tmp_path: Path) -> None:
    live = [Workload(name) for name in ("a", "b", "c", "d")]
    with workloads_of(tmp_path, max_workloads=3) as (workloads, removed):
        workloads.live(live)
        for each in live:
            workloads.announced(each)
        assert removed == [] and set(stored(tmp_path)) == {"a", "b", "c", "d"}
        workloads.live([Workload("d")])
        workloads.announced(Workload("e"))
        assert removed == ["a", "b"] and set(stored(tmp_path)) == {"c", "d", "e"}


def test_a_repeated_announcement_counts_as_a_use(tmp_path: Path) -> None:
    with workloads_of(tmp_path, max_workloads=3) as (workloads, removed):
        for name in ("a", "b", "c", "a", "d"):
            workloads.announced(Workload(name))
        assert removed == [], "the live runs are not known yet"
        workloads.live([Workload("a"), Workload("d")])
        workloads.announced(Workload("e"))
        assert removed == ["b", "c"]


def test_a_workload_that_is_being_opened_is_not_removed(tmp_path: Path) -> None:
    fit = SlowFit("slow")
    with workloads_of(tmp_path, max_workloads=3, fit=fit) as (workloads, removed), ThreadPoolExecutor(2) as beside:
        workloads.live([])
        slow = beside.submit(workloads.learner, "slow")
        assert fit.has_begun.wait(WITHIN_S)
        try:
            for name in ("a", "b", "c"):
                beside.submit(workloads.learner, name).result(WITHIN_S)
        finally:
            fit.may_end.set()
        slow.result(WITHIN_S)
        assert "slow" in stored(tmp_path) and "slow" not in removed
