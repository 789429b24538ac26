"""Runs `wattfleet` commands as if only `pip install wattfleet`, without extras, were installed.

    python base_installation.py < commands.json > results.json

Reads a list of command lines, each a list of words after `wattfleet`. Writes the exit code and the output of each.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import tomllib
from packaging.requirements import Requirement

PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
"""Read from the file, since the metadata of an editable installation may be older."""


def base_packages() -> set[str]:
    """The distributions that `pip install wattfleet` installs."""
    found = {"wattfleet"}
    waiting = set(_applying(PROJECT["dependencies"]))
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= set(_needed(name)) - found
    return found


def _needed(name: str) -> Iterator[str]:
    try:
        yield from _applying(requires(name) or [])
    except PackageNotFoundError:  # an optional package for another Python or system
        return


def _applying(lines: list[str]) -> Iterator[str]:
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _normal(requirement.name)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class OtherPackagesMissing:
    """Hides the modules of all distributions except these."""

    def __init__(self, distributions: set[str]) -> None:
        self._missing = {
            module
            for module, owners in packages_distributions().items()
            if not distributions & {_normal(owner) for owner in owners}
        }

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Raise for a hidden module; leave the others to Python."""
        if name.partition(".")[0] in self._missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run(words: list[str]) -> tuple[int, str]:
    """The exit code and the output of a command."""
    from click.testing import CliRunner

    from wattfleet.common.cli import exit_code, wattfleet
    from wattfleet.core.errors import WattfleetError

    result = CliRunner().invoke(wattfleet, words, prog_name="wattfleet")
    if isinstance(result.exception, WattfleetError):
        return exit_code(result.exception), f"{result.output}wattfleet: {result.exception}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


if __name__ == "__main__":
    sys.meta_path.insert(0, OtherPackagesMissing(base_packages()))
    json.dump([run(words) for words in json.load(sys.stdin)], sys.stdout)
