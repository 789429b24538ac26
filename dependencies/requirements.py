"""Print the lock's entries for extras of `pyproject.toml`: exact versions with their hashes.

An image installs them in a separate layer, so that a changed source does not reinstall them.

    python requirements.py pyproject.toml requirements.lock agent

Names of packages, such as `scikit-learn`, are accepted as well.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

_ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: ; (?P<marker>[^\\]+?))? \\$")
_PARENT = re.compile(r"^    # (?:via|  ) *(?P<parent>[A-Za-z0-9._-]*)")


@dataclass(frozen=True)
class Locked:
    """One package of a lock.

    Attributes:
        name: the name in the form of `normal`.
        version: the version that is installed.
        marker: where it is installed; empty for everywhere.
        parents: the packages that need it.
        text: its lines in the lock.
    """

    name: str
    version: str
    marker: str
    parents: frozenset[str]
    text: str


def normal(name: str) -> str:
    """Return a package's name in the normal form of indexes, without extras, versions and markers."""
    found = re.match(r"[A-Za-z0-9._-]+", name)
    assert found is not None, f"{name!r} is not the name of a package"
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def requirements(project: dict[str, Any], extra: str) -> list[str]:
    """Return the sorted packages that the project needs with one of its extras, with nested extras resolved."""
    own_extras = re.compile(rf"{re.escape(project['name'])}\[(?P<extras>[^]]+)\]$")
    found = set(project["dependencies"])
    for requirement in project["optional-dependencies"][extra]:
        if own := own_extras.match(requirement):
            for name in own["extras"].split(","):
                found.update(requirements(project, name.strip()))
        else:
            found.add(requirement)
    return sorted(found)


def entries(lock: str) -> Iterator[Locked]:
    """Return the packages of a lock."""
    for block in re.split(r"\n(?=[A-Za-z0-9])", lock):
        lines = block.strip("\n").splitlines()
        if entry := _ENTRY.match(lines[0]):
            comments = filter(None, map(_PARENT.match, lines[1:]))
            parents = frozenset(normal(each["parent"]) for each in comments if each["parent"])
            text = "\n".join(line for line in lines if "#" not in line).rstrip(" \\")
            yield Locked(normal(entry["name"]), entry["version"], entry["marker"] or "", parents, text)


def needed(locked: Iterable[Locked], names: Iterable[str]) -> list[Locked]:
    """Return packages and their dependencies, in the order of the lock."""
    locked, found = list(locked), set(map(normal, names))
    while more := {each.name for each in locked if each.parents & found} - found:
        found |= more
    return [each for each in locked if each.name in found]


def main(pyproject: str, lock: str, *wanted: str) -> None:
    """Print the entries."""
    project = tomllib.loads(Path(pyproject).read_text())["project"]
    names: list[str] = []
    for each in wanted:
        names += requirements(project, each) if each in project["optional-dependencies"] else [each]
    print(*(each.text for each in needed(entries(Path(lock).read_text()), names)), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
