"""Who may write what the service runs: its program, its interpreter, and all that it may import."""

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
"""Owner and permissions of a path, links followed."""


@dataclass(frozen=True)
class InstalledCode:
    """What runs when the service does.

    Attributes:
        program: the `wattfleet` of an environment.
        interpreter: the Python that runs it, and the file that makes an environment of it, if any.
        imported: folders and archives that this Python imports from.
    """

    program: Path
    interpreter: Sequence[Path] = ()
    imported: Sequence[Path] = ()

    def writable_by_others(self, look_at: Stat = os.stat, contents: bool = True) -> Path | None:
        """The first part that others than root may write, or put something else in the place of.

        The folders above each part count, and so does all that links on the way lead to.

        Args:
            look_at: `os.stat` outside of tests.
            contents: whether to look at every file in the folders of imports, too, which may take seconds.

        Raises:
            InvalidInputError: a part cannot be looked at.
        """
        try:
            for place in self._places(contents):
                try:
                    found = look_at(place)
                except (FileNotFoundError, NotADirectoryError):
                    # An archive that is optional, or a link that leads nowhere: who may make it, may write its folder.
                    continue
                if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return place
        except OSError as error:
            raise InvalidInputError(
                f"{error.filename} cannot be looked at ({error.strerror}): run this as root, or repair it"
            ) from None
        return None

    def _places(self, contents: bool) -> Iterator[Path]:
        seen: set[Path] = set()
        for path in (self.program, *self.interpreter, *self.imported):
            yield from _on_the_way_to(path, seen)
        if contents:
            walked: set[Path] = set()
            for folder in self.imported:
                yield from _below(folder, seen, walked)


def running_code() -> InstalledCode:
    """The environment that this runs in."""
    program = Path(sysconfig.get_path("scripts"), "wattfleet")
    # Python looks for imports beside the program, too, where it finds none.
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
