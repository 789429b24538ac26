"""The core's public interface: folders export what their stubs name, and other code imports no deeper modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CORE = ROOT / "wattfleet" / "core"
STUBS = sorted(CORE.rglob("__init__.pyi"))
EXPORTS = {
    ".".join(stub.parent.relative_to(ROOT).parts): {
        alias.asname or alias.name
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for stub in STUBS
}
"""The public folders of the core, and the names that each exports."""

PUBLIC_MODULES = {"wattfleet.core", "wattfleet.core.errors", *EXPORTS}
NOT_PRODUCTION = {"tests", "docs"}


@dataclass(frozen=True)
class Import:
    """One module that a file imports, and the names imported from it."""

    module: str
    names: tuple[str, ...]


def imports_in(source: str) -> Iterator[Import]:
    """Absolute imports in a file, including those inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield Import(node.module, tuple(alias.name for alias in node.names))


def violations(source: str, folder: str | None) -> list[str]:
    """List what a file imports from the core beyond its public interface.

    Args:
        source: the file's text.
        folder: the core's folder that holds the file, whose own modules it may import; None outside the core.
    """
    found = []
    for each in imports_in(source):
        path = each.module.split(".")
        if path[:2] != ["wattfleet", "core"] or (folder is not None and path[2:3] == [folder]):
            continue
        if each.module not in PUBLIC_MODULES:
            found.append(each.module)
        elif each.module != "wattfleet.core.errors":
            known = EXPORTS.get(each.module, set())
            paths = {name: f"{each.module}.{name}" for name in each.names if name not in known}
            found += [path for path in paths.values() if path not in PUBLIC_MODULES]
    return found


def production_files() -> list[Path]:
    """All Python files outside tests: packages, benchmarks, examples and deployment."""
    folders = [entry for entry in ROOT.iterdir() if entry.is_dir() and entry.name[0] != "."]
    return [
        path
        for folder in folders
        if folder.name not in NOT_PRODUCTION
        for path in sorted(folder.rglob("*.py"))
        if not any(part.startswith(".") or part == "build" for part in path.relative_to(ROOT).parts)
    ]


def core_folder(path: Path) -> str | None:
    """The core's folder that a file is in; None outside the core's folders."""
    parts = path.relative_to(ROOT).parts
    return parts[2] if parts[:2] == ("wattfleet", "core") and len(parts) > 3 else None


def test_production_code_imports_the_core_by_its_public_interface_only() -> None:
    files = production_files()
    assert {"wattfleet", "coordinator", "edge_agent", "benchmarks", "examples"} <= {
        path.relative_to(ROOT).parts[0] for path in files
    }
    offenders = {
        str(path.relative_to(ROOT)): found
        for path in files
        if (found := violations(path.read_text(), core_folder(path)))
    }
    assert offenders == {}


@pytest.mark.parametrize(
    ("source", "folder", "expected"),
    [
        ("from wattfleet.core.choosing.front import Values", None, ["wattfleet.core.choosing.front"]),
        ("import wattfleet.core.prediction.predictor", None, ["wattfleet.core.prediction.predictor"]),
        ("def f():\n    from wattfleet.core.modes.power_mode import BOARDS", None, ["wattfleet.core.modes.power_mode"]),
        ("from wattfleet.core.choosing import front", None, ["wattfleet.core.choosing.front"]),
        ("from wattfleet.core import choosing, prediction", None, []),
        ("from wattfleet.core import choice", None, ["wattfleet.core.choice"]),
        ("from wattfleet.core.choosing.front import Front", "planning", ["wattfleet.core.choosing.front"]),
        ("from wattfleet.core.choosing.front import Front", "choosing", []),
        ("from wattfleet.core.choosing import Front\nfrom wattfleet.core.errors import WattfleetError", None, []),
        ("from wattfleet.common.cli import main", None, []),
    ],
)
def test_deep_imports_are_found(source: str, folder: str | None, expected: list[str]) -> None:
    assert violations(source, folder) == expected


def test_the_public_folders_are_the_documented_ones() -> None:
    assert set(EXPORTS) == {
        "wattfleet.core.budgets",
        "wattfleet.core.choosing",
        "wattfleet.core.duties",
        "wattfleet.core.modes",
        "wattfleet.core.planning",
        "wattfleet.core.planning.policies",
        "wattfleet.core.prediction",
        "wattfleet.core.prediction.roofline",
    }


@pytest.mark.parametrize("package", sorted(EXPORTS))
def test_every_exported_name_exists(package: str) -> None:
    module = import_module(package)
    assert set(module.__all__) == EXPORTS[package]
    for name in EXPORTS[package]:
        assert getattr(module, name) is not None
