"""Upgrades a database's tables to this version by running Alembic's migrations."""

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
    """Alembic's configuration for the migrations."""
    config = Config()
    # Escape percent signs, which the configuration would interpolate.
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    return config


def upgrade(connection: Connection, now: Callable[[], datetime], to: str = "head") -> None:
    """Upgrade the tables to a version within the connection's transaction.

    Tables from before there were versions count as the first version.

    Args:
        connection: in a transaction.
        now: the date and time, with an offset.
        to: revision of `migrations/`.

    Raises:
        InvalidInputError: the database was written by a newer version.
    """
    config = migration_config()
    script = ScriptDirectory.from_config(config)
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current == script.get_current_head():
        return
    if current is not None and current not in {revision.revision for revision in script.walk_revisions()}:
        raise InvalidInputError(
            f"it was written by a newer version of Wattfleet (tables {current}; this version knows up to"
            f" {script.get_current_head()}): install the newer version"
        )
    _log.info("upgrading the store's tables from version %s to %s", current or "none", to)
    config.attributes["connection"] = connection
    config.attributes["now"] = now
    command.upgrade(config, to)
