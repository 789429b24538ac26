"""The documentation: its commands are run and exist, its paths exist, and the runbook covers every alert and error."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import click
import pytest
import yaml  # type: ignore[import-untyped]

from tests.fakes.documented_commands import (
    GROUPS,
    PAGES,
    ROOT,
    Block,
    blocks,
    blocks_of_page,
    calls,
    check_call,
    check_options,
    flower_programs,
    flwr_command,
)
from wattfleet.common.cli import wattfleet

# --- Documented settings ----------------------------------------------------------------------------------------------
# A key that is worth a setting has an option, or a document says what it is for.


@pytest.mark.parametrize(
    "model", ["coordinator.settings:CoordinatorSettings", "edge_agent.settings:AgentSettings"], ids=["serve", "run"]
)
def test_each_setting_without_an_option_is_named_in_a_document(model: str) -> None:
    keys_of = pytest.importorskip("wattfleet.common.settings.model").keys_of
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    unknown = [key.path for key in keys_of(resolve_name(model)) if not key.option and f"`{key.path}" not in text]
    assert not unknown, "name each in a document as `group.key`, or make it a constant beside the code that uses it"


# --- Documented commands ----------------------------------------------------------------------------------------------
# Every command block in the documentation is run by a test or states why it is not, and its commands exist.


BLOCKS = blocks()
_INLINE = re.compile(r"`((?:wattfleet|flwr) [a-z][^`]*|(?:wattfleet|flower)-super(?:link|node) [^`]*)`")
_FLWR = flwr_command()
_FLOWER_PROGRAMS = flower_programs()

each_block = pytest.mark.parametrize("block", BLOCKS, ids=str)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@each_block
def test_the_block_is_run_or_says_why_not(block: Block) -> None:
    assert block.group or block.reason, (
        "put `<!-- run: GROUP -->` or `<!-- not run: REASON -->` on the line before the block, see CONTRIBUTING.md"
    )
    assert not block.group or block.group in GROUPS, f"the groups are {', '.join(GROUPS)}"


@pytest.mark.parametrize("group", GROUPS)
def test_each_group_has_blocks_and_a_test_that_runs_them(group: str) -> None:
    assert any(block.group == group for block in BLOCKS)
    assert f'blocks_of("{group}")' in (ROOT / GROUPS[group]).read_text()


@each_block
def test_the_commands_of_the_block_exist(block: Block) -> None:
    for step in block.steps():
        for call in calls(step.command, "wattfleet"):
            check_call(call, wattfleet)
        for call in calls(step.command, "flwr"):
            check_call(call, _FLWR)
        for program, parsers in _FLOWER_PROGRAMS.items():
            for call in calls(step.command, program):
                check_options(call, parsers)
        for call in calls(step.command, "make"):
            targets = (ROOT / "Makefile").read_text()
            assert all(re.search(rf"^{target}:", targets, re.MULTILINE) for target in call if "=" not in target)
        for call in calls(step.command, "python"):
            assert call[0] != "-m" or find_spec(call[1]), call


@each_page
def test_the_commands_within_the_text_exist(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for inline in _INLINE.findall(text):
        command = " ".join(inline.split()).replace("\\|", "|")
        for name, root in {"wattfleet": wattfleet, "flwr": _FLWR}.items():
            for call in calls(command, name):
                check_call(call, root, is_complete=False)
        for program, parsers in _FLOWER_PROGRAMS.items():
            for call in calls(command, program):
                check_options(call, parsers)


@each_page
def test_blocks_are_fenced_since_only_those_are_looked_at(page: Path) -> None:
    fenced = {
        number for block in blocks_of_page(page) for number in range(block.line, block.line + len(block.lines) + 2)
    }
    lines = page.read_text().split("\n")
    indented = [
        number
        for number, line in enumerate(lines, start=1)
        if number not in fenced and line.startswith("    ") and not lines[number - 2].strip()
    ]
    assert indented == []


def test_a_command_that_does_not_exist_is_found() -> None:
    for wrong in ("coordinator devces", "agent fit --device a --none", "agent profile --method fast", "agent apply"):
        [call] = calls(f"FOO=1 || sudo /opt/bin/wattfleet {wrong} > out & # wattfleet", "wattfleet")
        with pytest.raises(click.UsageError):
            check_call(call, wattfleet)
    assert calls("until wattfleet agent apply <mode>; do sleep 1; done", "wattfleet") == [
        ["agent", "apply", "PLACEHOLDER"]
    ]
    assert calls("usermod -aG wattfleet anna", "wattfleet") == []


def test_an_option_of_flowers_programs_that_does_not_exist_is_found() -> None:
    for wrong in ("--enroled d", "--pol-s 1", "--poll-s 0", "--node-configs a=1", "--isolation none", "extra"):
        with pytest.raises(click.UsageError):
            check_options(wrong.split(), _FLOWER_PROGRAMS["wattfleet-supernode"])
    for wrong in ("--check-s", "--log-format xml"):
        with pytest.raises(click.UsageError):
            check_options(wrong.split(), _FLOWER_PROGRAMS["wattfleet-superlink"])
    check_options(["--insecure", "--poll-s", "0.5", "--log-level", "debug"], _FLOWER_PROGRAMS["wattfleet-supernode"])
    [call] = calls("a & wattfleet-supernode --port $((19094 + k)) --insecure", "wattfleet-supernode")
    assert call == ["--port", "1", "--insecure"]


# --- Documented paths -------------------------------------------------------------------------------------------------
# Every repository path that the documentation puts in back quotes exists.

MARKDOWN = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_repository_path_on_the_page_exists(page: Path) -> None:
    missing = sorted({path for path in _repository_paths(page.read_text()) if not _exists(path)})
    assert missing == []


def test_paths_of_devices_and_programs_are_not_repository_paths() -> None:
    text = "`/etc/nvpmodel.conf`, `s/epoch`, `wattfleet/gone.py`, `gone.py`, `__init__.py`, `docs/`"
    assert list(_repository_paths(text)) == ["wattfleet/gone.py", "gone.py", "docs/"]


# --- Runbook ----------------------------------------------------------------------------------------------------------
# The runbook states what to do at every alert and every error.

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
