"""The TLS files of a running server: noticing that they were replaced, and using them without a restart."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path


class WatchedFiles:
    """Files that somebody else replaces, such as a tool that renews certificates."""

    def __init__(self, *paths: Path) -> None:
        """Watch files, as they are now.

        Raises:
            OSError: one of them cannot be read.
        """
        self._paths = paths
        self._used = _states(paths)

    def replaced(self) -> list[tuple[int, int, int]] | None:
        """The state of the files if it is not the one in use; None otherwise.

        Raises:
            OSError: one of them cannot be read.
        """
        found = _states(self._paths)
        return None if found == self._used else found

    def use(self, state: list[tuple[int, int, int]]) -> None:
        """Note which state of the files is in use."""
        self._used = state


def load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Use a certificate and its key from the next connection on; if they do not match, those of before stay in use.

    Raises:
        OSError: they cannot be read, or do not belong together.
    """
    # A context that has failed to load a pair cannot serve any more, so that another one has to try first.
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    context.load_cert_chain(certificate, key)


def _states(paths: Sequence[Path]) -> list[tuple[int, int, int]]:
    """What changes if files, or what links point to, are replaced."""
    return [(found.st_ino, found.st_mtime_ns, found.st_size) for found in map(os.stat, paths)]
