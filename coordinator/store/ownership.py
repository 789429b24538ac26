"""Ownership of a store: one coordinator at a time holds its lock, and only the newest owner may write.

The lock makes a second coordinator wait. It is not sufficient: a coordinator that was disconnected or suspended may
still believe that it is the owner. Each owner therefore has a term, one higher than the previous one, and every
transaction checks that its term is the newest.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection, select, text, update
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError

from coordinator.errors import NotOwnerError
from coordinator.lock_file import lock_file
from coordinator.store.tables import CoordinatorTerm

_LOCK_OF_WATTFLEET = 0x57415454  # "WATT": the first half of the key, the schema is the second
# PostgreSQL releases the lock of a coordinator whose machine is gone after 10 + 3 * 5 seconds.
_DETECT_DEAD_PEER = "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"


class OwnerLock(Protocol):
    """A lock that is released when its process ends, even if it is killed."""

    def take(self) -> bool:
        """Take the lock, or check that it is still held; return False if another process holds it."""
        ...

    def release(self) -> None:
        """Release the lock."""
        ...


class FileLock:
    """A lock file beside an SQLite file: SQLite's own locks are short, and are lost when any handle is closed."""

    def __init__(self, database: Path) -> None:
        """Lock the file that a path resolves to.

        Raises:
            OSError: the path is a symbolic link that leads to itself.
        """
        self._path = lock_file(database)
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Take the lock.

        Raises:
            OSError: the lock file cannot be created.
        """
        if self._descriptor is not None:
            return True
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Release the lock; the file stays, because another process may have opened it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class AdvisoryLock:
    """An advisory lock of PostgreSQL for a database and schema; it ends with the connection that holds it."""

    def __init__(self, engine: Engine) -> None:
        """Lock the database of an engine."""
        self._engine = engine
        self._connection: Connection | None = None

    def take(self) -> bool:
        """Take the lock, on a new connection if the one that held it was lost.

        Raises:
            DBAPIError: the database does not answer.
        """
        if self._connection is not None:
            try:
                self._connection.execute(text("SELECT 1"))
                return True
            except DBAPIError:
                self.release()
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            connection.exec_driver_sql(_DETECT_DEAD_PEER)
            is_taken = connection.execute(
                text("SELECT pg_try_advisory_lock(:key, hashtext(current_schema()))"), {"key": _LOCK_OF_WATTFLEET}
            ).scalar_one()
        except BaseException:
            _close(connection)
            raise
        if is_taken:
            self._connection = connection
        else:
            _close(connection)
        return bool(is_taken)

    def release(self) -> None:
        """Release the lock."""
        if self._connection is not None:
            _close(self._connection)
            self._connection = None


def _close(connection: Connection) -> None:
    with suppress(DBAPIError):  # the connection is lost already
        connection.invalidate()
    connection.close()


def begin_term(connection: Connection) -> int:
    """Begin a new term, which ends all earlier ones when the transaction is committed."""
    term: int = connection.execute(
        update(CoordinatorTerm).values(term=CoordinatorTerm.term + 1).returning(CoordinatorTerm.term)
    ).scalar_one()
    return term


def require_term(connection: Connection, term: int, until_commit: bool = True) -> None:
    """Check that a term is the newest.

    Args:
        connection: in a transaction.
        term: the term.
        until_commit: whether it must stay the newest until the transaction ends.

    Raises:
        NotOwnerError: a newer term has begun.
    """
    # FOR SHARE, on PostgreSQL: a new term waits for this transaction, or this transaction sees the new term.
    term_now = select(CoordinatorTerm.term)
    newest = connection.execute(term_now.with_for_update(read=True) if until_commit else term_now).scalar_one()
    if newest != term:
        raise NotOwnerError(
            f"another coordinator has taken the store over (term {newest}, this one has term {term}): this one stops"
        )
