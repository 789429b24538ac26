"""The help of every command, in narrow and in wide terminals."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import click
import pytest

from wattfleet_io import cli
from wattfleet_io.help import settable_options

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="the extra `simulation` is not installed")

_LONGEST_OF_SERVE = 115
_SHELLS = "completion"
"""Its help has commands to copy, which must not be wrapped."""


def every_command(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, click.Context]]:
    """All commands with their words, such as `coordinator devices`."""
    yield ctx.command_path.partition(" ")[2], ctx
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            child = command.get_command(ctx, name)
            assert child is not None
            inner = child.context_class(child, info_name=name, parent=ctx, resilient_parsing=True)
            yield from every_command(child, inner)


@pytest.fixture(scope="module")
def commands() -> dict[str, click.Context]:
    root = cli.wattfleet
    return dict(every_command(root, root.context_class(root, info_name="wattfleet", resilient_parsing=True)))


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_help_is_cut(commands: dict[str, click.Context], monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert len(commands) > 60
    for words, ctx in commands.items():
        text = ctx.get_help()
        too_long = [line for line in text.split("\n") if len(line) > columns]
        assert words == _SHELLS or not too_long, f"{words}: {too_long}"
        assert "…" not in text, words
        shown = text.split()
        for option in ctx.command.get_params(ctx):
            if isinstance(option, click.Option) and not option.hidden:
                assert set(option.opts) & set(shown), f"{words}: {option.opts} is not in the help"


def test_the_last_lines_of_a_help_name_the_variables_and_nothing_else_does(commands: dict[str, click.Context]) -> None:
    for words, ctx in commands.items():
        text = " ".join(ctx.get_help().split())
        assert "env var" not in text, words
        variables = [str(each.envvar) for each in settable_options(ctx.command.get_params(ctx)) if each.envvar]
        named = text.partition("Variables: ")[2].rstrip(".")
        found: list[str] = []
        for part in filter(None, named.replace(";", ",").split(", ")):
            complete = part.strip()
            prefix = getattr(ctx.command, "prefix", f"{ctx.command_path.upper().replace(' ', '_').replace('-', '_')}_")
            found.append(complete if complete.startswith("WATTFLEET") else prefix + complete[1:])
        assert sorted(found) == sorted(variables), words


def test_no_option_states_its_default_twice(commands: dict[str, click.Context]) -> None:
    for words, ctx in commands.items():
        for parameter in ctx.command.get_params(ctx):
            _, text = parameter.get_help_record(ctx) or ("", "")
            assert not ("efault" in text.partition("[")[0] and "[default:" in text), f"{words}: {text}"


def test_the_help_of_serve_can_be_read(commands: dict[str, click.Context], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = commands["coordinator serve"].get_help()
    assert len(text.split("\n")) <= _LONGEST_OF_SERVE
    assert text.index("Addresses:") < text.index("--address") < text.index("Site:") < text.index("--site-budget-w")


def test_the_commands_of_the_coordinator_are_in_panels(commands: dict[str, click.Context]) -> None:
    text = commands["coordinator"].get_help()
    panels = [text.index(f"\n{name}:\n") for name in ("This machine", "Fleet", "Runs", "Identities")]
    assert panels == sorted(panels)
    assert panels[1] < text.index("\n  devices ") < panels[2] < text.index("\n  rounds ") < panels[3]
