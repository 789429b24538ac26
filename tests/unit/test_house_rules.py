"""Every test module keeps the limits on the lengths of names and modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MODULES = sorted(TESTS.rglob("*.py"))
MAX_NAME = 79


def relative(module: Path) -> str:
    return module.relative_to(TESTS).as_posix()


def names_of_tests(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            yield node.name


def test_names_of_tests_are_under_80_characters() -> None:
    long = {
        relative(module): names
        for module in MODULES
        if (names := [name for name in names_of_tests(module) if len(name) > MAX_NAME])
    }
    assert long == {}
