"""Checksums of the rows of an SQLite file, which has none itself, so that corruption by a disk is noticed.

Each table has a column `checksum`. Triggers of the coordinator's own connections maintain it; they are not in the file,
so that other programs can open it. PostgreSQL has checksums of its pages, and leaves the column empty.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import DecodeError

from coordinator.errors import DamagedStoreError
from wattfleet.core.errors import InvalidInputError

CHECKED_TABLES = (
    "device",
    "workload_front",
    "node",
    "run",
    "round",
    "observation",
    "training_energy",
    "counted_energy",
    "unplanned_round",
    "device_overrides",
    "budget_override",
    "supply_energy_budget",
    "battery_charge",
    "reference",
    "reference_pin",
    "coordinator_term",
    "coordinator_clock",
    "given_up_training",
    "grant_lifetime",
    "invite",
    "certificate",
    "audit_entry",
    "event",
)
_COLUMN = "checksum"
FUNCTION = "row_checksum"


def row_checksum(*values: object) -> int:
    """Compute the checksum of a row's values, in the order of its columns."""
    for value in values:
        if isinstance(value, bytes):
            values = tuple(("bytes", zlib.crc32(each)) if isinstance(each, bytes) else each for each in values)
            break
    # Escaped to ASCII, because the printable characters depend on the version of Unicode.
    return zlib.crc32(ascii(values).encode())


def prepare(connection: sqlite3.Connection) -> None:
    """Maintain the checksums of all rows that this connection writes, in the tables that have checksums."""
    connection.create_function(FUNCTION, -1, row_checksum, deterministic=True)
    # Otherwise triggers would need a temporary file.
    connection.execute("PRAGMA temp_store=MEMORY")
    for table in _tables(connection):
        columns = _columns(connection, table)
        new = ", ".join(f'NEW."{column}"' for column in columns)
        named = ", ".join(f'"{column}"' for column in columns)
        for name, event in (("inserted", "INSERT"), ("updated", f"UPDATE OF {named}")):
            connection.execute(
                f"CREATE TEMP TRIGGER IF NOT EXISTS {table}_{name} AFTER {event} ON main.{table} BEGIN"
                f" UPDATE {table} SET {_COLUMN} = {FUNCTION}({new}) WHERE rowid = NEW.rowid; END"
            )


def forget(connection: sqlite3.Connection) -> None:
    """Drop the triggers, before tables are changed."""
    for (name,) in connection.execute("SELECT name FROM sqlite_temp_master WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER temp.{name}")


def seal(connection: sqlite3.Connection) -> None:
    """Write the checksums of all rows and of the tables' definitions, after creating or changing tables."""
    for table in _tables(connection):
        connection.execute(f"UPDATE {table} SET {_COLUMN} = {_call(connection, table)}")
    connection.execute(f"PRAGMA user_version={_schema_checksum(connection)}")


def is_sealed(connection: sqlite3.Connection) -> bool:
    """Whether the file has checksums; a file that another program restored from a dump has none."""
    (kept,) = connection.execute("PRAGMA user_version").fetchone()
    return bool(kept)


def damaged(connection: sqlite3.Connection, rows: bool = True, tables: Collection[str] = CHECKED_TABLES) -> str | None:
    """Find differences from what the coordinator wrote, in the tables' definitions and the rows.

    Args:
        connection: a connection to the file.
        rows: whether to check all rows.
        tables: the tables whose rows are checked.

    Returns:
        The first difference, for a message; None if there is none, or the file has no checksums.
    """
    (kept,) = connection.execute("PRAGMA user_version").fetchone()
    if kept == 0:
        return None
    if kept != _schema_checksum(connection):
        return "the definitions of its tables have changed"
    if not rows:
        return None
    for table in filter(tables.__contains__, _tables(connection)):
        wrong = f"{_COLUMN} IS NOT {_call(connection, table)}"
        (count,) = connection.execute(f"SELECT count(*) FROM {table} WHERE {wrong}").fetchone()
        if count:
            return f"the content of {count} {'row' if count == 1 else 'rows'} of the table {table} has changed"
    return None


def row_counts(connection: sqlite3.Connection) -> dict[str, int]:
    """The number of rows of each table that has checksums."""
    return {
        table: connection.execute(f"SELECT count(*) FROM main.{table}").fetchone()[0] for table in _tables(connection)
    }


def _tables(connection: sqlite3.Connection) -> Iterator[str]:
    """The tables of the file that have checksums."""
    for table in CHECKED_TABLES:
        if any(row[1] == _COLUMN for row in connection.execute(f"PRAGMA main.table_info({table})").fetchall()):
            yield table


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    rows = connection.execute(f"PRAGMA main.table_info({table})").fetchall()
    return [row[1] for row in rows if row[1] != _COLUMN]


def _call(connection: sqlite3.Connection, table: str) -> str:
    return f"{FUNCTION}({', '.join(f'{chr(34)}{column}{chr(34)}' for column in _columns(connection, table))})"


def _schema_checksum(connection: sqlite3.Connection) -> int:
    """Compute a checksum of the tables' definitions and their version, from 1 to 2^31 - 1."""
    definitions = connection.execute(
        "SELECT name, sql FROM main.sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name"
    ).fetchall()
    versions = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    return zlib.crc32(ascii((definitions, versions)).encode()) % (2**31 - 1) + 1


# --- Integrity --------------------------------------------------------------------------------------------------------
# Checks whether a store's SQLite file still contains what was written to it.

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
        connection: a connection to the file; `prepare` was called for it.
        name: the file's name for messages.
        rows: whether to also check the indexes and all rows, which takes time for each row.

    Raises:
        DamagedStoreError: something differs from what was written. sqlite3.Error: SQLite cannot read the file.
    """
    check = "integrity_check" if rows else "quick_check"
    found = [str(row[0]) for row in connection.execute(f"PRAGMA {check}(1)").fetchall()]
    why = " ".join(found[0].split()) if found != ["ok"] else damaged(connection, rows)
    if why is not None:
        raise damaged_store(name, why)


def damaged_store(name: str, why: str) -> DamagedStoreError:
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
        raise damaged_store(name, f"a row cannot be read: {type(error).__name__}: {why}") from None


def driver_connection(connection: Any) -> sqlite3.Connection:
    """The driver's connection behind an SQLAlchemy connection."""
    driver: sqlite3.Connection = connection.connection.driver_connection
    return driver
