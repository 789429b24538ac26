"""Who may plan: one coordinator at a time holds a store's lock, and only the one that took it last may write.

The lock tells a second coordinator to wait. That alone would not do: a coordinator that was cut off, or stopped for a
while, may take itself for the owner still. So each owner has a term, one higher than the last, and every transaction
makes sure that its own is the newest.
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

from coordinator.store.errors import NotOwnerError
from coordinator.store.tables import CoordinatorTerm

_LOCK_OF_WATTFLEET = 0x57415454  # "WATT": the first half of the key, the schema is the second
# Seconds after which PostgreSQL lets go of the lock of a coordinator whose machine is gone: 10 + 3 * 5.
_NOTICED_GONE = "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"


class OwnerLock(Protocol):
    """A lock that ends with its process, whichever way that ends."""

    def take(self) -> bool:
        """Take it, or make sure that it is held still; False where another process holds it."""
        ...

    def release(self) -> None:
        """Let go of it."""
        ...


class FileLock:
    """A lock beside an SQLite file: the database's own are too short, and are lost when any handle is closed."""

    def __init__(self, database: Path) -> None:
        """Lock what a path leads to, whatever it is called."""
        resolved = database.resolve()
        self._path = resolved.with_name(f"{resolved.name}.lock")
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Take it.

        Raises:
            OSError: the file cannot be made.
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
        """Let go of it; the file stays, as another process may have it open already."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class AdvisoryLock:
    """A lock of PostgreSQL's, for the database and schema; it ends with the connection that holds it."""

    def __init__(self, engine: Engine) -> None:
        """Lock the database of an engine, which is not for anything else."""
        self._engine = engine
        self._connection: Connection | None = None

    def take(self) -> bool:
        """Take it; on a new connection if the one that held it was lost.

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
            connection.exec_driver_sql(_NOTICED_GONE)
            is_taken = connection.execute(
                text("SELECT pg_try_advisory_lock(:key, hashtext(current_schema()))"), {"key": _LOCK_OF_WATTFLEET}
            ).scalar_one()
        except BaseException:
            _drop(connection)
            raise
        if is_taken:
            self._connection = connection
        else:
            _drop(connection)
        return bool(is_taken)

    def release(self) -> None:
        """Let go of it."""
        if self._connection is not None:
            _drop(self._connection)
            self._connection = None


def _drop(connection: Connection) -> None:
    with suppress(DBAPIError):  # it is gone already
        connection.invalidate()
    connection.close()


def begin_term(connection: Connection) -> int:
    """Begin a new term, which ends all earlier ones as soon as the transaction is over."""
    term: int = connection.execute(
        update(CoordinatorTerm).values(term=CoordinatorTerm.term + 1).returning(CoordinatorTerm.term)
    ).scalar_one()
    return term


def require_term(connection: Connection, term: int, until_commit: bool = True) -> None:
    """Make sure that a term is the newest.

    Args:
        connection: in a transaction.
        term: the term.
        until_commit: it has to stay the newest until the transaction is over.

    Raises:
        NotOwnerError: a newer one has begun.
    """
    # FOR SHARE, where it means anything: whoever begins a term waits for this transaction, or this one sees the term.
    term_now = select(CoordinatorTerm.term)
    newest = connection.execute(term_now.with_for_update(read=True) if until_commit else term_now).scalar_one()
    if newest != term:
        raise NotOwnerError(
            f"another coordinator has taken the store over in term {newest}; this one, of term {term}, plans no more"
        )
