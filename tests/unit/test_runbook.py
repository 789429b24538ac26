"""The runbook states what to do at every alert and every error."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(ROOT / path.name for path in ROOT.glob("*/") if (ROOT / path.name / "__init__.py").exists())
ALERTS, ERRORS = (ROOT / "docs/operate.md").read_text().split("\n## Errors\n")


def errors_of(folders: list[Path]) -> set[str]:
    """The names of all subclasses of `WattfleetError`, direct or indirect, except private ones."""
    bases: dict[str, set[str]] = {}
    for module in (module for folder in folders for module in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(ast.unparse(base).split(".")[-1] for base in node.bases)
    found = {"WattfleetError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return {name for name in found - {"WattfleetError"} if not name.startswith("_")}


def test_the_runbook_has_exactly_the_alerts_of_the_rules() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert re.findall(r"^\| `(\w+)` \|", ALERTS, re.MULTILINE) == alerts


def test_the_runbook_has_every_error_once() -> None:
    cells = re.findall(r"^\| (`[^|]+) \|", ERRORS, re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(errors_of([*PACKAGES, ROOT / "proto"]))


def test_each_row_of_the_runbook_says_what_it_means_and_what_to_do() -> None:
    rows = re.findall(r"^\| `.*$", ALERTS + ERRORS, re.MULTILINE)
    assert all(len([cell for cell in row.split("|") if cell.strip()]) == 3 for row in rows)


def test_a_class_that_is_an_error_through_another_is_found(tmp_path: Path) -> None:
    (tmp_path / "errors.py").write_text("class OneError(WattfleetError): ...\nclass TwoError(OneError): ...\n")
    (tmp_path / "others.py").write_text("class OtherError(Exception): ...\nclass _OwnError(x.TwoError): ...\n")
    assert errors_of([tmp_path]) == {"OneError", "TwoError"}
