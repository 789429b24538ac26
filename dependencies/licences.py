"""Write docs/licences.md: every package that Wattfleet needs at run time, with its version and licence.

The licences come from the metadata of the installed packages. Run this in the environment that `make install` creates.

    python -m dependencies.licences > docs/licences.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import tomllib
from packaging.markers import Marker

from dependencies.requirements import Locked, entries, needed, normal, requirements

ROOT = Path(__file__).parents[1]

EXTRAS = (
    *("prediction", "agent", "flower", "serving", "plots", "coordinator"),
    *("postgresql", "parquet", "jetson", "nvml", "simulation", "simulation-large"),
)
"""The extras that users install. `dev` is left out, since it only checks and builds Wattfleet."""

_TORCH = "Apache-2.0 AND BSD-2-Clause AND BSD-3-Clause AND BSL-1.0 AND MIT"
_STATED = {"pyarrow": "Apache-2.0", "torch": _TORCH}
"""Packages that are not in the lock, with the licence on the package's page."""

_BUNDLED = {"uplot": ("1.6.32", "MIT", ["coordinator", "simulation"])}
"""Scripts that Wattfleet's packages contain, with their version, licence and the extras that use them."""

_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "GNU Lesser General Public License v3 (LGPLv3)": "LGPL-3.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF",
}
_COPYLEFT = {
    r"\bAGPL": "copyleft, also for users over a network",
    r"(?<![AL])GPL": "copyleft",
    r"\bLGPL": "copyleft for the library itself",
    r"\bMPL": "copyleft for its own files",
}
_UNKNOWN = "unknown"

_HEAD = """# Licences of dependencies

Wattfleet is under the Apache License 2.0. This page lists what it needs at run time, with all extras of
`pyproject.toml`. `make licences` writes it from `requirements.lock` and from what the installed packages state; a test
fails if it is out of date. Packages that only check and build Wattfleet are in the lock, and not here.

**jetson-stats** is under the AGPL-3.0. It is not installed unless somebody chooses the extra `jetson`, which only the
device `jtop` uses, or `dev`, which tests it. No other part of Wattfleet imports it.

**uPlot**, which draws the charts of the coordinator's page, comes with Wattfleet: its files and its licence are in
`coordinator/page/static/uplot/`.

"""


def licence_of(name: str) -> str:
    """Return the licence that an installed package states, in its shortest form.

    Raises:
        PackageNotFoundError: the package is not installed.
    """
    stated: Any = metadata(name)
    if expression := stated.get("License-Expression"):
        return str(expression)
    classifiers = [each.split(" :: ")[-1] for each in stated.get_all("Classifier") or () if each.startswith("License")]
    named = sorted({_CLASSIFIERS[each] for each in classifiers if each in _CLASSIFIERS})
    text = (stated.get("License") or "").strip()
    if re.fullmatch(r"[A-Za-z]+-[0-9][\w.-]*", text):  # more exact than a classifier
        return str(text)
    if named:
        return " or ".join(named)
    return _UNKNOWN if len(text) > 40 or text in ("", "UNKNOWN") else str(text)


def remark(licence: str) -> str:
    """Return what a user of a package should know about its licence; empty if there is nothing."""
    if licence == _UNKNOWN:
        return "**look it up**"
    return "; ".join(text for pattern, text in _COPYLEFT.items() if re.search(pattern, licence))


def page() -> str:
    """Return the page as Markdown."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = [each for each in entries((ROOT / "requirements.lock").read_text()) if _is_for_linux(each)]
    extras = _extras_of(project, locked)
    rows = [(each.name, each.version, licence_of(each.name)) for each in locked if each.name in extras]
    rows += [(name, "not locked", licence) for name, licence in _STATED.items() if name in extras]
    rows += [(name, version, licence) for name, (version, licence, _) in _BUNDLED.items()]
    extras |= {name: uses for name, (_, _, uses) in _BUNDLED.items()}
    lines = [
        f"| {name} | {version} | {licence} | {remark(licence)} | {', '.join(extras[name])} |"
        for name, version, licence in sorted(rows)
    ]
    return (
        _HEAD
        + "\n".join(["| package | version | licence | note | needed by |", "|---|---|---|---|---|", *lines])
        + "\n"
    )


def _is_for_linux(package: Locked) -> bool:
    environment = {
        "sys_platform": "linux",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
    }
    return not package.marker or Marker(package.marker).evaluate(environment)


def _extras_of(project: dict[str, Any], locked: list[Locked]) -> dict[str, list[str]]:
    """Return the extras that need each package; `core` stands for Wattfleet without extras."""
    found: dict[str, list[str]] = {}
    core = set(_needed(project["dependencies"], locked))
    for name in core:
        found[name] = ["core"]
    for extra in EXTRAS:
        for name in _needed(requirements(project, extra), locked):
            if name not in core:
                found.setdefault(name, []).append(extra)
    return found


def _needed(names: list[str], locked: list[Locked]) -> Iterator[str]:
    yield from (package.name for package in needed(locked, names))
    yield from (name for name in _STATED if name in map(normal, names))


if __name__ == "__main__":
    try:
        print(page(), end="")
    except PackageNotFoundError as error:
        sys.exit(f"{error.name} is not installed: run this in the environment that `make install` creates")
