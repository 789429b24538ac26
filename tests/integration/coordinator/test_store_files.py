"""A store in an SQLite file: which files it creates, what it refuses, and what a kill leaves behind."""

from __future__ import annotations

import shutil
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.state.records import NodeRecord
from coordinator.store.store import Store
from tests.fakes.records_to_store import BLANK, assert_devices
from wattfleet.errors import InvalidInputError


def test_a_new_store_makes_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "var" / "lib" / "wattfleet" / "fleet.db"
    Store(path).close()
    assert path.is_file()


def test_other_users_may_read_neither_a_new_store_nor_one_of_an_earlier_version(tmp_path: Path) -> None:
    def modes() -> dict[str, int]:
        return {each.name: stat.S_IMODE(each.stat().st_mode) for each in (folder, *folder.iterdir())}

    folder = tmp_path / "fleet"
    private = {"fleet": 0o750, "fleet.db": 0o640, "fleet.db.lock": 0o600}
    store = Store(folder / "fleet.db")
    store.save(BLANK)
    assert modes() == {**private, "fleet.db-wal": 0o640, "fleet.db-shm": 0o640}
    store.close()
    (folder / "fleet.db").chmod(0o644)
    Store(folder / "fleet.db").close()
    assert modes() == private


@pytest.mark.parametrize("name", ["what?.db", "50%20W.db", "a #b.db"])
def test_the_file_has_the_name_that_was_given(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / name)
    store.save(BLANK)
    store.close()
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}.lock"}


def test_what_is_saved_survives_a_process_that_is_killed(tmp_path: Path) -> None:
    # The files while the first process still has them open, as a kill would leave them.
    store = Store(tmp_path / "coordinator.db")
    store.save(BLANK)
    store.save(NodeRecord(2**64 - 1, "nano"))
    left = tmp_path / "left"
    left.mkdir()
    for file in tmp_path.glob("coordinator.db*"):
        shutil.copy(file, left)
    store.close()
    after = Store(left / "coordinator.db")
    assert_devices(after.load(), BLANK)
    assert after.load().nodes == {2**64 - 1: "nano"}
    after.close()


def test_writes_go_through_a_log_that_is_synced_at_every_commit(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.db"
    store = Store(path)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    with store._transaction() as connection:  # noqa: SLF001 - each connection has its own setting
        full = 2
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == full
    store.close()


def no_database(path: Path) -> None:
    path.write_bytes(b"cores,cpu_khz\n" * 100)


def a_directory(path: Path) -> None:
    path.mkdir()


def below_a_file(path: Path) -> None:
    path.parent.write_text("")


@pytest.mark.parametrize("made", [no_database, a_directory, below_a_file])
def test_what_is_no_database_is_refused_and_left_alone(tmp_path: Path, made: Callable[[Path], None]) -> None:
    path = tmp_path / "here" / "coordinator.db"
    if made is not below_a_file:
        path.parent.mkdir()
    made(path)
    before = (path.read_bytes(), path.stat().st_mode) if path.is_file() else None
    with pytest.raises(InvalidInputError) as refusal:
        Store(path)
    assert str(refusal.value).startswith(f"{path} cannot be used as the coordinator's store: ")
    assert "\n" not in str(refusal.value)
    assert ((path.read_bytes(), path.stat().st_mode) if path.is_file() else None) == before


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.db"
    path.symlink_to(path)
    with pytest.raises(InvalidInputError, match=r"coordinator\.db cannot be used as the coordinator's store: .*link"):
        Store(path)
