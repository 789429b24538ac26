"""Print the requirements of an extra of `pyproject.toml`, one per line.

An image installs them in a separate layer, so that a changed source does not reinstall them.

    python requirements.py pyproject.toml agent
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import tomllib


def requirements(project: dict[str, Any], extra: str) -> list[str]:
    """What the project needs with one of its extras, sorted; extras that name the project are followed."""
    own_extras = re.compile(rf"{re.escape(project['name'])}\[(?P<extras>[^]]+)\]$")
    found = set(project["dependencies"])
    for requirement in project["optional-dependencies"][extra]:
        if own := own_extras.match(requirement):
            for name in own["extras"].split(","):
                found.update(requirements(project, name.strip()))
        else:
            found.add(requirement)
    return sorted(found)


if __name__ == "__main__":
    path, extra = sys.argv[1:]
    print(*requirements(tomllib.loads(Path(path).read_text())["project"], extra), sep="\n")
