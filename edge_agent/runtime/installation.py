"""The random name of this installation, which distinguishes it from another one with the same device id."""

from __future__ import annotations

import logging
import re
import uuid
from pathlib import Path

from wattfleet_io.atomic_files import close_to_others, make_state_folder, read_regular_file, replace_file

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}")


def installation_name(path: Path) -> str:
    """Read the name from a file; if there is none, create one and store it.

    If the name cannot be stored, the agent uses it for this run only. After a restart, the coordinator then takes the
    agent for another device with the same id, until the old session has expired.

    Other users may not enter the folder. One in which an earlier version has created the name is closed to them.

    Args:
        path: the file; its folder is created.
    """
    if path.exists():
        close_to_others(path.parent)
    try:
        stored = read_regular_file(path).decode("ascii").strip()
        if _NAME.fullmatch(stored):
            return stored
        _log.error("%s: holds no installation name; creating a new one", path)
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        _log.error("%s: cannot be read (%s); creating a new installation name", path, error)
    name = uuid.uuid4().hex
    try:
        make_state_folder(path.parent)
        replace_file(path, f"{name}\n".encode())
    except OSError as error:
        _log.error("%s: cannot be written: %s", path, error.strerror)
    return name
