"""Brings a database to the tables of this version."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from wattfleet.errors import InvalidInputError

_log = logging.getLogger(__name__)


def migration_config() -> Config:
    """Where the migrations are."""
    config = Config()
    # Percent signs mean something in it.
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    return config


def upgrade(connection: Connection, now: Callable[[], datetime], to: str = "head") -> None:
    """Bring the tables to a version, within the connection's transaction: all of it, or nothing.

    Tables of before there were versions are taken for those of the first.

    Args:
        connection: in a transaction.
        now: the date and time, with an offset.
        to: revision of `migrations/`.

    Raises:
        InvalidInputError: the database is of a newer version than this.
    """
    config = migration_config()
    script = ScriptDirectory.from_config(config)
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current == script.get_current_head():
        return
    if current is not None and current not in {revision.revision for revision in script.walk_revisions()}:
        raise InvalidInputError(
            f"it was written by a newer version of Wattfleet (its tables are {current}, the newest that this version"
            f" knows are {script.get_current_head()}): install that version again"
        )
    _log.info("the store's tables are brought from version %s to %s", current or "none", to)
    config.attributes["connection"] = connection
    config.attributes["now"] = now
    command.upgrade(config, to)
