"""Copies and checks a store's SQLite file; PostgreSQL has its own tools for this."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from coordinator.store import checksums
from coordinator.store.errors import StoreFullError
from coordinator.store.integrity import damaged, require_undamaged
from wattfleet.errors import InvalidInputError
from wattfleet_io.atomic_files import sync_folder

SIDECARS = ("-wal", "-shm")
"""The ends of the names of the files that SQLite keeps beside a database."""


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
