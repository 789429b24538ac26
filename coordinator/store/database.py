"""Databases that a store can be in: how they are named, opened, and what their errors mean."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, create_engine, event, make_url
from sqlalchemy.engine import Engine
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError

from coordinator.store.errors import StoreFullError, StoreUnavailableError, UnstorableRecordError
from wattfleet.errors import InvalidInputError, WattfleetError

_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}

READS = {"only_reads": True}
"""Options of an engine's transactions that only read, beside one that writes."""

# Seconds, which the URL may override. A server that vanished must not hold up the writer for the kernel's quarter of
# an hour (tcp_user_timeout is in ms).
_POSTGRESQL_PATIENCE = {
    "connect_timeout": "5",
    "tcp_user_timeout": "10000",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
}
# PostgreSQL's SQLSTATE, and the classes of those that a value is the reason of: what it is, what it breaks, its size.
_DISK_FULL = "53100"
_OF_A_VALUE = ("22", "23", "54")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def database_url(location: str | Path) -> URL:
    """The URL of a database: a path is that of an SQLite file.

    Args:
        location: a path, `sqlite:///PATH` or `postgresql://USER@HOST:PORT/DATABASE`.

    Raises:
        InvalidInputError: it cannot be used; the text holds nothing of a URL, which may have a password in it.
    """
    if isinstance(location, Path) or "://" not in location:
        if not str(location):
            raise InvalidInputError("the coordinator's store needs a path or a URL")
        return URL.create("sqlite", database=str(location))
    try:
        url = make_url(location)
    except (ArgumentError, ValueError):
        url = None
    if url is None or url.drivername not in _DRIVERS:
        raise InvalidInputError(
            "the coordinator's store is a path, sqlite:///PATH or postgresql://USER@HOST:PORT/DATABASE;"
            " other characters than letters and digits in a user's name or password have to be written as %XX"
        )
    url = url.set(drivername=_DRIVERS[url.drivername])
    if not url.database or url.database == ":memory:":
        raise InvalidInputError("the URL of the coordinator's store names no database, or one that a restart loses")
    if url.drivername == "sqlite" and url.query:
        raise InvalidInputError("the URL of an SQLite file takes no parameters")
    return url


def display_name(url: URL) -> str:
    """How messages name a database: without users, passwords and parameters."""
    if url.drivername == "sqlite":
        return str(url.database)
    return URL.create("postgresql", host=url.host, port=url.port, database=url.database).render_as_string()


def open_engine(url: URL, lock_timeout_s: float = 5.0) -> Engine:
    """An engine whose commits are on disk when they return.

    Args:
        url: of the database.
        lock_timeout_s: time to wait for another program's lock.

    Raises:
        InvalidInputError: the database's driver is not installed.
    """
    if url.drivername == "sqlite":
        engine = create_engine(url)
        event.listen(engine, "connect", partial(_prepare_sqlite, int(1000 * lock_timeout_s)))
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    # Of several, the last counts.
    options = f"-c lock_timeout={int(1000 * lock_timeout_s)}ms {url.normalized_query.get('options', [''])[0]}"
    patient = url.set(query={**_POSTGRESQL_PATIENCE, **url.query, "options": options})
    try:
        return create_engine(patient, pool_pre_ping=True)
    except ModuleNotFoundError:
        raise InvalidInputError("PostgreSQL needs its driver: pip install 'wattfleet[postgresql]'") from None


def _prepare_sqlite(lock_timeout_ms: int, connection: Any, _record: object) -> None:
    # The driver would begin transactions by itself, and not before it creates tables.
    connection.isolation_level = None
    try:
        with closing(connection.cursor()) as cursor:
            cursor.execute(f"PRAGMA busy_timeout={lock_timeout_ms}")
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute("PRAGMA synchronous=FULL")  # what was acknowledged survives a power cut
    except sqlite3.Error:
        connection.close()  # nobody else would: it is not in the pool yet
        raise


def _begin_sqlite(connection: Connection) -> None:
    # At once for writing: a transaction that has read first is not let wait for another's lock.
    only_reads = connection.get_execution_options().get("only_reads", False)
    connection.exec_driver_sql("BEGIN" if only_reads else "BEGIN IMMEDIATE")


@contextmanager
def typed_errors(name: str) -> Iterator[None]:
    """Turn what a database says into errors that say what to do.

    Args:
        name: the database, for people.

    Raises:
        StoreFullError: there is no room.
        UnstorableRecordError: a value is the reason.
        StoreUnavailableError: anything else.
    """
    try:
        yield
    except DBAPIError as error:
        if isinstance(error, (DataError, IntegrityError)) or _sqlstate(error).startswith(_OF_A_VALUE):
            raise UnstorableRecordError(f"{name} takes no such value: {reason(error)}") from None
        kind = StoreFullError if _is_full(error) else StoreUnavailableError
        raise kind(f"the coordinator cannot store anything now: {name}: {reason(error)}") from None


@contextmanager
def typed_opening_errors(name: str) -> Iterator[None]:
    """The same for a database that is opened, which may also be none at all.

    Args:
        name: the database, for people.

    Raises:
        StoreFullError: there is no room.
        StoreUnavailableError: it is locked, or its server does not answer.
        InvalidInputError: anything else.
    """
    try:
        yield
    except (OSError, DBAPIError, InvalidInputError) as error:
        why = reason(error) if isinstance(error, DBAPIError) else error
        raise _kind_at_opening(error)(f"{name}: cannot be used as the coordinator's store: {why}") from None


def _kind_at_opening(error: OSError | DBAPIError | InvalidInputError) -> type[WattfleetError]:
    if isinstance(error, OSError):
        return StoreFullError if error.errno in _NO_ROOM else InvalidInputError
    if not isinstance(error, DBAPIError):
        return InvalidInputError
    if _is_full(error):
        return StoreFullError
    # Of one class are SQLite's errors of a file that is locked and of one that cannot be opened.
    is_away = not isinstance(error.orig, sqlite3.Error) or "is locked" in str(error.orig)
    return StoreUnavailableError if is_away else InvalidInputError


def _sqlstate(error: DBAPIError) -> str:
    return getattr(error.orig, "sqlstate", None) or ""


def _is_full(error: DBAPIError) -> bool:
    return _sqlstate(error) == _DISK_FULL or "disk is full" in str(error.orig)


def reason(error: DBAPIError) -> str:
    """What the driver says, in one line: what follows may hold whole rows."""
    return next(iter(str(error.orig).splitlines()), type(error.orig).__name__)
