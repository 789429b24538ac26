"""Atomic file operations: after a power cut, a file has either its old or its new content."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes, write: Callable[[int, bytes], int] = os.write) -> None:
    """Replace a file's content atomically; it is on disk when this returns.

    Args:
        path: the file; its folder exists.
        content: the new content.
        write: writes bytes to a descriptor; `os.write` except in tests.

    Raises:
        OSError: it cannot be written; the old content stays.
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
    """Remove a file; it is gone from the disk when this returns.

    Raises:
        OSError: it cannot be removed.
    """
    path.unlink()
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that new, renamed and removed files survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
