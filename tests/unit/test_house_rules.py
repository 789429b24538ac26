"""Rules that every test module keeps: the length of names and of modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MODULES = sorted(TESTS.rglob("*.py"))
MAX_NAME = 79
MAX_LINES = 400

TO_SPLIT = {"unit/edge_agent/test_profiler.py", "unit/edge_agent/test_sysfs_device.py"}
"""Modules that are still longer than the rule allows; no module may join them."""


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


def test_no_test_module_is_over_400_lines() -> None:
    long = {relative(module) for module in MODULES if len(module.read_text().splitlines()) > MAX_LINES}
    assert long <= TO_SPLIT
