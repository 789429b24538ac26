"""Checks who can change the code that the service runs: program, interpreter and imports."""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wattfleet.errors import InvalidInputError

Stat = Callable[[Path], os.stat_result]
"""Returns owner and permissions of a path, following links."""


@dataclass(frozen=True)
class InstalledCode:
    """The code that the service runs.

    Attributes:
        program: the `wattfleet` of an environment.
        interpreter: the Python that runs it, and the `pyvenv.cfg` of its environment, if any.
        imported: folders and archives from which this Python imports.
    """

    program: Path
    interpreter: Sequence[Path] = ()
    imported: Sequence[Path] = ()

    def writable_by_others(self, look_at: Stat = os.stat) -> Path | None:
        """Return the first part that users other than root can change or replace; None if there is none.

        This checks all parent folders, every file in the folders of imports, and the targets of all links on the way.
        It may take seconds.

        Args:
            look_at: `os.stat` except in tests.

        Raises:
            InvalidInputError: a part cannot be read.
        """
        try:
            for place in self._places():
                try:
                    found = look_at(place)
                except (FileNotFoundError, NotADirectoryError):
                    # An optional archive or a broken link: creating it requires access to its folder, which is checked.
                    continue
                if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return place
        except OSError as error:
            raise InvalidInputError(
                f"{error.filename} cannot be read ({error.strerror}); run this as root, or repair it"
            ) from None
        return None

    def _places(self) -> Iterator[Path]:
        seen: set[Path] = set()
        for path in (self.program, *self.interpreter, *self.imported):
            yield from _on_the_way_to(path, seen)
        walked: set[Path] = set()
        for folder in self.imported:
            yield from _below(folder, seen, walked)


def running_code() -> InstalledCode:
    """Return the code of the environment that runs this process."""
    program = Path(sysconfig.get_path("scripts"), "wattfleet")
    # Python also searches the program's folder, which does not contain modules.
    imported = [Path(place) for place in sys.path if place and Path(place) != program.parent]
    return InstalledCode(program, (Path(sys.executable), Path(sys.prefix, "pyvenv.cfg")), imported)


def _on_the_way_to(path: Path, seen: set[Path]) -> Iterator[Path]:
    for place in (path, *path.parents):
        if place in seen:
            continue
        seen.add(place)
        yield place
        if place.is_symlink():
            yield from _on_the_way_to(place.parent / place.readlink(), seen)


def _below(folder: Path, seen: set[Path], walked: set[Path]) -> Iterator[Path]:
    where = folder.resolve()
    if where in walked or not where.is_dir():
        return
    walked.add(where)
    with os.scandir(where) as listed:
        entries = list(listed)
    for entry in entries:
        path = Path(entry.path)
        if entry.is_symlink():
            yield from _on_the_way_to(path, seen)
        else:
            yield path
        if entry.is_dir():
            yield from _below(path, seen, walked)
