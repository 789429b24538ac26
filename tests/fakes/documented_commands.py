"""The command blocks of the documentation, and the marks that state which test runs each of them.

A mark is the comment before a block. `<!-- run: board -->` names the group of blocks that one test module runs, in
`GROUPS`. `<!-- not run: needs a Jetson -->` states why no test runs the block.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from enum import Enum
from io import StringIO
from itertools import pairwise
from pathlib import Path

import click
from click.testing import CliRunner

from wattfleet.common import cli
from wattfleet.core.errors import WattfleetError
from wattfleet.flower.superlink import command as superlink
from wattfleet.flower.supernode import command as supernode

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "deploy/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
GROUPS = {
    "board": "tests/integration/docs/test_commands.py",
    "board with two workloads": "tests/integration/docs/test_commands.py",
    "imitated board": "tests/integration/docs/test_commands.py",
    "this machine": "tests/integration/docs/test_commands.py",
    "duty": "tests/integration/docs/test_commands.py",
    "fleet": "tests/integration/docs/test_commands.py",
    "desk": "tests/integration/docs/test_desk.py",
    "own app": "tests/integration/docs/test_your_app.py",
    "quickstart": "tests/integration/docs/test_your_app.py",
}
"""Group of blocks -> the test module that runs them."""

PROGRAMS = (
    *("wattfleet", "wattfleet-superlink", "wattfleet-supernode", "flower-superlink", "flwr"),
    *("cd", "curl", "docker", "git", "journalctl", "kubectl", "make", "pip", "psql", "python", "sudo", "systemctl"),
)
_SHELL = ("bash", "console", "sh")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)\s*$")
_MARK = re.compile(r"^\s*<!-- (?P<kind>run|not run): (?P<text>.+) -->$")
_PLACEHOLDER = re.compile(r"<[a-zA-Z][^<>\n]*>")
_PROMPT = "$ "
_ARITHMETIC = re.compile(r"\$\(\([^()]*\)\)")
_BEFORE_A_PROGRAM = {"sudo", "until", "while", "do", "docker", "compose", "exec", "coordinator"}


@dataclass(frozen=True)
class Step:
    """One command of a block, and the lines that the page shows as its output."""

    command: str
    output: list[str]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: path in the repository.
        line: line of the fence, from 1.
        language: language given after the fence; empty for none.
        lines: the lines without the fence and its indentation.
        group: the group that a test runs; empty for none.
        reason: why no test runs it; empty for none.
    """

    page: str
    line: int
    language: str
    lines: list[str]
    group: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def has_prompts(self) -> bool:
        return any(line.startswith(_PROMPT) for line in self.lines)

    @property
    def has_commands(self) -> bool:
        first = next(filter(None, self.lines), "").split(" ")[0]
        return self.language in _SHELL or (not self.language and (self.has_prompts or first in PROGRAMS))

    def steps(self) -> list[Step]:
        """The commands in order, each with its output; a block without prompts is one command."""
        if not self.has_prompts:
            return [Step(self.text, [])]
        steps: list[Step] = []
        for line in self.lines:
            if line.startswith(_PROMPT):
                steps.append(Step(line.removeprefix(_PROMPT), []))
            elif steps:
                steps[-1].output.append(line)
        return steps


def blocks() -> list[Block]:
    """The command blocks of all pages."""
    return [block for page in PAGES for block in blocks_of_page(page) if block.has_commands]


def blocks_of(group: str) -> list[Block]:
    """The blocks of a group, in the order of the pages."""
    return [block for block in blocks() if block.group == group]


def blocks_of_page(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page."""
    lines = page.read_text(encoding="utf-8").split("\n")
    number = 0
    while number < len(lines):
        begin, fence = number, _FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        while lines[number].strip() != "```":
            number += 1
        mark = _MARK.match(lines[begin - 1])
        yield Block(
            page.relative_to(ROOT).as_posix(),
            begin + 1,
            fence["language"],
            [line.removeprefix(fence["indent"]) for line in lines[begin + 1 : number]],
            **({} if mark is None else {("group" if mark["kind"] == "run" else "reason"): mark["text"]}),
        )
        number += 1


def calls(command: str, program: str) -> list[list[str]]:
    """The arguments of each call of a program in shell commands; `/opt/bin/PROGRAM` is the same program."""
    text = _ARITHMETIC.sub("1", _PLACEHOLDER.sub("PLACEHOLDER", command).replace("\\\n", " "))
    found = []
    for line in text.split("\n"):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("();<>|&"):
                names = [each.rpartition("/")[2] for each in words]
                if program in names and {*names[: names.index(program)]} <= _BEFORE_A_PROGRAM:
                    found.append(words[names.index(program) + 1 :])
                words = []
            else:
                words.append(word)
    return found


def resolved(arguments: list[str], root: click.Command) -> tuple[click.Context, list[str]]:
    """The context of the command that a call names, and the remaining arguments."""
    context, rest = click.Context(root, info_name=root.name), list(arguments)
    while isinstance(context.command, click.Group) and rest and not rest[0].startswith(("-", "...")):
        _, child, rest = context.command.resolve_command(context, rest)
        assert child is not None
        context = click.Context(child, info_name=child.name, parent=context)
    return context, rest


def check_call(arguments: list[str], root: click.Command, is_complete: bool = True) -> None:
    """Parse a call without executing it.

    Args:
        arguments: the arguments after the program's name; `...` stands for any.
        root: the program.
        is_complete: False if the call may lack arguments, as in a sentence: then only names are checked.

    Raises:
        click.UsageError: there is no such command or option, or a value is missing or not one of the choices.
    """
    context, rest = resolved(arguments, root)
    command = context.command
    if not is_complete or "..." in rest:
        known = {
            name for parameter in command.get_params(context) for name in parameter.opts + parameter.secondary_opts
        }
        for name in (word.partition("=")[0] for word in rest if word.startswith("--")):
            if name not in known:
                raise click.NoSuchOption(name, ctx=context)
        return
    values, left, _ = command.make_parser(context).parse_args(rest)
    if left:
        raise click.UsageError(f"unexpected: {left}")
    for parameter in command.get_params(context):
        value = values.get(parameter.name)
        if isinstance(value, Enum):  # Click's marker for a missing value
            value = None
        if parameter.required and (value is None or parameter.value_is_missing(value)):
            raise click.MissingParameter(ctx=context, param=parameter)
        if isinstance(parameter.type, click.Choice) and isinstance(value, str):
            parameter.type.convert(value, parameter, context)


def flwr_command() -> click.Command:
    """Flower's `flwr`, whose modules use deprecated features of Typer."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        command: click.Command = importlib.import_module("flwr.cli.app").typer_click_object
    return command


def flower_programs() -> dict[str, list[argparse.ArgumentParser]]:
    """Programs that start a part of Flower -> the parsers of their options, in the order in which they are used."""
    # Flower exports functions under the modules' names, and no parser.
    flowers_superlink = vars(importlib.import_module("flwr.superlink.cli.flower_superlink"))
    flowers_supernode = vars(importlib.import_module("flwr.supernode.cli.flower_supernode"))
    of_superlink = flowers_superlink["_parse_args_run_superlink"]()
    of_supernode = flowers_supernode["_parse_args_run_supernode"]()
    return {
        "flower-superlink": [of_superlink],
        "flower-supernode": [of_supernode],
        "wattfleet-superlink": [superlink.own_options_parser(), of_superlink],
        "wattfleet-supernode": [supernode.own_options_parser(), of_supernode],
    }


def check_options(arguments: Sequence[str], parsers: Sequence[argparse.ArgumentParser]) -> None:
    """Parse a call with several parsers, each of which gets the arguments that the previous one does not know.

    Raises:
        click.UsageError: an option does not exist, or its value is missing or not one of the choices.
    """
    left = [argument for argument in arguments if argument != "..."]
    for parser in parsers:
        said = StringIO()
        try:
            with redirect_stderr(said):
                left = parser.parse_known_args(left)[1]
        except SystemExit:
            raise click.UsageError(said.getvalue()) from None
    if left:
        raise click.UsageError(f"unexpected: {left}")


# --- Documented runs --------------------------------------------------------------------------------------------------
# Runs documented commands in the test's process, and compares their output with the page.

_ERROR = "wattfleet: "
_INTERRUPTED = "^C"
_GAP = re.compile(r"\s{2,}|\s*[│┃]\s*")
_FIGURE = re.compile(r"\d")
_BORDER = re.compile(r"\s*[┡┣]")
_ROW = re.compile(r"(?P<key>[a-z]+(?: [a-zA-Z]+)?)\s{2,}\S")


def run_block(block: Block, added: Mapping[str, object]) -> None:
    """Run the `wattfleet` commands of a block in order, and check their output.

    Args:
        block: the block of commands.
        added: option -> value, for commands that have the option and do not set it. The page states that it omits these
            options, or their defaults are paths of the whole machine.

    Raises:
        AssertionError: a command failed, did not fail as shown, or does not print the columns that the page shows.
    """
    for step in block.steps():
        for call in calls(step.command, "wattfleet"):
            printed, code = run_call(call, added)
            fails = any(line.startswith(_ERROR) for line in step.output)
            assert (code != 0) == fails, f"{block}: {call} ended with {code}: {printed}"
            missing = [label for label in labels(step) if not re.search(rf"(?<!\w){re.escape(label)}(?!\w)", printed)]
            assert not missing, f"{block}: {call} does not print {missing}, but:\n{printed}"


def run_call(call: list[str], added: Mapping[str, object]) -> tuple[str, int]:
    """The output of a command and its exit code; arguments as for `run_block`."""
    options = [
        word
        for name, value in added.items()
        if name in _options(call) and name not in call
        for word in (name, str(value))
    ]
    result = CliRunner().invoke(cli.wattfleet, [*call, *options], env={"COLUMNS": "120"}, prog_name="wattfleet")
    if isinstance(result.exception, WattfleetError):
        return f"{result.output}{_ERROR}{result.exception}", cli.exit_code(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output, result.exit_code


def labels(step: Step) -> Iterator[str]:
    """The words of headers, and the first words of rows, in the output that a page shows for a command."""
    if _INTERRUPTED in step.output:
        return
    for line, following in pairwise([*step.output, ""]):
        cells = [cell for cell in _GAP.split(line.strip()) if cell]
        row = _ROW.match(line)
        is_header = len(cells) > 2 and all(len(cell.split()) <= 2 for cell in cells) and not _FIGURE.search(line)
        if is_header and (_FIGURE.search(following) or _BORDER.match(following)):
            yield from (word for cell in cells for word in cell.split() if word.isalpha())
        elif row is not None and not is_header:
            yield row["key"]


def _options(call: list[str]) -> set[str]:
    context, _ = resolved(call, cli.wattfleet)
    return {name for parameter in context.command.get_params(context) for name in parameter.opts}
