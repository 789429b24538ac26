"""Checks whether a store's SQLite file still contains what was written to it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import DecodeError

from coordinator.store import checksums
from coordinator.store.errors import DamagedStoreError
from wattfleet.errors import InvalidInputError

_LONGEST_REASON = 200
_NO_DATABASE = "file is not a database"
UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    DecodeError,
    InvalidInputError,
)
"""Errors of converting a row whose content this version would not write."""


def require_undamaged(connection: sqlite3.Connection, name: str, rows: bool = True) -> None:
    """Check the file's structure, the definitions of its tables, and its rows.

    Args:
        connection: a connection to the file; `checksums.prepare` was called for it.
        name: the file's name for messages.
        rows: whether to also check the indexes and all rows, which takes time for each row.

    Raises:
        DamagedStoreError: something differs from what was written. sqlite3.Error: SQLite cannot read the file.
    """
    check = "integrity_check" if rows else "quick_check"
    found = [str(row[0]) for row in connection.execute(f"PRAGMA {check}(1)").fetchall()]
    why = " ".join(found[0].split()) if found != ["ok"] else checksums.damaged(connection, rows)
    if why is not None:
        raise damaged(name, why)


def damaged(name: str, why: str) -> DamagedStoreError:
    """Create the error for a damaged file."""
    what = "it is damaged" if why != _NO_DATABASE else "it is not an SQLite database, or it is damaged"
    return DamagedStoreError(
        f"{name} cannot be used as the coordinator's store: {what} ({why[:_LONGEST_REASON]}): restore a backup with"
        f" `wattfleet coordinator store restore BACKUP --store {name}`"
    )


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Convert errors of converting rows to records into typed errors.

    Args:
        name: the database's name for messages.

    Raises:
        DamagedStoreError: a row cannot be read.
    """
    try:
        yield
    except DamagedStoreError:
        raise
    except UNREADABLE as error:
        why = next(iter(str(error).splitlines()), "")
        raise damaged(name, f"a row cannot be read: {type(error).__name__}: {why}") from None


def driver_connection(connection: Any) -> sqlite3.Connection:
    """The driver's connection behind an SQLAlchemy connection."""
    driver: sqlite3.Connection = connection.connection.driver_connection
    return driver
