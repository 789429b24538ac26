"""Databases for a store: their URLs, engines and errors."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import URL, Connection, create_engine, event, insert, inspect, make_url
from sqlalchemy.engine import Engine
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError

from coordinator.errors import (
    DamagedStoreError,
    StoreFullError,
    StoreUnavailableError,
    UnstorableRecordError,
)
from coordinator.store import checksums
from coordinator.store.checksums import UNREADABLE, damaged_store
from coordinator.store.tables import Base, CoordinatorTerm
from wattfleet.core.errors import InvalidInputError, WattfleetError

_log = logging.getLogger(__name__)


# --- Upgrade ----------------------------------------------------------------------------------------------------------
# Creates a database's tables, or upgrades them to this version by running Alembic's migrations.

WITHOUT_VERSION = "has tables but no version of them, so it is no store"
_NO_STORE = f"it {WITHOUT_VERSION}: name a new file or an empty database, or restore a backup of the store"


def migration_config() -> Config:
    """Alembic's configuration for the migrations."""
    config = Config()
    # Escape percent signs, because the configuration would interpolate them.
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    return config


@cache
def _versions() -> ScriptDirectory:
    """The migrations; their files are read only once."""
    return ScriptDirectory.from_config(migration_config())


def version_of(connection: Connection) -> str | None:
    """The version of a database's tables; None if it is empty.

    Raises:
        InvalidInputError: the database was written by a newer version, or its tables have no version.
    """
    script = _versions()
    try:
        current = MigrationContext.configure(connection).get_current_revision()
    except CommandError as error:
        raise InvalidInputError(f"the version of its tables cannot be read: {error}") from None
    if current is not None and current not in {revision.revision for revision in script.walk_revisions()}:
        raise InvalidInputError(
            f"it was written by a newer version of Wattfleet (tables {current}; this version knows up to"
            f" {script.get_current_head()}): install the newer version"
        )
    if current is None and inspect(connection).get_table_names():
        raise InvalidInputError(_NO_STORE)
    return current


def newest_version() -> str | None:
    """The version of tables that this version of Wattfleet writes."""
    return _versions().get_current_head()


def upgrade(connection: Connection, to: str = "head") -> None:
    """Upgrade the tables to a version within the connection's transaction.

    An empty database gets the newest tables at once.

    Args:
        connection: in a transaction.
        to: a revision of `migrations/`.

    Raises:
        InvalidInputError: the database was written by a newer version, its tables have no version, or a row cannot be
            read.
    """
    current = version_of(connection)
    if current is not None and current == newest_version():
        return
    if current is None and to == "head":
        _create_newest(connection)
        return
    config = migration_config()
    _log.info("upgrading the store's tables from version %s to %s", current or "none", to)
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, to)
    except UNREADABLE as error:
        why = next(iter(str(error).splitlines()), "")[:200]
        raise InvalidInputError(
            f"its tables of version {current} cannot be upgraded, because a row cannot be read"
            f" ({type(error).__name__}: {why}): restore a backup"
        ) from None


def _create_newest(connection: Connection) -> None:
    """Create the tables as all migrations together would create them in an empty database."""
    Base.metadata.create_all(connection)
    connection.execute(insert(CoordinatorTerm).values(only=1, term=0))
    MigrationContext.configure(connection).stamp(_versions(), "head")


# --- Database ---------------------------------------------------------------------------------------------------------

_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}

LOCK_TIMEOUT_S = 5.0
"""Time to wait for another program's lock on the database, s."""

READS = {"only_reads": True}
"""Execution options of transactions that only read."""

# In seconds (tcp_user_timeout in ms); the URL may override them. Without them, a server that vanished would block the
# writer for a quarter of an hour, the kernel's default.
_POSTGRESQL_TIMEOUTS = {
    "connect_timeout": "5",
    "tcp_user_timeout": "10000",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
}
# PostgreSQL's SQLSTATE of a full disk, and the classes of errors in a value: data, integrity, program limit.
_DISK_FULL = "53100"
_VALUE_ERRORS = ("22", "23", "54")
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_LEAST_ROOM_BYTES = 256 * 1024
"""Below this, SQLite cannot create the files beside a database."""
# SQLite's errors about the file's surroundings rather than its content.
_OUTSIDE_THE_FILE = ("is locked", "disk is full", "disk I/O error", "unable to open", "readonly", "is not authorized")


def database_url(location: str | Path) -> URL:
    """Parse the location of a database; a path names an SQLite file.

    Args:
        location: a path, `sqlite:///PATH` or `postgresql://USER@HOST:PORT/DATABASE`.

    Raises:
        InvalidInputError: the location cannot be used; the message does not quote the URL, which may contain a
            password.
    """
    if isinstance(location, Path) or "://" not in location:
        if not str(location):
            raise InvalidInputError("the coordinator's store must be a path or a URL")
        return URL.create("sqlite", database=str(location))
    try:
        url = make_url(location)
    except (ArgumentError, ValueError):
        url = None
    if url is None or url.drivername not in _DRIVERS:
        raise InvalidInputError(
            "the coordinator's store must be a path, sqlite:///PATH or postgresql://USER@HOST:PORT/DATABASE;"
            " in a user name or password, write all characters except letters and digits as %XX"
        )
    url = url.set(drivername=_DRIVERS[url.drivername])
    if not url.database or url.database == ":memory:":
        raise InvalidInputError("the URL of the coordinator's store must name a database that survives a restart")
    if url.drivername == "sqlite" and url.query:
        raise InvalidInputError("the URL of an SQLite file must not have parameters")
    return url


def display_name(url: URL) -> str:
    """A database's name for messages: without user, password and parameters."""
    if url.drivername == "sqlite":
        return str(url.database)
    return URL.create("postgresql", host=url.host, port=url.port, database=url.database).render_as_string()


def open_engine(url: URL) -> Engine:
    """Open an engine whose commits are on disk when they return.

    Args:
        url: the URL of the database.

    Raises:
        InvalidInputError: the database's driver is not installed.
    """
    if url.drivername == "sqlite":
        engine = create_engine(url)
        event.listen(engine, "connect", partial(_prepare_sqlite, int(1000 * LOCK_TIMEOUT_S)))
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    # If an option is repeated, the last one counts.
    options = f"-c lock_timeout={int(1000 * LOCK_TIMEOUT_S)}ms {url.normalized_query.get('options', [''])[0]}"
    with_timeouts = url.set(query={**_POSTGRESQL_TIMEOUTS, **url.query, "options": options})
    try:
        return create_engine(with_timeouts, pool_pre_ping=True)
    except ModuleNotFoundError:
        raise InvalidInputError("PostgreSQL needs its driver: pip install 'wattfleet[postgresql]'") from None


def _prepare_sqlite(lock_timeout_ms: int, connection: Any, _record: object) -> None:
    # Otherwise the driver begins transactions itself, but not before it creates tables.
    connection.isolation_level = None
    try:
        with closing(connection.cursor()) as cursor:
            cursor.execute(f"PRAGMA busy_timeout={lock_timeout_ms}")
            if has_no_version(connection):  # before the file is changed
                raise InvalidInputError(_NO_STORE)
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute("PRAGMA synchronous=FULL")  # acknowledged records survive a power cut
        checksums.prepare(connection)
    except BaseException:
        connection.close()  # the connection is not in the pool yet
        raise


def has_no_version(connection: sqlite3.Connection) -> bool:
    """Whether an SQLite file has tables, but no version of them."""
    names = {name for (name,) in connection.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")}
    if "alembic_version" in names:
        return connection.execute("SELECT version_num FROM main.alembic_version").fetchone() is None
    return bool(names)


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE, because a transaction that has read first cannot wait for another one's lock.
    only_reads = connection.get_execution_options().get("only_reads", False)
    connection.exec_driver_sql("BEGIN" if only_reads else "BEGIN IMMEDIATE")


@contextmanager
def typed_errors(name: str) -> Iterator[None]:
    """Convert a database's errors to typed errors.

    Args:
        name: the database's name for messages.

    Raises:
        StoreFullError: the disk is full.
        UnstorableRecordError: the database cannot store a value.
        StoreUnavailableError: any other error.
    """
    try:
        yield
    except DBAPIError as error:
        if isinstance(error, (DataError, IntegrityError)) or _sqlstate(error).startswith(_VALUE_ERRORS):
            raise UnstorableRecordError(f"{name} cannot store a value: {reason(error)}") from None
        kind = StoreFullError if _is_full(error, name) else StoreUnavailableError
        raise kind(f"the coordinator's store is unavailable: {name}: {_with_remedy(error, name)}") from None


@contextmanager
def typed_opening_errors(name: str) -> Iterator[None]:
    """Convert errors while a database is opened; the file may also not be a database.

    Args:
        name: the database's name for messages.

    Raises:
        StoreFullError: the disk is full.
        StoreUnavailableError: the database is locked, or its server does not answer.
        DamagedStoreError: SQLite cannot read the file's content.
        InvalidInputError: any other error.
    """
    try:
        yield
    except DamagedStoreError:
        raise
    except UnicodeDecodeError:  # SQLite's message quotes the file
        raise damaged_store(name, "a table's definition is not UTF-8") from None
    except (OSError, DBAPIError, sqlite3.Error, InvalidInputError) as error:
        if _is_damage(error, name):
            raise damaged_store(name, _first_line(_driver_error(error))) from None
        why = _with_remedy(error, name) if isinstance(error, (DBAPIError, sqlite3.Error)) else error
        raise _kind_at_opening(error, name)(f"{name} cannot be used as the coordinator's store: {why}") from None


def _kind_at_opening(
    error: OSError | DBAPIError | sqlite3.Error | InvalidInputError, name: str
) -> type[WattfleetError]:
    if isinstance(error, OSError):
        return StoreFullError if error.errno in _DISK_FULL_ERRNOS else InvalidInputError
    if isinstance(error, InvalidInputError):
        return InvalidInputError
    if _is_full(error, name):
        return StoreFullError
    # SQLite raises the same class for a locked file and for one that cannot be opened.
    driver = _driver_error(error)
    is_unavailable = not isinstance(driver, sqlite3.Error) or "is locked" in str(driver)
    return StoreUnavailableError if is_unavailable else InvalidInputError


def _is_damage(error: Exception, name: str) -> bool:
    """Whether an error means that SQLite can reach a file but cannot read its content."""
    driver = _driver_error(error)
    if not isinstance(driver, sqlite3.Error):
        return False
    # A file itself also states whether it may be written to.
    if "readonly" in str(driver):
        return os.access(name, os.W_OK) and os.access(Path(name).parent, os.W_OK)
    return not any(sign in str(driver) for sign in _OUTSIDE_THE_FILE)


def _with_remedy(error: DBAPIError | sqlite3.Error, name: str) -> str:
    """The first line of the driver's message, with the remedy if it is known."""
    if _is_full(error, name):
        return "database or disk is full: free some space" if _is_sqlite(error) else _first_line(_driver_error(error))
    if isinstance(error, DBAPIError) and "malformed" in str(error.orig):
        return f"{reason(error)}: stop the coordinator and restore a backup with `wattfleet coordinator store restore`"
    return _first_line(_driver_error(error))


def _sqlstate(error: DBAPIError) -> str:
    return getattr(error.orig, "sqlstate", None) or ""


def _is_full(error: DBAPIError | sqlite3.Error, name: str) -> bool:
    if isinstance(error, DBAPIError) and _sqlstate(error) == _DISK_FULL:
        return True
    said = str(_driver_error(error))
    # SQLite reports this error only if there is no space for its shared-memory file.
    return "disk is full" in said or ("disk I/O error" in said and _has_no_room(Path(name).parent))


def _has_no_room(folder: Path) -> bool:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _LEAST_ROOM_BYTES


def _driver_error(error: BaseException) -> BaseException:
    return error.orig if isinstance(error, DBAPIError) and error.orig is not None else error


def _is_sqlite(error: BaseException) -> bool:
    return isinstance(_driver_error(error), sqlite3.Error)


def _first_line(error: BaseException) -> str:
    """The first line of a driver's message; the other lines may contain whole rows."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def reason(error: DBAPIError) -> str:
    """The first line of the driver's message."""
    return _first_line(_driver_error(error))
