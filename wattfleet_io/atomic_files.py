"""Files that are either as they were or as they are to be, whenever the power fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes, write: Callable[[int, bytes], int] = os.write) -> None:
    """Make a file hold something else; it is on disk when this returns.

    Args:
        path: the file; its folder exists.
        content: what it is to hold.
        write: how bytes get to a descriptor, `os.write` outside of tests.

    Raises:
        OSError: it cannot be written; it is as it was before.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            while content:
                content = content[write(descriptor, content) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_file(path: Path) -> None:
    """Remove a file, and its name from the disk.

    Raises:
        OSError: it cannot be removed.
    """
    path.unlink()
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the names of a folder's files on disk, too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
