"""Every repository path that the documentation puts in back quotes exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OUTPUT = "out"
TOP_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {OUTPUT}
SOURCE_SUFFIXES = (".py", ".pyi", ".proto")
SOURCE_KINDS = {"__init__.py", "__init__.pyi", ".pyi", ".proto"}
"""Kinds of files, which pages name without meaning one file."""

_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"`([\w./*-]+)`")


def _repository_paths(text: str) -> Iterator[str]:
    """Yield back-quoted paths that start with a top-level folder, and all names of source files.

    All other paths are files of a device or of another program, such as `/etc/nvpmodel.conf`.
    """
    for quoted in _QUOTED.findall(_BLOCK.sub("", text)):
        folder, slash, _ = quoted.partition("/")
        if (slash and folder in TOP_FOLDERS) or (quoted.endswith(SOURCE_SUFFIXES) and quoted not in SOURCE_KINDS):
            yield quoted


def _exists(path: str) -> bool:
    return any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_repository_path_on_the_page_exists(page: Path) -> None:
    missing = sorted({path for path in _repository_paths(page.read_text()) if not _exists(path)})
    assert missing == []


def test_paths_of_devices_and_programs_are_not_repository_paths() -> None:
    text = "`/etc/nvpmodel.conf`, `s/epoch`, `wattfleet/gone.py`, `gone.py`, `__init__.py`, `docs/`"
    assert list(_repository_paths(text)) == ["wattfleet/gone.py", "gone.py", "docs/"]
