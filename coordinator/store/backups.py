"""Copies, checks and restores a store's SQLite file; PostgreSQL has tools of its own for that."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from coordinator.store import checksums
from coordinator.store.errors import StoreInUseError
from coordinator.store.integrity import require_undamaged
from coordinator.store.ownership import FileLock
from wattfleet.errors import InvalidInputError
from wattfleet_io.atomic_files import sync_folder

_PAGES_AT_ONCE = 1_000
"""Pages per step of a copy: between steps, a running coordinator can write."""
_SIDECARS = ("-wal", "-shm")


def has_tables(connection: sqlite3.Connection) -> bool:
    """Whether a file has any table."""
    (count,) = connection.execute("SELECT count(*) FROM main.sqlite_master").fetchone()
    return bool(count)


def check_file(path: Path) -> None:
    """Check a file, which a coordinator may be using, without changing it.

    Raises:
        DamagedStoreError: it does not hold what was written to it.
        sqlite3.Error: SQLite cannot read it.
    """
    with _reading(path) as connection:
        connection.create_function(checksums.FUNCTION, -1, checksums.row_checksum, deterministic=True)
        require_undamaged(connection, str(path))


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, which a coordinator may be using; an existing copy is replaced only by a complete one.

    Raises:
        OSError: the copy cannot be written.
        sqlite3.Error: the source cannot be read, or there is no room for the copy.
    """
    draft = target.with_name(f".{target.name}.draft")
    try:
        draft.unlink(missing_ok=True)
        # Not readable by others than the source.
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, os.stat(source).st_mode & 0o777))
        with _reading(source) as connection, closing(sqlite3.connect(draft)) as copy:
            connection.backup(copy, pages=_PAGES_AT_ONCE)
            copy.execute("PRAGMA journal_mode=DELETE")  # the copy is one file
        _sync(draft)
        os.replace(draft, target)
        sync_folder(target.parent)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def restore_file(backup: Path, path: Path) -> Path | None:
    """Put a checked backup in a store's place; the file that was there is kept beside it.

    Returns:
        Where the replaced file is now; None if there was none.

    Raises:
        StoreInUseError: a coordinator uses the store.
        InvalidInputError: the backup has no tables.
        DamagedStoreError: the backup is damaged.
        OSError: a file cannot be written.
        sqlite3.Error: SQLite cannot read the backup, or there is no room for the copy.
    """
    lock = FileLock(path)
    if not lock.take():
        raise StoreInUseError(f"a coordinator uses {path}: stop it before a backup is restored")
    try:
        check_file(backup)
        with _reading(backup) as connection:
            if not has_tables(connection):
                raise InvalidInputError(f"{backup} is empty: name a backup of a store")
        draft = path.with_name(f".{path.name}.restored")
        copy_file(backup, draft)
        replaced = _free_name(path) if path.exists() else None
        for sidecar in _SIDECARS:  # they would be taken for the new file's
            with suppress(FileNotFoundError):
                beside = path.with_name(path.name + sidecar)
                if replaced is None:
                    beside.unlink()
                else:
                    os.replace(beside, replaced.with_name(replaced.name + sidecar))
        if replaced is not None:
            os.link(path, replaced)
        os.replace(draft, path)
        sync_folder(path.parent)
        return replaced
    finally:
        lock.release()


def _free_name(path: Path) -> Path:
    """A name beside a file that no file has yet."""
    number = 1
    while (free := path.with_name(f"{path.name}.replaced-{number}")).exists():
        number += 1
    return free


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that cannot write."""
    with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as connection:
        yield connection


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
