"""`wattfleet coordinator store`: checks, backups and restores of a store, with and without a running coordinator."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from coordinator.store import checksums
from coordinator.store.restoring import Restoration
from coordinator.store.store import Store
from tests.fakes.full_store import everything_in, fill, served_by
from tests.fakes.records_to_store import BLANK
from wattfleet.errors import WattfleetError
from wattfleet_io import cli

_WRITES_FOR_S = 30.0


def store(*arguments: str | Path) -> str:
    """The output of a command, which has to succeed."""
    result: Result = CliRunner().invoke(cli.wattfleet, ["coordinator", "store", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


def refused(*arguments: str | Path) -> str:
    """The output of a command that fails: one line."""
    with pytest.raises(WattfleetError) as refusal:
        store(*arguments)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "coordinator.db"
    fill(path)
    return path


def damage(path: Path) -> None:
    """Change a device's name directly in the file, as a faulty disk may."""
    content = path.read_bytes()
    assert b"nano-7" in content
    path.write_bytes(content.replace(b"nano-7", b"nano-X"))


def test_check_counts_the_rows_of_an_undamaged_store(path: Path) -> None:
    said = store("check", "--store", path)
    assert "device: 12 rows" in said and said.endswith(f"{path} is undamaged\n")


def test_check_and_backup_refuse_a_damaged_store(path: Path, tmp_path: Path) -> None:
    damage(path)
    for command in (("check",), ("backup", tmp_path / "copy.db")):
        said = refused(*command, "--store", path)
        assert said.startswith(f"{path} cannot be used as the coordinator's store: it is damaged")
        assert said.endswith(f"restore a backup with `wattfleet coordinator store restore BACKUP --store {path}`")
    assert not list(tmp_path.glob("*copy*"))


def test_a_backup_beside_a_coordinator_has_all_that_was_stored(path: Path, tmp_path: Path) -> None:
    with closing(Store(path)) as running:
        running.save(BLANK)
        store("check", "--store", path)
        store("backup", tmp_path / "copy.db", "--store", path)
        right = served_by(running)
        running.save(replace(BLANK, detail="later"))
        assert everything_in(tmp_path / "copy.db") == right


def test_a_backup_ends_while_others_write_all_the_time(path: Path, tmp_path: Path) -> None:
    ended, writes = threading.Event(), 0
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE filler (content)")
        connection.executemany("INSERT INTO filler VALUES (?)", [(bytes(2**20),)] * 24)
        connection.execute("DROP TABLE filler")  # its pages stay in the file

    def write() -> None:
        nonlocal writes
        until_s = time.monotonic() + _WRITES_FOR_S
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            checksums.prepare(connection)
            connection.execute("PRAGMA journal_mode=WAL")  # as a coordinator does
            connection.execute("PRAGMA synchronous=OFF")
            while not ended.is_set() and time.monotonic() < until_s:
                connection.execute("UPDATE device SET detail = ?", (f"row {writes}",))
                writes += 1

    writing = threading.Thread(target=write)
    writing.start()
    try:
        store("backup", tmp_path / "copy.db", "--store", path)
        assert writing.is_alive(), "it ended before the writes did"
    finally:
        ended.set()
        writing.join()
    assert writes and "device: 12 rows" in store("check", "--store", tmp_path / "copy.db")


def test_a_backup_does_not_replace_a_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.db").write_text("mine")
    assert refused("backup", tmp_path / "copy.db", "--store", path).endswith("choose another name, or remove it first")
    assert (tmp_path / "copy.db").read_text() == "mine"


def test_a_restored_store_serves_what_was_backed_up_and_the_old_file_is_kept(path: Path, tmp_path: Path) -> None:
    backup = tmp_path / "copy.db"
    store("backup", backup, "--store", path)
    right = everything_in(path)
    damage(path)
    damaged = path.read_bytes()
    path.with_name("coordinator.db-wal").write_bytes(b"left by a kill")
    said = store("restore", backup, "--store", path)
    assert f"{path} was kept as {path}.replaced-1" in said
    assert path.with_name("coordinator.db.replaced-1").read_bytes() == damaged
    assert path.with_name("coordinator.db.replaced-1-wal").read_bytes() == b"left by a kill"
    assert everything_in(path) == right


class Killed(BaseException):
    """Represents SIGKILL."""


def killed_before(monkeypatch: pytest.MonkeyPatch, step: int) -> list[tuple[str, str]]:
    """Make the process die after `step` changes of the folder; returns the names of these changes and their targets."""
    made: list[tuple[str, str]] = []

    def dying(name: str) -> None:
        change = getattr(os, name)

        def changed(*arguments: Any, **options: Any) -> Any:
            if len(made) == step:
                raise Killed
            made.append((name, str(arguments[-1])))
            return change(*arguments, **options)

        monkeypatch.setattr(os, name, changed)

    for name in ("link", "replace", "unlink"):
        dying(name)
    return made


def restore(backup: Path, path: Path) -> None:
    with Restoration(backup, path) as restoration:
        restoration.put_in_place()


@pytest.mark.parametrize("step", range(12))
def test_a_restore_that_is_killed_leaves_the_old_or_the_new_store(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    backup, folder = tmp_path / "copy.db", tmp_path / "killed"
    store("backup", backup, "--store", path)
    new = everything_in(path)
    folder.mkdir()
    with closing(Store(path)) as writing:
        writing.save(BLANK)  # it is only in the write-ahead log
        assert path.with_name("coordinator.db-wal").stat().st_size
        for each in tmp_path.glob("coordinator.db*"):
            shutil.copy(each, folder / each.name)
    old = everything_in(path)
    assert old != new
    with monkeypatch.context() as patched:
        made = killed_before(patched, step)
        with suppress(Killed):
            restore(backup, folder / path.name)
    is_restored = ("replace", str(folder / path.name)) in made
    assert everything_in(folder / path.name) == (new if is_restored else old)
    restore(backup, folder / path.name)
    assert everything_in(folder / path.name) == new


def test_a_backup_can_be_restored_where_no_store_is(path: Path, tmp_path: Path) -> None:
    store("backup", tmp_path / "copy.db", "--store", path)
    store("restore", tmp_path / "copy.db", "--store", tmp_path / "new.db")
    assert everything_in(tmp_path / "new.db") == everything_in(path)


def test_nothing_is_restored_while_a_coordinator_uses_the_store(path: Path, tmp_path: Path) -> None:
    store("backup", tmp_path / "copy.db", "--store", path)
    with closing(Store(path)) as running:
        running.save(BLANK)
        assert "stop it before you restore a backup" in refused("restore", tmp_path / "copy.db", "--store", path)
        assert len(running.load().devices) == 13


def test_what_is_no_good_backup_is_not_restored(path: Path, tmp_path: Path) -> None:
    right = everything_in(path)
    bad = tmp_path / "copy.db"
    assert f"{bad} is not a file" in refused("restore", bad, "--store", path)
    bad.write_text("cores,cpu_khz\n" * 100)
    assert f"{bad} cannot be used" in refused("restore", bad, "--store", path)
    sqlite3.connect(bad.with_name("empty.db")).close()
    assert "has no tables" in refused("restore", bad.with_name("empty.db"), "--store", path)
    bad.unlink()
    store("backup", bad, "--store", path)
    damage(bad)
    assert "it is damaged" in refused("restore", bad, "--store", path)
    assert everything_in(path) == right


@pytest.mark.parametrize(
    ("command", "instead"), [("check", "pg_amcheck"), ("backup", "pg_dump"), ("restore", "pg_restore")]
)
def test_for_postgresql_its_own_tools_are_named(command: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTFLEET_COORDINATOR_STORE_LOCATION", "postgresql://fleet:hunter2@db.example/watts")
    said = refused(command, *([] if command == "check" else ["copy.db"]))
    assert instead in said and "hunter2" not in said


def test_the_store_is_that_of_the_settings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTFLEET_COORDINATOR_STORE_LOCATION", str(path))
    assert f"{path} is undamaged" in store("check")


def test_an_upgrade_copies_the_file_first(tmp_path: Path) -> None:
    before_versions = Path(__file__).parent / "data" / "store_before_versions.sql"
    path = tmp_path / "coordinator.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(before_versions.read_text())
        before = list(connection.iterdump())
    Store(path).close()
    with closing(sqlite3.connect(tmp_path / "coordinator.db.tables-none.backup")) as connection:
        assert list(connection.iterdump()) == before


def test_a_full_backup_disk_is_told_and_leaves_nothing(path: Path, small_disk: Path) -> None:
    with open(small_disk / "rest", "wb") as file:
        file.write(bytes(16 * 2**20 - 64 * 2**10))
    said = refused("backup", small_disk / "copy.db", "--store", path)
    assert "no space for" in said and "free some space" in said
    assert [each.name for each in small_disk.iterdir()] == ["rest"]
