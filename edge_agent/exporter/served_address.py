"""Records the address of a running agent's metrics for `wattfleet agent status`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_agent.paths import EXPORTER_FILE
from wattfleet.errors import InvalidInputError
from wattfleet_io.atomic_files import make_state_folder, read_regular_file, remove_file, replace_file
from wattfleet_io.parsing import parse_json

_log = logging.getLogger(__name__)


@contextmanager
def noted(url: str, state_directory: Path) -> Iterator[None]:
    """Record the URL of the metrics within this context."""
    path = state_directory / EXPORTER_FILE
    try:
        make_state_folder(state_directory)
        replace_file(path, json.dumps({"url": url}).encode() + b"\n")
    except OSError as error:
        _log.debug("%s: cannot be written: %s", path, error.strerror)
    try:
        yield
    finally:
        try:
            remove_file(path)
        except OSError as error:
            _log.debug("%s: cannot be removed: %s", path, error.strerror)


def read_url(state_directory: Path) -> str | None:
    """Return the recorded URL of the metrics; None if they are not served.

    Raises:
        InvalidInputError: the file cannot be read, or is damaged.
    """
    path = state_directory / EXPORTER_FILE
    try:
        url = parse_json(read_regular_file(path))["url"]
        if not isinstance(url, str):
            raise ValueError
        return url
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidInputError(f"{path}: is damaged; the agent writes it again when it starts") from None
