"""Copies, checks and restores a store's SQLite file; PostgreSQL has its own tools for this."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from coordinator.store import checksums
from coordinator.store.errors import StoreFullError, StoreInUseError
from coordinator.store.integrity import damaged, require_undamaged
from coordinator.store.ownership import FileLock
from wattfleet.errors import InvalidInputError
from wattfleet_io.atomic_files import sync_folder

_SIDECARS = ("-wal", "-shm")


def has_tables(connection: sqlite3.Connection) -> bool:
    """Whether a file has any table."""
    (count,) = connection.execute("SELECT count(*) FROM main.sqlite_master").fetchone()
    return bool(count)


def check_file(path: Path, name: Path | None = None) -> dict[str, int]:
    """Check a file without changing it; a coordinator may be using it.

    Args:
        path: the file.
        name: the file's name for messages; None for its path.

    Returns:
        The number of rows by table, without tables from before checksums were introduced.

    Raises:
        InvalidInputError: the file has no tables.
        DamagedStoreError: the file does not contain what was written to it.
    """
    with _reading(path) as connection:
        connection.create_function(checksums.FUNCTION, -1, checksums.row_checksum, deterministic=True)
        # One transaction, so that the check does not see rows that a coordinator writes meanwhile.
        connection.execute("BEGIN")
        try:
            require_undamaged(connection, str(name or path))
            if not has_tables(connection):
                raise InvalidInputError(f"{name or path} has no tables: name the file of a store")
            return checksums.row_counts(connection)
        except sqlite3.Error as error:
            raise damaged(str(name or path), str(error)) from None


def back_up(path: Path, target: Path) -> None:
    """Copy a store's file and check the copy; a coordinator may be using the file.

    Raises:
        DamagedStoreError: the store is damaged, and no copy was made.
        StoreFullError: there is no space for the copy.
        OSError: the copy cannot be written.
        sqlite3.Error: the store cannot be read.
    """
    draft = target.with_name(f".{target.name}.unchecked")
    try:
        copy_file(path, draft)
        check_file(draft, path)
        os.replace(draft, target)
        sync_folder(target.parent)
    finally:
        draft.unlink(missing_ok=True)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file that a coordinator may be using; an existing copy is replaced only by a complete one.

    Raises:
        StoreFullError: there is no space for the copy.
        OSError: the copy cannot be written.
        sqlite3.Error: the source cannot be read.
    """
    draft = target.with_name(f".{target.name}.draft")
    try:
        draft.unlink(missing_ok=True)
        # Only readable by those who can read the source.
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, os.stat(source).st_mode & 0o777))
        with _reading(source) as connection, closing(sqlite3.connect(draft)) as copy:
            # In one step, because a write between two steps would restart the copy. A coordinator can write meanwhile
            # (WAL).
            connection.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # the copy is one file
        _sync(draft)
        os.replace(draft, target)
        sync_folder(target.parent)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        if is_full or (isinstance(error, sqlite3.Error) and "is full" in str(error)):
            raise StoreFullError(f"no space for {target}: free some space on its disk") from None
        raise


def restore_file(backup: Path, path: Path) -> Path | None:
    """Replace a store by a checked backup; the previous file is kept next to it.

    Returns:
        The new path of the previous file; None if there was no file.

    Raises:
        StoreInUseError: a coordinator uses the store.
        InvalidInputError: the backup has no tables.
        DamagedStoreError: the backup is damaged.
        StoreFullError: there is no space for the copy.
        OSError: a file cannot be written.
    """
    lock = FileLock(path)
    if not lock.take():
        raise StoreInUseError(f"a coordinator uses {path}: stop it before you restore a backup")
    try:
        check_file(backup)
        draft = path.with_name(f".{path.name}.restored")
        copy_file(backup, draft)
        replaced = _free_name(path) if path.exists() else None
        if replaced is not None:
            # The old file's write-ahead log is written into it first, so that the file is complete if this process is
            # killed.
            for sidecar in _SIDECARS:
                with suppress(FileNotFoundError):
                    os.link(path.with_name(path.name + sidecar), replaced.with_name(replaced.name + sidecar))
            _write_log_into(path)
        for sidecar in _SIDECARS:  # SQLite would treat them as the new file's
            with suppress(FileNotFoundError):
                os.unlink(path.with_name(path.name + sidecar))
        if replaced is not None:
            os.link(path, replaced)
        os.replace(draft, path)
        sync_folder(path.parent)
        return replaced
    finally:
        lock.release()


def _free_name(path: Path) -> Path:
    """An unused name next to a file."""
    number = 1
    while any(path.with_name(f"{path.name}.replaced-{number}{end}").exists() for end in ("", *_SIDECARS)):
        number += 1
    return path.with_name(f"{path.name}.replaced-{number}")


def _write_log_into(path: Path) -> None:
    """Write a file's write-ahead log into the file, unless the file is damaged."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(FULL)")


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection."""
    with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as connection:
        yield connection


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
