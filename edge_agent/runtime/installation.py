"""What tells this agent's installation from another that was given the same device id."""

from __future__ import annotations

import logging
import re
import uuid
from pathlib import Path

from wattfleet_io.atomic_files import replace_file

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}")


def installation_name(path: Path) -> str:
    """The name that a file holds; made, and kept there, where it holds none.

    An agent that cannot keep its name goes on with one for this run: until its old session has lapsed, the coordinator
    then takes it for another device of the same id when it restarts.

    Args:
        path: the file; its folder is made.
    """
    try:
        kept = path.read_text(encoding="ascii").strip()
        if _NAME.fullmatch(kept):
            return kept
        _log.error("%s: holds no name of an installation; it gets a new one", path)
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        _log.error("%s: cannot be read (%s); a new name is made", path, error)
    name = uuid.uuid4().hex
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{name}\n".encode())
    except OSError as error:
        _log.error("%s: cannot be written: %s", path, error.strerror)
    return name
