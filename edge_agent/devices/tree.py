"""Access to the kernel's files below a root, which tests replace."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path


class Tree:
    """The files of one machine. Paths are those on that machine, such as `/sys/class/devfreq`.

    Args:
        root: the machine's root folder; `/` on the machine itself.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def exists(self, path: str) -> bool:
        """Return whether the file or folder exists and is visible."""
        return os.path.exists(self.location(path))

    def may_write(self, path: str) -> bool:
        """Return whether this process may write a file, without writing."""
        return os.access(self.location(path), os.W_OK)

    def glob(self, pattern: str) -> list[str]:
        """Return the matching paths, sorted by the numbers in them."""
        found = glob.glob(pattern.lstrip("/"), root_dir=self._root)
        return sorted((f"/{path}" for path in found), key=_numbers_in_order)

    def read(self, path: str) -> str:
        """Return the text of a file, without white space or device-tree NULs at its ends.

        Raises:
            OSError: it is missing, or the kernel does not answer.
        """
        return self.location(path).read_text(encoding="utf-8", errors="replace").strip("\0 \t\n")

    def write(self, path: str, text: str) -> None:
        """Write a value to the kernel in one write.

        Raises:
            OSError: it is missing, or the kernel refuses it.
        """
        # Unbuffered, and without creating the file, since a vanished setting is an error.
        descriptor = os.open(self.location(path), os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def location(self, path: str) -> Path:
        """Return the location of that machine's path on this one."""
        return self._root / path.lstrip("/")


def _numbers_in_order(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]
