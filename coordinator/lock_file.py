"""The lock file beside an SQLite store, in which its coordinator notes where it serves operators.

The operator's commands import this module, so it does not import SQLAlchemy.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from wattfleet.common.addresses import split_address
from wattfleet.core.errors import InvalidInputError

_LONGEST = 300


def lock_file(database: Path) -> Path:
    """Return the lock file of the database that a path resolves to.

    Raises:
        OSError: the path is a symbolic link that leads to itself.
    """
    try:
        resolved = database.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
    return resolved.with_name(f"{resolved.name}.lock")


def note_address(database: Path, address: str) -> None:
    """Note the host:port at which operators are served; only the holder of the lock may do so.

    Raises:
        OSError: the lock file cannot be written.
    """
    with lock_file(database).open("r+") as file:
        file.write(f"{address}\n")
        file.truncate()


def noted_address(database: Path) -> str | None:
    """Return the host:port at which the latest coordinator of a store served operators; None if it is unknown."""
    try:
        with lock_file(database).open() as file:
            address = file.read(_LONGEST).strip()
        split_address(address)
    except (OSError, ValueError, InvalidInputError):
        return None
    return address
