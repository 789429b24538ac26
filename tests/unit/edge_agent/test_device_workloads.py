"""The workloads of a device: which are kept, what is known about each, and their folders on disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.learning.workloads import Workloads
from edge_agent.paths import PROFILE_FILE, WORKLOAD_FILE
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.profiling.stored_profile import WorkloadFolders, chosen_workload, folder_name, read_profile
from edge_agent.settings import WorkloadSettings
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    ASSUMED_MINIBATCHES_PER_EPOCH,
    BatchOptions,
    JournalHeader,
    JournalledRound,
    PowerMode,
    Provenance,
    Workload,
    WorkloadFacts,
)
from wattfleet_proto.limits import MAX_MINIBATCHES_PER_EPOCH

# --- Device workloads -------------------------------------------------------------------------------------------------
# The workloads of a device: opened concurrently, kept while in use, and removed in order of last use.


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


# --- Known workload ---------------------------------------------------------------------------------------------------
# An agent's knowledge of a workload whose batch size a plan may choose.

# To reach the same accuracy, a batch size of 64 needs twice as many samples as one of 16.
OPTIONS = BatchOptions((16, 32, 64), (0.5, 0.75, 1.0))


def known(batch: int | None = 16, length: int | None = 200, options: BatchOptions | None = OPTIONS) -> KnownWorkload:
    return KnownWorkload(Workload("app", WorkloadFacts(batch=batch), options), length)


# --- minibatches of an epoch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "minibatches"), [(16, 200.0), (32, 150.0), (64, 100.0)])
def test_an_epoch_has_other_minibatches_with_another_batch(batch: int, minibatches: float) -> None:
    assert known().minibatches_of(batch) == pytest.approx(minibatches)
    trained = known().with_batch(batch)
    assert (trained.workload.facts.batch, trained.minibatches_per_epoch) == (batch, minibatches)
    assert trained.counted_minibatches == minibatches


@pytest.mark.parametrize(
    ("workload", "reported"),
    [
        (known(), 100),
        (known(32, 150), 100),
        (known(64, 100), 100),
        (known(length=None), None),
        (known(options=None), 200),
        (known(batch=48), 200),
        (known(batch=None), 200),
        (known(length=1), 1),
    ],
    ids=["16", "32", "64", "unknown length", "no options", "another batch", "unknown batch", "one minibatch"],
)
def test_the_coordinator_is_told_the_minibatches_of_the_largest_batch(
    workload: KnownWorkload, reported: int | None
) -> None:
    assert workload.reported_minibatches == reported


@pytest.mark.parametrize("trained", OPTIONS.batches)
def test_the_assumed_length_is_that_of_the_largest_batch(trained: int) -> None:
    unknown = known(batch=trained, length=None)
    assert unknown.minibatches_of(64) == pytest.approx(ASSUMED_MINIBATCHES_PER_EPOCH)
    assert unknown.minibatches_of(16) == pytest.approx(2 * ASSUMED_MINIBATCHES_PER_EPOCH)
    assert unknown.counted_minibatches == round(unknown.minibatches_of(trained))
    assert unknown.reported_minibatches is None and unknown.with_batch(32).minibatches_per_epoch is None


def test_without_a_choice_the_assumed_length_is_that_of_the_apps_batch() -> None:
    assert known(length=None, options=None).counted_minibatches == ASSUMED_MINIBATCHES_PER_EPOCH
    assert known(batch=48, length=None).counted_minibatches == ASSUMED_MINIBATCHES_PER_EPOCH


def test_an_epoch_of_another_batch_stays_within_what_can_be_counted() -> None:
    assert known(64, 1).with_batch(16).minibatches_per_epoch == 2
    assert known(16, 1).with_batch(64).minibatches_per_epoch == 1
    most = known(64, MAX_MINIBATCHES_PER_EPOCH)
    assert most.with_batch(16).minibatches_per_epoch == MAX_MINIBATCHES_PER_EPOCH


# --- memory -------------------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_leaves_the_smaller_ones() -> None:
    after = known(64, 100).out_of_memory()
    assert after.too_large_batch == 64
    assert after.offered_batches == (16, 32)
    assert (after.workload.facts.batch, after.minibatches_per_epoch) == (32, 150), "the largest that is left"
    assert after.reported_minibatches == 100, "as other devices count"


def test_batches_that_do_not_fit_one_after_the_other_leave_none() -> None:
    after = known(64, 100).out_of_memory().out_of_memory()
    assert after.offered_batches == (16,)
    assert (after.too_large_batch, after.workload.facts.batch) == (32, 16)
    none = after.out_of_memory()
    assert (none.offered_batches, none.too_large_batch, none.workload.facts.batch) == ((), 16, 16)
    assert none.out_of_memory() == none


def test_a_batch_above_one_that_does_not_fit_is_not_offered_when_options_come_again() -> None:
    after = known(32, 150).out_of_memory()
    assert after.with_batches(OPTIONS).offered_batches == (16,)
    assert after.with_batches(BatchOptions((32, 64), (1.0, 1.0))).offered_batches == ()
    assert after.with_batches(None).offered_batches == ()
    assert known().with_batches(OPTIONS) == known()


@pytest.mark.parametrize("workload", [known(options=None), known(batch=48), known(batch=None)])
def test_an_app_that_lets_no_plan_choose_keeps_its_batch(workload: KnownWorkload) -> None:
    assert workload.out_of_memory() == workload


@given(
    st.dictionaries(st.integers(1, 512), st.floats(0.1, 10), min_size=1, max_size=16),
    st.lists(st.integers(0, 15), max_size=20),
)
def test_after_any_failures_only_smaller_batches_are_trained(samples: dict[int, float], chosen: list[int]) -> None:
    options = BatchOptions.of(samples)
    state = known(batch=options.batches[0], length=1_000, options=options)
    failed: set[int] = set()
    for number in chosen:
        left = state.offered_batches
        if not left:
            break
        batch = left[number % len(left)]
        failed.add(batch)
        state = state.with_batch(batch).out_of_memory()
        assert state.offered_batches == tuple(each for each in options.batches if each < min(failed))


# --- stored -------------------------------------------------------------------------------------------------------


def through_json(workload: KnownWorkload) -> KnownWorkload:
    return KnownWorkload.from_content(json.loads(json.dumps(workload.content())))


def test_what_was_learned_survives_a_restart_without_the_options_of_the_run() -> None:
    """The coordinator sends the options again, but only the device knows that a batch size does not fit."""
    after = known(64, 100).out_of_memory()
    restarted = through_json(after)
    assert restarted == after.with_batches(None)
    assert restarted.with_batches(OPTIONS) == after


@pytest.mark.parametrize("damaged", ["64", 64.0, True, [64]])
def test_a_damaged_batch_is_refused(damaged: object) -> None:
    with pytest.raises(TypeError, match="too_large_batch is not a whole number"):
        KnownWorkload.from_content({**known().content(), "too_large_batch": damaged})


@pytest.mark.parametrize("length", [0, -1, MAX_MINIBATCHES_PER_EPOCH + 1])
def test_a_length_out_of_range_is_refused(length: int) -> None:
    with pytest.raises(InvalidInputError, match="minibatches_per_epoch must be 1 to"):
        replace(known(), minibatches_per_epoch=length)


# --- Workload folders -------------------------------------------------------------------------------------------------
# Folders of workloads on disk: their files, and how names are kept apart.

MODE = PowerMode(6, 1_510_400, 624_750_000, 2_133_000_000)


def header(workload: str = "resnet18", provenance: Provenance = "hardware") -> JournalHeader:
    return JournalHeader("orin-0", "orin-nano", provenance, workload, 16)


def known_named(name: str, batch: int | None = 16, length: int | None = None) -> KnownWorkload:
    return KnownWorkload(Workload(name, WorkloadFacts(batch=batch)), length)


def test_workloads_are_found_again_the_most_recently_used_first(tmp_path: Path) -> None:
    folders = WorkloadFolders(tmp_path)
    for name in ("a", "b", "c"):
        folders.prepare(known_named(name, length=7))
    folders.note(known_named("a", batch=32, length=9))
    again = WorkloadFolders(tmp_path)
    assert [stored.name for stored in again.stored()] == ["a", "c", "b"]
    assert again.known("a") == known_named("a", batch=32, length=9)
    again.note(known_named("b"))
    assert [stored.name for stored in WorkloadFolders(tmp_path).stored()] == ["b", "a", "c"]


@pytest.mark.parametrize("name", ["../../etc", "a/b", "a b", "A" * 200, "...", "net#1f2e3d4c", "\u7db2"])
def test_any_name_has_a_folder_of_its_own_below_the_state_directory(tmp_path: Path, name: str) -> None:
    folder = WorkloadFolders(tmp_path).prepare(known_named(name))
    assert folder.parent == tmp_path / "workloads" and len(folder.name) < 60
    assert [stored.name for stored in WorkloadFolders(tmp_path).stored()] == [name]


def test_names_that_look_alike_have_folders_of_their_own() -> None:
    assert len({folder_name(name) for name in ("a b", "a/b", "a-b", "a?b")}) == 4


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "other"}', "[" * 9000])
def test_a_lost_description_is_taken_from_the_journal(tmp_path: Path, content: str) -> None:
    folder = WorkloadFolders(tmp_path).prepare(known_named("resnet18"))
    Journal.open(folder / PROFILE_FILE, header()).close()
    (folder / WORKLOAD_FILE).write_text(content)
    assert WorkloadFolders(tmp_path).known("resnet18") == known_named("resnet18")


def test_several_workloads_have_to_be_named(tmp_path: Path) -> None:
    folders = WorkloadFolders(tmp_path)
    folders.prepare(known_named("a"))
    folders.prepare(known_named("b"))
    with pytest.raises(InvalidInputError, match="several workloads; pass one as --workload: 'b', 'a'"):
        chosen_workload(tmp_path)
    assert chosen_workload(tmp_path, "a").name == "a"
    with pytest.raises(InvalidInputError, match="no workload 'c'; choose one of 'b', 'a'"):
        chosen_workload(tmp_path, "c")


def test_a_workload_of_which_nothing_is_measured_is_not_chosen(tmp_path: Path) -> None:
    folders = WorkloadFolders(tmp_path)
    for name in ("measured", "failed"):
        folders.prepare(known_named(name))
    (chosen_workload(tmp_path, "measured").folder / "predictor").mkdir()
    assert chosen_workload(tmp_path).name == "measured"
    (chosen_workload(tmp_path, "failed").folder / "predictor").mkdir()
    with pytest.raises(InvalidInputError, match="several workloads"):
        chosen_workload(tmp_path)


def test_another_batch_is_another_point_of_the_same_journal(tmp_path: Path) -> None:
    path = tmp_path / PROFILE_FILE
    with Journal.open(path, header()) as journal:
        journal.append(JournalledRound(MODE, 100.0, 9000.0))
        journal.batch = 32
        assert journal.remaining([MODE]) == [MODE]
        journal.append(JournalledRound(MODE, 180.0, 9500.0))
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [line.get("batch") for line in lines] == [None, 32]
    with Journal.open(path, header("another name")) as again:
        again.batch = 32
        assert [(row.batch, row.minibatch_ms) for row in again.measurements] == [(16, 100.0), (32, 180.0)]
    profile = read_profile(tmp_path, 32)
    assert profile is not None and profile.batch == 32 and profile.profile.batches == (16, 32)


def test_a_new_workload_is_not_reported_as_one_without_a_description(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    WorkloadFolders(tmp_path).prepare(known_named("a"))
    assert caplog.messages == []


def test_a_profile_of_before_is_no_second_workload_beside_its_folder(tmp_path: Path) -> None:
    folders = WorkloadFolders(tmp_path)
    folders.prepare(known_named("resnet18"))
    folders.prepare(known_named("other"))
    with Journal.open(tmp_path / PROFILE_FILE, header()):
        pass
    found = WorkloadFolders(tmp_path).stored()
    assert [stored.name for stored in found] == ["other", "resnet18"]
    assert found[-1].folder == folders.folder("resnet18")
