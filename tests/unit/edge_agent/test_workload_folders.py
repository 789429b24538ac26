"""Folders of workloads on disk: their files, the migration from earlier versions, and how names are kept apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_agent.devices.device import Provenance
from edge_agent.paths import PREDICTOR_DIRECTORY, PROFILE_FILE, WORKLOAD_FILE
from edge_agent.profiling.journal import Journal, JournalHeader, RoundRecord
from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.profiling.stored_profile import WorkloadFolders, chosen_workload, folder_name, read_profile
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, Workload, WorkloadFacts

MODE = PowerMode(6, 1_510_400, 624_750_000, 2_133_000_000)


def header(workload: str = "resnet18", provenance: Provenance = "hardware") -> JournalHeader:
    return JournalHeader("orin-0", "orin-nano", provenance, workload, 16)


def known(name: str, batch: int | None = 16, length: int | None = None) -> KnownWorkload:
    return KnownWorkload(Workload(name, WorkloadFacts(batch=batch)), length)


def test_workloads_are_found_again_the_most_recently_used_first(tmp_path: Path) -> None:
    folders = WorkloadFolders(tmp_path)
    for name in ("a", "b", "c"):
        folders.prepare(known(name, length=7))
    folders.note(known("a", batch=32, length=9))
    again = WorkloadFolders(tmp_path)
    assert [stored.name for stored in again.stored()] == ["a", "c", "b"]
    assert again.known("a") == known("a", batch=32, length=9)
    again.note(known("b"))
    assert [stored.name for stored in WorkloadFolders(tmp_path).stored()] == ["b", "a", "c"]


@pytest.mark.parametrize("name", ["../../etc", "a/b", "a b", "A" * 200, "...", "net#1f2e3d4c", "\u7db2"])
def test_any_name_has_a_folder_of_its_own_below_the_state_directory(tmp_path: Path, name: str) -> None:
    folder = WorkloadFolders(tmp_path).prepare(known(name))
    assert folder.parent == tmp_path / "workloads" and len(folder.name) < 60
    assert [stored.name for stored in WorkloadFolders(tmp_path).stored()] == [name]


def test_names_that_look_alike_have_folders_of_their_own() -> None:
    assert len({folder_name(name) for name in ("a b", "a/b", "a-b", "a?b")}) == 4


def test_the_state_of_an_earlier_version_becomes_a_workload(tmp_path: Path) -> None:
    with Journal.open(tmp_path / PROFILE_FILE, header()) as journal:
        journal.append(RoundRecord(MODE, 100.0, 9000.0))
    (tmp_path / PREDICTOR_DIRECTORY).mkdir()
    before = (tmp_path / PROFILE_FILE).read_bytes()
    assert chosen_workload(tmp_path).name == "resnet18", "a command may run before the new agent does"
    WorkloadFolders(tmp_path).move_in_earlier(521)
    stored = chosen_workload(tmp_path)
    assert stored.known == known("resnet18", length=521)
    assert (stored.folder / PROFILE_FILE).read_bytes() == before and (stored.folder / PREDICTOR_DIRECTORY).is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["workloads"]


def test_a_virtual_boards_earlier_state_becomes_its_built_in_workload(tmp_path: Path) -> None:
    Journal.open(tmp_path / PROFILE_FILE, header("resnet18-imagenet", "simulated")).close()
    WorkloadFolders(tmp_path).move_in_earlier(None)
    assert chosen_workload(tmp_path).name == "built-in"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "other"}', "[" * 9000])
def test_a_lost_description_is_taken_from_the_journal(tmp_path: Path, content: str) -> None:
    folder = WorkloadFolders(tmp_path).prepare(known("resnet18"))
    Journal.open(folder / PROFILE_FILE, header()).close()
    (folder / WORKLOAD_FILE).write_text(content)
    assert WorkloadFolders(tmp_path).known("resnet18") == known("resnet18")


def test_several_workloads_have_to_be_named(tmp_path: Path) -> None:
    folders = WorkloadFolders(tmp_path)
    folders.prepare(known("a"))
    folders.prepare(known("b"))
    with pytest.raises(InvalidInputError, match="several workloads; pass one as --workload: 'b', 'a'"):
        chosen_workload(tmp_path)
    assert chosen_workload(tmp_path, "a").name == "a"
    with pytest.raises(InvalidInputError, match="no workload 'c'; choose one of 'b', 'a'"):
        chosen_workload(tmp_path, "c")


def test_another_batch_is_another_point_of_the_same_journal(tmp_path: Path) -> None:
    path = tmp_path / PROFILE_FILE
    with Journal.open(path, header()) as journal:
        journal.append(RoundRecord(MODE, 100.0, 9000.0))
        journal.batch = 32
        assert journal.remaining([MODE]) == [MODE]
        journal.append(RoundRecord(MODE, 180.0, 9500.0))
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
    WorkloadFolders(tmp_path).prepare(known("a"))
    assert caplog.messages == []


def test_a_profile_of_before_is_no_second_workload_beside_its_folder(tmp_path: Path) -> None:
    folders = WorkloadFolders(tmp_path)
    folders.prepare(known("resnet18"))
    folders.prepare(known("other"))
    with Journal.open(tmp_path / PROFILE_FILE, header()):
        pass
    found = WorkloadFolders(tmp_path).stored()
    assert [stored.name for stored in found] == ["other", "resnet18"]
    assert found[-1].folder == folders.folder("resnet18")
