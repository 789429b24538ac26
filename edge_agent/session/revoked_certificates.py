"""The viewers and operators who may no longer read the metrics, also while the coordinator is unreachable."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from wattfleet_io.atomic_files import make_state_folder, read_regular_file, replace_file
from wattfleet_io.parsing import parse_json

_log = logging.getLogger(__name__)


class RevokedCertificates:
    """The revoked certificates that the coordinator has named last.

    Args:
        path: stores them; None keeps them in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._serials = frozenset[str]()
        if path is None:
            return
        try:
            self._serials = frozenset(map(str, parse_json(read_regular_file(path))["serials"]))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.error("%s: cannot be read (%s); the coordinator sends it again", path, error)

    def receive(self, serials: Iterable[str]) -> None:
        """Replace them by those that the coordinator names now; a failure to store them is logged."""
        received = frozenset(serials)
        if received == self._serials:
            return
        self._serials = received
        if self._path is None:
            return
        try:
            make_state_folder(self._path.parent)
            replace_file(self._path, json.dumps({"serials": sorted(received)}).encode() + b"\n")
        except OSError as error:
            _log.error(
                "%s: cannot be written: %s; after a restart, revoked viewers may read until the coordinator is reached",
                self._path,
                error.strerror,
            )

    def is_revoked(self, serial: str) -> bool:
        """Return whether a certificate was revoked, by its serial number; called from any thread."""
        return serial in self._serials
