"""Runs documented commands in the test's process, and compares their output with the page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

from click.testing import CliRunner

from tests.fakes.documented_commands import Block, Step, calls, resolved
from wattfleet.errors import WattfleetError
from wattfleet_io import cli

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
