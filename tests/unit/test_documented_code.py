"""Python and TOML in the documentation is valid, and its names, arguments and keys exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from flwr.app import UserConfig
from flwr.common.config import parse_config_args

import wattfleet.core.planning
import wattfleet.flower
import wattfleet.serving
from coordinator.budgets.site_file import read_site_file
from edge_agent.devices.host import HOST_FILE, parse_host_file
from tests.fakes.documented_commands import PAGES, ROOT, Block, blocks, blocks_of_page, calls
from wattfleet.common import cli

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PUBLIC = (wattfleet.flower, wattfleet.serving, wattfleet.core.planning)
_IMPORT = re.compile(r"from ((?:wattfleet|reference_models)[\w.]*) import (\w+(?:, \w+)*)")
_INLINE_CALL = re.compile(r"`([A-Za-z_]+\([^`]*\))`")


def blocks_in(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks_of_page(page) if block.language in languages]


def code_of(block: Block) -> str:
    """The code of a block, with `pass` as the body of each loop or function that has none."""
    lines = []
    for line, following in zip(block.lines, [*block.lines[1:], ""], strict=True):
        lines.append(line)
        begin = len(line) - len(line.lstrip())
        if line.partition("#")[0].rstrip().endswith(":") and len(following) - len(following.lstrip()) <= begin:
            lines.append(f"{' ' * begin}    pass")
    return "\n".join(lines)


def tree_of(code: str) -> ast.Module:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(code, "documentation", "exec", flags)
    assert isinstance(tree, ast.Module)
    return tree


def documented_calls() -> Iterator[tuple[Path, ast.Call]]:
    """The calls in Python blocks and in inline code."""
    for page in PAGES:
        for block in blocks_of_page(page):
            if block.language == "python":
                yield from ((page, node) for node in ast.walk(tree_of(code_of(block))) if isinstance(node, ast.Call))
        for inline in _INLINE_CALL.findall(page.read_text()):
            try:
                tree = ast.parse(" ".join(inline.split()))
            except SyntaxError:  # prose, or another language
                continue
            yield from ((page, node) for node in ast.walk(tree) if isinstance(node, ast.Call))


def public(name: str) -> Callable[..., Any] | None:
    for module in _PUBLIC:
        if name in dir(module):
            found: Callable[..., Any] = getattr(module, name)
            return found
    return None


def check_arguments(call: ast.Call, function: Callable[..., Any]) -> None:
    """Raise TypeError if the function does not accept these arguments; `...` stands for any others."""
    arguments = [each for each in call.args if not (isinstance(each, ast.Constant) and each.value is ...)]
    keywords = {each.arg: None for each in call.keywords if each.arg is not None}
    inspect.signature(function).bind_partial(*arguments, **keywords)


@pytest.mark.parametrize("block", blocks_in("python"), ids=str)
def test_python_can_be_compiled(block: Block) -> None:
    tree_of(code_of(block))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_imported_exists(page: Path) -> None:
    for module, names in _IMPORT.findall(page.read_text()):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_functions_take_the_arguments_that_the_pages_give_them() -> None:
    checked = 0
    for page, call in documented_calls():
        function = public(call.func.id) if isinstance(call.func, ast.Name) else None
        if function is None:
            continue
        try:
            check_arguments(call, function)
        except TypeError as error:
            pytest.fail(f"{page.relative_to(ROOT)}: {ast.unparse(call)}: {error}")
        checked += 1
    assert checked > 25


def test_an_argument_that_does_not_exist_is_found() -> None:
    for wrong in ("PowerAware(s, quorums=1)", "Quorum(part=0.5)"):
        [call] = [node for node in ast.walk(ast.parse(wrong)) if isinstance(node, ast.Call)]
        assert isinstance(call.func, ast.Name)
        function = public(call.func.id)
        assert function is not None
        with pytest.raises(TypeError):
            check_arguments(call, function)


@pytest.mark.parametrize("block", blocks_in("toml"), ids=str)
def test_toml_is_what_its_reader_takes(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.toml"
    file.write_text(block.text)
    tables = tomllib.loads(block.text)
    if "supplies" in tables:
        (tmp_path / "plan.csv").write_text("from,until,watts\n2026-06-01T06:00+02:00,,200\n")
        assert read_site_file(file)
    elif "host" in tables:
        assert parse_host_file(block.text.encode(), HOST_FILE).kind == tables["host"]["kind"]
    elif "project" in tables:
        package = tomllib.loads((ROOT / "examples/own_policy/pyproject.toml").read_text())
        assert tables["project"].items() <= package["project"].items()
    else:
        monkeypatch.setenv("WATTFLEET_CONFIG", str(file))
        for command in (["simulate"], ["coordinator", "devices"]):  # they validate the tables of the whole group
            shown = CliRunner().invoke(cli.wattfleet, [*command, "--help"])
            assert shown.exit_code == 0, shown.exception


def run_configs() -> list[tuple[Block, str, UserConfig]]:
    """Each block with `flwr run`, the app's folder, and the overrides of the run config."""
    return [
        (block, call[1], parse_config_args([call[call.index(option) + 1]]))
        for block in blocks()
        for step in block.steps()
        for call in calls(step.command, "flwr")
        for option in ("-c", "--run-config")
        if option in call
    ]


def test_the_run_config_that_a_command_overrides_has_these_keys() -> None:
    assert run_configs()
    for block, app, overridden in run_configs():
        folder = ROOT / "examples" / app.partition("examples/")[2]
        # A reader's own app takes the run config of the example that the guide uses.
        folder = folder if (folder / "pyproject.toml").exists() else ROOT / "examples/quickstart-sklearn/plain"
        config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        assert overridden.keys() <= config.keys(), str(block)
