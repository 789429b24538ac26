"""Creates a database's tables, or upgrades them to this version by running Alembic's migrations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, insert, inspect

from coordinator.store.integrity import UNREADABLE
from coordinator.store.tables import Base, CoordinatorTerm
from wattfleet.errors import InvalidInputError

_log = logging.getLogger(__name__)


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
    """The version of a database's tables; None if it has no version.

    Raises:
        InvalidInputError: the database was written by a newer version.
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
    return current


def newest_version() -> str | None:
    """The version of tables that this version of Wattfleet writes."""
    return _versions().get_current_head()


def upgrade(connection: Connection, now: Callable[[], datetime], to: str = "head") -> None:
    """Upgrade the tables to a version within the connection's transaction.

    Tables from before there were versions count as the first version. An empty database gets the newest tables at once.

    Args:
        connection: in a transaction.
        now: the date and time, with a UTC offset.
        to: a revision of `migrations/`.

    Raises:
        InvalidInputError: the database was written by a newer version, or a row cannot be read.
    """
    current = version_of(connection)
    if current is not None and current == newest_version():
        return
    if current is None and to == "head" and not inspect(connection).get_table_names():
        _create_newest(connection)
        return
    config = migration_config()
    _log.info("upgrading the store's tables from version %s to %s", current or "none", to)
    config.attributes["connection"] = connection
    config.attributes["now"] = now
    try:
        command.upgrade(config, to)
    except UNREADABLE as error:
        why = next(iter(str(error).splitlines()), "")[:200]
        raise InvalidInputError(
            f"its tables of version {current or 'none'} cannot be upgraded, because a row cannot be read"
            f" ({type(error).__name__}: {why}): restore a backup"
        ) from None


def _create_newest(connection: Connection) -> None:
    """Create the tables as all migrations together would create them in an empty database."""
    Base.metadata.create_all(connection)
    connection.execute(insert(CoordinatorTerm).values(only=1, term=0))
    MigrationContext.configure(connection).stamp(_versions(), "head")
