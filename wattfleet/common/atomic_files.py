"""Files in a process's own folders: replaced atomically, and never through another user's link.

After a power cut, a file has either its old or its new content. Another user who may write to a folder could put a
symbolic link, a pipe or a file of their own there; a process of root must neither follow nor use it.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)

_STATE_FOLDER_MODE = 0o750

_ABANDONED_S = 3600.0
"""A draft that is older than a newer one by this time, s, was left by a killed process."""


def replace_file(path: Path, content: bytes, write: Callable[[int, bytes], int] = os.write, mode: int = 0o644) -> None:
    """Replace a file's content atomically; it is on disk when this returns.

    If several processes write at once, the content of the last one stays. Each writes its own draft.

    Args:
        path: the file; its folder exists.
        content: the new content.
        write: writes bytes to a file descriptor; tests replace `os.write`.
        mode: the file's permissions, before the process's umask; 0o600 for secrets.

    Raises:
        OSError: the file cannot be written; the old content stays.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    try:
        # O_EXCL also refuses links, which could exist only if somebody guessed the name.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            while content:
                content = content[write(descriptor, content) :]
            os.fsync(descriptor)
            written_at_s = os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    with suppress(OSError):
        _remove_abandoned(path, written_at_s - _ABANDONED_S)
    sync_folder(path.parent)


def _remove_abandoned(path: Path, before_s: float) -> None:
    """Remove the drafts of a file that were written before a given time of the file system's clock."""
    with os.scandir(path.parent) as entries:
        for entry in entries:
            is_draft = entry.name.startswith(f".{path.name}.") and entry.name.endswith(".draft")
            if is_draft and entry.stat(follow_symlinks=False).st_mtime < before_s:
                os.unlink(entry.path)


def open_regular_file(path: Path, flags: int) -> int:
    """Open a file that is not a link; see `os.open` for the flags. A new file gets the mode 644.

    Returns:
        Its descriptor.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or is opened for writing by root and belongs to
            another user.
    """
    try:
        # Without O_NONBLOCK, a pipe would block until somebody writes to it.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed: remove it", str(path)) from None
        raise
    found = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(found.st_mode):
        problem = "is not a regular file: remove it"
    elif flags & (os.O_WRONLY | os.O_RDWR) and os.geteuid() == 0 != found.st_uid:
        problem = f"belongs to user {found.st_uid}, not to root: remove it, or change its owner to root"
    if problem is not None:
        os.close(descriptor)
        raise OSError(errno.EPERM, problem, str(path))
    return descriptor


def read_regular_file(path: Path) -> bytes:
    """Return the content of a file that is not a link.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    with open(open_regular_file(path, os.O_RDONLY), "rb") as file:
        return file.read()


def require_own_folder(folder: Path) -> None:
    """Check that nobody else can replace the files in a folder to which a process of root writes.

    The folder may be absent. For processes of other users, nothing is checked.

    Raises:
        OSError: the folder belongs to another user, or every user may write to it.
    """
    if os.geteuid() != 0:
        return
    try:
        found = folder.stat()
    except FileNotFoundError:
        return
    if found.st_uid != 0:
        raise OSError(
            errno.EPERM,
            f"the folder {folder} belongs to user {found.st_uid}, not to root: run `chown root {folder}`",
            str(folder),
        )
    if found.st_mode & stat.S_IWOTH:
        raise OSError(
            errno.EPERM, f"every user may write to the folder {folder}: run `chmod o-w {folder}`", str(folder)
        )


def require_file_of(path: Path, uid: int = 0) -> None:
    """Check that nobody but a user, and root, can change or replace a file.

    Args:
        path: the file; it exists.
        uid: the user.

    Raises:
        OSError: the file or its folder belongs to another user, the group or others may write to it, or the file is a
            symbolic link.
    """
    if path.is_symlink():
        raise OSError(
            errno.ELOOP, f"{path} is a symbolic link, which is not followed: put the file itself there", str(path)
        )
    user = "root" if uid == 0 else str(uid)
    for each in (path.parent, path):
        found = each.stat()
        if found.st_uid not in (0, uid):
            problem = f"{each} belongs to user {found.st_uid}, not to {user}: run `chown {user} {each}`"
            raise OSError(errno.EPERM, problem, str(each))
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError(errno.EPERM, f"other users may write to {each}: run `chmod go-w {each}`", str(each))


def make_state_folder(folder: Path) -> None:
    """Create a folder, and its parents, that other users may not enter; existing folders stay as they are.

    Raises:
        OSError: a folder cannot be created.
    """
    try:
        folder.mkdir(mode=_STATE_FOLDER_MODE)
    except FileNotFoundError:
        make_state_folder(folder.parent)
        folder.mkdir(mode=_STATE_FOLDER_MODE, exist_ok=True)
    except FileExistsError:
        if not folder.is_dir():
            raise


def remove_file(path: Path) -> None:
    """Remove a file; it is gone from the disk when this returns.

    Raises:
        OSError: the file cannot be removed.
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
