"""Every command block in the documentation is run by a test or states why it is not, and its commands exist."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

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
from wattfleet_io.cli import wattfleet

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
