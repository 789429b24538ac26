"""Notices when the TLS files of a running server are replaced, and loads them without a restart."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path


class WatchedFiles:
    """TLS files that are replaced from outside, for example by a tool that renews certificates."""

    def __init__(self, *paths: Path) -> None:
        """Watch files, with their current content as the one in use.

        Raises:
            OSError: one of them cannot be read.
        """
        self._paths = paths
        self._used = _states(paths)

    def replaced(self) -> list[tuple[int, int, int]] | None:
        """Return the state of the files if it differs from the one in use; else None.

        Raises:
            OSError: one of them cannot be read.
        """
        found = _states(self._paths)
        return None if found == self._used else found

    def use(self, state: list[tuple[int, int, int]]) -> None:
        """Record which state of the files is in use."""
        self._used = state


def load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Make the next connections use a certificate and its key. If these do not match, the earlier ones stay in use.

    Raises:
        OSError: they cannot be read, or do not belong together.
    """
    # A context cannot serve any more after it failed to load a pair. So the pair is tried with another context first.
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    context.load_cert_chain(certificate, key)


def _states(paths: Sequence[Path]) -> list[tuple[int, int, int]]:
    """Return the inode, modification time (ns) and size (bytes) of each file; links are followed."""
    return [(found.st_ino, found.st_mtime_ns, found.st_size) for found in map(os.stat, paths)]
