"""Access to the kernel's files below a root, which tests replace."""

from __future__ import annotations

import fnmatch
import os
import re
from pathlib import Path

_MAX_LINKS = 40
"""Maximum of links on a path, as in the kernel; the others of a cycle are not followed."""


class Tree:
    """The files of one machine. Paths are those on that machine, such as `/sys/class/devfreq`.

    Links lead to that machine's files, too: below another root, an absolute link such as `/proc/device-tree` is
    followed there, not on this machine.

    Args:
        root: the machine's root folder; `/` on the machine itself.
    """

    def __init__(self, root: Path) -> None:
        self._root = "" if root == Path("/") else str(root)

    def is_read_only(self, path: str) -> bool:
        """Return whether a file is on a file system that nobody can write, not even root."""
        try:
            return bool(os.statvfs(self._found(path)).f_flag & os.ST_RDONLY)
        except OSError:
            return False

    def exists(self, path: str) -> bool:
        """Return whether the file or folder exists and is visible."""
        return os.path.exists(self._found(path))

    def may_write(self, path: str) -> bool:
        """Return whether this process may write a file, without writing."""
        return os.access(self._found(path), os.W_OK)

    def glob(self, pattern: str) -> list[str]:
        """Return the matching paths, sorted by the numbers in them."""
        found = [""]
        for part in pattern.strip("/").split("/"):
            found = [f"{folder}/{name}" for folder in found for name in self._named(folder, part)]
        return sorted(found, key=_numbers_in_order)

    def read(self, path: str) -> str:
        """Return the text of a file, without white space or device-tree NULs at its ends.

        Raises:
            OSError: it is missing, or the kernel does not answer.
        """
        with open(self._found(path), encoding="utf-8", errors="replace") as file:
            return file.read().strip("\0 \t\n")

    def write(self, path: str, text: str) -> None:
        """Write a value to the kernel in one write.

        Raises:
            OSError: it is missing, or the kernel refuses it.
        """
        # Unbuffered, and without creating the file, since a vanished setting is an error.
        descriptor = os.open(self._found(path), os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def location(self, path: str) -> Path:
        """Return the location of that machine's path on this one."""
        return Path(self._found(path))

    def _found(self, path: str) -> str:
        # Texts, since a board's tree is read hundreds of times for one mode, and paths as objects took most of it.
        if not self._root:
            return f"/{path.lstrip('/')}"
        pending, place = _parts_reversed(path), self._root
        links = 0
        while pending:
            part = pending.pop()
            if part == "..":
                place = place if place == self._root else place.rpartition("/")[0]
                continue
            folder, place = place, f"{place}/{part}"
            if links < _MAX_LINKS and (target := _link_at(place)):
                links += 1
                place = self._root if target.startswith("/") else folder
                pending += _parts_reversed(target)
        return place

    def _named(self, folder: str, pattern: str) -> list[str]:
        """Return the names in a folder that match a pattern without slashes."""
        if not any(character in pattern for character in "*?["):
            return [pattern] if self.exists(f"{folder}/{pattern}") else []
        try:
            return fnmatch.filter(os.listdir(self._found(folder)), pattern)
        except OSError:
            return []


def _parts_reversed(path: str) -> list[str]:
    """Return the names on a path, the last first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _numbers_in_order(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


def _link_at(place: str) -> str:
    """Return where a symbolic link points to; empty if there is none, or no permission to see it."""
    try:
        return os.readlink(place)
    except OSError:
        return ""
